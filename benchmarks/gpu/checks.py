# SPDX-License-Identifier: Apache-2.0
"""Whether a result is right. Nothing is timed before it is."""

import torch


class WrongResult(AssertionError):
    """A contender computes something else than it is measured for."""


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """``|out - reference| / |reference|`` in float64; infinite when ``out`` is not finite.

    Raises `WrongResult` when the shapes differ.
    """
    if out.shape != reference.shape:
        raise WrongResult(f"the result is {list(out.shape)}, not {list(reference.shape)}")
    out, reference = out.double(), reference.double()
    error = float((out - reference).norm() / reference.norm().clamp_min(1e-300))
    return error if error == error else float("inf")


def expect_close(what: str, out: torch.Tensor, reference: torch.Tensor, bound: float) -> float:
    """The relative error, or `WrongResult` when it is above ``bound``."""
    error = relative_error(out, reference)
    if not error <= bound:
        raise WrongResult(f"{what}: relative error {error:.2e}, at most {bound:.0e} is right")
    return error


def expect_equal(what: str, out: torch.Tensor | None, reference: torch.Tensor | None) -> None:
    """`WrongResult` unless both have the same bits (or both are absent)."""
    if out is None and reference is None:
        return
    if out is None or reference is None or out.shape != reference.shape or out.dtype != reference.dtype:
        shown = [None if t is None else (str(t.dtype), list(t.shape)) for t in (out, reference)]
        raise WrongResult(f"{what}: {shown[0]}, not {shown[1]}")
    bits = [t.contiguous().view(torch.uint8) for t in (out, reference)]
    if not torch.equal(*bits):
        differing = int((bits[0] != bits[1]).sum())
        raise WrongResult(f"{what}: {differing} of {bits[0].numel()} bytes differ")


def some_rows(n_rows: int, count: int, device: torch.device) -> torch.Tensor:
    """Indices of rows to check: the first, the last, and some between, ``count`` in all (or every row)."""
    if n_rows <= count:
        return torch.arange(n_rows, device=device)
    generator = torch.Generator().manual_seed(n_rows)
    ends = torch.cat([torch.arange(count // 3), torch.arange(n_rows - count // 3, n_rows)])
    between = torch.randint(n_rows, (count - len(ends),), generator=generator)
    return torch.cat([ends, between]).unique().to(device)
