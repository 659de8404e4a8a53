# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 smooth` and `gptq`: a checkpoint in full precision that loses less when it is quantized."""

from dataclasses import asdict
from typing import Annotated

import typer

from .console import print_json
from .options import (
    DeviceOption,
    JsonOption,
    MaxLengthOption,
    ModelArgument,
    OutArgument,
    OverwriteOption,
    SamplesOption,
    TextFieldOption,
    reported_errors,
)


TextOption = Annotated[
    str, typer.Option("--text", metavar="TEXT", help="Texts like those that the model is for; as for hf-mxfp4 eval.")
]


def smooth(
    model: ModelArgument,
    out: OutArgument,
    text: TextOption,
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
    with reported_errors():
        from ..lab import TextOptions, rewrite_checkpoint, smooth_model

        options = TextOptions(text, text_field, samples, max_length)
        found = rewrite_checkpoint(
            model,
            out,
            options,
            lambda loaded, batches: smooth_model(loaded, batches, strength),
            device=device,
            overwrite=overwrite,
        )
    if as_json:
        print_json(asdict(found))
        return
    low, high = found.exponents
    typer.echo(
        f"{out}: activations scaled at {len(found.places)} places, {found.n_channels} of {found.n_all} channels by "
        f"2^{low} to 2^{high}; the logits are the same bit for bit"
    )
    if found.left:
        typer.echo(f"left alone, since their dtype cannot hold the scaled weights: {', '.join(found.left)}")


def gptq(
    model: ModelArgument,
    out: OutArgument,
    text: TextOption,
    scheme: Annotated[
        str,
        typer.Option(
            "--scheme",
            metavar="SCHEME",
            help="What weights will be quantized to, as for hf-mxfp4 eval; of fallback with whole residuals (of1) "
            "alone. 'even' for exports to plain MXFP4.",
        ),
    ] = "even+mbs128-blockwise",
    text_field: TextFieldOption = None,
    samples: SamplesOption = 128,
    max_length: MaxLengthOption = 512,
    device: DeviceOption = "auto",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Round the weights of a model onto the 4-bit grid of a scheme, column by column, so that what each rounding loses
    is made up for by the columns that follow (GPTQ).

    What comes out is a plain checkpoint, which loses nothing more when its weights are quantized under that scheme: for
    packing, LoRA on packed weights, and export.
    """
    with reported_errors():
        from ..lab import TextOptions, read_schemes, rewrite_checkpoint, round_model

        config = read_schemes([scheme])[0].config

        def change(loaded, batches):
            return round_model(loaded, batches, config, lambda name: typer.echo(f"rounded {name}", err=True))

        options = TextOptions(text, text_field, samples, max_length)
        found = rewrite_checkpoint(model, out, options, change, device=device, overwrite=overwrite)
    if as_json:
        print_json(asdict(found))
        return
    typer.echo(
        f"{out}: {len(found.layers)} layers rounded for {scheme}; the errors of their outputs are {found.gain_db:.1f} "
        "dB below those of the nearest values"
    )
    if found.left:
        typer.echo(f"left alone: {', '.join(found.left)}")
