# SPDX-License-Identifier: Apache-2.0
"""Which training checkpoints (`checkpoint-<step>` folders of a Trainer) are whole.

A Trainer writes into the final folder, `trainer_state.json` last, and takes the folder with the largest number to
resume from: after a kill, the half-written one. Here a checkpoint counts only when its `trainer_state.json` can be
read, and all files that the manifest lists have the sizes that it says; a run is resumed only from one whose checksums
agree too. The manifest is written when every other file is, before `trainer_state.json`.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open

from ..._logging import get_logger
from ...files import is_draft
from .manifest import MANIFEST, file_damage, read_manifest, size_problem, weight_files, write_manifest
from .reader import ShardError


TRAINER_STATE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def checkpoint_step(folder: str | os.PathLike) -> int | None:
    """The step in the name of a checkpoint folder; `None` for any other name."""
    match = _CHECKPOINT.fullmatch(Path(folder).name)
    return int(match[1]) if match else None


def invalidate(folder: str | os.PathLike) -> None:
    """Make an older checkpoint in ``folder`` count as incomplete, before another one is written over it."""
    for name in (TRAINER_STATE, MANIFEST):
        Path(folder, name).unlink(missing_ok=True)


def write_whole_manifest(folder: str | os.PathLike) -> int:
    """Record all files under ``folder``, to be called when all processes have written theirs; return their number. The
    model card is left out because people edit it."""
    folder = Path(folder)
    left_out = {MANIFEST, TRAINER_STATE, "README.md"}
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return write_manifest(folder, [name for name in names if name not in left_out and not is_draft(Path(name).name)])


def why_incomplete(folder: str | os.PathLike) -> str | None:
    """Return why a checkpoint cannot be resumed from, without reading its large files; `None` when nothing is known to
    be wrong with it. Of a checkpoint without a manifest, only `trainer_state.json` can be looked at."""
    folder = Path(folder)
    if not folder.is_dir():
        return "there is no such folder"
    try:
        state = json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8"))
        state["global_step"]
    except FileNotFoundError:
        return f"it has no {TRAINER_STATE}: saving it was not finished"
    except (OSError, ValueError, KeyError, TypeError):
        return f"its {TRAINER_STATE} is cut short"
    try:
        records = read_manifest(folder)
    except ShardError as error:
        return str(error)
    for name, record in records.items():
        if (problem := size_problem(folder / name, record)) is not None:
            return f"{name}: {problem}"
    return None


def why_damaged(folder: str | os.PathLike) -> str | None:
    """Return why a checkpoint must not be resumed from, after reading all of it: [`why_incomplete`], a file that does
    not have its checksum, or a weight that is not finite."""
    folder = Path(folder)
    if (reason := why_incomplete(folder)) is not None:
        return reason
    records = read_manifest(folder)
    try:
        for name in sorted({*records, *weight_files(folder)}):
            for problem in file_damage(folder / name, records.get(name)) or []:
                return problem
        for name in weight_files(folder):
            if name.endswith(".safetensors") and (tensor := first_not_finite(folder / name)) is not None:
                return f"{tensor} in {name} holds NaN or infinity"
    except ShardError as error:
        return str(error)
    return None


def first_not_finite(file: Path) -> str | None:
    """Return the name of the first floating-point tensor of a file that holds NaN or infinity; `None` for none."""
    with safe_open(file, "pt") as opened:
        for name in opened.keys():
            tensor = opened.get_tensor(name)
            if tensor.is_floating_point() and not tensor.float().isfinite().all():
                return name
    return None


def last_complete_checkpoint(
    output_dir: str | os.PathLike, why_not: Callable[[Path], str | None] = why_incomplete
) -> str | None:
    """The checkpoint folder in ``output_dir`` with the largest step that is whole, or `None`. Each newer one that is
    not is named in a warning. ``why_not`` tells what is wrong with one, `None` where nothing is."""
    output_dir = Path(output_dir)
    entries = output_dir.iterdir() if output_dir.is_dir() else ()
    folders = [path for path in entries if checkpoint_step(path) is not None and path.is_dir()]
    for folder in sorted(folders, key=checkpoint_step, reverse=True):
        reason = why_not(folder)
        if reason is None:
            return str(folder)
        get_logger().warning("%s is not resumed from: %s", folder, reason)
    return None
