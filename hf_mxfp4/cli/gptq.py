# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 gptq`: round weights onto the grid of a scheme so that the outputs of layers change least."""

import json
from dataclasses import asdict
from typing import Annotated, Literal

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


def gptq(
    model: ModelArgument,
    out: OutArgument,
    text: LikelyTextOption,
    scheme: Annotated[
        str,
        typer.Option(
            "--scheme",
            metavar="SCHEME",
            help="What weights will be quantized to, as for hf-mxfp4 eval; of fallback with whole residuals (of1) "
            "alone. 'even' for exports to plain MXFP4.",
        ),
    ] = "even+mbs128-blockwise",
    inputs: Annotated[
        Literal["full", "quantized"],
        typer.Option(
            "--inputs",
            help="What weights are multiplied with: inputs in full precision, or as SCHEME quantizes activations "
            "(w4a4), for products of both.",
        ),
    ] = "full",
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
    with told_errors("nothing was written"):
        from ..lab.errors.source import SourceError
        from ..lab.gptq import round_checkpoint
        from ..lab.perplexity.schemes import read_schemes
        from ..lab.texts import TextOptions

        config = read_schemes([scheme])[0].config
        options = TextOptions(text, text_field, samples, max_length)
        texts = options.read()
        typer.echo(f"loading {model} into memory", err=True)
        try:
            found = round_checkpoint(
                model,
                out,
                options,
                config,
                texts=texts,
                device=device,
                overwrite=overwrite,
                inputs=inputs,
                on_layer=lambda name: typer.echo(f"rounded {name}", err=True),
            )
        except SourceError:
            raise
        except ValueError as error:
            fail(str(error))
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=1))
        return
    typer.echo(
        f"{out}: {len(found.layers)} layers rounded for {scheme}; the errors of their outputs are {found.gain_db:.1f} "
        "dB below those of the nearest values"
    )
    if found.left:
        typer.echo(f"left alone: {', '.join(found.left)}")
