# SPDX-License-Identifier: Apache-2.0
"""The GEMM kernels of a pass: those of the spec, where these tensors and this device take them; checked and counted."""

import torch

from ...backends import self_check
from ...backends.select import is_torchs_own
from ..spec import GemmSpec
from .select import GemmKernel, count_product, dtype_problem, hardware_of, select_kernel


#: Kernels that must work, by name and whether products are those of experts.
_FAMILIES = {
    ("fp8", False): ("folds", "fp8 products"),
    ("fp8", True): ("folds", "fp8 products of experts"),
    ("mxfp4", False): ("quantize", "mxfp4 products"),
}


def kernel_of_product(
    gemm: str, spec: GemmSpec, *operands: torch.Tensor, dtype: torch.dtype, experts: bool = False
) -> str:
    """The name of the kernel for these operands of a product, with an output of ``dtype``. It is counted."""
    name = expected_kernel(gemm, spec, *operands, dtype=dtype, experts=experts)
    count_product(gemm, name)
    return name


def expected_kernel(
    gemm: str, spec: GemmSpec, *operands: torch.Tensor, dtype: torch.dtype, experts: bool = False
) -> str:
    """What [`kernel_of_product`] will name, of a product that is still to come."""
    device = operands[0].device
    kernel = select_kernel(gemm, spec.scheme, hardware_of(device), dtype, spec.gemm_kernel, experts)
    name = kernel.name
    if name != "dense" and not all(map(_is_taken, operands)):
        name = "dense"
    if name != "dense" and spec.gemm_kernel == "auto":
        name = checked(kernel, device, experts).name
    return name


def _is_taken(x: torch.Tensor) -> bool:
    """Whether kernels take a tensor: one of torch's own kinds, of a dtype that they know."""
    return is_torchs_own(x) and dtype_problem(x.dtype) is None


def checked(kernel: GemmKernel, device: torch.device, experts: bool = False) -> GemmKernel:
    """``kernel``, or the dense one where kernels that it needs do not work on this device."""
    if kernel.name == "dense":
        return kernel
    problem = self_check.problem(device, *_FAMILIES[kernel.name, experts])
    return kernel if problem is None else GemmKernel("dense", f"the {kernel.name} kernel is not used: {problem}")
