# SPDX-License-Identifier: Apache-2.0
"""Data that break quantizers, and a comparison of bits."""

import torch


def adversarial_rows(shape: tuple[int, int], dtype: torch.dtype, start: int, rng: torch.Generator) -> torch.Tensor:
    """Rows that cycle, from the kind ``start`` on, through the kinds of data that break quantizers."""
    n_rows, n_cols = shape
    finfo = torch.finfo(dtype)

    def normal() -> torch.Tensor:
        return torch.randn(n_cols, generator=rng, dtype=torch.float64)

    def choice(values: tuple[float, ...]) -> torch.Tensor:
        pick = torch.randint(len(values), (n_cols,), generator=rng)
        return torch.tensor(values, dtype=torch.float64)[pick]

    def exponents(low: float, high: float) -> torch.Tensor:
        return 2.0 ** (torch.rand(n_cols, generator=rng, dtype=torch.float64) * (high - low) + low).floor()

    grid_and_ties = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0)
    lowest = -149 if dtype != torch.float16 else -24
    kinds = (
        lambda: normal(),
        lambda: normal() * exponents(-12, 12),
        lambda: choice(grid_and_ties) * choice((-1.0, 1.0)) * 2.0**-3,
        lambda: choice((0.0, -0.0, 0.0, 3.0)),
        lambda: choice((*(1.0,) * 60, float("nan"), float("inf"), -float("inf"))) * normal(),
        lambda: normal() * exponents(lowest, lowest + 12),
        lambda: choice((finfo.max, -finfo.max, finfo.max / 2, finfo.max * 0.8, 1.0)),
        lambda: normal() * exponents(-124, 126) if dtype != torch.float16 else normal() * exponents(-24, 14),
        lambda: torch.full((n_cols,), finfo.max, dtype=torch.float64) * torch.rand(n_cols, generator=rng).double(),
        lambda: torch.zeros(n_cols, dtype=torch.float64),
    )
    rows = [kinds[(start + row) % len(kinds)]() for row in range(n_rows)]
    return torch.stack(rows).to(dtype) if rows else torch.empty(shape, dtype=dtype)


def same(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """Equal bits, NaN and NaN apart, and no gradient."""
    if found is None or expected is None:
        return found is expected
    found = found.cpu()
    if (found.shape, found.dtype, found.requires_grad) != (expected.shape, expected.dtype, False):
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    equal = found.contiguous().view(integers) == expected.contiguous().view(integers)
    if found.is_floating_point():
        equal |= found.float().isnan() & expected.float().isnan()
    return bool(equal.all())
