# SPDX-License-Identifier: Apache-2.0
"""The autograd operator: a product of quantized operands, with the straight-through gradient."""

import pytest
import torch
import torch.nn.functional as F

from hf_mxfp4 import fake_quantize
from hf_mxfp4.gemm import GemmSpec, GemmState, LayerRng, quantized_linear
from hf_mxfp4.numerics import FULL, GemmScheme, LinearScheme, QuantScheme


def state_of(inputs) -> GemmState:
    return GemmState(GemmSpec(LinearScheme(GemmScheme(inputs, QuantScheme()))), [LayerRng(0, "layer")])


STATE, WEIGHT_ONLY = state_of(QuantScheme()), state_of(FULL)


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small integers, many of which quantization changes, and on which sums of products are exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).float()


def quantized(x: torch.Tensor) -> torch.Tensor:
    return fake_quantize(x.detach())


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (2, 1, 3, 6), (0, 6), (2, 0, 6)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_forward_and_the_three_gradients(shape, has_bias):
    x, weight = integers(*shape).requires_grad_(), integers(5, 6, seed=1).requires_grad_()
    bias = integers(5, seed=2).requires_grad_() if has_bias else None
    y = quantized_linear(x, weight, bias, STATE)
    assert torch.equal(y, F.linear(quantized(x), quantized(weight), bias))
    assert not torch.equal(quantized(weight), weight)

    grad = integers(*shape[:-1], 5, seed=3)
    y.backward(grad)
    rows = grad.reshape(-1, 5)
    assert torch.equal(x.grad, grad @ quantized(weight))
    assert torch.equal(weight.grad, rows.t() @ quantized(x).reshape(-1, 6))
    if has_bias:
        assert torch.equal(bias.grad, rows.sum(0))


def test_literal():
    x = torch.tensor([[2.0, 5.5]], requires_grad=True)  # 5.5 becomes 6
    weight = torch.tensor([[1.0, -6.0], [0.3, 6.0]], requires_grad=True)  # 0.3 becomes 0.5
    bias = torch.tensor([10.0, 20.0], requires_grad=True)
    y = quantized_linear(x, weight, bias, STATE)
    assert y.tolist() == [[2.0 - 36.0 + 10.0, 1.0 + 36.0 + 20.0]]
    y.backward(torch.tensor([[1.0, 2.0]]))
    assert x.grad.tolist() == [[1.0 + 1.0, -6.0 + 12.0]]
    assert weight.grad.tolist() == [[2.0, 6.0], [4.0, 12.0]]
    assert bias.grad.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_no_gradient_where_none_is_needed(frozen):
    tensors = {"x": integers(3, 6), "weight": integers(5, 6, seed=1), "bias": integers(5, seed=2)}
    for name, operand in tensors.items():
        operand.requires_grad_(name != frozen)
    quantized_linear(*tensors.values(), STATE).sum().backward()
    for name, operand in tensors.items():
        assert (operand.grad is None) == (name == frozen)


def test_nothing_is_recorded_without_gradients():
    with torch.no_grad():
        y = quantized_linear(integers(3, 6), integers(5, 6).requires_grad_(), None, STATE)
    assert not y.requires_grad


def test_backward_survives_a_weight_whose_storage_was_freed_in_between():
    x, weight = integers(3, 6).requires_grad_(), integers(5, 6, seed=1).requires_grad_()
    y = quantized_linear(x, weight, None, WEIGHT_ONLY)
    kept = weight.data
    weight.data = torch.empty(0)
    weight.data = kept
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 5) @ fake_quantize(weight.detach()))


def test_a_weight_written_between_forward_and_backward_is_an_error():
    x, weight = integers(3, 6).requires_grad_(), integers(5, 6, seed=1).requires_grad_()
    y = quantized_linear(x, weight, None, STATE)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_there_is_no_second_derivative():
    x, weight = integers(3, 6).requires_grad_(), integers(5, 6, seed=1).requires_grad_()
    (grad,) = torch.autograd.grad(quantized_linear(x, weight, None, STATE).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_decides_the_dtype_of_the_product(dtype):
    x, weight = integers(3, 6).requires_grad_(), integers(5, 6, seed=1).requires_grad_()
    bias = integers(5, seed=2).requires_grad_()
    with torch.autocast("cpu", dtype):
        y = quantized_linear(x, weight, bias)
    assert y.dtype == dtype
    assert torch.equal(y, F.linear(x.to(dtype), weight.to(dtype), bias.to(dtype)))
    y.backward(torch.ones_like(y))
    for operand in (x, weight, bias):
        assert operand.grad.dtype == torch.float32
    assert torch.equal(bias.grad, torch.full((5,), 3.0))
