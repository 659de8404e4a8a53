# SPDX-License-Identifier: Apache-2.0
"""Output folders, each of one run at a time."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hf_mxfp4.files import lock


#: The file that is locked; it stays when the run has ended.
LOCK = ".lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder within this context, and make it if it is missing. Raises `ValueError` when another process has
    locked it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:  # which leaves alone what a link of this name points to
        if not lock(file.fileno(), wait=False):
            raise ValueError(
                f"another process is at work in {folder}, or a run that it started still is; wait for its end, or "
                "choose another folder"
            )
        yield
