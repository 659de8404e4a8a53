# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 verify`: compare everything in a checkpoint with the checksums that were written with it."""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .conversions import bytes_in, told_conversion_errors
from .options import JsonOption, fail


if TYPE_CHECKING:
    from ..checkpoint.verify import Verification


_HOW = "save_pretrained, hf-mxfp4 pack, export and import write them; hf-mxfp4 verify --add does for a folder as it is"


def verify(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint's folder, a .safetensors file, or a model on the Hugging Face Hub (its files are "
            "downloaded to the usual cache one at a time, each checked before the next).",
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
    from ..checkpoint.io.folder import CheckpointError
    from ..checkpoint.io.reader import ShardError
    from ..lab.errors.source import SourceError

    with told_conversion_errors("nothing was written"):
        try:
            if add:
                _add(Path(model).expanduser())
            found = _verified(model)
        except (typer.Exit, OSError, CheckpointError, ShardError, SourceError):
            raise
        except Exception as error:  # exit code 1 means damage and nothing else
            fail(f"{model} could not be checked: {type(error).__name__}: {error}")
    if as_json:
        typer.echo(json.dumps({"model": model, **found.to_dict()}, indent=1))
    else:
        _show(model, found)
    if found.problems:
        raise typer.Exit(1)
    if missing := found.lacking if found.checked else found.unchecked:
        fail(f"not compared, without checksums: {', '.join(missing)}. {_HOW}")


def _verified(model: str) -> "Verification":
    from ..checkpoint.io.manifest import MANIFEST
    from ..checkpoint.io.reader import ShardError
    from ..checkpoint.verify import Verification, verify_folder
    from .console import ByteProgress

    path = Path(model).expanduser()
    if path.is_dir():
        with ByteProgress(bytes_in(path)) as progress:
            return verify_folder(path, progress)
    from ..lab.errors.source import DamagedSourceError, open_source

    found = Verification()
    try:
        source = open_source(model)
    except DamagedSourceError as error:
        found.add(error.file, str(error))
        return found
    folder: Path | None = None
    manifest = None
    if source.kind == "hub":
        with contextlib.suppress(ShardError):  # files from before manifests have checksums of their own
            source.path(MANIFEST)
    with ByteProgress(source.total_bytes or (bytes_in(path) if path.is_file() else None)) as progress:
        for shard in source.shards:
            try:
                file = source.path(shard)
            except ShardError as error:
                found.add(shard, str(error))
                continue
            manifest = found.manifest_of(file.parent) if manifest is None else manifest
            found.check_file(file, manifest.get(file.name), progress)
            folder = file.parent if source.kind == "hub" else None
    if folder is not None:
        found.check_folder(folder)
    return found


def _add(folder: Path) -> None:
    from ..checkpoint.verify import add_to_folder, verify_folder
    from .console import ByteProgress

    if not folder.is_dir():
        fail(f"--add writes into a folder, and {folder} is none")
    before = verify_folder(folder)
    if before.problems:
        _show(str(folder), before)
        fail("no checksums were added to what is damaged", code=1)
    with ByteProgress(bytes_in(folder)) as progress:
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
