# SPDX-License-Identifier: Apache-2.0
"""How far two routings of the same tokens agree."""

import torch


def choice_agreement(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The share of each token's experts in ``a`` that ``b`` chose too, in any order.

    Args:
        a, b: expert indices ``[..., k]``, distinct along the last axis.

    Returns:
        ``[...]``, float32 in [0, 1].

    Raises `ValueError` when the shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(f"two routings of the same tokens have one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    return (a.unsqueeze(-1) == b.unsqueeze(-2)).any(dim=-1).float().mean(dim=-1)
