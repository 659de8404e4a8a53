# SPDX-License-Identifier: Apache-2.0
"""The verdict on a family of kernels: made once per process and device, and a warning when it is bad.

``HF_MXFP4_SELF_CHECK=0`` takes all kernels as they are.
"""

import contextlib
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..._logging import get_logger


VARIABLE = "HF_MXFP4_SELF_CHECK"

#: Family and device -> what is wrong, `None` where nothing is.
_found: dict[tuple[str, torch.device], str | None] = {}


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
    """
    try:
        return _found[family.name, device]
    except KeyError:
        return _settled(family, device)


def state(family: Family, device: torch.device) -> str:
    """What is known, in words, without checking anything now."""
    if not family.exists(device):
        return f"not checked (no {family.needs} here)"
    if not _is_asked_for():
        return f"not checked ({VARIABLE}=0)"
    if (family.name, device) not in _found:
        return "not checked yet"
    found = _found[family.name, device]
    return "checked" if found is None else f"failed: {found}; {family.instead} in their place"


def _is_asked_for() -> bool:
    return os.environ.get(VARIABLE, "1") != "0"


def _settled(family: Family, device: torch.device) -> str | None:
    if not _is_asked_for():
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
    _found[family.name, device] = found = _checked_now(family, device)
    if found is not None:
        _say(family, device, found)
    return found


def _is_captured(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _checked_now(family: Family, device: torch.device) -> str | None:
    begin = time.monotonic()
    modes = torch.inference_mode(False), torch.no_grad(), torch.device("cpu")
    casts = torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False)
    try:
        with contextlib.ExitStack() as stack:  # without the modes of the code that asks
            for context in (*modes, *casts):
                stack.enter_context(context)
            found = family.check(device)
    except Exception as error:  # compilers and drivers fail in every way, and what is computed instead does not
        return f"{type(error).__name__}: {error}"
    get_logger().info("checked the %s kernels on %s in %.1f s", family.name, device, time.monotonic() - begin)
    return found


def _say(family: Family, device: torch.device, found: str) -> None:
    text = (
        f"the {family.name} kernels do not work on {device}: {found}. What takes their place is slower: "
        f"{family.instead}. Please report this with the output of `hf-mxfp4 env`"
    )
    get_logger().error("%s", text)
    warnings.warn(text, stacklevel=4)
