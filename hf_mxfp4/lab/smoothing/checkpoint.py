# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in full precision to one that computes the same, with smoother activations."""

import os
from collections.abc import Sequence

import torch
from torch import nn

from ..rewrite import rewrite_checkpoint
from ..texts import TextOptions
from .smooth import Smoothing, smooth_model


def smooth_checkpoint(
    model: str | os.PathLike,
    out: str | os.PathLike,
    options: TextOptions,
    *,
    texts: Sequence[str] | None = None,
    strength: float = 0.5,
    device: str = "auto",
    overwrite: bool = False,
) -> Smoothing:
    """[`smooth_model`] of a checkpoint; the rest is as of [`hf_mxfp4.lab.rewrite.rewrite_checkpoint`]."""

    def change(loaded: nn.Module, batches: Sequence[torch.Tensor]) -> Smoothing:
        return smooth_model(loaded, batches, strength)

    return rewrite_checkpoint(model, out, options, change, texts=texts, device=device, overwrite=overwrite)
