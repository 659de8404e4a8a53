# SPDX-License-Identifier: Apache-2.0
"""The autograd operator: a product of quantized operands, with the straight-through gradient."""

import pytest
import torch
import torch.nn.functional as F

from hf_mxfp4 import fake_quantize
from hf_mxfp4.gemm import GemmSpec, GemmState, LayerRng, quantized_linear
from hf_mxfp4.numerics import FULL, GemmScheme, LinearScheme, QuantScheme


STATE = GemmState(GemmSpec(LinearScheme(GemmScheme(FULL, QuantScheme()))), [LayerRng(0, "layer")])


def changed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of "quantized" operands whose every trace in a result is visible, and exact."""
    return quantized_linear(x, weight, bias, input_operand=x.detach() / 2, weight_operand=weight.detach() * 4)


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small integers, on which every sum of products below is exact in float32, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (2, 1, 3, 6), (0, 6), (2, 0, 6)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_forward_and_the_three_gradients(shape, has_bias):
    x, weight = integers(*shape).requires_grad_(), integers(5, 6, seed=1).requires_grad_()
    bias = integers(5, seed=2).requires_grad_() if has_bias else None
    y = changed_linear(x, weight, bias)
    assert torch.equal(y, F.linear(x / 2, weight * 4, bias))

    grad = integers(*shape[:-1], 5, seed=3)
    y.backward(grad)
    rows = grad.reshape(-1, 5)
    assert torch.equal(x.grad, grad @ (weight.detach() * 4))
    assert torch.equal(weight.grad, rows.t() @ (x.detach().reshape(-1, 6) / 2))
    if has_bias:
        assert torch.equal(bias.grad, rows.sum(0))


def test_literal():
    x = torch.tensor([[2.0, 4.0]], requires_grad=True)
    weight = torch.tensor([[1.0, -1.0], [0.5, 0.0]], requires_grad=True)
    bias = torch.tensor([10.0, 20.0], requires_grad=True)
    y = changed_linear(x, weight, bias)
    assert y.tolist() == [[4.0 - 8.0 + 10.0, 2.0 + 20.0]]
    y.backward(torch.tensor([[1.0, 2.0]]))
    assert x.grad.tolist() == [[4.0 + 2.0 * 2.0, -4.0]]
    assert weight.grad.tolist() == [[1.0, 2.0], [2.0, 4.0]]
    assert bias.grad.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_no_gradient_where_none_is_needed(frozen):
    tensors = {"x": integers(3, 6), "weight": integers(5, 6, seed=1), "bias": integers(5, seed=2)}
    for name, operand in tensors.items():
        operand.requires_grad_(name != frozen)
    changed_linear(*tensors.values()).sum().backward()
    for name, operand in tensors.items():
        assert (operand.grad is None) == (name == frozen)


def test_nothing_is_recorded_without_gradients():
    with torch.no_grad():
        y = changed_linear(integers(3, 6), integers(5, 6).requires_grad_(), None)
    assert not y.requires_grad


def test_backward_survives_a_weight_whose_storage_was_freed_in_between():
    x, weight = integers(3, 6).requires_grad_(), integers(5, 6, seed=1).requires_grad_()
    y = quantized_linear(x, weight, None, STATE)
    kept = weight.data
    weight.data = torch.empty(0)
    weight.data = kept
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 5) @ fake_quantize(weight.detach()))


def test_a_weight_written_between_forward_and_backward_is_an_error():
    x, weight = integers(3, 6).requires_grad_(), integers(5, 6, seed=1).requires_grad_()
    y = changed_linear(x, weight, None)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_there_is_no_second_derivative():
    x, weight = integers(3, 6).requires_grad_(), integers(5, 6, seed=1).requires_grad_()
    (grad,) = torch.autograd.grad(changed_linear(x, weight, None).square().sum(), x, create_graph=True)
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
