# SPDX-License-Identifier: Apache-2.0
"""Packed layers of a scheme whose forward product rotates: the codes are those of the trainable layer's operand, the
product is that of the dequantized weight in the model's basis, and gradients go back through the rotation."""

import pytest
import torch
from lora_models import IDS, UP, with_lora
from test_lora_experts import deltas, summed_twin
from test_packed_experts import routing, twins
from tiny_models import make_model
from torch import nn

from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig, cached_weights, pack
from hf_mxfp4.integrations.transformers.swap import quantize_linears


#: Of mode "qat": the packed twin of each is what is tested.
SCHEMES = {
    "weights, H64": {"preset": "w4a16", "scale_rule": "even", "macro_search": "blockwise", "outlier_fallback": None},
    "weights with residuals": {"preset": "w4a16", "outlier_fallback": 0.5},
    "both": {"preset": "w4a4", "outlier_fallback": None},
    "both with residuals": {"preset": "w4a4", "outlier_fallback": 0.5},
    "selected residuals": {"preset": "w4a4", "outlier_fallback": 0.5, "outlier_fallback_rate": 0.2},
    "tiles": {"preset": "w4a4", "macro_block": None, "outlier_fallback": None, "weight_block": "32x32"},
}
SIZES = {"weights with residuals": 16, "both": 128, "tiles": 32}
ALL = pytest.mark.parametrize("name", SCHEMES)
K = 256


def config(name: str, **options) -> MXFP4RLConfig:
    rotation = {"rotation": f"deterministic-{SIZES.get(name, 64)}"}
    return MXFP4RLConfig(fprop=rotation, **{**SCHEMES[name], **options})


def pair(name: str, dtype=torch.float32, **options) -> tuple[MXFP4Linear, MXFP4PackedLinear]:
    """A trainable layer and its packed twin, with outliers that a rotation spreads."""
    trained = MXFP4Linear(K, 96, config=config(name, **options), name="a.layer", dtype=dtype)
    with torch.no_grad():
        trained.weight[:, ::37] *= 20
    return trained, MXFP4PackedLinear.from_linear(trained, trained.config.packed(), "a.layer")


def inputs(dtype=torch.float32, tokens=5) -> torch.Tensor:
    x = torch.randn(2, tokens, K, dtype=dtype)
    x[..., 3] *= 30
    return x


