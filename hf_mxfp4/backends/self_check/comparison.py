# SPDX-License-Identifier: Apache-2.0
"""What checks of kernels are made of: data that break them, and comparisons of bits and of products."""

from collections.abc import Iterable

import torch


#: Largest errors of a product, relative to the sum of the magnitudes of what is summed: rounding of the result, and of
#: float32 sums.
BOUNDS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-16}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def few(compiled: int, interpreted: int, device: torch.device) -> int:
    """A size for a device: the second one where kernels are interpreted, which takes long."""
    return interpreted if device.type == "cpu" else compiled


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers on the CPU, the same in every process."""
    rng = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=rng, dtype=torch.float32, device="cpu").to(dtype)


def of_all_sizes(seed: int, n_rows: int, n_cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A matrix whose blocks of 32 have magnitudes from 2**-18 to 2**12, with NaN, infinity, a row of zeros and one of
    numbers halfway between neighbours."""
    x = normal(seed, n_rows, n_cols, dtype=torch.float32)
    rng = torch.Generator(device="cpu").manual_seed(seed + 1)
    exponents = torch.randint(-18, 13, (n_rows, -(-n_cols // 32)), generator=rng, device="cpu")
    x = x * torch.exp2(exponents.float()).repeat_interleave(32, dim=1)[:, :n_cols]
    x[0, 3], x[n_rows - 1, n_cols - 1], x[1] = torch.nan, torch.inf, 0
    halfway = torch.tensor([0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0, 6.0], dtype=torch.float32, device="cpu")
    x[2] = halfway.repeat(-(-n_cols // 8))[:n_cols]
    return x.to(dtype)


def first_difference(pairs: Iterable[tuple[str, torch.Tensor | None, torch.Tensor | None]]) -> str | None:
    """What the first of some tensors is that has other bits than it should, NaN and NaN apart; `None` when none is.

    Args:
        pairs: of each a name, what was found on a device, and what it should be on the CPU.
    """
    for name, found, expected in pairs:
        if found is expected is None:
            continue
        if found is None or expected is None or (found.shape, found.dtype) != (expected.shape, expected.dtype):
            return f"{name}: another shape or dtype than the definition's"
        found, integers = found.cpu(), _INTEGERS[expected.element_size()]
        same = found.contiguous().view(integers) == expected.contiguous().view(integers)
        if expected.is_floating_point():
            same |= found.float().isnan() & expected.float().isnan()
        if not same.all():
            return f"{name}: {int((~same).sum())} of {same.numel()} values are not the definition's"
    return None


def product_problem(
    name: str, found: torch.Tensor, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None
) -> str | None:
    """Why ``found`` is not ``left right^T + bias`` in its dtype, `None` when it is; ``left``, ``right`` and ``bias`` on
    the CPU."""
    left, right, bound = left.double(), right.double(), BOUNDS[found.dtype]
    expected, magnitude = left @ right.t(), left.abs() @ right.abs().t()
    if bias is not None:
        expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
    error = float(((found.cpu().double() - expected).abs() / magnitude.clamp(min=1e-30)).max())
    return None if error < bound else f"{name}: off by {error:.1e} of the sum of magnitudes"
