# SPDX-License-Identifier: Apache-2.0
"""What the commands that write checkpoints share."""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import fail, told_errors


if TYPE_CHECKING:
    from ..checkpoint.costs import ConversionReport, LayerCost


OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write: a new or an empty one.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace the checkpoint in OUT, once the new one is complete.")
]


@contextlib.contextmanager
def told_conversion_errors() -> Iterator[None]:
    """Turn what a user can mend into a message and exit code 2, and Ctrl-C into a message and 130."""
    from ..checkpoint.atomic import FolderError
    from ..checkpoint.folder import CheckpointError
    from ..checkpoint.stream import ShardError

    with told_errors("nothing was written"):
        try:
            yield
        except (CheckpointError, FolderError, ShardError) as error:
            fail(str(error))


def bytes_in(folder: Path) -> int:
    """About what will be read of a checkpoint."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def show(report: "ConversionReport", as_json: bool) -> None:
    """What was done to each layer that changed, and in sum, on standard output."""
    from .console import out, plain_table

    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1, allow_nan=False))
        return
    console = out()
    changed = [layer for layer in report.layers if layer.action != "kept"]
    if changed:
        rows = [[_name(c), c.action, _decibels(c.sqnr_db), c.reason or ""] for c in changed]
        headings = ["layer", "what", "SQNR dB", "why"][: 4 if any(c.reason for c in changed) else 3]
        console.print(plain_table(report.scheme, headings, [row[: len(headings)] for row in rows]))
    counts = ", ".join(f"{count} {action}" for action, count in report.counts().items())
    total = f"{report.n_layers} layers ({counts}), SQNR {_decibels(report.total_sqnr_db)}"
    console.print(f"{report.path}: {report.format}, {total}", markup=False, highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _name(cost: "LayerCost") -> str:
    return cost.name if cost.matrices == 1 else f"{cost.name} ({cost.matrices} experts)"


def _decibels(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.2f}"
