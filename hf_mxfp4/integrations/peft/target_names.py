# SPDX-License-Identifier: Apache-2.0
"""Targets that a model has not, or that do not reach its experts: PEFT accepts them beside others, and trains less than
was asked."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from peft import LoraConfig
from torch import nn

from ..._logging import get_logger
from ...layers import MXFP4PackedExperts
from ...suggestions import nearest_names


#: What linear layers of experts are called in checkpoints and in models of older versions of transformers.
_OLD_NAMES = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3")
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


def check_expert_targets(config: LoraConfig, model: nn.Module) -> None:
    """Say that ``target_modules="all-linear"`` means no experts; raise `ValueError` for the name of a part of experts
    that no module of ``model`` has any more, with which PEFT would train other layers only."""
    targets = config.target_modules
    if isinstance(targets, str):
        if targets.lower() == "all-linear":
            count = sum(isinstance(module, MXFP4PackedExperts) for module in model.modules())
            get_logger().warning(
                'target_modules="all-linear" means linear layers: the experts of %d layers get no adapters. For '
                'adapters on them, give a list of names with "experts" among them',
                count,
            )
        return
    names = [name for name, _ in model.named_modules()]
    for target in sorted(targets or ()):
        if target.rpartition(".")[2] in _OLD_NAMES and not any(f".{name}".endswith(f".{target}") for name in names):
            raise ValueError(
                f"target_modules has {target!r}, which no layer of {type(model).__name__} is called: its experts are "
                "one module each; give 'experts' for adapters on both projections of every expert"
            )
