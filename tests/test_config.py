# SPDX-License-Identifier: Apache-2.0
"""`MXFP4RLConfig`: defaults, presets, options of products, refusals, and the forms in which it travels."""

import copy
import dataclasses
import inspect
import json
import math
import pickle
import pydoc

import pytest
import torch
from tables import CONFIGS, GEMMS
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig, QuantScheme, ScaleRule
from hf_mxfp4.checkpoint import CheckpointError, pack_checkpoint
from hf_mxfp4.numerics import FP8, FULL, PLAIN, REUSE, GemmScheme, Rotation
from hf_mxfp4.presets import MXFP4, PRESETS, Preset
from hf_mxfp4.rl.vllm import rollout_parameters


DEFAULTS = {
    "quant_method": "mxfp4_rl", "format_version": 1, "mode": "qat", "preset": "w4a8", "scale_rule": "even",
    "macro_block": 128, "macro_search": "block_mantissas_fp8", "outlier_fallback": None, "smooth": True,
    "modules_to_not_convert": None, "backend": "auto",
}  # fmt: skip

#: Those of the tables, and packed ones.
TRAVELLING = CONFIGS | {
    "gemms": GEMMS,
    "fprop": {"fprop": {"x": "floor+stochastic", "rotation": "deterministic-128"}, "stochastic_seed": 3},
    "packed": {"mode": "packed"},
    "packed w4a4": {"mode": "packed", "preset": "w4a4", "outlier_fallback": 0.25},
    "packed plain": {"mode": "packed", "macro_block": None, "modules_to_not_convert": ["layers.1"]},
}


def test_defaults_and_config_files_without_all_options_and_of_other_methods():
    saved = {
        "quant_method": "mxfp4_rl", "format_version": 1, "mode": "qat", "preset": "w4a4", "scale_rule": "rceil",
        "macro_block": 128, "macro_search": "hybrid", "outlier_fallback": 0.5, "modules_to_not_convert": None,
    }  # fmt: skip
    scheme = {"scale_rule": "rceil", "macro_search": "hybrid"}
    assert MXFP4RLConfig().to_dict() == DEFAULTS
    config = MXFP4RLConfig.from_dict(saved)
    assert config == MXFP4RLConfig(preset="w4a4", **scheme, outlier_fallback=0.5)
    assert MXFP4RLConfig.from_dict({"quant_method": "mxfp4_rl"}) == MXFP4RLConfig()
    weights_only = {"preset": "w4a16", "outlier_fallback": None}
    assert MXFP4RLConfig.from_dict({**saved, **weights_only}) == MXFP4RLConfig(**weights_only, **scheme)
    for method in ("mxfp4", "MXFP4_RL"):
        with pytest.raises(ValueError, match=f"'{method}'.*'mxfp4_rl'"):
            MXFP4RLConfig.from_dict({"quant_method": method})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"preset": "w4a8"}),
        ({"preset": "w4a16"}, {}),
        ({"preset": "w4a4", "outlier_fallback": 1.0}, {"preset": "w4a4", "outlier_fallback": 1.0}),
    ],
    ids=["default", "weight-only", "w4a4"],
)
def test_the_packed_twin_of_a_trainable_config(options, expected):
    config = MXFP4RLConfig(**options)
    twin = config.packed()
    assert twin == MXFP4RLConfig(mode="packed", **expected)
    assert (twin.weight_scheme, twin.activation_scheme) == (config.weight_scheme, config.activation_scheme)
    assert twin.packed() == twin


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [("scale_rul", "scale_rule"), ("macroblock", "macro_block"), ("modules_to_not_covert", "modules_to_not_convert")],
)
def test_misspelt_option_names_the_nearest(key, suggestion):
    for build in (lambda: MXFP4RLConfig(**{key: None}), lambda: MXFP4RLConfig.from_dict({key: None})):
        with pytest.raises(TypeError, match=f"^MXFP4RLConfig has no option '{key}'; did you mean .*'{suggestion}'"):
            build()


def test_the_signature_and_help_list_every_option():
    parameters = inspect.signature(MXFP4RLConfig).parameters
    options = {option.name: option for option in dataclasses.fields(MXFP4RLConfig) if option.init}
    assert list(parameters) == list(options)
    assert {name: found.default for name, found in parameters.items()} == {n: o.default for n, o in options.items()}
    words = " ".join(pydoc.render_doc(MXFP4RLConfig, renderer=pydoc.plaintext).replace("|", " ").split())
    for name, option in options.items():
        assert f"{name} (" in words
        assert " ".join(option.metadata["help"].replace("|", " ").split()) in words


