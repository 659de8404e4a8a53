# SPDX-License-Identifier: Apache-2.0
"""The GEMM kernels of a pass: those of the spec, where these tensors and this device take them; checked and counted."""

import warnings

import torch

from ...backends.select import is_torchs_own
from ..spec import GemmSpec
from . import fast, fast_grouped
from .select import GemmKernel, count_product, dtype_problem, hardware_of, select_kernel


#: What a self-check of a kernel found on a device; of products of one matrix, or of experts.
_problems: dict[tuple[str, torch.device, bool], str | None] = {}


def kernel_of_product(
    gemm: str, spec: GemmSpec, *operands: torch.Tensor, dtype: torch.dtype, experts: bool = False
) -> str:
    """The name of the kernel for these operands of a product, with an output of ``dtype``. It is counted."""
    device = operands[0].device
    kernel = select_kernel(gemm, spec.scheme, hardware_of(device), dtype, spec.gemm_kernel, experts)
    name = kernel.name
    if name != "dense" and not all(map(_is_taken, operands)):
        name = "dense"
    if name != "dense" and spec.gemm_kernel == "auto":
        name = checked(kernel, device, experts).name
    count_product(gemm, name)
    return name


def _is_taken(x: torch.Tensor) -> bool:
    """Whether kernels take a tensor: one of torch's own kinds, of a dtype that they know."""
    return is_torchs_own(x) and dtype_problem(x.dtype) is None


def checked(kernel: GemmKernel, device: torch.device, experts: bool = False) -> GemmKernel:
    """``kernel``, or the dense one where a self-check found, once per process, that it does not work on this device."""
    if kernel.name == "dense":
        return kernel
    key = kernel.name, device, experts
    if key not in _problems:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return GemmKernel("dense", "a CUDA graph is captured before the kernel was checked")
        _problems[key] = _problem(*key)
    if _problems[key] is None:
        return kernel
    return GemmKernel("dense", f"the {kernel.name} kernel failed its self-check: {_problems[key]}")


def _problem(name: str, device: torch.device, experts: bool) -> str | None:
    try:
        problem = (fast_grouped if experts else fast).self_check(name, device)
    except Exception as error:  # compilers and drivers fail in every way, and the dense kernel does the same
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        warnings.warn(f"engine='auto' takes dense products on {device}: {name} {problem}", stacklevel=2)
    return problem
