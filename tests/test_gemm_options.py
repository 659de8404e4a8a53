# SPDX-License-Identifier: Apache-2.0
"""`fprop`, `dgrad`, `wgrad` and the presets of `MXFP4RLConfig`."""

import math

import pytest
import torch
from tables import GEMMS
from tiny_models import make_model
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig
from hf_mxfp4.checkpoint import CheckpointError, pack_checkpoint
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.numerics import FP8, FULL, PLAIN, REUSE, GemmScheme, QuantScheme, Rotation, ScaleRule
from hf_mxfp4.rl.vllm import rollout_parameters


WEIGHT = INPUT = QuantScheme(ScaleRule.EVEN, 128, "blockwise", 1.0)
PAPER_A = QuantScheme(ScaleRule.RCEIL, 128, "static", 0.5)
FLOOR = QuantScheme(ScaleRule.FLOOR)
TILES = QuantScheme(ScaleRule.FLOOR, block_rows=32)
EVEN = QuantScheme(ScaleRule.EVEN, 128, "blockwise")
SELECTIVE = QuantScheme(ScaleRule.EVEN, 128, "blockwise", 1.0, fallback_rate=0.05)
EVEN_TILES = QuantScheme(ScaleRule.EVEN, 128, "blockwise", block_rows=32)

#: Preset -> fprop, dgrad, wgrad.
EXPECTED = {
    "w4a16": (GemmScheme(FULL, WEIGHT), PLAIN, PLAIN),
    "w4a4": (GemmScheme(INPUT, WEIGHT), PLAIN, PLAIN),
    "w4a4_tuned": (GemmScheme(SELECTIVE, SELECTIVE), PLAIN, PLAIN),
    "w4a4_h64": (GemmScheme(SELECTIVE, EVEN, Rotation(64)), PLAIN, PLAIN),
    "w4a4g8": (GemmScheme(INPUT, WEIGHT), GemmScheme(FP8, REUSE), GemmScheme(FP8, REUSE)),
    "w4a4g4": (GemmScheme(INPUT, WEIGHT), GemmScheme(INPUT, WEIGHT), GemmScheme(INPUT, INPUT)),
    "paper_a": (GemmScheme(PAPER_A, PAPER_A), PLAIN, PLAIN),
    "paper_b": (GemmScheme(FLOOR, TILES), GemmScheme(FLOOR, TILES), GemmScheme(FLOOR, FLOOR, Rotation(16))),
    "w4a4g4_tuned": (GemmScheme(EVEN, EVEN_TILES), GemmScheme(EVEN, EVEN_TILES), GemmScheme(EVEN, EVEN, Rotation(16))),
}


@pytest.mark.parametrize("preset", EXPECTED)
def test_presets(preset):
    scheme = MXFP4RLConfig(preset=preset).gemms()
    assert (scheme.fprop, scheme.dgrad, scheme.wgrad) == EXPECTED[preset]


def test_operands_that_are_not_named_keep_the_presets():
    config = MXFP4RLConfig(preset="w4a4g4", wgrad={"x": "even+mbs64+stochastic", "rotation": "random-64"})
    x = QuantScheme(ScaleRule.EVEN, 64, "static", rounding="stochastic")
    assert config.gemms().wgrad == GemmScheme(INPUT, x, Rotation(64, random=True))
    assert (config.gemms().fprop, config.gemms().dgrad) == EXPECTED["w4a4g4"][:2]
    off = MXFP4RLConfig(preset="paper_b", wgrad={"rotation": "none"})
    assert off.gemms().wgrad == GemmScheme(FLOOR, FLOOR)


def test_a_rotation_goes_with_the_quantization_that_it_is_for():
    off = {"grad": "full", "x": "reuse"}
    assert MXFP4RLConfig(preset="paper_b", wgrad=off).gemms().wgrad == PLAIN


def test_fprop_is_what_the_schemes_of_weights_and_activations_follow():
    config = MXFP4RLConfig(fprop={"x": "full", "weight": "floor+32x32"})
    assert config.activation_scheme is None and config.weight_scheme == TILES
    assert config.packed().weight_scheme == TILES and config.packed().activation_scheme is None
    with pytest.raises(ValueError, match="leaves weights in full precision"):
        _ = MXFP4RLConfig(fprop={"weight": "full"}).weight_scheme


