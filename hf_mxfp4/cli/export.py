# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 export` and `hf-mxfp4 import`: to and from the formats of other engines."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .conversions import OutArgument, OverwriteOption, VerboseOption, bytes_in, show, told_conversion_errors
from .options import JsonOption


class FormatName(str, Enum):
    """The names in [`hf_mxfp4.checkpoint.formats`]."""

    COMPRESSED_TENSORS = "compressed-tensors"
    QUARK = "quark"
    GPT_OSS = "gpt-oss"
    BF16 = "bf16"


class ScaleRuleName(str, Enum):
    """The names of [`hf_mxfp4.ScaleRule`]."""

    RCEIL = "rceil"
    FLOOR = "floor"
    EVEN = "even"
    MSE = "mse"


class PresetName(str, Enum):
    """Presets that engines other than this package know."""

    W4A16 = "w4a16"
    W4A4 = "w4a4"


class OnMismatch(str, Enum):
    """What [`hf_mxfp4.checkpoint.export`] takes."""

    REFUSE = "refuse"
    REQUANTIZE = "requantize"
    DEQUANTIZE = "dequantize"


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Folder of a full-precision checkpoint, plain or trained with mode='qat', or a packed one.",
        ),
    ],
    out: OutArgument,
    format: Annotated[
        FormatName,
        typer.Option(
            "--format",
            help="compressed-tensors: vLLM, transformers (W4A16); quark: vLLM (W4A4); gpt-oss: experts of gpt-oss "
            "models; bf16: all.",
        ),
    ],
    on_mismatch: Annotated[
        OnMismatch,
        typer.Option(
            "--on-mismatch",
            help="Layers that the format cannot hold (macro factors, outlier fallback): refuse, requantize to plain "
            "MXFP4, or dequantize to bfloat16. Of a packed checkpoint, rather export the original.",
        ),
    ] = OnMismatch.REFUSE,
    scale_rule: Annotated[
        ScaleRuleName | None,
        typer.Option(
            "--scale-rule",
            help="How block scales are chosen: by default even for a plain checkpoint, its own for any other.",
        ),
    ] = None,
    preset: Annotated[
        PresetName | None,
        typer.Option("--preset", help="For a plain checkpoint: w4a16 (default), or w4a4 in format quark."),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", help="For a plain checkpoint: layers to leave alone, as modules_to_not_convert."),
    ] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Write a checkpoint in another engine's format, and say what it cost.

    Full-precision weights are quantized once, to plain MXFP4; packed ones of plain MXFP4 keep their bytes.
    """
    with told_conversion_errors():
        from ..checkpoint.convert.export import export as export_checkpoint
        from .console import ByteProgress

        with ByteProgress(bytes_in(source)) as progress:
            report = export_checkpoint(
                source,
                out,
                format.value,
                on_mismatch.value,
                scale_rule=scale_rule and scale_rule.value,
                preset=preset and preset.value,
                modules_to_not_convert=skip,
                overwrite=overwrite,
                on_bytes=progress,
            )
    show(report, as_json, verbose)


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Folder of an MXFP4 checkpoint of compressed-tensors, AMD Quark or gpt-oss."
        ),
    ],
    out: OutArgument,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Turn another engine's MXFP4 checkpoint into a packed one, bit for bit."""
    with told_conversion_errors():
        from ..checkpoint.convert.importing import import_checkpoint
        from .console import ByteProgress

        with ByteProgress(bytes_in(source)) as progress:
            report = import_checkpoint(source, out, overwrite=overwrite, on_bytes=progress)
    show(report, as_json)
