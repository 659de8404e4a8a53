# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a GPU where there is none: tensors without data, and a list of the launches of Triton kernels."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode


#: No machine has a GPU of this number, so caches by device cannot mix it up with a real one.
DEVICE = torch.device("cuda", 100)


@dataclass(frozen=True)
class Launch:
    """A launch of a Triton kernel: numbers of programs along the axes, and its positional arguments."""

    grid: tuple[int, ...]
    arguments: tuple


#: Not empty while torch itself computes. Parts of it are in Python and must see the meta device.
_in_torch: list[bool] = []


@contextlib.contextmanager
def stub_gpu() -> Iterator[list[Launch]]:
    """Let tensors of the meta device claim to be on `DEVICE`; yield the launches on it, none of which runs."""
    launches: list[Launch] = []
    with contextlib.ExitStack() as stack:
        for target, name, value in _replacements(launches):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(_OnMeta())
        yield launches


def _replacements(launches: list[Launch]) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced: object, name of its attribute, new value."""
    properties = SimpleNamespace(major=10, minor=0, multi_processor_count=148, warp_size=32)
    real_device = torch.Tensor.device.__get__

    def device_of(x: torch.Tensor) -> torch.device:
        real = real_device(x)
        return DEVICE if real.type == "meta" and not _in_torch else real

    def launch(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        if callable(grid):
            grid = grid(constants)
        launches.append(Launch(tuple(grid), arguments))

    yield triton.JITFunction, "run", launch
    yield torch.Tensor, "device", property(device_of)
    yield torch.Tensor, "is_cuda", property(lambda x: real_device(x).type == "meta")
    yield torch.Tensor, "is_meta", property(lambda x: real_device(x).type == "meta" and bool(_in_torch))
    yield torch.cuda, "_lazy_init", lambda: None
    yield torch.cuda, "device", lambda _: contextlib.nullcontext()
    yield torch.cuda, "current_device", lambda: DEVICE.index
    yield torch.cuda, "get_device_properties", lambda *_: properties
    yield torch.cuda, "get_device_capability", lambda *_: (10, 0)


class _OnMeta(TorchDispatchMode):
    """Make tensors for CUDA devices on the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", None) == "cuda":
            kwargs["device"] = torch.device("meta")
        _in_torch.append(True)
        try:
            return func(*args, **kwargs)
        finally:
            _in_torch.pop()
