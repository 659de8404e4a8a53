# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a GPU on machines that have none: tensors without data, and a list of kernel launches.

Within [`stub_gpu`], tensors of torch's meta device claim to be on a CUDA device, so layers and kernels run the Python
code that they run on that GPU. Launches of Triton kernels are noted with their arguments, and no kernel runs.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class GPU:
    """What code asks about a GPU.

    Attributes:
        number: index of the CUDA device that stands for it. No machine has a device with such a number, so caches by
            device cannot mix it up with a real one.
        capability: compute capability, as torch gives it.
        shared_memory: bytes that one program can have.
    """

    name: str
    number: int
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int = 227 << 10

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.number)


H100 = GPU("H100", 90, (9, 0), 132)
B200 = GPU("B200", 100, (10, 0), 148)


@dataclass(frozen=True)
class Launch:
    """A launch of a Triton kernel.

    Attributes:
        kernel: the jitted function.
        grid: numbers of programs along the axes.
        arguments: positional arguments.
        constants: keyword arguments, with the options of the compiler.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    constants: dict[str, Any]


#: Not empty while torch itself computes. Parts of it are in Python and must see the meta device.
_in_torch: list[bool] = []


@contextlib.contextmanager
def stub_gpu(gpu: GPU) -> Iterator[list[Launch]]:
    """Stand for one GPU within this context; yield the list of launches, which grows in order.

    Self-checks of kernels, which compare numbers, count as passed. Raises `RuntimeError` under TRITON_INTERPRET=1,
    where kernels are called in other ways.
    """
    from hf_mxfp4.ops import self_check
    from mxfp4_kernels.common.scheme import INTERPRETED

    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET=1 is set: kernels are called in other ways then; unset it")
    launches: list[Launch] = []
    verified = {(family, gpu.device): None for family in self_check.FAMILIES}
    with contextlib.ExitStack() as stack:
        for target, name, value in _replacements(gpu, launches):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(mock.patch.dict(self_check._found, verified))
        stack.enter_context(_OnMeta())
        yield launches


def _replacements(gpu: GPU, launches: list[Launch]) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced: object, name of its attribute, new value."""
    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=gpu.multiprocessors,
        shared_memory_per_block_optin=gpu.shared_memory,
        total_memory=80 << 30,
        L2_cache_size=50 << 20,
        warp_size=32,
    )
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    real_device = torch.Tensor.device.__get__

    def device_of(x: torch.Tensor) -> torch.device:
        real = real_device(x)
        return gpu.device if real.type == "meta" and not _in_torch else real

    def launch(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        if callable(grid):
            grid = grid(constants)
        launches.append(Launch(kernel, tuple(grid), arguments, constants))

    yield triton.JITFunction, "run", launch
    yield torch.Tensor, "device", property(device_of)
    yield torch.Tensor, "is_cuda", property(lambda x: real_device(x).type == "meta")
    yield torch.Tensor, "is_meta", property(lambda x: real_device(x).type == "meta" and bool(_in_torch))
    yield torch.version, "cuda", "13.0"
    yield torch.cuda, "_lazy_init", lambda: None
    yield torch.cuda, "device", lambda _: contextlib.nullcontext()
    yield torch.cuda, "get_device_properties", lambda *_: properties
    yield torch.cuda, "get_device_capability", lambda *_: gpu.capability
    yield torch.cuda, "get_device_name", lambda *_: gpu.name
    yield torch.cuda, "current_device", lambda: gpu.number
    yield torch.cuda, "current_stream", lambda *_: stream
    yield torch.cuda, "is_current_stream_capturing", lambda: False


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
