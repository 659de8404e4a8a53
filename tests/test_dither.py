# SPDX-License-Identifier: Apache-2.0
"""Master weights from 16-bit checkpoints: moved off rounding boundaries, while checkpoint and policy stay the same."""

import pytest
import torch
from safetensors.torch import load_file
from same_bits import IDS
from tables import CONFIGS, PLAIN, some
from tiny_models import make_model
from torch import nn
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig
from hf_mxfp4.layers import trainable_matrices
from hf_mxfp4.ops import quantize_weight
from hf_mxfp4.prepare import dither_masters


SCHEMES = some(
    CONFIGS, "plain", "floor", "even", "mse", "static", "row static", "default", "w4a4", "fallback 1",
    "paper_a", "paper_b", "tiles",
)  # fmt: skip


def gaussian(rows, columns, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).mul_(0.02).to(dtype).float()


def one_layer(weight, name="layer", **options):
    """A model of one layer on a weight, and the layer."""
    layer = MXFP4Linear(weight.shape[1], weight.shape[0], bias=False, config=MXFP4RLConfig(**options), name=name)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return nn.ModuleDict({"layer": layer}), layer


def stored(layer, weight):
    """Codes and scales of the forward product."""
    return quantize_weight(weight.detach(), layer.gemms.fprop.right, "auto")


def movement(layer, weight, step):
    """How far quantized weights move along a random step, over how far their masters do."""
    change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * step
    moved = weight + change
    change = (moved - weight).double()
    quantized = (layer.effective_weight(moved) - layer.effective_weight(weight)).double()
    return float((quantized * change).sum() / change.square().sum())


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if "32x32" not in str(SCHEMES[name])])
def test_the_fused_places_are_those_of_the_eager_functions(scheme, dtype):
    weight = gaussian(40, 384, dtype)
    weight[0], weight[1, 3], weight[2, 5] = 0, torch.inf, torch.nan
    weight[3, :32] = 2.0**-7  # cells that are narrower below
    found = []
    for backend in ("auto", "eager"):
        model, layer = one_layer(weight, backend=backend, **SCHEMES[scheme])
        report = dither_masters(model)
        found.append((layer.weight.detach().view(torch.int32), report.n_left))
    (fused, n_left), (eager, n_left_eagerly) = found
    assert torch.equal(fused, eager)
    assert n_left == n_left_eagerly


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_small_step_moves_quantized_weights_as_far_as_masters(scheme):
    weight = gaussian(384, 512)
    model, layer = one_layer(weight, **SCHEMES[scheme])
    undithered = movement(layer, weight, 2e-6)
    report = dither_masters(model)
    dithered = layer.weight.detach().clone()
    assert torch.equal(dithered.bfloat16().float(), weight)
    assert equal(stored(layer, weight), stored(layer, dithered))
    assert 0.5 < movement(layer, dithered, 2e-6) < 1.5
    assert report.n_weights == weight.numel()
    assert report.dtypes == ("bfloat16",)
    assert report.n_left < 0.01 * weight.numel()
    if scheme in ("plain", "floor", "even", "mse", "fallback 1", "paper_b", "tiles"):
        assert undithered > 10


def test_a_tie_leaves_to_the_side_that_nearest_even_chose():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    above = torch.tensor([False, True, False, True, False, True, False])
    weight = torch.zeros(64, 32)
    weight[:, 0] = 5.5
    weight[:32, 1:8], weight[32:, 1:8] = ties, -ties
    weight *= 2**-7
    model, layer = one_layer(weight, **PLAIN)
    dither_masters(model)
    moved = (layer.weight.detach().abs() - weight.abs())[:, 1:8]
    assert ((moved > 0) == above).all()
    assert (moved != 0).all()
    assert (layer.weight.detach()[:, 8:] == 0).all()
    assert (layer.weight.detach().abs() <= 6 * 2**-7 * (1 + 2**-8)).all()


