# SPDX-License-Identifier: Apache-2.0
"""What the commands that write checkpoints share."""

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from .options import fail, told_errors


if TYPE_CHECKING:
    from ..checkpoint.convert.costs import ConversionReport, LayerCost


OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write: a new or an empty one.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace the checkpoint in OUT, once the new one is complete.")
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", help="Print a line for each layer too, not only for each type of layer.")
]

#: What the actions of a report are called in sentences.
_ACTIONS = {
    "kept": "kept byte for byte",
    "packed": "quantized from full precision",
    "requantized": "quantized again",
    "dequantized": "dequantized to bfloat16",
    "left": "left in full precision",
}


@contextlib.contextmanager
def told_conversion_errors(when_interrupted: str = "nothing was written") -> Iterator[None]:
    """Turn what a user can mend into a message and exit code 2, and Ctrl-C into a message and 130."""
    from ..checkpoint.io.atomic import FolderError
    from ..checkpoint.io.folder import ArgumentError, CheckpointError
    from ..checkpoint.io.reader import ShardError

    with told_errors(when_interrupted):
        try:
            yield
        except ArgumentError as error:
            fail(error.on_command_line())
        except (CheckpointError, FolderError, ShardError) as error:
            fail(str(error))


def bytes_in(folder: Path) -> int:
    """About what will be read of a checkpoint."""
    files = [folder] if folder.is_file() else [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def show(report: "ConversionReport", as_json: bool, verbose: bool = False) -> None:
    """Print what was done to each type of layer, what it cost and what it saved, on standard output."""
    from ..checkpoint.convert.costs import bits_per_weight
    from .console import out, plain_table, say

    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1, allow_nan=False))
        return
    console = out()
    if any(layer.action != "kept" for layer in report.layers):
        title = report.scheme if report.weights is None else f"weights in {report.weights}"
        if verbose:
            console.print(_by_layer(report, title))
        headings = ["type of layer", "layers", "what", "SQNR dB: median", "worst", "bits per weight"]
        console.print(plain_table(title, headings, _by_type(report.layers)))
    counts = ", ".join(f"{count} {_ACTIONS[action]}" for action, count in report.counts().items())
    say(f"{report.path}: {report.format}, {report.n_layers} layers: {counts}")
    say(f"weights: {report.error()}")
    bits = [bits_per_weight(report.layers, when) for when in ("before", "after")]
    in_bits = f"; bits per weight of these layers: {bits[0]:.4g} -> {bits[1]:.4g}" if None not in bits else ""
    say(f"tensors: {_size(report.bytes_before)} -> {_size(report.bytes_after)}{in_bits}")
    for note in [*_reasons(report), *report.notes]:
        say(note)
    if report.file is not None:
        say(f"every layer: {report.path / report.file}" + ("" if verbose else ", or --verbose"))


def _by_type(costs: "Sequence[LayerCost]") -> list[list[str]]:
    """A row for all layers of a type that the same was done to."""
    from ..checkpoint.convert.costs import bits_per_weight
    from ..lab.errors.layer_names import location_of

    groups: dict[tuple[str, str], list[LayerCost]] = {}
    for cost in costs:
        groups.setdefault((location_of(cost.name).layer_type, cost.action), []).append(cost)
    rows = []
    for (layer_type, action), members in groups.items():
        values = [member.sqnr_db for member in members]
        count, bits = str(sum(member.matrices for member in members)), f"{bits_per_weight(members):.4g}"
        rows.append([layer_type, count, action, *(_decibels(find(values), action) for find in (median, min)), bits])
    return rows


def _reasons(report: "ConversionReport") -> list[str]:
    """Why the format left no choice for some layers, where the notes do not say it."""
    found: dict[tuple[str, str], int] = {}
    for cost in report.layers:
        if cost.reason and not any(cost.reason in note for note in report.notes):
            found[cost.action, cost.reason] = found.get((cost.action, cost.reason), 0) + cost.matrices
    return [f"{count} layers were {_ACTIONS[action]}: {reason}." for (action, reason), count in found.items()]


def _by_layer(report: "ConversionReport", title: str):
    from .console import plain_table

    rows = [[_name(c), c.action, _decibels(c.sqnr_db, c.action), c.reason or ""] for c in report.layers]
    headings = ["layer", "what", "SQNR dB", "why"][: 4 if any(c.reason for c in report.layers) else 3]
    return plain_table(title, headings, [row[: len(headings)] for row in rows])


def _name(cost: "LayerCost") -> str:
    return cost.name if cost.matrices == 1 else f"{cost.name} ({cost.matrices} experts)"


def _decibels(value: float, action: str) -> str:
    if action == "left":
        return "-"
    return "exact" if value == math.inf else f"{value:.2f}"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
