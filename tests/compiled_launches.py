# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there: Triton compiles for it, and what it would launch is handed over."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.compiler import CompiledKernel


#: Of architectures: multiprocessors, and bytes of shared memory that a program may have.
GPUS = {80: (108, 166912), 90: (132, 232448), 100: (148, 232448)}


@contextlib.contextmanager
def compiled_for(arch: int, launched: Callable[[CompiledKernel, tuple[int, ...], list], None]) -> Iterator[None]:
    """Within, kernels are compiled for ``sm_<arch>``, but for machine code, which is the work of ptxas alone. Of each
    launch, ``launched`` gets the kernel, the grid, and kinds and values of what is passed at run time."""
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )

    def run(kernel: CompiledKernel) -> Callable:
        def launch(x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
            _, _, _, _, *arguments = rest
            launched(kernel, (x, y, z), list(_passed(kernel.src.signature.values(), arguments)))

        return launch

    with contextlib.ExitStack() as stack:
        for place, name, stand_in in (
            (triton.runtime.driver, "_active", driver),
            (CompiledKernel, "run", property(run)),
            (CompiledKernel, "_init_handles", lambda kernel: None),
            (CUDABackend, "make_cubin", lambda *arguments: b""),
            (torch.cuda, "get_device_capability", lambda device=None: (arch // 10, arch % 10)),
        ):
            stack.enter_context(mock.patch.object(place, name, stand_in))
        yield


def _passed(kinds: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """Those of arguments, which may be tuples of others, in order, without constants."""
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from _passed(kind, value)
        elif kind != "constexpr":
            yield kind, value
