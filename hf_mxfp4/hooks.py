# SPDX-License-Identifier: Apache-2.0
"""Changes to the modules of a model that are undone when a context ends: hooks, and evaluation mode."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def hooked_inputs(hooks: Iterable[tuple[nn.Module, Callable]]) -> Iterator[None]:
    """Within this context each module tells its hook of its arguments, as `register_forward_pre_hook` has it."""
    handles = [module.register_forward_pre_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Turn dropout and checkpointing off; restore the training mode of every module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def replaced_method(module: Any, method: str, replacement: Callable) -> Iterator[None]:
    """Replace a method of one object, module or class; restore it on exit."""
    own = vars(module).get(method)
    setattr(module, method, replacement)
    try:
        yield
    finally:
        delattr(module, method)
        if own is not None:
            setattr(module, method, own)
