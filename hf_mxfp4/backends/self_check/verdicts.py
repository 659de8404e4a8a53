# SPDX-License-Identifier: Apache-2.0
"""The verdict on a family of kernels: made once per process and device, kept on disk, and said aloud when it is bad.

``HF_MXFP4_SELF_CHECK=0`` takes all kernels as they are, ``force`` checks again whatever is kept.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ..._logging import get_logger
from . import record


VARIABLE = "HF_MXFP4_SELF_CHECK"
_CHOICES = ("1", "0", "force")

#: Family and device -> what is wrong, `None` where nothing is.
_found: dict[tuple[str, torch.device], str | None] = {}
_lock = threading.RLock()


@dataclass(frozen=True)
class Family:
    """Kernels that stand or fall together.

    Attributes:
        name: of the family.
        check: returns what is wrong on a device, `None` when nothing is. It may raise.
        instead: what is computed in their place, in words.
        needs: what hardware they are for, in words; empty for all.
        exists: whether a device is such hardware.
    """

    name: str
    check: Callable[[torch.device], str | None]
    instead: str
    needs: str = ""
    exists: Callable[[torch.device], bool] = lambda device: True


def problem(family: Family, device: torch.device) -> str | None:
    """What is wrong with a family of kernels on a device, in words; `None` when nothing is.

    It is checked when first asked for. Under capture into a CUDA graph and while code is traced, where nothing can be
    checked, that is the problem until the next call outside of these.

    Raises `ValueError` for another value of ``HF_MXFP4_SELF_CHECK``.
    """
    try:
        return _found[family.name, device]
    except KeyError:
        return _settled(family, device)


def state(family: Family, device: torch.device) -> str:
    """What is known, in words, without checking anything now."""
    if not family.exists(device):
        return f"not checked (no {family.needs} here)"
    if mode() == "0":
        return f"not checked ({VARIABLE}=0)"
    place = family.name, device
    if place in _found:
        found = _found[place]
    else:
        entry = record.find(device, family.name)
        if entry is None:
            return "not checked yet"
        found = entry.problem
    return "checked" if found is None else f"failed: {found}; {family.instead} in their place"


def mode() -> str:
    """``"1"``, ``"0"`` or ``"force"``, as the environment says. Raises `ValueError` for something else."""
    text = os.environ.get(VARIABLE, "1")
    if text not in _CHOICES:
        raise ValueError(
            f"{VARIABLE}={text!r} must be 1 (check kernels once on a machine), 0 (take them as they are) or force "
            "(check them again)"
        )
    return text


def _settled(family: Family, device: torch.device) -> str | None:
    asked = mode()
    if asked == "0":
        return None
    if torch.compiler.is_compiling():
        return "code is traced before the kernels were checked"
    if _is_captured(device):
        text = "a CUDA graph is captured before the kernels were checked"
        warnings.warn(
            f"{family.name} kernels: {text}, so that it holds {family.instead}; run the model once before",
            stacklevel=4,
        )
        return text
    with _lock:
        place = family.name, device
        if place not in _found:  # of another thread
            entry = None if asked == "force" else record.find(device, family.name)
            found = entry.problem if entry is not None else _checked_now(family, device)
            if found is not None:
                _say(family, device, found)
            _found[place] = found
    return _found[place]


def _is_captured(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _checked_now(family: Family, device: torch.device) -> str | None:
    """The verdict of a check, kept on disk unless it raised: memory may be there the next time."""
    begin = time.monotonic()
    try:
        found = _in_a_thread_of_its_own(family, device)
    except Exception as error:  # compilers and drivers fail in every way, and what is computed instead does not
        return f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begin
    record.keep(device, family.name, found, seconds)
    get_logger().info("checked the %s kernels on %s in %.1f s", family.name, device, seconds)
    return found


def _in_a_thread_of_its_own(family: Family, device: torch.device) -> str | None:
    """Autocast, inference mode, default devices, modes that watch operations and memory pools belong to the thread
    that asks."""

    def check() -> str | None:
        with torch.no_grad():
            return family.check(device)

    with ThreadPoolExecutor(1) as other:
        return other.submit(check).result()


def _say(family: Family, device: torch.device, found: str) -> None:
    text = (
        f"the {family.name} kernels do not work on {device}: {found}. What takes their place is slower: "
        f"{family.instead}. {VARIABLE}=force checks them again; please report this with what `hf-mxfp4 env` prints"
    )
    get_logger().error("%s", text)
    warnings.warn(text, stacklevel=4)
