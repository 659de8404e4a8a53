# SPDX-License-Identifier: Apache-2.0
"""Rows sorted by expert: where each expert's begin and end, on the device, and on the host only when asked."""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch


class Groups:
    """Rows sorted by expert: the first ``counts[0]`` belong to expert 0, and so on.

    Args:
        counts: rows of each expert.

    Attributes:
        n_experts: how many there are.
        n_rows: of all experts.
    """

    def __init__(self, counts: Sequence[int]):
        self.counts = tuple(counts)
        self.n_experts, self.n_rows = len(self.counts), sum(self.counts)
        self._ends = torch.tensor(self.counts).cumsum(0, dtype=torch.int32)

    @classmethod
    def of_ends(cls, ends: torch.Tensor, n_rows: int) -> "Groups":
        """From int32 ``[experts]``, where the rows of each end, on any device. Nothing is read back from there before
        `counts` is, or the groups are iterated over."""
        groups = cls.__new__(cls)
        groups.n_experts = ends.shape[0]
        groups.n_rows = n_rows
        groups._ends = ends
        return groups

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Rows of each expert. Waits for the device when first asked for."""
        return tuple(self._ends.diff(prepend=self._ends.new_zeros(1)).tolist())

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Experts that have rows, and the rows. Waits for the device as `counts` does."""
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(start, start + count)
            start += count

    def offsets(self, device: torch.device) -> torch.Tensor:
        """int32 ``[experts]``: where the rows of each expert end."""
        if self._ends.device != device:
            self._ends = self._ends.to(device)
        return self._ends

    def per_row(self, values: torch.Tensor) -> torch.Tensor:
        """``values [experts, ...]`` repeated for the rows of each expert: ``[rows, ...]``."""
        ends = self.offsets(values.device)
        counts = ends.diff(prepend=ends.new_zeros(1))
        return values.repeat_interleave(counts, dim=0, output_size=self.n_rows)


def sum_rows(rows: torch.Tensor, groups: Groups | None) -> torch.Tensor:
    """Return the gradient of a bias, ``[N]`` or of experts ``[E, N]``, from output gradients ``[M, N]``."""
    if groups is None:
        return rows.sum(dim=0)
    out = rows.new_zeros(groups.n_experts, rows.shape[1])
    for expert, expert_rows in groups:
        out[expert] = rows[expert_rows].sum(dim=0)
    return out


def group_by_expert(expert_ids: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, Groups]:
    """Return the order that sorts rows by expert, stable, and their groups. Does not wait for a GPU.

    Args:
        expert_ids: the expert of each row, an integer vector.

    Raises `ValueError` for a row of an expert that does not exist, as in expert parallelism; on a GPU that is found
    there, and stops it (a device-side assertion).
    """
    ids, order = torch.sort(expert_ids, stable=True)
    experts = torch.arange(-1, n_experts, device=ids.device, dtype=ids.dtype)
    places = torch.searchsorted(ids, experts, right=True, out_int32=True)
    ends = places[1:] - places[0]  # so that the rows of negative experts are missing as well
    if torch.compiler.is_compiling():
        return order, Groups.of_ends(ends, len(ids))  # the operators check it
    if ids.device.type == "cpu":
        if ends[-1] != len(ids):
            wrong = ids[0] if ids[0] < 0 else ids[-1]
            raise ValueError(
                f"a token was sent to expert {int(wrong)} of {n_experts}; MXFP4 experts know no expert parallelism"
            )
    elif not ids.is_meta:
        torch._assert_async(ends[-1] == len(ids), "a token was sent to an expert that does not exist")
    return order, Groups.of_ends(ends, len(ids))
