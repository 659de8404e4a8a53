# SPDX-License-Identifier: Apache-2.0
"""`MXFP4PackedExperts` against the trainable experts of the same scheme, and packed layers of a scheme that rotates."""

import copy
import functools
import pickle

import moe_models
import pytest
import torch
from lora_models import IDS, UP, changes_of, summed_twin, with_lora
from passes import passes
from rotations import rotation_matrix
from same_bits import assert_same
from tiny_models import make_model
from torch import nn

from hf_mxfp4 import MXFP4Experts, MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig, cached_weights, pack
from hf_mxfp4.layers import MXFP4PackedExperts
from hf_mxfp4.numerics import LinearScheme
from hf_mxfp4.ops import GemmSpec, weight_operand


FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss"]
CONFIG = MXFP4RLConfig()
routing = functools.partial(moe_models.routing, 19, dtype=torch.float32)


def twins(family="qwen3_moe", config=CONFIG, dtype=torch.float32):
    """Trainable experts and their packed twin."""
    experts = make_model(family, layers=1, dtype=dtype).model.layers[0].mlp.experts
    trained = MXFP4Experts.from_experts(experts, config, "mlp.experts")
    return trained, MXFP4PackedExperts.from_experts(trained, config.packed(), "mlp.experts")


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_repeat_the_trainable_ones(family, dtype):
    trained, packed = twins(family, CONFIG, dtype)
    inputs = routing(dtype=dtype)
    expected = passes(trained, *inputs)[:2]
    assert_same(passes(packed, *inputs)[:2], expected)
    assert expected[1].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_frozen_bytes_and_biases_the_very_ones(family):
    trained, packed = twins(family)
    weights = [p for name, p in packed.named_parameters() if not name.endswith("bias")]
    assert {p.dtype for p in weights} == {torch.uint8}
    assert not any(p.requires_grad for p in weights)
    if family == "gpt_oss":
        assert packed.down_proj_bias is trained.down_proj_bias


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_of_few_tokens_are_the_trainable_ones_up_to_float32_sums(family):
    trained, packed = twins(family)
    inputs = routing()
    # Two products one after the other, of sums of at most 96 terms.
    torch.testing.assert_close(packed(*inputs), trained(*inputs), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_experts_again(family):
    trained, packed = twins(family)
    plain = packed.to_experts()
    expected = trained.to_experts()
    assert type(plain) is type(expected)
    assert_same(dict(plain.state_dict()), dict(expected.state_dict()))
    assert packed.to_experts(torch.bfloat16).down_proj.dtype == torch.bfloat16
    if family == "gpt_oss":
        assert plain.down_proj_bias is not packed.down_proj_bias


def test_every_option_of_products_reaches_experts():
    config = MXFP4RLConfig(mode="packed", backend="eager", matmul_backend="dense")
    experts = make_model("qwen3_moe", layers=1).model.layers[0].mlp.experts
    layer = MXFP4PackedExperts.from_experts(experts, config)
    expected = GemmSpec(LinearScheme(config.gemms().fprop), backend="eager", matmul_backend="dense")
    assert [state.spec for state in layer.states.values()] == [expected, expected]


def test_dtype_follows_to():
    _, packed = twins("gpt_oss")
    packed.to(torch.bfloat16)
    assert packed.compute_dtype == torch.bfloat16
    assert packed.gate_up_proj.dtype == torch.uint8
    assert packed(*routing(dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="input is torch.float32"):
        packed(*routing())


def test_tensors_that_are_missing_or_replaced_by_floats_are_refused():
    _, packed = twins()
    packed.down_proj_scale = None
    with pytest.raises(ValueError, match="mlp.experts.down_proj_scale is missing"):
        packed.check()
    packed.down_proj = torch.nn.Parameter(torch.ones(4, 64, 32))
    with pytest.raises(TypeError, match="down_proj was replaced"):
        packed(*routing())


def test_a_state_dict_is_read_and_copies_are_equal():
    _, packed = twins()
    other = pickle.loads(pickle.dumps(copy.deepcopy(packed)))
    assert torch.equal(other(*routing()), packed(*routing()))
    for tensor in other.state_dict().values():
        tensor.zero_()
    assert not torch.equal(other(*routing()), packed(*routing()))
    other.load_state_dict(packed.state_dict())
    assert torch.equal(other(*routing()), packed(*routing()))


def test_what_cannot_be_packed():
    trained, _ = twins()
    with pytest.raises(ValueError, match="needs a config of mode='packed'"):
        MXFP4PackedExperts.from_experts(trained, MXFP4RLConfig())
    plain = trained.to_experts()
    plain.gate_up_proj = torch.nn.Parameter(torch.zeros(4, 64, 64, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(TypeError, match="nothing to quantize"):
        MXFP4PackedExperts.from_experts(plain, CONFIG.packed())


#: Schemes that rotate: of mode "qat", and what is tested is the packed twin.
ROTATION = {"rotation": "deterministic-32"}
SCHEMES = {
    "default": {"fprop": ROTATION},
    "w4a16": {"preset": "w4a16", "fprop": ROTATION},
    "w4a4": {"preset": "w4a4", "fprop": ROTATION},
    "residuals": {"preset": "w4a4", "outlier_fallback": 0.5, "fprop": ROTATION},
    "tiles": {"preset": "w4a4", "fprop": {**ROTATION, "weight": "even+32x32"}},
}
ALL = pytest.mark.parametrize("name", SCHEMES)
K = 256


def pair(name: str, dtype=torch.float32, **options) -> tuple[MXFP4Linear, MXFP4PackedLinear]:
    """A trainable layer and its packed twin, with outliers that a rotation spreads."""
    config = MXFP4RLConfig(**SCHEMES[name], **options)
    trained = MXFP4Linear(K, 96, config=config, name="a.layer", dtype=dtype)
    with torch.no_grad():
        trained.weight[:, ::37] *= 20
    return trained, MXFP4PackedLinear.from_linear(trained, trained.config.packed(), "a.layer")


def inputs(dtype=torch.float32, tokens=5) -> torch.Tensor:
    x = torch.randn(2, tokens, K, dtype=dtype)
    x[..., 3] *= 30
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ALL
def test_the_codes_are_those_of_the_operand_that_the_trainable_layer_multiplies_with(name, dtype):
    trained, packed = pair(name, dtype)
    assert torch.equal(packed.forward_weight(dtype), trained.quantized_weight(trained.weight, dtype))
    assert not torch.equal(packed.forward_weight(dtype), packed.dequantized_weight(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ALL
def test_outputs_and_gradients_are_the_trainable_ones_where_both_multiply_dense_values(name, dtype):
    trained, packed = pair(name, dtype, backend="eager")
    x = inputs(dtype)
    grad = torch.randn(2, 5, 96, dtype=dtype)
    (y, grad_x), (expected, of_trained) = (passes(layer, x, grad=grad)[:2] for layer in (packed, trained))
    assert torch.equal(y, expected)
    assert grad_x.dtype == dtype
    # The trainable layer rotates the weight back, this one the gradient.
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 0.25}
    torch.testing.assert_close(grad_x, of_trained, **close)
    torch.testing.assert_close(grad_x.double(), grad.double() @ packed.dequantized_weight(torch.float64), **close)


@ALL
def test_on_codes_outputs_are_the_trainable_ones_up_to_float32_sums(name):
    trained, packed = pair(name)
    for tokens in (1, 40):
        x = inputs(tokens=tokens)
        torch.testing.assert_close(packed(x), trained(x), rtol=2e-5, atol=2e-4)
        with torch.no_grad():
            torch.testing.assert_close(packed(x), trained(x), rtol=2e-5, atol=2e-4)


def test_dequantized_weights_are_in_the_basis_of_the_model():
    trained, packed = pair("default")
    values = packed.dequantized_weight(torch.float64)
    turned = packed.forward_weight(torch.float64) @ rotation_matrix("deterministic-32", K, None).T
    torch.testing.assert_close(values, turned, rtol=0, atol=1e-6)
    torch.testing.assert_close(values.float(), trained.effective_weight(trained.weight), rtol=0, atol=1e-6)
    assert (values - trained.weight).norm() < 0.15 * trained.weight.norm()


def test_a_plain_layer_computes_as_the_rotated_one():
    _, packed = pair("w4a16")
    x = inputs()
    torch.testing.assert_close(packed.to_linear()(x), packed(x), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_compiler")
@ALL
def test_compiled_layers_have_the_bits_of_eager_ones(name):
    _, packed = pair(name)
    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True)
    x = inputs()
    assert_same(passes(compiled, x), passes(packed, x))


def test_autocast_rotates_in_float32_and_multiplies_in_its_dtype():
    trained, packed = pair("w4a4", backend="eager")
    x = inputs()
    y, grad_x, *_ = passes(packed, x, autocast=True)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, passes(trained, x, autocast=True)[0])
    assert grad_x.dtype == torch.float32
    assert grad_x.any()


@torch.no_grad()
def test_a_packed_model_is_the_trained_one(load):
    model = load(mode="qat", fprop=ROTATION, dither_ties=False)
    expected = model(IDS).logits
    packed = pack(model)
    torch.testing.assert_close(packed(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    with cached_weights(packed):
        torch.testing.assert_close(packed(IDS).logits, expected, rtol=1e-4, atol=1e-4)


def test_adapters_merge_in_the_basis_of_the_model_and_come_apart_again(load):
    adapted = with_lora(pack(load(mode="qat", fprop=ROTATION, dither_ties=False)))
    layer = adapted.get_submodule(UP)
    base = layer.base_layer
    before = layer.base_layer.weight.clone()
    total = base.dequantized_weight(torch.float32) + layer.get_delta_weight("default")
    torch.testing.assert_close(layer.effective_weight(), total, rtol=0, atol=1e-6)
    layer.merge()
    summed = nn.Linear(total.shape[1], total.shape[0], bias=False)
    summed.weight = nn.Parameter(total)
    again = MXFP4PackedLinear.from_linear(summed, base.config)
    assert torch.equal(base.weight, again.weight)
    assert not torch.equal(base.weight, before)
    # What a merge loses is measured in that basis too: far less than the adapter and the weight together.
    assert layer.merge_error.noise < 0.05 * total.square().sum().item()
    layer.unmerge()
    assert torch.equal(base.weight, before)


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_packed_experts_repeat_the_trainable_ones(family):
    trained, packed = twins(family, MXFP4RLConfig(fprop=ROTATION))
    (y, grad_x), (expected, of_trained) = (passes(layer, *routing())[:2] for layer in (packed, trained))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad_x, of_trained, rtol=1e-4, atol=1e-6)
    for projection in packed.projections:
        operand = weight_operand(getattr(trained, projection), torch.float32, trained.states[projection])
        assert torch.equal(packed.forward_weight(projection), operand)
        plain = trained.to_experts().get_parameter(projection)
        torch.testing.assert_close(packed.dequantized_weight(projection), plain, rtol=0, atol=1e-6)


def test_lora_on_packed_experts_is_in_the_basis_of_the_model(load):
    model = load("qwen3_moe", fprop=ROTATION)
    model = with_lora(model, target_modules=["experts"])
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.experts")
    twin = summed_twin(model)
    found = model(IDS).logits
    expected = twin(IDS).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = [torch.autograd.grad(logits.square().sum(), trained) for logits in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)

    base = layer.get_base_layer()
    total = base.dequantized_weight("down_proj", torch.float32)[1] + changes_of(layer)["down_proj"][1].detach()
    layer.merge()
    assert torch.equal(base.down_proj[1], base.pack_matrix(total)["weight"])


def test_a_width_that_the_rotation_does_not_divide_is_refused_by_name():
    config = MXFP4RLConfig(mode="packed", fprop=ROTATION)
    with pytest.raises(ValueError, match=r"a\.layer has 72 inputs, no multiple of 32"):
        MXFP4PackedLinear.from_linear(nn.Linear(72, 8), config, "a.layer")
