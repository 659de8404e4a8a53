# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 verify`: compare everything in a checkpoint with the checksums that were written with it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import WorkProgress, print_json
from .convert import bytes_in
from .options import JsonOption, fail, reported_errors


if TYPE_CHECKING:
    from ..checkpoint import Verification


_HOW = "save_pretrained, hf-mxfp4 pack, export and import write them; hf-mxfp4 verify --add does for a folder as it is"


def verify(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint's folder, a .safetensors file, or a model on the Hugging Face Hub, which is downloaded "
            "to the usual cache.",
        ),
    ],
    add: Annotated[
        bool,
        typer.Option(
            "--add",
            help="First record checksums of those files of the folder that have none, as they are now, in "
            "mxfp4_manifest.json. The files themselves stay as they are.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check all files of a checkpoint against the checksums that were written with it, and that the index and
    config.json describe them. Everything that is damaged is named.

    Exit code 0: nothing is. 1: something is. 2: files have no checksums, there is no such checkpoint, or it could not
    be checked.
    """
    with reported_errors():
        try:
            if add:
                _add(Path(model).expanduser())
            found = _verified(model)
        except (typer.Exit, OSError, ValueError):
            raise
        except Exception as error:  # exit code 1 means damage and nothing else
            fail(f"{model} could not be checked: {type(error).__name__}: {error}")
    if as_json:
        print_json({"model": model, **found.to_dict()})
    else:
        _show(model, found)
    if found.problems:
        raise typer.Exit(1)
    if missing := found.lacking:
        fail(f"not compared, without checksums: {', '.join(missing)}. {_HOW}")


def _verified(model: str) -> "Verification":
    from ..checkpoint import verify_folder
    from ..lab.source import local_path

    path, _ = local_path(model)
    with WorkProgress(bytes_in(path)) as progress:
        return verify_folder(path, progress)


def _add(folder: Path) -> None:
    from ..checkpoint import add_to_folder, verify_folder

    if not folder.is_dir():
        fail(f"--add writes into a folder, and {folder} is none")
    before = verify_folder(folder)
    if before.problems:
        _show(str(folder), before)
        fail("no checksums were added to what is damaged", code=1)
    with WorkProgress(bytes_in(folder)) as progress:
        added = add_to_folder(folder, progress)
    typer.echo(f"checksums added to {len(added)} files", err=True)


def _show(model: str, found: "Verification") -> None:
    for problem in found.problems:
        typer.echo(problem.reason)
    for note in found.notes:
        typer.echo(note)
    if found.checked and found.unchecked:
        typer.echo(f"not compared, without checksums: {', '.join(found.unchecked)}")
    if found.checked:
        verdict = f"{len(found.problems)} problems" if found.problems else "all as it was written"
        size = f"{found.n_tensors} tensors in {len(found.checked)} files, {found.n_bytes / 1e6:.1f} MB"
        typer.echo(f"{model}: {size}: {verdict}")
