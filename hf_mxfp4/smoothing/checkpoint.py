# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in full precision to one that computes the same, with smoother activations."""

import os
from collections.abc import Sequence
from pathlib import Path

from ..analysis.errors.source import SourceError
from ..analysis.perplexity.load import load
from ..analysis.texts import TextOptions
from ..checkpoint.io.atomic import atomic_folder
from ..checkpoint.io.saved_files import checksums_in
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
    """[`smooth_model`] of a checkpoint, in its own dtype, saved with its tokenizer into a folder that appears whole.

    Args:
        model: a folder, or a model on the Hub; all of it is loaded.
        out: the new folder.
        options: which texts activations are measured on.
        texts: those texts, where they have been read already.
        overwrite: replace a checkpoint that is there.

    Raises:
        SourceError: the model or texts cannot be read, or it is quantized.
        ValueError: as [`smooth_model`] does.
        FolderError: ``out`` cannot be written.
    """
    texts = options.read() if texts is None else texts
    with atomic_folder(Path(out).expanduser().resolve(), overwrite=overwrite) as folder:
        loaded = load(str(model), "auto", device)
        if loaded.stored or loaded.own is not None:
            raise SourceError(f"{model} is quantized; smooth the original, and quantize what comes out")
        found = smooth_model(loaded.model, options.tokens(loaded.tokenizer, texts), strength)
        with checksums_in(folder):
            loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    return found
