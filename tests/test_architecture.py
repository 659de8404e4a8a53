# SPDX-License-Identifier: Apache-2.0
"""The map in docs/architecture.md shows the house as it is."""

import re
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
MAP = (ROOT / "docs" / "architecture.md").read_text()
#: Names in backquotes that begin with a folder of the project.
PATHS = sorted(set(re.findall(r"`((?:hf_mxfp4|kernels|recipes|benchmarks|tests|docs)/[\w./-]*)`", MAP)))


@pytest.mark.parametrize("path", PATHS)
def test_what_the_map_names_exists(path):
    assert (ROOT / path).exists()


def test_the_map_names_every_room():
    rooms = {file.parent for top in ("hf_mxfp4", "kernels/mxfp4_kernels") for file in (ROOT / top).rglob("*.py")}
    rooms |= {folder for folder in (ROOT / "recipes").iterdir() if any(folder.glob("*.py"))}
    missing = [room for room in rooms if f"{room.relative_to(ROOT)}" not in MAP and f"`{room.name}/`" not in MAP]
    assert len(PATHS) > 40 and not missing
