# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in full precision to another: of the same numbers but for what is changed on the way."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from ..checkpoint import atomic_folder, weight_files, write_manifest
from .loading import load
from .source import SourceError
from .texts import TextOptions


Found = TypeVar("Found")


def rewrite_checkpoint(
    model: str | os.PathLike,
    out: str | os.PathLike,
    options: TextOptions,
    change: Callable[[nn.Module, Sequence[torch.Tensor]], Found],
    *,
    device: str = "auto",
    overwrite: bool = False,
) -> Found:
    """Load a model, change it, and save it with its tokenizer, in its own dtype, into a folder that appears whole.

    Args:
        model: a folder, or a model on the Hub; all of it is loaded.
        out: the new folder.
        options: which texts activations are measured on.
        change: what is done with the model, in place, on the token ids of the texts.
        overwrite: replace a checkpoint that is there.

    Returns:
        What ``change`` does.

    Raises:
        SourceError: the model or texts cannot be read, or it is quantized.
        ValueError: as ``change`` does.
        FolderError: ``out`` cannot be written.
    """
    texts = options.read()  # what is wrong with them is known before a model is loaded
    with atomic_folder(Path(out).expanduser().resolve(), overwrite=overwrite) as folder:
        loaded = load(str(model), "auto", device)
        if loaded.stored or loaded.own is not None:
            raise SourceError(f"{model} is quantized; take the original, and quantize what comes out")
        found = change(loaded.model, options.tokens(loaded.tokenizer, texts))
        loaded.model.save_pretrained(folder)
        write_manifest(folder, weight_files(folder))
        loaded.tokenizer.save_pretrained(folder)
    return found