REFUSED = [
    ({"wgrad": {"grda": "full"}}, "wgrad has no option 'grda'; did you mean 'grad'?"),
    ({"wgrad": {"weight": "full"}}, "wgrad has no option 'weight'"),
    ({"fprop": {"rotatoin": "none"}}, "fprop has no option 'rotatoin'; did you mean 'rotation'?"),
    ({"dgrad": {"grad": "rciel"}}, "dgrad, grad: scheme 'rciel': no scale rule 'rciel'; did you mean 'rceil'?"),
    ({"dgrad": {"grad": "rceil+stochastc"}}, "did you mean 'stochastic'?"),
    ({"dgrad": {"grad": None}}, "dgrad has grad=None, which must be text"),
    ({"dgrad": {"grad": "rceil+32x32"}}, "tiles of 32x32 are for weights"),
    ({"dgrad": {"weight": "fp8"}}, "'fp8' is for output gradients"),
    ({"dgrad": {"grad": "reuse"}}, "'reuse' is for the weight of dgrad and the x of wgrad"),
    ({"fprop": {"x": "reuse"}}, "'reuse' is for the weight of dgrad and the x of wgrad"),
    ({"wgrad": {"rotation": "deterministic-48"}}, "rotation='deterministic-48' is not supported"),
    ({"wgrad": {"rotation": "random"}}, "rotation='random' is not supported"),
    ({"wgrad": {"rotation": "random-16"}}, "rotation=random-16 of wgrad has no effect"),
    ({"wgrad": {}}, "wgrad={} must be a mapping"),
    ({"wgrad": "rceil"}, "wgrad='rceil' must be a mapping"),
    ({"dgrad": {"grad": "rceil+stochastic"}, "backend": "cpu"}, "backend='cpu' does not round stochastically"),
    ({"stochastic_seed": -1}, "stochastic_seed=-1"),
    ({"stochastic_seed": True}, "stochastic_seed=True"),
    (
        {"stochastic_seed": 1, "preset": "w4a4g4", "dither_ties": False},
        "stochastic_seed=1 has no effect, since nothing is random",
    ),
    ({"mode": "packed", "dgrad": {"grad": "fp8"}}, r"dgrad=.* has no effect in mode='packed' whose frozen weights"),
    ({"mode": "packed", "wgrad": {"grad": "fp8"}}, r"wgrad=.* has no effect in mode='packed'"),
    ({"mode": "packed", "preset": "w4a4g4"}, "preset='w4a4g4' is not supported; choose one of 'w4a16', 'w4a4'$"),
    ({"mode": "packed", "fprop": {"rotation": "random-16"}}, "rotates both operands by signs that are drawn anew"),
    ({"mode": "packed", "fprop": {"weight": "rceil+stochastic"}}, "rounds stochastically"),
    ({"mode": "packed", "fprop": {"weight": "full"}}, "leaves weights in full precision"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_refused_with_the_reason(options, message):
    with pytest.raises(ValueError, match=message):
        MXFP4RLConfig(**options)


def test_the_packed_twin_keeps_the_forward_product_alone():
    for preset in ("w4a4g8", "w4a4g4", "paper_a", "paper_b", "w4a4g4_tuned"):
        config = MXFP4RLConfig(preset=preset)
        twin = config.packed()
        assert twin.preset == "w4a4" and twin.gemms().fprop == config.gemms().fprop and twin.gemms().wgrad == PLAIN
    rotated = MXFP4RLConfig(fprop={"x": "floor", "rotation": "deterministic-128"})
    assert rotated.packed().gemms().fprop == rotated.gemms().fprop and rotated.packed().weight_rotation == Rotation(128)
    with pytest.raises(ValueError, match="cannot be packed: its fprop rounds stochastically"):
        MXFP4RLConfig(fprop={"x": "floor+stochastic", "rotation": "deterministic-128"}).packed()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"preset": "paper_b"},
            "paper_b [weights mxfp4+floor+32x32, activations mxfp4+floor], dgrad [grad mxfp4+floor, weight "
            "mxfp4+floor+32x32], wgrad [grad mxfp4+floor, x mxfp4+floor, rotation deterministic-16]",
        ),
        (
            {**GEMMS, "preset": "w4a16", "macro_block": None, "outlier_fallback": None},
            "w4a16 [weights mxfp4+even, activations full precision], dgrad [grad mxfp4+rceil+stochastic, weight as in "
            "fprop], wgrad [grad fp8, x full precision, rotation random-32]",
        ),
    ],
    ids=["paper_b", "gemms"],
)
def test_describe_names_every_quantized_operand(options, expected):
    assert MXFP4RLConfig(**options).describe() == expected


