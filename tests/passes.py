# SPDX-License-Identifier: Apache-2.0
"""A forward and a backward pass through a layer."""

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
