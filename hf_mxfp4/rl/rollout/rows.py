# SPDX-License-Identifier: Apache-2.0
"""Rows of a scored rollout: taken out of one padded batch and put into another of other widths."""

from collections.abc import Iterable

import torch
from torch.nn.functional import pad

from .replay import BATCH_KEY


_PROMPT = {"prompt_ids": None, "prompt_mask": 0}  # padded on the left; `None` is the padding token
_COMPLETION = {  # padded on the right
    "completion_ids": None,
    "completion_mask": 0,
    "tool_mask": 1,
    "old_per_token_logps": 0.0,
    "ref_per_token_logps": 0.0,
    "sampling_per_token_logps": 0.0,
    "importance_sampling_ratio": 1.0,
}
_WHOLE = {"num_items_in_batch"}  # not by row

Batch = dict[str, torch.Tensor]


def movable(batch: Batch) -> list[str]:
    """The entries that have one row per completion. Raises `ValueError` for one that this module knows nothing of."""
    known = {*_PROMPT, *_COMPLETION, BATCH_KEY, "advantages"}
    unknown = sorted(set(batch) - known - _WHOLE)
    if unknown:
        raise ValueError(f"rollouts with {', '.join(unknown)} cannot be taken apart (images are not supported)")
    return [name for name in batch if name in known]


def take_rows(batch: Batch, rows: Iterable[int]) -> list[Batch]:
    """Copies of single rows, without their batch axis."""
    names = movable(batch)
    return [{name: batch[name][row].clone() for name in names} for row in rows]


def put_rows(batch: Batch, rows: dict[int, Batch], pad_token: int, by_sequence: set[str]) -> Batch:
    """The batch with some rows replaced, padded to the widest of all.

    Args:
        batch: as TRL's `_generate_and_score_completions` returns it, prompts ``[B, P]``, completions ``[B, C]``.
        rows: what [`take_rows`] returned of another batch, by the index it is put at.
        by_sequence: entries with one number for each row.
    """
    names = movable(batch)
    every = [batch, *rows.values()]
    prompt = max(entry["prompt_ids"].shape[-1] for entry in every)
    completion = max(entry["completion_ids"].shape[-1] for entry in every)

    def padded(entry: Batch, name: str) -> torch.Tensor:
        left = prompt - entry["prompt_ids"].shape[-1]
        right = completion - entry["completion_ids"].shape[-1]
        if name in by_sequence:
            return entry[name]
        if name == BATCH_KEY:  # [.., P + C, layers, k]
            return pad(entry[name], (0, 0, 0, 0, left, right), value=-1)
        if name in _PROMPT:
            return pad(entry[name], (left, 0), value=pad_token if _PROMPT[name] is None else _PROMPT[name])
        return pad(entry[name], (0, right), value=pad_token if _COMPLETION[name] is None else _COMPLETION[name])

    result = dict(batch)
    for name in names:
        result[name] = padded(batch, name).clone()
        for index, row in rows.items():
            result[name][index] = padded(row, name).to(result[name].device)
    return result
