# SPDX-License-Identifier: Apache-2.0
"""A forward and a backward pass through a layer, and products within their rounding.

Libraries of products add up in another order on another processor, for other numbers of rows, or where memory is
aligned differently. Bits are compared of one and the same product alone.
"""

import torch


def passes(layer: torch.nn.Module, x: torch.Tensor, *routing, grad=None, autocast=False) -> list[torch.Tensor]:
    """The output, the gradient of ``x``, and those of the parameters that have one: of weights and biases."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x, *routing)
    if grad is None:
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    y.backward(grad)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def assert_product(
    found: torch.Tensor, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """``found [M, N]`` is ``left [M, C] right[N, C]^T + bias[N]`` with sums in float32 (float64: in that) in whatever
    order, rounded to its dtype."""
    left, right = left.detach().double(), right.detach().double()
    exact, size = left @ right.mT, left.abs() @ right.mT.abs()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    in_sums = torch.finfo(torch.promote_types(found.dtype, torch.float32)).eps
    bound = torch.finfo(found.dtype).eps * exact.abs() + (left.shape[-1] + 1) * in_sums * size
    error = (found.double() - exact).abs()
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times the rounding"