def rotation_matrix(size: int) -> torch.Tensor:
    block, two = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(block) < size:  # Sylvester's construction
        block = torch.kron(two, block)
    return torch.block_diag(*[block / size**0.5] * (K // size))


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ALL
def test_the_codes_are_those_of_the_operand_that_the_trainable_layer_multiplies_with(name, dtype):
    trained, packed = pair(name, dtype)
    values = packed.forward_weight(dtype)
    assert torch.equal(values, trained.quantized_weight(trained.weight, dtype))
    plain = MXFP4PackedLinear.from_linear(trained, MXFP4RLConfig(mode="packed", **SCHEMES[name]))
    assert not torch.equal(values, plain.forward_weight(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ALL
def test_outputs_and_gradients_are_the_trainable_ones_where_both_multiply_dense_values(name, dtype):
    trained, packed = pair(name, dtype, backend="eager")
    x = inputs(dtype)
    taken = [x.clone().requires_grad_() for _ in range(2)]
    outs = [layer(each) for layer, each in zip((trained, packed), taken, strict=True)]
    assert torch.equal(*outs)
    grad = torch.randn_like(outs[0])
    for out in outs:
        out.backward(grad)
    # The trainable layer rotates the weight back, this one the gradient.
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 0.25}
    torch.testing.assert_close(taken[1].grad, taken[0].grad, **close)
    expected = grad.double().reshape(-1, 96) @ packed.dequantized_weight(torch.float64)
    torch.testing.assert_close(taken[1].grad.double().reshape(-1, K), expected, **close)
    assert taken[1].grad.dtype == dtype


@ALL
def test_on_codes_outputs_are_the_trainable_ones_up_to_float32_sums(name):
    trained, packed = pair(name)
    for tokens in (1, 40):
        x = inputs(tokens=tokens)
        torch.testing.assert_close(packed(x), trained(x), rtol=2e-5, atol=2e-4)
        with torch.no_grad():
            torch.testing.assert_close(packed(x), trained(x), rtol=2e-5, atol=2e-4)


def test_dequantized_weights_are_in_the_basis_of_the_model():
    _, packed = pair("both")
    turned = packed.forward_weight(torch.float64) @ rotation_matrix(128).T
    torch.testing.assert_close(packed.dequantized_weight(torch.float64), turned, rtol=0, atol=1e-6)
    _, packed = pair("weights, H64")
    x, plain = inputs(), packed.to_linear()
    torch.testing.assert_close(plain(x), packed(x), rtol=1e-4, atol=1e-4)
    assert packed.to_linear(torch.bfloat16).weight.dtype == torch.bfloat16
    # It is the trainable layer's, and near the weight itself.
    trained, packed = pair("weights, H64")
    values = packed.dequantized_weight()
    torch.testing.assert_close(values, trained.effective_weight(trained.weight), rtol=0, atol=1e-6)
    assert (values - trained.weight).norm() < 0.15 * trained.weight.norm()


def test_a_weight_in_portions_has_the_same_codes(monkeypatch):
    trained, whole = pair("both with residuals")
    monkeypatch.setattr("hf_mxfp4.gemm.packed_weight.PORTION", 32 * K)
    again = MXFP4PackedLinear.from_linear(trained, trained.config.packed())
    assert all(torch.equal(a, b) for a, b in zip(again.packed_weight(), whole.packed_weight(), strict=True))


@ALL
def test_compiled_layers_have_the_bits_of_eager_ones(name):
    _, packed = pair(name)
    taken = [inputs().requires_grad_()]
    taken.append(taken[0].detach().clone().requires_grad_())
    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True)
    outs = packed(taken[0]), compiled(taken[1])
    for out in outs:
        out.square().sum().backward()
    assert torch.equal(*outs) and torch.equal(taken[0].grad, taken[1].grad)
    torch._dynamo.reset()


def test_autocast_rotates_in_float32_and_multiplies_in_its_dtype():
    trained, packed = pair("both", backend="eager")
    x = inputs().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = packed(x)
        assert torch.equal(y, trained(x)) and y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32 and x.grad.abs().sum() > 0


# ---- in models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["weights, H64", "both with residuals"])
def test_a_packed_model_is_the_trained_one_and_lora_trains_on_it(name, load):
    model = load(**vars_of(name), dither_ties=False)
    with torch.no_grad():
        expected = model(IDS).logits
    packed = pack(model)
    with torch.no_grad():
        torch.testing.assert_close(packed(IDS).logits, expected, rtol=1e-4, atol=1e-4)
        with cached_weights(packed):
            torch.testing.assert_close(packed(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    adapted = with_lora(packed)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(4):
        loss = adapted(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01


def vars_of(name: str) -> dict:
    return {"mode": "qat", **SCHEMES[name], "fprop": {"rotation": "deterministic-16"}}


def test_adapters_merge_in_the_basis_of_the_model_and_come_apart_again(load):
    model = pack(load(**vars_of("weights, H64"), dither_ties=False))
    adapted = with_lora(model)
    layer = adapted.get_submodule(UP)
    base, before = layer.base_layer, layer.base_layer.weight.clone()
    delta = layer.get_delta_weight("default")
    weight = base.dequantized_weight(torch.float32)
    torch.testing.assert_close(layer.effective_weight(), weight + delta, rtol=0, atol=1e-6)
    with torch.no_grad():
        outside = layer.base_layer(torch.ones(1, base.in_features))
    layer.merge()
    again = MXFP4PackedLinear.from_linear(with_weight(weight + delta), base.config)
    assert torch.equal(base.weight, again.weight) and not torch.equal(base.weight, before)
    # What a merge loses is measured in that basis too: far less than the adapter and the weight together.
    assert layer.merge_error.noise < 0.05 * (weight + delta).square().sum().item()
    layer.unmerge()
    assert torch.equal(base.weight, before)
    with torch.no_grad():
        assert torch.equal(layer.base_layer(torch.ones(1, base.in_features)), outside)


def with_weight(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight)
    return linear


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_packed_experts_repeat_the_trainable_ones(family):
    scheme = MXFP4RLConfig(outlier_fallback=None, fprop={"rotation": "deterministic-32"})
    trained, packed = twins(family, scheme)
    states, index, weights = routing()
    taken = [states.clone().requires_grad_() for _ in range(2)]
    outs = [layer(x, index, weights) for layer, x in zip((trained, packed), taken, strict=True)]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-6)
    for out in outs:
        out.square().sum().backward()
    torch.testing.assert_close(taken[1].grad, taken[0].grad, rtol=1e-4, atol=1e-6)
    for projection in packed.projections:
        operand = trained.quantized_weight(projection, getattr(trained, projection), torch.float32)
        assert torch.equal(packed.forward_weight(projection), operand)
        plain = trained.to_experts().get_parameter(projection)
        torch.testing.assert_close(packed.dequantized_weight(projection), plain, rtol=0, atol=1e-6)


def test_lora_on_packed_experts_is_in_the_basis_of_the_model(load):
    scheme = {"scale_rule": "even", "macro_search": "blockwise", "fprop": {"rotation": "deterministic-32"}}
    model = with_lora(load("qwen3_moe", **scheme), target_modules=["experts"])
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.experts")
    twin = summed_twin(model)
    found, expected = model(IDS).logits, twin(IDS).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    factors = [p for p in model.parameters() if p.requires_grad]
    pairs = zip(*(torch.autograd.grad(each.square().sum(), factors) for each in (found, expected)), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-3, atol=1e-4) for one, other in pairs)
    base = layer.base_layer
    total = base.dequantized_weight("down_proj", torch.float32)[1] + deltas(layer, "down_proj")[1].detach()
    layer.merge()
    assert torch.equal(base.down_proj[1], base.pack_matrix(total)["weight"])


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_width_that_the_rotation_does_not_divide_is_refused_by_name():
    linear = nn.Linear(72, 8)
    own = config("weights, H64").packed()
    with pytest.raises(ValueError, match=r"a\.layer has 72 inputs, no multiple of 64.*modules_to_not_convert"):
        MXFP4PackedLinear.from_linear(linear, own, "a.layer")


def test_random_signs_are_refused():
    with pytest.raises(ValueError, match="rotates both operands by signs that are drawn anew"):
        MXFP4RLConfig(fprop={"rotation": "random-16"}).packed()
    with pytest.raises(ValueError, match="rotates both operands by signs that are drawn anew"):
        MXFP4RLConfig(mode="packed", fprop={"rotation": "random-16"})


def test_a_model_that_does_not_fit_is_refused():
    model = make_model()
    with pytest.raises(ValueError, match="inputs, no multiple of 128"):
        quantize_linears(model, MXFP4RLConfig(mode="packed", fprop={"rotation": "deterministic-128"}))
