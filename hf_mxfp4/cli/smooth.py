# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 smooth`: move the scales of outlier channels from activations into weights."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from .options import (
    DeviceOption,
    JsonOption,
    LikelyTextOption,
    MaxLengthOption,
    ModelArgument,
    OutArgument,
    OverwriteOption,
    SamplesOption,
    TextFieldOption,
    fail,
    told_errors,
)


def smooth(
    model: ModelArgument,
    out: OutArgument,
    text: LikelyTextOption,
    text_field: TextFieldOption = None,
    samples: SamplesOption = 32,
    max_length: MaxLengthOption = 512,
    strength: Annotated[
        float, typer.Option("--strength", min=0, max=1, help="0 makes weights alike, 1 activations.")
    ] = 0.5,
    device: DeviceOption = "auto",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Scale the channels of activations by powers of two, and the weights that read them by the inverse: the model
    computes the same, bit for bit, and loses less when activations are quantized too.

    What comes out is a plain checkpoint, for training, packing and export as any other.
    """
    with told_errors("nothing was written"):
        from ..lab.errors.source import SourceError
        from ..lab.smoothing import smooth_checkpoint
        from ..lab.texts import TextOptions

        options = TextOptions(text, text_field, samples, max_length)
        texts = options.read()
        typer.echo(f"loading {model} into memory", err=True)
        try:
            found = smooth_checkpoint(
                model, out, options, texts=texts, strength=strength, device=device, overwrite=overwrite
            )
        except SourceError:
            raise
        except ValueError as error:
            fail(str(error))
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=1))
        return
    low, high = found.exponents
    typer.echo(
        f"{out}: activations scaled at {len(found.places)} places, {found.n_channels} of {found.n_all} channels by "
        f"2^{low} to 2^{high}; the logits are the same bit for bit"
    )
    if found.left:
        typer.echo(f"left alone, since their dtype cannot hold the scaled weights: {', '.join(found.left)}")
