# SPDX-License-Identifier: Apache-2.0
"""Time that the host takes to launch products of one row: of a packed layer, of `F.linear`, and of an empty kernel."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
from torch import nn

from .bench import ROUNDS, Call, Case
from .cases import BF16, linear_layer, packed_layer, random_matrix


#: Size of a projection of Qwen2.5-1.5B, and of its keys and values.
SIZE = 1536
KEYS = 256


class Attention(nn.Module):
    """The three layers of an attention block that get the same input."""

    def __init__(self, q_proj: nn.Module, k_proj: nn.Module, v_proj: nn.Module):
        super().__init__()
        self.q_proj = q_proj
        self.k_proj = k_proj
        self.v_proj = v_proj

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def cases(tiny: bool) -> Iterator[Case]:
    """Yield a planned call, a first call that plans, and calls of q, k and v."""
    size, keys = (32, 32) if tiny else (SIZE, KEYS)

    def plain(device: torch.device) -> Call:
        x = random_matrix(device, 1, size)
        weight = linear_layer(device, size, size).weight
        return torch.no_grad()(lambda: F.linear(x, weight))

    def planned(device: torch.device, backend: str) -> Call:
        layer = packed_layer(device, size, size, backend)
        x = random_matrix(device, 1, size)
        return torch.no_grad()(lambda: layer(x))

    def first(device: torch.device, backend: str) -> Call:
        # Two are called before samples are taken, to check the result and to compile the kernel.
        count = 3 if tiny else 2 + ROUNDS
        layers = iter([packed_layer(device, size, size, backend) for _ in range(count)])
        x = random_matrix(device, 1, size)
        return torch.no_grad()(lambda: next(layers)(x))

    def attention(device: torch.device, backend: str | None = None) -> Call:
        layers: list[nn.Module] = []
        for n in (size, keys, keys):
            if backend is None:
                layers.append(linear_layer(device, n, size))
            else:
                layers.append(packed_layer(device, n, size, backend))
        module = Attention(*layers)
        x = random_matrix(device, 1, size)
        return torch.no_grad()(lambda: module(x))

    def empty(device: torch.device) -> Call:
        x = torch.empty(1, device=device)
        return lambda: _nothing[(1,)](x)

    shape = size, size
    peers = {BF16: plain, "empty Triton launch": empty}
    yield Case("host", "packed layer, planned", shape, planned, peers=peers, tolerance=1e-2, timing="host")
    yield Case("host", "packed layer, first call", shape, first, peers=peers, tolerance=1e-2, timing="once")
    joined = size + 2 * keys, size
    yield Case("host", "packed q, k, v", joined, attention, peers={BF16: attention}, tolerance=1e-2, timing="host")


@triton.jit
def _nothing(x_ptr):
    pass
