# SPDX-License-Identifier: Apache-2.0
"""Figures that are made but not drawn: rendering them takes longer than the rest of a short run."""

from pathlib import Path
from typing import BinaryIO

from matplotlib.figure import Figure


def _write_nothing(self: Figure, target: str | Path | BinaryIO, **options: object) -> None:
    if isinstance(target, (str, Path)):
        Path(target).touch()


def leave_figures_undrawn(patch=setattr) -> None:
    """Have figures saved as empty files, where ``patch`` is the ``setattr`` of a monkeypatch for as long as that
    lasts."""
    patch(Figure, "savefig", _write_nothing)
