# SPDX-License-Identifier: Apache-2.0
"""What `MXFP4Linear` and `MXFP4Experts` keep of their input for the backward pass: how much it is, and that gradients
are the same."""

import itertools
import math

import pytest
import torch
from passes import passes
from same_bits import assert_same
from tables import CONFIGS, some
from test_experts import routing
from tiny_models import make_model
from torch.autograd.graph import saved_tensors_hooks

from hf_mxfp4 import MXFP4Experts, MXFP4Linear, MXFP4RLConfig, pack
from hf_mxfp4.integrations.transformers import quantize_linears
from hf_mxfp4.layers import set_quantization_step


#: Tokens, outputs and inputs, none of them a multiple of 16 or 32.
M, N, K = 43, 37, 50
EXACT = {
    **some(CONFIGS, "w4a4", "eager", "plain", "fallback of weights", "mse row", "w4a4g8", "paper_a"),
    "no fallback": {"outlier_fallback": None},
    "block mantissas": {"scale_rule": "even", "macro_search": "blockwise"},
    "dynamic": {"macro_search": "dynamic"},
    "deterministic rotation": {"fprop": {"rotation": "deterministic-16"}},
    "random rotation": {"fprop": {"rotation": "random-64"}},
    "stochastic": {"fprop": {"x": "rceil+mbs128-static+stochastic"}},
    "selective fallback": {"outlier_fallback_rate": 0.25},
    "selective, block mantissas": {"outlier_fallback_rate": 0.1, "macro_search": "blockwise"},
    "dgrad in MXFP4": {"dgrad": {"grad": "rceil"}},
}


def pair_of_layers(dtype=torch.float32, form="mxfp4", in_features=K, **options) -> tuple[MXFP4Linear, MXFP4Linear]:
    """The same layer twice: inputs saved as usual, and in ``form``."""
    torch.manual_seed(0)
    configs = (MXFP4RLConfig(saved_activations=kept, **options) for kept in ("full", form))
    full, saved = (MXFP4Linear(in_features, N, dtype=dtype, config=config, name="up_proj") for config in configs)
    saved.load_state_dict(full.state_dict())
    return full, saved


def kept_bytes(layer: torch.nn.Module, *inputs: torch.Tensor) -> int:
    """Bytes that a forward pass keeps besides the layer's parameters."""
    kept = {}

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in {p.untyped_storage().data_ptr() for p in layer.parameters()}:
            kept[tensor.untyped_storage().data_ptr()] = (tensor, tensor.untyped_storage().nbytes())
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        y = layer(*inputs)
    assert y.requires_grad == any(p.requires_grad for p in layer.parameters())
    return sum(size for _, size in kept.values())


def inputs(*shape: int, dtype=torch.float32) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    x[..., 3] *= 40
    return x.to(dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*itertools.product(EXACT, [torch.float32, torch.bfloat16]), ("w4a4", torch.float64), ("w4a4", torch.float16)],
    ids=str,
)
def test_codes_give_the_same_gradients_bit_for_bit(name, dtype):
    full, saved = pair_of_layers(dtype, **EXACT[name])
    x = inputs(M, K, dtype=dtype)
    expected = passes(full, x)
    assert_same(passes(saved, x), expected)
    assert expected[2].abs().sum() > 0


@pytest.mark.parametrize("shape", [(K,), (2, 5, K), (0, K), (2, 0, K)], ids=str)
@pytest.mark.parametrize("form", ["mxfp4", "fp8"])
def test_any_number_of_axes_and_tokens(form, shape):
    full, saved = pair_of_layers(form=form)
    expected, found = passes(full, inputs(*shape)), passes(saved, inputs(*shape))
    assert_same(found[:2], expected[:2])
    assert found[2].shape == (N, K)
    if form == "mxfp4":
        assert_same(found, expected)


@pytest.mark.parametrize("name", ["w4a4", "eager", "block mantissas", "random rotation", "selective fallback"])
def test_the_same_under_autocast(name):
    full, saved = pair_of_layers(**EXACT[name])
    assert_same(passes(saved, inputs(M, K), autocast=True), passes(full, inputs(M, K), autocast=True))


