# SPDX-License-Identifier: Apache-2.0
"""Hooks on modules that are gone again when a context ends."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

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