def test_odd_shapes_and_non_finite_weights():
    weight = gaussian(37, 300)
    weight[3, 5], weight[4, 6] = float("inf"), float("nan")
    for options in ({}, {"preset": "paper_b"}, {"macro_block": 256, "macro_search": "static"}):
        model, layer = one_layer(weight, **options)
        dither_masters(model)
        found = layer.weight.detach()
        assert torch.equal(found.bfloat16().view(torch.int16), weight.bfloat16().view(torch.int16))
        assert equal(stored(layer, weight), stored(layer, found))
        assert (found != weight).double().mean() > 0.9


def test_the_draw_depends_on_seed_and_name_alone():
    weight = gaussian(64, 64)

    def dithered(name="a", seed=0):
        model, layer = one_layer(weight, name, stochastic_seed=seed, **PLAIN)
        dither_masters(model)
        return layer.weight.detach()

    first = dithered()
    assert torch.equal(first, dithered())
    assert not torch.equal(first, dithered(name="b"))
    assert not torch.equal(first, dithered(seed=1))


def test_weights_in_e4m3_leave_their_ties_too():
    weight = gaussian(64, 96)
    model, layer = one_layer(weight, preset="w8a8")
    before = layer.effective_weight(weight)
    held = movement(layer, weight, 1e-7)
    assert dither_masters(model).n_weights == weight.numel()
    moved = layer.weight.detach()
    assert torch.equal(layer.effective_weight(moved), before)
    assert torch.equal(moved.bfloat16().float(), weight)
    # One in sixteen lay on a tie, so that the smallest step moved E4M3 weights by far more than masters.
    assert held > 10
    assert abs(movement(layer, moved, 1e-4) - 1) < 0.3


@pytest.mark.parametrize(
    ("options", "dtype", "reason"),
    [
        ({}, torch.bfloat16, "are trained in bfloat16"),
        ({"fprop": {"weight": "full"}}, torch.float32, "are taken in full precision in the forward product"),
        ({"fprop": {"weight": "nvfp4"}}, torch.float32, "are taken in nvfp4 in the forward product"),
        ({"fprop": {"weight": "rceil+stochastic"}}, torch.float32, "are rounded at random"),
        ({"fprop": {"rotation": "random-16"}}, torch.float32, "are rotated in the forward product"),
        ({"fprop": {"rotation": "deterministic-64"}}, torch.float32, "are rotated in the forward product"),
    ],
)
def test_weights_that_it_would_do_nothing_for_are_left_alone(options, dtype, reason):
    weight = gaussian(32, 64)
    model, layer = one_layer(weight, **options)
    layer.to(dtype)
    report = dither_masters(model)
    assert torch.equal(layer.weight.detach().float(), weight)
    assert report.n_weights == 0
    assert [text for text in report.skipped if reason in text]
    assert reason in str(report)


def load(folder, dtype=torch.float32, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=MXFP4RLConfig(**options))


