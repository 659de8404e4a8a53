# SPDX-License-Identifier: Apache-2.0
"""Verdicts on disk: ``$HF_MXFP4_CACHE/self_check/<gpu>.json`` (``~/.cache/hf_mxfp4`` by default), good for as long as
driver, torch, Triton and the sources of kernels and checks are the same."""

import functools
import hashlib
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch


_ROOMS = (Path(__file__).parent, Path(__file__).parents[2] / "numerics")
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


class Entry(NamedTuple):
    """A verdict: what is wrong, `None` where nothing is, and the day and seconds of the check."""

    problem: str | None
    day: str
    seconds: float


def find(device: torch.device, family: str) -> Entry | None:
    """The verdict on a family of kernels that holds for a device; `None` where there is none. None is kept of CPUs."""
    if device.type == "cpu":
        return None
    try:
        return Entry(**_families(device)[family])
    except (KeyError, TypeError):
        return None


def keep(device: torch.device, family: str, problem: str | None, seconds: float) -> None:
    """Add a verdict to the file. Of two processes that write at once, one may lose its own."""
    if device.type == "cpu":
        return
    from mxfp4_kernels.common import autotune

    entry = Entry(problem, time.strftime("%Y-%m-%d"), round(seconds, 1))
    families = {**_families(device), family: entry._asdict()}
    autotune.write_table(file_of(device), {"version": version(), "families": families})


def file_of(device: torch.device) -> Path:
    """Where verdicts on a device are."""
    from mxfp4_kernels.common import autotune

    return autotune.cache_folder() / "self_check" / f"{autotune.gpu_name(device)}.json"


@functools.lru_cache(maxsize=1)
def version() -> str:
    """Of all that a verdict depends on."""
    from mxfp4_kernels.common import autotune

    digest = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted(room.rglob("*.py")):
            digest.update(path.read_bytes())
    runtime = torch.version.hip or torch.version.cuda
    checks = f"checks {digest.hexdigest()[:16]}"
    return f"driver {_driver()}, torch {torch.__version__} on {runtime}, {autotune.version()}, {checks}"


def _driver() -> str:
    for path in _DRIVERS:
        try:
            number = re.search(r"\d+\.[\d.]*\d", path.read_text(encoding="utf-8"))
        except OSError:
            continue
        if number is not None:
            return number[0]
    return "unknown"


def _families(device: torch.device) -> dict[str, Any]:
    from mxfp4_kernels.common import autotune

    table = autotune.read_table(file_of(device))
    return table.get("families", {}) if table.get("version") == version() else {}
