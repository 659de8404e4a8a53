# SPDX-License-Identifier: Apache-2.0
"""Which training checkpoints (`checkpoint-<step>` folders of a Trainer) are whole.

A Trainer writes into the final folder, `trainer_state.json` last, and takes the folder with the largest number to
resume from: after a kill, the half-written one. Here a checkpoint counts only when its `trainer_state.json` can be
read, and all files that the manifest lists have the sizes that it says. The manifest is written when every other file
is, before `trainer_state.json`. Sizes tell a copy that was cut short as well.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from ..._logging import get_logger
from ...files import draft_of, write_json


MANIFEST = "mxfp4_manifest.json"
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


def write_manifest(folder: str | os.PathLike) -> int:
    """List all files under ``folder`` with their sizes in its manifest; their number. To be called when all processes
    have written theirs. The model card is left out: people edit it."""
    folder = Path(folder)
    left_out = {MANIFEST, draft_of(MANIFEST).name, TRAINER_STATE, "README.md"}
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    sizes = {name: (folder / name).stat().st_size for name in names if name not in left_out}
    write_json(folder / MANIFEST, {"files": sizes})
    return len(sizes)


def has_manifest(folder: str | os.PathLike) -> bool:
    """Whether the checkpoint was written with a manifest; those of other trainers have none."""
    return Path(folder, MANIFEST).is_file()


def why_incomplete(folder: str | os.PathLike) -> str | None:
    """Why a checkpoint cannot be resumed from; `None` when nothing is known to be wrong with it. Of a checkpoint
    without a manifest, only `trainer_state.json` can be looked at."""
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
    if not has_manifest(folder):
        return None
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, size in sizes.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
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