@pytest.mark.parametrize("fallback", [None, 1.0])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_huge_values_saturate_alike_and_a_nan_stays_where_it_was(autocast, fallback):
    full, saved = pair_of_layers(outlier_fallback=fallback)
    x = inputs(M, 2 * K)[:, :K]
    x[0, 0], x[1, 1], x[2, 2], x[5, 40] = 3.4e38, 1e-40, 0.0, math.nan
    found, expected = (passes(layer, x, autocast=autocast) for layer in (saved, full))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert expected[2].isnan().any() and not expected[2].isnan().all()


def test_steps_and_repeated_passes_draw_alike():
    full, saved = pair_of_layers(**EXACT["stochastic"])
    seen = []
    for step in (0, 3):
        for layer in (full, saved):
            set_quantization_step(layer, step)
            layer.zero_grad()
        expected = passes(full, inputs(M, K))
        assert_same(passes(saved, inputs(M, K)), expected)
        seen.append(expected[0])
    assert not torch.equal(*seen)


# What is kept: bits per value, by arithmetic. 256 inputs: two macro blocks, eight blocks, one fp8 scale per row.
BITS = [
    ("full", {}, torch.float32, 32),
    ("full", {}, torch.bfloat16, 16),
    ("mxfp4", {"outlier_fallback": None}, torch.float32, 4.3125),
    ("mxfp4", {}, torch.float32, 8.5625),
    ("mxfp4", {"outlier_fallback_operands": "weights"}, torch.bfloat16, 4.3125),
    ("mxfp4", {"preset": "w4a4g8", "outlier_fallback": None}, torch.bfloat16, 4.3125),
    ("fp8", {"preset": "w4a4g4"}, torch.bfloat16, 8 + 8 / 256),
    ("fp8", {"preset": "paper_b"}, torch.float32, 8 + 8 / 256),
    ("full", {"preset": "w4a8"}, torch.bfloat16, 8 + 8 / 256),
    ("full", {"preset": "w4a8g8"}, torch.float32, 8 + 8 / 256),
]


@pytest.mark.parametrize(("form", "options", "dtype", "bits"), BITS)
def test_bits_kept_per_value(form, options, dtype, bits):
    _, layer = pair_of_layers(dtype, form, in_features=256, **options)
    x = inputs(3, 7, 256, dtype=dtype)
    assert 8 * kept_bytes(layer, x) / x.numel() == bits


@pytest.mark.parametrize("form", ["full", "mxfp4", "fp8"])
def test_a_frozen_weight_keeps_nothing(form):
    _, layer = pair_of_layers(form=form)
    layer.weight.requires_grad_(False)
    assert kept_bytes(layer, inputs(M, K)) == 0
    assert kept_bytes(layer.requires_grad_(False), inputs(M, K)) == 0


@pytest.mark.parametrize("preset", ["w4a16", "w4a4", "w4a4g8", "w4a4g4", "paper_a", "paper_b"])
def test_fp8_rounds_the_gradient_of_the_weight_alone(preset):
    """E4M3 has 3 mantissa bits: at most 2**-4 of a value, 2.6 % root mean square, and no more in a sum of tokens with
    independent errors. Where Wgrad quantizes again, a value near a boundary can change its code besides."""
    full, saved = pair_of_layers(form="fp8", preset=preset)
    x = inputs(256, K)
    expected, found = passes(full, x), passes(saved, x)
    assert_same([found[0], found[1], found[3]], [expected[0], expected[1], expected[3]])
    error = ((found[2] - expected[2]).norm() / expected[2].norm()).item()
    assert 0.005 < error < (0.12 if preset in ("w4a4g4", "paper_b") else 0.04)


def test_fp8_is_exact_for_values_on_the_grid_of_e2m1():
    """Without macro factors and fallback, block exponents of a row that lie within E4M3's range are exact."""
    full, saved = pair_of_layers(form="fp8", macro_block=None, outlier_fallback=None)
    assert_same(passes(saved, inputs(M, K)), passes(full, inputs(M, K)))


