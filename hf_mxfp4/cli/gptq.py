# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 gptq`: round weights onto the grid of a scheme so that the outputs of layers change least."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .options import JsonOption, fail, told_errors


def gptq(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, or a model on the Hub, in full precision.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the new checkpoint.")],
    text: Annotated[
        str,
        typer.Option("--text", metavar="TEXT", help="Texts like those that the model is for; as for hf-mxfp4 eval."),
    ],
    scheme: Annotated[
        str,
        typer.Option(
            "--scheme",
            metavar="SCHEME",
            help="What weights will be quantized to, as for hf-mxfp4 eval; without fallback. 'even' for exports to "
            "plain MXFP4.",
        ),
    ] = "even+mbs128-blockwise",
    text_field: Annotated[
        str | None, typer.Option("--text-field", help="Field of the texts, as for hf-mxfp4 eval.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Texts, or windows of a running text.")] = 128,
    max_length: Annotated[int, typer.Option("--max-length", min=2, help="Tokens per text or window.")] = 512,
    device: Annotated[str, typer.Option("--device", help="'cpu', 'cuda', ...", show_default="a GPU if any")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint in OUT.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Round the weights of a model onto the 4-bit grid of a scheme, column by column, so that what each rounding loses
    is made up for by the columns that follow (GPTQ).

    What comes out is a plain checkpoint, which loses nothing more when its weights are quantized under that scheme: for
    packing, LoRA on packed weights, and export.
    """
    with told_errors("nothing was written"):
        from ..analysis.errors.source import SourceError
        from ..analysis.perplexity.schemes import read_schemes
        from ..analysis.texts import TextOptions
        from ..gptq import round_checkpoint

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
