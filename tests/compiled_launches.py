# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there: tensors on it have no storage, and Triton compiles for it without launching."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.compiler import CompiledKernel


#: Multiprocessors, and bytes of shared memory that a program may have, by architecture.
GPUS = {
    "80": (108, 166912),
    "90": (132, 232448),
    "100": (148, 232448),
    "120": (170, 101376),
    "gfx942": (304, 65536),
    "gfx950": (256, 163840),
}


class Compiled(NamedTuple):
    """A kernel that would be launched.

    Attributes:
        kernel: its code and metadata.
        grid: numbers of programs.
        arguments: kind and value of what is passed at run time.
    """

    kernel: CompiledKernel
    grid: tuple[int, ...]
    arguments: list[tuple[str, Any]]


@contextlib.contextmanager
def fake_gpu(arch: str, machine_code: bool = False) -> Iterator[list[Compiled]]:
    """Within, tensors are made without storage, those on ``"cuda"`` seem to be on a GPU of an architecture, and the
    list grows by each launch. Without ``machine_code`` ptxas, which takes most of the time, does not run."""
    launches: list[Compiled] = []
    is_hip = arch.startswith("gfx")
    with contextlib.ExitStack() as stack:
        for target, name, stand_in in _of_cuda(arch):
            stack.enter_context(mock.patch.object(target, name, stand_in))
        for target, name, stand_in in _of_triton(arch, launches.append):
            stack.enter_context(mock.patch.object(target, name, stand_in))
        if is_hip:
            stack.enter_context(mock.patch.object(torch.version, "hip", "7.0"))
        elif not machine_code:
            stack.enter_context(without_machine_code())
        stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", lambda tensor: 1 << 20))
        # Another thread would make real tensors.
        stack.enter_context(mock.patch.object(ThreadPoolExecutor, "submit", _submit))
        stack.enter_context(FakeTensorMode())
        yield launches


@contextlib.contextmanager
def without_machine_code() -> Iterator[None]:
    """Let Triton compile for NVIDIA without ptxas, into a cache of its own: a GPU that found such a kernel in the cache
    of its user could not run it."""
    with triton.knobs.cache.scope(), mock.patch.object(CUDABackend, "make_cubin", lambda *arguments: b""):
        triton.knobs.cache.dir = str(Path(triton.knobs.cache.dir) / "without_machine_code")
        yield


def _of_cuda(arch: str) -> Iterator[tuple[Any, str, Any]]:
    """What is replaced in torch: object, name and stand-in."""
    capability = (9, 4) if arch.startswith("gfx") else (int(arch) // 10, int(arch) % 10)
    count, shared = GPUS[arch]
    properties = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        gcnArchName=arch,
        name=f"sm_{arch}",
        multi_processor_count=count,
        shared_memory_per_block_optin=shared,
    )
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    yield torch.cuda, "device", lambda device: contextlib.nullcontext()
    yield torch.cuda, "stream", lambda stream: contextlib.nullcontext()
    yield torch.cuda, "current_stream", lambda device=None: stream
    yield torch.cuda, "current_device", lambda: 0
    yield torch.cuda, "is_current_stream_capturing", lambda: False
    yield torch.cuda, "get_device_properties", lambda device=None: properties
    yield torch.cuda, "get_device_name", lambda device=None: properties.name
    yield torch.cuda, "get_device_capability", lambda device=None: capability


def _of_triton(arch: str, launched: Callable[[Compiled], None]) -> Iterator[tuple[Any, str, Any]]:
    """What is replaced in Triton: object, name and stand-in."""
    target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch), 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )

    def run(kernel: CompiledKernel) -> Callable:
        def launch(x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
            _, _, _, _, *arguments = rest
            launched(Compiled(kernel, (x, y, z), list(_passed(kernel.src.signature.values(), arguments))))

        return launch

    yield triton.runtime.driver, "_active", driver
    yield CompiledKernel, "run", property(run)
    yield CompiledKernel, "_init_handles", lambda kernel: None


def _passed(kinds: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """Those of arguments, which may be tuples of others, in order, without constants."""
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from _passed(kind, value)
        elif kind != "constexpr":
            yield kind, value


def _submit(pool: ThreadPoolExecutor, function: Any, *arguments: Any, **options: Any) -> Future:
    future: Future = Future()
    future.set_result(function(*arguments, **options))
    return future