@pytest.fixture
def half(tmp_path):
    """A factory of checkpoints in 16 bits."""

    def save(family="qwen2", dtype=torch.bfloat16, layers=1):
        folder = tmp_path / f"{family}-{dtype}"
        make_model(family, dtype=dtype, layers=layers).save_pretrained(folder)
        return str(folder)

    return save


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen2", torch.bfloat16), ("llama", torch.float16), ("qwen3_moe", torch.bfloat16), ("gpt_oss", torch.bfloat16)],
)
def test_loading_keeps_the_checkpoint_and_its_policy(family, dtype, half, tmp_path):
    folder = half(family, dtype)
    plain = load(folder, dither_ties=False)
    model = load(folder)
    before, after = ({m.name: m.weight() for m in trainable_matrices(each)} for each in (plain, model))
    assert all(torch.equal(after[name].to(dtype).float(), before[name]) for name in before)
    moved = sum(int((after[name] != before[name]).sum()) for name in before)
    report = model.quantization_report.dither
    assert plain.quantization_report.dither is None
    assert report.n_weights == sum(weight.numel() for weight in before.values())
    assert moved == report.n_weights - report.n_left > 0.95 * report.n_weights
    assert report.dtypes == (str(dtype).removeprefix("torch."),)
    assert report.skipped == {}
    assert f"dithered {report.n_weights} weights" in str(model.quantization_report)
    wanted = plain(IDS).logits
    assert torch.equal(model(IDS).logits, wanted)
    others = dict(plain.named_parameters())
    quantized = {m.full_name for m in trainable_matrices(model)}
    assert all(torch.equal(p, others[name]) for name, p in model.named_parameters() if name not in quantized)

    model.save_pretrained(tmp_path / "policy")
    again = load(tmp_path / "policy")
    assert all(torch.equal(p, dict(again.named_parameters())[name]) for name, p in model.named_parameters())
    assert again.quantization_report.dither.n_weights == 0
    assert "dither" not in str(again.quantization_report)
    assert torch.equal(again(IDS).logits, wanted)


def test_what_is_not_dithered(half, checkpoint):
    sixteen = load(half(), dtype=torch.bfloat16)
    assert "weights are trained in bfloat16" in str(sixteen.quantization_report)
    assert load(half(), mode="packed").quantization_report.dither is None
    full = load(checkpoint("qwen2"), smooth=False)
    assert full.quantization_report.dither.skipped == {"are no 16-bit numbers": 14}
    masters = load_file(f"{full.config._name_or_path}/model.safetensors")
    assert all(torch.equal(m.weight(), masters[m.full_name]) for m in trainable_matrices(full))


def test_a_model_that_is_not_quantized(half):
    models = [AutoModelForCausalLM.from_pretrained(half(), dtype=torch.float32) for _ in range(4)]
    models[0].model.layers[0].mlp.up_proj.requires_grad_(False)
    reports = [dither_masters(models[0]), dither_masters(models[1]), dither_masters(models[2], seed=1)]
    first, second, seeded, loaded = ({name: p.detach() for name, p in m.named_parameters()} for m in models)
    moved = {name for name in loaded if not torch.equal(first[name], loaded[name])}
    projections = {name for name in loaded if name.endswith(("proj.weight", "lm_head.weight"))}
    assert moved == projections - {"model.layers.0.mlp.up_proj.weight"}
    assert reports[0].n_weights == sum(loaded[name].numel() for name in moved)
    assert reports[0].dtypes == ("bfloat16",)
    assert all(torch.equal(second[name].bfloat16().float(), loaded[name]) for name in loaded)
    assert all(torch.equal(first[name], second[name]) for name in moved)
    assert not any(torch.equal(second[name], seeded[name]) for name in moved)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(models[1](IDS).logits, models[3](IDS).logits)
    # A step of a hundredth of an ulp is seen by one weight in a hundred, and not by none.
    name = "model.layers.0.mlp.down_proj.weight"
    step = loaded[name].abs() * 2**-8 / 100
    seen = [((w[name] + step).bfloat16() != w[name].bfloat16()).float().mean() for w in (second, loaded)]
    assert 0.005 < seen[0] < 0.02
    assert seen[1] == 0
    with pytest.raises(ValueError, match="no trainable matrix"):
        dither_masters(nn.LayerNorm(4))


@pytest.mark.parametrize("name", ["dither_ties", "smooth"])
def test_options_of_loading_are_no_part_of_a_scheme(name):
    off = MXFP4RLConfig(**{name: False})
    assert off == MXFP4RLConfig()
    assert hash(off) == hash(MXFP4RLConfig())
    assert getattr(MXFP4RLConfig.from_dict(off.to_dict()), name) is False
    assert MXFP4RLConfig(mode="packed", **{name: False}) == MXFP4RLConfig(mode="packed")
    with pytest.raises(ValueError, match="must be True or False"):
        MXFP4RLConfig(**{name: "yes"})
