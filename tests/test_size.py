# SPDX-License-Identifier: Apache-2.0
"""The project stays as small as `tests/size_limits.json` says."""

import json
from pathlib import Path

import pytest

from benchmarks.packages import sizes


ROOT = Path(__file__).resolve().parents[1]
LIMITS = json.loads((ROOT / "tests" / "size_limits.json").read_text())
SIZES = sizes(ROOT)


def complaint(package: str, size: dict[str, int], limit: dict[str, int]) -> str:
    """Say in a sentence what exceeds its limit; empty where nothing does."""
    over = [f"{size[unit]:,} {unit} (limit {most:,})" for unit, most in limit.items() if size[unit] > most]
    if not over:
        return ""
    return f"{package} has {', '.join(over)}: shorten it, or raise its limit in tests/size_limits.json and say why."


def test_every_package_has_a_limit():
    assert {name: set(size) for name, size in SIZES.items()} == {name: set(limit) for name, limit in LIMITS.items()}
    assert all(number > 100 for size in SIZES.values() for unit, number in size.items() if unit != "files")


@pytest.mark.parametrize("package", LIMITS)
def test_a_package_is_within_its_limit(package):
    assert complaint(package, SIZES[package], LIMITS[package]) == ""


def test_what_exceeds_a_limit_is_said():
    size, limit = {"lines": 1201, "files": 7}, {"lines": 1200, "files": 7}
    assert complaint("kernels", size, limit) == (
        "kernels has 1,201 lines (limit 1,200): shorten it, or raise its limit in tests/size_limits.json and say why."
    )
    assert complaint("kernels", {"lines": 1200, "files": 7}, limit) == ""
