# SPDX-License-Identifier: Apache-2.0
"""Targets that a model has not: PEFT accepts them beside others that it has, and trains less than was asked."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from peft import LoraConfig
from torch import nn

from .._logging import get_logger
from ..suggestions import nearest_names


_STRICT: ContextVar[bool] = ContextVar("strict_targets", default=False)


@contextlib.contextmanager
def strict_targets() -> Iterator[None]:
    """Within this context a LoRA with a target that the model has not raises `ValueError`, where otherwise, as PEFT
    accepts it, there is a warning."""
    token = _STRICT.set(True)
    try:
        yield
    finally:
        _STRICT.reset(token)


def check_target_names(config: LoraConfig, model: nn.Module, quantized: bool) -> None:
    """Say which entries of ``target_modules`` and ``target_parameters`` are the name of nothing in ``model``, and what
    they may have meant: a warning for a quantized model; within [`strict_targets`] a `ValueError`, for any model.

    Entries that match are matched as PEFT does it. Text in place of a list is left to PEFT, which refuses what matches
    nothing.
    """
    if not quantized and not _STRICT.get():
        return
    kinds = {
        "target_modules": ("module", [name for name, _ in model.named_modules() if name]),
        "target_parameters": ("parameter", [name for name, _ in model.named_parameters()]),
    }
    found = []
    for option, (kind, names) in kinds.items():
        targets = getattr(config, option, None) or ()
        if isinstance(targets, str):
            continue
        # Below adapters that are there already, names are longer.
        names = list(dict.fromkeys(name.replace(".base_layer", "") for name in names if ".lora_" not in name))
        for target in sorted(targets):
            if not any(f".{name}".endswith(f".{target}") for name in names):
                near = " or ".join(map(repr, nearest_names(target, names)))
                found.append(f"{option} has {target!r}, the name of no {kind} of {type(model).__name__} (near: {near})")
    if not found:
        return
    message = "; ".join(found)
    if _STRICT.get():
        raise ValueError(f"{message}. Correct it or leave it out: PEFT would train the other targets alone")
    get_logger().warning("%s: the adapter is made of the other targets alone", message)
