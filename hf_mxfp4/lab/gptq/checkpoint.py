# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in full precision to one whose weights lie on the grid of a scheme."""

import os
from collections.abc import Callable, Sequence

from ...config import MXFP4RLConfig
from ..rewrite import rewrite_checkpoint
from ..texts import TextOptions
from .rounding import Rounding, round_model


def round_checkpoint(
    model: str | os.PathLike,
    out: str | os.PathLike,
    options: TextOptions,
    config: MXFP4RLConfig,
    *,
    texts: Sequence[str] | None = None,
    device: str = "auto",
    overwrite: bool = False,
    on_layer: Callable[[str], None] = lambda name: None,
    inputs: str = "full",
) -> Rounding:
    """[`round_model`] of a checkpoint, saved in its own dtype. The rest is as
    [`hf_mxfp4.lab.rewrite.rewrite_checkpoint`] has it, which also says what is raised."""

    def change(loaded, batches) -> Rounding:
        return round_model(loaded, batches, config, on_layer, inputs)

    return rewrite_checkpoint(model, out, options, change, texts=texts, device=device, overwrite=overwrite)
