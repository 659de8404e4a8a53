# SPDX-License-Identifier: Apache-2.0
"""Launches the functions of `mxfp4_kernels` on CPU tensors: kernels are compiled for a GPU that is not there, and their
PTX is executed on the memory of the tensors."""

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.compiler import CompiledKernel

import mxfp4_kernels.dequantization as dequantization
import mxfp4_kernels.fp4 as fp4
import mxfp4_kernels.fp8 as fp8
from mxfp4_kernels.common import scheme
from mxfp4_kernels.decode import product
from mxfp4_kernels.decode.config import Gpu

from .machine import execute
from .memory import GlobalMemory
from .parser import parse


#: Of architectures: multiprocessors and bytes of shared memory of a program.
_GPUS = {80: (108, 166912), 90: (132, 232448), 100: (148, 232448)}


@contextlib.contextmanager
def executed(arch: int) -> Iterator[list[str]]:
    """Within, launches on CPU tensors are compiled for ``sm_<arch>`` and executed; the list grows by their names."""
    launched: list[str] = []
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    patch = mock.patch.object
    with contextlib.ExitStack() as stack:
        for change in (
            patch(triton.runtime.driver, "_active", driver),
            patch(CompiledKernel, "run", property(functools.partial(_launch, launched=launched))),
            patch(CompiledKernel, "_init_handles", lambda kernel: None),
            # Machine code is the work of ptxas alone.
            patch(CUDABackend, "make_cubin", lambda *arguments: b""),
            patch(torch.cuda, "get_device_capability", lambda device=None: (arch // 10, arch % 10)),
            patch(product, "gpu_of", lambda device: Gpu(str(arch), *_GPUS[arch])),
            patch(product, "weight_constants", lambda *most, **_: _weight_constants(*most[:-1], True)),
        ):
            stack.enter_context(change)
        for module in (scheme, dequantization, fp4, fp8, product):
            stack.enter_context(patch(module, "check_device", lambda x: None))
        yield launched


_weight_constants = product.weight_constants


def _launch(kernel: CompiledKernel, launched: list[str]) -> Any:
    def run(x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        _, _, _, _, *arguments = rest
        found = list(_runtime_arguments(kernel.src.signature.values(), arguments))
        launched.append(kernel.metadata.name)
        memory = GlobalMemory([_buffer(value) for value in found if isinstance(value, torch.Tensor)])
        numbers = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in found]
        # Two pointers follow to scratch memory, which our kernels do not have.
        execute(_parsed(kernel.asm["ptx"]), (x, y, z), [*numbers, 0, 0], memory, kernel.metadata.shared)

    return run


_parsed = functools.lru_cache(parse)


def _runtime_arguments(types: Any, values: Any) -> Iterator[Any]:
    """What is passed at run time of arguments, which may be tuples of others, in order."""
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple):
            yield from _runtime_arguments(kind, value)
        elif kind != "constexpr":
            yield value


def _buffer(tensor: torch.Tensor) -> tuple[int, np.ndarray]:
    """Address and bytes of a tensor, from its first element to its last."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.detach().as_strided((count if tensor.numel() else 0,), (1,)).view(torch.uint8)
    return tensor.data_ptr(), flat.numpy()
