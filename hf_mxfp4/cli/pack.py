# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 pack`: a full-precision checkpoint becomes a packed one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .conversions import OutArgument, OverwriteOption, VerboseOption, bytes_in, show, told_conversion_errors
from .options import JsonOption, fail


if TYPE_CHECKING:
    from ..config import MXFP4RLConfig


def pack(
    source: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a checkpoint, trained with mode='qat' or a plain one.")
    ],
    out: OutArgument,
    preset: Annotated[str | None, typer.Option("--preset", help="'w4a16' (default) or 'w4a4'.")] = None,
    scale_rule: Annotated[str | None, typer.Option("--scale-rule", help="rceil (default), floor, even or mse.")] = None,
    macro_block: Annotated[
        str | None, typer.Option("--macro-block", help="32, 64, 128 (default), 256, row or none.")
    ] = None,
    macro_search: Annotated[
        str | None, typer.Option("--macro-search", help="static, dynamic, hybrid (default) or blockwise.")
    ] = None,
    outlier_fallback: Annotated[
        float | None, typer.Option("--outlier-fallback", help="Weight of the residual, such as 0.5 (default: none).")
    ] = None,
    weight_block: Annotated[str | None, typer.Option("--weight-block", help="1x32 (default) or 32x32.")] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", help="Layers to leave alone, as modules_to_not_convert. Repeatable."),
    ] = None,
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
        "modules_to_not_convert": skip,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with told_conversion_errors():
        from ..checkpoint.convert.pack import pack_checkpoint
        from .console import ByteProgress

        config = _config(source, given)
        with ByteProgress(bytes_in(source)) as progress:
            report = pack_checkpoint(source, out, config, overwrite=overwrite, on_bytes=progress)
    show(report, as_json, verbose)


def _config(source: Path, given: dict[str, Any]) -> "MXFP4RLConfig | None":
    """The scheme for a plain checkpoint; nothing for one that has its own, unless options contradict that."""
    from ..checkpoint.convert.sources import own_config
    from ..checkpoint.io.folder import open_checkpoint
    from ..config import MXFP4RLConfig

    if not given and own_config(open_checkpoint(source)) is not None:
        return None
    if given.get("macro_block") == "none":
        given["macro_block"] = None
    try:
        return MXFP4RLConfig(mode="packed", **given)
    except ValueError as error:
        fail(str(error))
