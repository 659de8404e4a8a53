# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there: kernels that are launched on it are compiled to PTX, and do not run."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.compiler import CompiledKernel

from .texts import without_names


#: Bytes of shared memory of a program, and multiprocessors.
_HARDWARE = {90: (227 * 1024, 132), 100: (227 * 1024, 148)}


class Launch:
    """One launch.

    Attributes:
        kernel: its name.
        ptx: of [`without_names`].
        grid: programs along three axes.
        settings: warps, stages and bytes of shared memory.
        arguments: those of run time in order, tensors as dtype and shape, numbers as they are.
    """

    def __init__(self, kernel: CompiledKernel, grid: tuple[int, ...], arguments: tuple):
        self.kernel = kernel.src.fn.__name__
        self.ptx = without_names(kernel.asm["ptx"])
        self.grid = grid
        data = kernel.metadata
        self.settings = {"warps": data.num_warps, "stages": data.num_stages, "shared": data.shared}
        self.arguments = list(_runtime_arguments(kernel.src.signature.values(), arguments))


@contextlib.contextmanager
def fake_gpu(capability: int) -> Iterator[list[Launch]]:
    """Within, tensors are made without storage, those on ``"cuda"`` seem to be on a GPU of a compute capability, and
    the list grows by each launch."""
    shared, multiprocessors = _HARDWARE[capability]
    properties = SimpleNamespace(
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=multiprocessors,
        shared_memory_per_block_optin=shared,
        gcnArchName="",
        name=f"sm_{capability}",
    )
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    launches: list[Launch] = []

    def run(kernel: CompiledKernel) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
            _, _, _, _, *arguments = rest
            launches.append(Launch(kernel, (x, y, z), tuple(arguments)))

        return launch

    stand_ins = {
        "device": lambda device: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: stream,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
    }
    with contextlib.ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        stack.enter_context(mock.patch.object(CompiledKernel, "run", property(run)))
        stack.enter_context(mock.patch.object(CompiledKernel, "_init_handles", lambda kernel: None))
        # Machine code is the work of ptxas alone.
        stack.enter_context(mock.patch.object(CUDABackend, "make_cubin", lambda *arguments: b""))
        stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", lambda tensor: 1 << 20))
        # Another thread would make real tensors.
        stack.enter_context(mock.patch.object(ThreadPoolExecutor, "submit", _submit))
        stack.enter_context(FakeTensorMode())
        yield launches


def _submit(pool: ThreadPoolExecutor, function: Any, *arguments: Any, **options: Any) -> Future:
    future: Future = Future()
    future.set_result(function(*arguments, **options))
    return future


def _runtime_arguments(types: Any, values: Any) -> Iterator[str]:
    """What is passed at run time of arguments, which may be tuples of others, in order."""
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple):
            yield from _runtime_arguments(kind, value)
        elif kind != "constexpr":
            is_tensor = isinstance(value, torch.Tensor)
            yield f"{kind}: " + (f"{value.dtype} {list(value.shape)}" if is_tensor else repr(value))