def test_enums_and_numeric_strings_are_normalised():
    config = MXFP4RLConfig(scale_rule=ScaleRule.EVEN, macro_block="64")
    assert config == MXFP4RLConfig(scale_rule="even", macro_block=64)
    assert json.loads(config.to_json_string())["macro_block"] == 64
    assert type(config.scale_rule) is str


#: Values that no option of this name has.
INVALID = {
    "mode": ["train", None],
    "preset": ["w4a6", "W4A4", None, ["w4a4"]],
    "scale_rule": ["ceil", None],
    "macro_block": [0, 16, 512, -128, True, 128.0, "rows"],
    "macro_search": ["both", "blockwise", None],
    "smooth": [1, None],
    "outlier_fallback": [0, -0.5, 1.5, float("nan"), float("inf"), "0.5", True],
    "modules_to_not_convert": ["lm_head", ["layers.0", 3], [""], 5],
    "backend": ["cuda", None],
    "format_version": [0, 2, 99, "1", True, None],
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_values_are_named(name):
    for value in INVALID[name]:
        for build in (lambda v: MXFP4RLConfig(**{name: v}), lambda v: MXFP4RLConfig.from_dict({name: v})):
            with pytest.raises(ValueError) as error:
                build(value)
            assert f"{name}={value!r}" in str(error.value)


@pytest.mark.parametrize("options", TRAVELLING.values(), ids=TRAVELLING)
def test_every_form_that_it_travels_in_is_equal_frozen_and_hashes_alike(options, tmp_path):
    config = MXFP4RLConfig(**options)
    config.to_json_file(tmp_path / "scheme.json")
    copies = [
        MXFP4RLConfig(**options),
        MXFP4RLConfig.from_dict(config.to_dict()),
        MXFP4RLConfig.from_dict(json.loads(config.to_json_string())),
        MXFP4RLConfig.from_dict(dict(config)),
        MXFP4RLConfig.from_dict(json.loads((tmp_path / "scheme.json").read_text())),
        copy.copy(config),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        eval(repr(config)),
        dataclasses.replace(config),
    ]
    for other in copies:
        assert other == config
        assert hash(other) == hash(config)
        assert other.gemms() == config.gemms()
        with pytest.raises(dataclasses.FrozenInstanceError):
            other.preset = "w4a16"
    assert {config, *copies} == {config}
    for name in ("dgrad", "wgrad", "stochastic_seed"):
        assert config.to_dict().get(name) == options.get(name)


def test_dictionary_form_is_accepted_by_from_pretrained(checkpoint):
    folder = checkpoint()
    as_dict = {"quant_method": "mxfp4_rl", "preset": "w4a16", "macro_block": None, "outlier_fallback": None}
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=as_dict)
    assert model.quantization_report.n_quantized == 14
    assert model.hf_quantizer.quantization_config == MXFP4RLConfig.from_dict(as_dict)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"preset": "w4a16"}, "w4a16 [weights mxfp4+even+mbs128-blockwise_fp8, activations full precision]"),
        ({"preset": "w4a4"}, "w4a4 [weights mxfp4+even+mbs128-blockwise, activations mxfp4+even+mbs128-blockwise]"),
        (
            {"preset": "w4a4", "scale_rule": "floor", "macro_block": None},
            "w4a4 [weights mxfp4+floor, activations mxfp4+floor]",
        ),
        (
            {"preset": "w4a4", "macro_search": "hybrid", "outlier_fallback": 1.0},
            "w4a4 [weights mxfp4+even+mbs128-dynamic+of1, activations mxfp4+even+mbs128-static+of1]",
        ),
        ({}, "w4a8 [weights mxfp4+even+mbs128-blockwise_fp8, activations fp8]"),
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
    ids=str,
)
def test_describe(options, expected):
    assert MXFP4RLConfig(**options).describe() == expected


EVEN = QuantScheme(ScaleRule.EVEN, 128, "block_mantissas")
THREE = QuantScheme(ScaleRule.EVEN, 128, "block_mantissas_fp8")
PAPER_A = QuantScheme(ScaleRule.RCEIL, 128, "static", 0.5)
FLOOR = QuantScheme(ScaleRule.FLOOR)
TILES = QuantScheme(ScaleRule.FLOOR, block_rows=32)

