# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 pack`, `export` and `import`: to packed checkpoints, and to and from the formats of other engines."""

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .conversions import OutArgument, OverwriteOption, VerboseOption, bytes_in, show, told_conversion_errors
from .options import JsonOption, SkipOption, fail


if TYPE_CHECKING:
    from ..config import MXFP4RLConfig


class FormatName(str, Enum):
    """The names in [`hf_mxfp4.checkpoint.formats`]."""

    COMPRESSED_TENSORS = "compressed-tensors"
    QUARK = "quark"
    GPT_OSS = "gpt-oss"
    GGUF = "gguf"
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


def pack(
    source: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a checkpoint, trained with mode='qat' or a plain one.")
    ],
    out: OutArgument,
    preset: Annotated[str | None, typer.Option("--preset", help="'w4a16' (default) or 'w4a4'.")] = None,
    scale_rule: Annotated[str | None, typer.Option("--scale-rule", help="even (default), rceil, floor or mse.")] = None,
    macro_block: Annotated[
        str | None, typer.Option("--macro-block", help="32, 64, 128 (default), 256, row or none.")
    ] = None,
    macro_search: Annotated[
        str | None, typer.Option("--macro-search", help="block_mantissas (default), static, dynamic or hybrid.")
    ] = None,
    outlier_fallback: Annotated[
        float | None, typer.Option("--outlier-fallback", help="Weight of the residual, such as 0.5 (default: none).")
    ] = None,
    weight_block: Annotated[str | None, typer.Option("--weight-block", help="1x32 (default) or 32x32.")] = None,
    rotation: Annotated[
        str | None,
        typer.Option(
            "--rotation",
            help="Pack weights rotated by blocks, and rotate inputs: deterministic-16, -32, -64 or -128 (default: "
            "none). For this package alone.",
        ),
    ] = None,
    skip: SkipOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Pack the weights of a checkpoint into 4 bits, one at a time.

    A checkpoint trained with mode='qat' is packed under its own scheme, a plain one under the options. The result is
    what `hf_mxfp4.pack` and `save_pretrained` give, model card included.
    """
    options = {
        "preset": preset,
        "scale_rule": scale_rule,
        "macro_block": macro_block,
        "macro_search": macro_search,
        "outlier_fallback": outlier_fallback,
        "weight_block": weight_block,
        "fprop": None if rotation is None else {"rotation": rotation},
        "modules_to_not_convert": skip,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with told_conversion_errors():
        from ..checkpoint import pack_checkpoint
        from .console import ByteProgress

        config = _scheme_for(source, given)
        with ByteProgress(bytes_in(source)) as progress:
            report = pack_checkpoint(source, out, config, overwrite=overwrite, on_bytes=progress)
    show(report, as_json, verbose)


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
            "models; gguf: llama.cpp and what builds on it, in one file; bf16: all.",
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
    skip: SkipOption = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            hidden=True,
        ),
    ] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Write a checkpoint in another engine's format, and say what it cost.

    Full-precision weights are quantized once, to plain MXFP4; packed ones of plain MXFP4 keep their bytes.
    """
    if text is not None:
        fail(
            f"export has no --text; run hf-mxfp4 gptq {source} ROUNDED --scheme even --text {text}, and export ROUNDED"
        )
    with told_conversion_errors():
        from ..checkpoint import export as export_checkpoint
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
            metavar="SOURCE",
            help="Folder of an MXFP4 checkpoint of compressed-tensors, AMD Quark or gpt-oss, or a GGUF file.",
        ),
    ],
    out: OutArgument,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Turn another engine's MXFP4 checkpoint into a packed one, bit for bit."""
    with told_conversion_errors():
        from ..checkpoint import import_checkpoint
        from .console import ByteProgress

        with ByteProgress(bytes_in(source)) as progress:
            report = import_checkpoint(source, out, overwrite=overwrite, on_bytes=progress)
    show(report, as_json)


def _scheme_for(source: Path, given: dict[str, Any]) -> "MXFP4RLConfig | None":
    """The scheme for a plain checkpoint; nothing for one that has its own, unless options contradict that."""
    from ..checkpoint import open_checkpoint, own_config
    from ..config import MXFP4RLConfig

    if not given and own_config(open_checkpoint(source)) is not None:
        return None
    if given.get("macro_block") == "none":
        given["macro_block"] = None
    try:
        return MXFP4RLConfig(mode="packed", **given)
    except ValueError as error:
        fail(str(error))