ROTATED = {"fprop": {"rotation": "deterministic-16"}, "macro_block": None, "outlier_fallback": None}
RANDOM = {**ROTATED, "fprop": {"rotation": "random-16"}}


def test_a_forward_product_that_weights_cannot_express_is_not_packed_or_pushed(tmp_path, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint(), quantization_config=MXFP4RLConfig(**ROTATED))
    model.save_pretrained(tmp_path / "rotated")
    card = (tmp_path / "rotated" / "README.md").read_text()
    assert "rotation deterministic-16" in card
    random = AutoModelForCausalLM.from_pretrained(checkpoint(), quantization_config=MXFP4RLConfig(**RANDOM))
    random.save_pretrained(tmp_path / "random")
    with pytest.raises(CheckpointError, match="its fprop rotates both operands by signs that are drawn anew"):
        pack_checkpoint(tmp_path / "random", tmp_path / "packed")
    with pytest.raises(ValueError, match="vLLM cannot sample from .*: its fprop rotates"):
        list(rollout_parameters(model.named_parameters(), model))
    with pytest.raises(ValueError, match="cannot be packed: its fprop rotates"):
        hf_mxfp4.pack(random)


def test_the_reported_error_is_that_of_what_is_computed(checkpoint):
    reports = []
    for options in (ROTATED, {"fprop": {"weight": "full"}}, {"preset": "w4a4g4"}, {}):
        config = MXFP4RLConfig(**options)
        model = AutoModelForCausalLM.from_pretrained(checkpoint(), quantization_config=config)
        layers = [m for m in model.modules() if isinstance(m, MXFP4Linear)]
        signal = sum(float(m.weight.detach().double().square().sum()) for m in layers)
        noise = sum(float((m.to_linear().weight - m.weight).detach().double().square().sum()) for m in layers)
        expected = math.inf if noise == 0 else 10 * math.log10(signal / noise)
        assert model.quantization_report.sqnr_db == pytest.approx(expected, rel=1e-4)
        reports.append(model.quantization_report.sqnr_db)
    assert reports[1] == math.inf and reports[2] == reports[3]


# ---- training ------------------------------------------------------------------------------------------------------


STOCHASTIC = {
    "preset": "w4a4g4",
    "dgrad": {"grad": "rceil+mbs128+stochastic"},
    "wgrad": {"grad": "rceil+mbs128+stochastic", "rotation": "random-32"},
}
TRAINED = {preset: {"preset": preset} for preset in EXPECTED} | {"stochastic": STOCHASTIC}
#: Trained in every run: gradients in 8 bits, tiles and a rotation, everything at random.
FEW = ("w4a4g8", "w4a4g4_tuned", "stochastic")


def losses(options: dict | None, steps: int = 20) -> list[float]:
    model = make_model("llama", layers=1).train()
    if options is not None:
        quantize_linears(model, MXFP4RLConfig(**options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    ids = torch.randint(2, 32, (4, 24), generator=torch.Generator().manual_seed(0))
    values = []
    for step in range(steps):
        if options is STOCHASTIC:
            assert hf_mxfp4.set_quantization_step(model, step) == 7
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


@pytest.fixture(scope="module")
def full_precision() -> list[float]:
    return losses(None)


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.large) for n in TRAINED])
def test_a_tiny_model_trains(name, full_precision):
    values = losses(TRAINED[name])
    assert full_precision[-1] < 0.6 * full_precision[0]
    fall = (values[0] - values[-1]) / (full_precision[0] - full_precision[-1])
    assert 0.8 < fall < 1.2, (values[-1], full_precision[-1])