#: Preset -> fprop, dgrad, wgrad.
EXPECTED = {
    "w4a16": (GemmScheme(FULL, THREE), PLAIN, PLAIN),
    "w4a8": (GemmScheme(FP8, THREE), PLAIN, PLAIN),
    "w4a8g8": (GemmScheme(FP8, THREE), GemmScheme(FP8, REUSE), GemmScheme(FP8, REUSE)),
    "w4a4": (GemmScheme(EVEN, EVEN), PLAIN, PLAIN),
    "w4a4g4": (GemmScheme(EVEN, EVEN), GemmScheme(EVEN, EVEN), GemmScheme(EVEN, EVEN)),
    "w8a8": (GemmScheme(FP8, FP8), PLAIN, PLAIN),
    "paper_a": (GemmScheme(PAPER_A, PAPER_A), PLAIN, PLAIN),
    "paper_b": (GemmScheme(FLOOR, TILES), GemmScheme(FLOOR, TILES), GemmScheme(FLOOR, FLOOR, Rotation(16))),
}


def test_expected_names_every_preset():
    assert list(EXPECTED) == list(PRESETS)


@pytest.mark.parametrize("preset", EXPECTED)
def test_presets(preset):
    scheme = MXFP4RLConfig(preset=preset).gemms()
    assert (scheme.fprop, scheme.dgrad, scheme.wgrad) == EXPECTED[preset]


def test_packing_keeps_the_preset_where_packed_weights_have_it(monkeypatch):
    plain = Preset("plain", "", fprop=(FP8, MXFP4), macro_block=None, modes=("qat", "packed"))
    monkeypatch.setitem(PRESETS, "plain", plain)
    assert MXFP4RLConfig(preset="plain").packed().preset == "plain"


@pytest.mark.parametrize("preset", EXPECTED)
@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("scale_rule", ["rceil", "floor", "even", "mse"]),
        ("macro_block", [None, 32, 64, 128, 256, "row"]),
        ("macro_search", ["static", "dynamic", "hybrid", "block_mantissas", "block_mantissas_fp8"]),
        ("outlier_fallback", [None, 0.5, 1.0]),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_every_option_of_the_scheme_has_an_effect_or_is_refused(preset, option, values):
    usual = MXFP4RLConfig(preset=preset)
    for value in values:
        if value is None or value == getattr(usual, option):
            continue
        try:
            config = MXFP4RLConfig(preset=preset, **{option: value})
        except ValueError as error:
            assert option in str(error)
        else:
            assert config.gemms() != usual.gemms(), f"{option}={value!r} does nothing under {preset}"


#: Of every other option that is no part of `gemms`: a value that is not the default.
OF_LAYERS = {
    "mode": "packed",
    "preset": "w4a16",
    "fprop": {"x": "floor"},
    "dgrad": {"grad": "fp8"},
    "wgrad": {"grad": "fp8"},
    "stochastic_seed": 5,
    "dither_ties": False,
    "smooth": False,
    "modules_to_not_convert": ["layers.1"],
    "backend": "eager",
    "matmul_backend": "dense",
}


def test_every_option_of_the_layers_reaches_them(checkpoint):
    def facts(**options):
        config = MXFP4RLConfig(**options)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype="float32")
        layer = model.model.layers[0].mlp.down_proj
        weight = layer.weight.detach().sum().item()  # another dither gives another sum
        return type(layer), layer.state.spec, model.quantization_report.n_quantized, weight

    folder = checkpoint(dtype=torch.bfloat16)
    options = {option.name for option in dataclasses.fields(MXFP4RLConfig) if option.init}
    of_scheme = {"scale_rule", "macro_block", "macro_search", "outlier_fallback"}
    assert options == {*OF_LAYERS, *of_scheme, "format_version"}
    default = facts()
    for name, value in OF_LAYERS.items():
        assert facts(**{name: value}) != default, name


def test_operands_that_are_not_named_keep_the_presets():
    config = MXFP4RLConfig(preset="w4a4g4", wgrad={"x": "even+mbs64+stochastic", "rotation": "random-64"})
    x = QuantScheme(ScaleRule.EVEN, 64, "static", rounding="stochastic")
    assert config.gemms().wgrad == GemmScheme(EVEN, x, Rotation(64, random=True))
    assert (config.gemms().fprop, config.gemms().dgrad) == EXPECTED["w4a4g4"][:2]
    assert MXFP4RLConfig(preset="paper_b", wgrad={"grad": "full", "x": "reuse"}).gemms().wgrad == PLAIN
    off = MXFP4RLConfig(preset="paper_b", wgrad={"rotation": "none"})
    assert off.gemms().wgrad == GemmScheme(FLOOR, FLOOR)