UNUSED = 1
EXPERTS = {
    "w4a4": {},
    "w4a4g8": {"preset": "w4a4g8"},
    "blockwise": {"macro_search": "blockwise", "outlier_fallback": None},
    "selective": {"outlier_fallback_rate": 0.25},
    "random": {"fprop": {"x": "rceil+stochastic", "rotation": "random-16"}, "outlier_fallback": None},
}


def pair_of_experts(form="mxfp4", family="qwen3_moe", **options) -> list[MXFP4Experts]:
    """The same experts twice: inputs saved as usual, and in ``form``."""
    plain = (make_model(family, layers=1).model.layers[0].mlp.experts for _ in range(2))
    configs = (MXFP4RLConfig(saved_activations=saved, **options) for saved in ("full", form))
    return [MXFP4Experts.from_experts(p, c, "layers.0.mlp.experts") for p, c in zip(plain, configs, strict=True)]


ROUTED = routing(41, dtype=torch.float32, unused=UNUSED)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("scheme", EXPERTS)
def test_codes_give_experts_the_same_gradients(scheme, family):
    full, saved = pair_of_experts("mxfp4", family, **EXPERTS[scheme])
    assert kept_bytes(saved, *ROUTED) < kept_bytes(full, *ROUTED)
    expected = passes(full, *ROUTED)
    assert_same(passes(saved, *ROUTED), expected)
    assert expected[2].abs().sum() > 0 and not expected[2][UNUSED].any()


@pytest.mark.parametrize("preset", ["w4a4", "w4a16", "w4a4g4"])
def test_fp8_rounds_the_gradients_of_the_weights_of_experts_alone(preset):
    full, saved = pair_of_experts("fp8", preset=preset)
    assert kept_bytes(saved, *ROUTED) < kept_bytes(full, *ROUTED)
    expected, found = passes(full, *ROUTED), passes(saved, *ROUTED)
    assert_same(found[:2], expected[:2])
    for a, b in zip(found[2:], expected[2:], strict=True):
        assert 0.001 < ((a - b).norm() / b.norm()).item() < 0.12


@pytest.mark.parametrize("options", [{"preset": "w4a16"}, {"fprop": {"x": "full"}}], ids=str)
def test_codes_need_a_quantized_input(options):
    with pytest.raises(ValueError, match=r"fprop takes x in full precision.*'fp8'.*w4a4, w4a4g8, paper_a"):
        MXFP4RLConfig(saved_activations="mxfp4", **options)


@pytest.mark.parametrize(
    "options", [{"preset": "w4a4g4"}, {"preset": "paper_b"}, {"wgrad": {"x": "full"}}, {"wgrad": {"x": "mse"}}], ids=str
)
def test_codes_need_a_wgrad_that_reuses_them(options):
    with pytest.raises(ValueError, match=r"wgrad does not reuse the x of fprop.*'fp8'"):
        MXFP4RLConfig(saved_activations="mxfp4", **options)
    assert MXFP4RLConfig(saved_activations="fp8", **options).saved_activations == "fp8"


def test_other_forms_are_refused():
    with pytest.raises(ValueError, match=r"saved_activations='fp8' has no effect in mode='packed'"):
        MXFP4RLConfig(mode="packed", saved_activations="fp8")
    for form in ("FP8", None):
        with pytest.raises(ValueError, match=r"saved_activations=.*'full', 'mxfp4', 'fp8'"):
            MXFP4RLConfig(saved_activations=form)


def test_it_is_seen_and_survives_a_round_trip():
    config = MXFP4RLConfig(saved_activations="mxfp4")
    assert config.describe().endswith("saved activations mxfp4")
    assert "saved_activations='mxfp4'" in repr(config)
    assert "saved activations mxfp4" in repr(MXFP4Linear(K, N, config=config))
    assert MXFP4RLConfig.from_dict(config.to_dict()) == config
    assert config.packed().saved_activations == "full"
    usual = MXFP4RLConfig()
    assert "saved" not in usual.describe() and "saved_activations" not in usual.to_dict()


def test_packing_a_model_drops_it():
    model = make_model("qwen2")
    quantize_linears(model, MXFP4RLConfig(saved_activations="fp8"))
    assert "saved" not in pack(model).config.quantization_config.describe()
