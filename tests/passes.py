# SPDX-License-Identifier: Apache-2.0
"""A forward and a backward pass through a layer, and products within their rounding.

Libraries of products add up in another order on another processor, for other numbers of rows, or where memory is
aligned differently. Tests compare bits only where both results come from the very same product.
"""

import torch


def passes(layer: torch.nn.Module, x: torch.Tensor, *routing, grad=None, autocast=False) -> list[torch.Tensor]:
    """Return the output, the gradient of ``x``, and the gradients of the weights and biases that train."""
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
    """Check that ``found [M, N]`` is ``left [M, C] right[N, C]^T + bias[N]``, rounded to its dtype.

    The sums may be in any order, in float32, or in float64 if that is the dtype.
    """
    left = left.detach().double()
    right = right.detach().double()
    exact = left @ right.mT
    size = left.abs() @ right.mT.abs()
    if bias is not None:
        exact = exact + bias.double()
        size = size + bias.double().abs()
    rounding_of_sums = torch.finfo(torch.promote_types(found.dtype, torch.float32)).eps
    bound = torch.finfo(found.dtype).eps * exact.abs() + (left.shape[-1] + 1) * rounding_of_sums * size
    error = (found.double() - exact).abs()
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times the rounding"