def test_fprop_is_what_the_schemes_of_weights_and_activations_follow():
    config = MXFP4RLConfig(fprop={"x": "full", "weight": "floor+32x32"})
    assert config.activation_scheme is None
    assert config.weight_scheme == TILES
    assert config.packed().weight_scheme == TILES
    assert config.packed().activation_scheme is None
    with pytest.raises(ValueError, match="takes weights in full precision; there is no scheme of MXFP4"):
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
    ({"wgrad": {"x": "fp8"}}, "'fp8' is for output gradients \\(grad\\) and for fprop"),
    ({"wgrad": {"x": "nvfp4"}}, "'nvfp4' is for fprop, to compare with"),
    ({"fprop": {"weight": "mxfp8"}}, "'mxfp8' is for the x of fprop and output gradients"),
    (
        {"preset": "w8a8", "scale_rule": "rceil"},
        r"scale_rule='rceil' has no effect on any operand of w8a8 \[weights fp8",
    ),
    ({"mode": "packed", "fprop": {"weight": "nvfp4"}}, "takes weights in nvfp4, and packed ones are in MXFP4"),
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
    ({"macro_block": None, "macro_search": "static"}, "macro_search='static' has no effect on any operand"),
    ({"fprop": {"x": "floor", "weight": "floor"}, "scale_rule": "rceil"}, "scale_rule='rceil' has no effect on any"),
    ({"preset": "w4a4", "matmul_backend": "fp8"}, "no product is one of E4M3 numbers .in fprop block mantissas up to"),
    ({"preset": "w4a8", "matmul_backend": "fp8", "outlier_fallback": 0.5}, "in fprop residuals of weight"),
    ({"preset": "w4a16", "matmul_backend": "fp8"}, "in fprop x is in full precision"),
    (
        {"mode": "packed", "preset": "w4a4g4"},
        "preset='w4a4g4' is for mode='qat'; with mode='packed' choose one of 'w4a16', 'w4a8', 'w4a4'$",
    ),
    ({"mode": "packed", "fprop": {"rotation": "random-16"}}, "rotates both operands by signs that are drawn anew"),
    ({"mode": "packed", "fprop": {"weight": "rceil+stochastic"}}, "rounds stochastically"),
    ({"mode": "packed", "fprop": {"weight": "full"}}, "takes weights in full precision, and packed ones"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_refused_with_the_reason(options, message):
    with pytest.raises(ValueError, match=message):
        MXFP4RLConfig(**options)


def test_the_packed_twin_keeps_the_forward_product_alone():
    for preset in ("w4a4g4", "paper_a", "paper_b"):
        config = MXFP4RLConfig(preset=preset)
        twin = config.packed()
        assert twin.preset == "w4a4"
        assert twin.gemms().fprop == config.gemms().fprop
        assert twin.gemms().wgrad == PLAIN
    for preset, fprop in (("w4a8g8", {}), ("w8a8", {"weight": "floor"})):
        config = MXFP4RLConfig(preset=preset, fprop=fprop or None)
        assert config.packed().preset == "w4a8"
        assert config.packed().gemms().fprop == config.gemms().fprop
    rotated = MXFP4RLConfig(fprop={"x": "floor", "rotation": "deterministic-128"})
    assert rotated.packed().gemms().fprop == rotated.gemms().fprop
    assert rotated.packed().weight_rotation == Rotation(128)
    with pytest.raises(ValueError, match="cannot be packed: its fprop rounds stochastically"):
        MXFP4RLConfig(fprop={"x": "floor+stochastic", "rotation": "deterministic-128"}).packed()


ROTATED = {"preset": "w4a4", "macro_block": None, "fprop": {"rotation": "deterministic-16"}}
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
    for options in (ROTATED, {"fprop": {"weight": "full"}}, {"preset": "w4a8g8"}, {}):
        config = MXFP4RLConfig(**options)
        model = AutoModelForCausalLM.from_pretrained(checkpoint(), quantization_config=config)
        layers = [m for m in model.modules() if isinstance(m, MXFP4Linear)]
        signal = sum(float(m.weight.detach().double().square().sum()) for m in layers)
        noise = sum(float((m.to_linear().weight - m.weight).detach().double().square().sum()) for m in layers)
        expected = None if noise == 0 else pytest.approx(10 * math.log10(signal / noise), rel=1e-4)
        assert model.quantization_report.sqnr_db == expected
        reports.append(model.quantization_report.sqnr_db)
    assert reports[1] is None
    assert reports[2] == reports[3]
