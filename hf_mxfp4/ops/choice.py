# SPDX-License-Identifier: Apache-2.0
"""What multiplies in a product, and why: the one place that chooses by hardware, scheme and dtype.

* ``dense``: an ordinary product of the quantized values, in the dtype of the model. Always possible.
* ``fp8``: the same values as E4M3 elements and scales, on FP8 tensor cores by `scaled_mm`, or `scaled_grouped_mm` of
  experts. Differs from the dense product by the rounding of sums and of the output, and by elements of MXFP4
  activations too small for E4M3 beside the largest of their row, which are counted.
* ``fp4``: the codes of forward operands as they are, on FP4 tensor cores; see [`hf_mxfp4.ops.fp4`].
* ``mxfp8``: inputs in MXFP8 and codes of weights that become such elements; see there.
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..numerics import LinearScheme
from .fp4 import FP4_HARDWARE, MXFP4_HARDWARE


#: Hardware with FP8 tensor cores; what `hf-mxfp4 env` lists.
FP8_HARDWARE = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "gfx950")
#: Of these, what has FP8 products of all experts in one launch.
GROUPED_FP8_HARDWARE = ("sm_90",)
#: Whether PyTorch has FP8 products on the CPU, as 2.11 has not.
HAS_FP8_ON_CPU = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")


@dataclass(frozen=True)
class MatmulBackend:
    """``name``: ``"dense"``, ``"fp8"``, ``"mxfp8"`` or ``"fp4"``; ``reason``: why that one, in words."""

    name: str
    reason: str


@functools.lru_cache(maxsize=64)
def hardware_of(device: torch.device) -> str:
    """``"sm_90"``, ``"gfx950"``, ``"cpu"``, or ``"interpreter"`` for a CPU under TRITON_INTERPRET=1."""
    if device.type == "cuda" and torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    if device.type == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter"
    return device.type


@functools.lru_cache(maxsize=1024)
def select_matmul(
    gemm: str,
    scheme: LinearScheme,
    hardware: str,
    dtype: torch.dtype = torch.bfloat16,
    requested: str = "auto",
    experts: bool = False,
    codes: bool = True,
) -> MatmulBackend:
    """Choose the backend of one product.

    Args:
        gemm: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        scheme: of the layer's products.
        hardware: see [`hardware_of`].
        dtype: of the output.
        requested: ``"dense"``, ``"fp8"``, or ``"auto"`` for the fastest that multiplies the very values; on the CPU
            that is the dense one, whose FP8 products are for tests. ``"fp4"`` is ``"auto"``.
        experts: whether the product is that of all experts of a layer.
        codes: whether the operands are at hand as codes too.
    """
    if requested == "dense":
        return MatmulBackend("dense", "matmul_backend='dense' was asked for")
    if codes and not experts and requested != "fp8" and _fp4_problem(gemm, scheme, hardware, dtype) is None:
        return MatmulBackend("fp4", "the operands are E2M1 codes and one scale per block")
    if codes and not experts and _runs_in_mxfp8(gemm, scheme, hardware, dtype, requested):
        return MatmulBackend("mxfp8", "the operands are E4M3 elements and one scale per block")
    on_cpu = hardware in ("cpu", "interpreter")
    if on_cpu and requested != "fp8":
        return MatmulBackend("dense", "on the CPU there is nothing faster")
    if hardware not in FP8_HARDWARE and not (on_cpu and HAS_FP8_ON_CPU):
        return MatmulBackend("dense", f"{hardware} has no FP8 products")
    if dtype != (torch.float32 if on_cpu else torch.bfloat16):
        return MatmulBackend("dense", f"FP8 products on {hardware} have no output in {dtype}")
    if experts and (gemm == "wgrad" or hardware not in GROUPED_FP8_HARDWARE):
        where = "their tokens are no multiples of 16" if gemm == "wgrad" else f"{hardware} has no grouped FP8 products"
        return MatmulBackend("dense", f"experts are multiplied in 16 bits: {where}")
    reason = scheme.e4m3_problem(gemm)
    if reason is not None:
        return MatmulBackend("dense", reason)
    return MatmulBackend("fp8", "the values are E4M3 numbers times a scale per row")


@functools.lru_cache(maxsize=1024)
def _fp4_problem(gemm: str, scheme: LinearScheme, hardware: str, dtype: torch.dtype) -> str | None:
    """Return why the operands of a product are no codes that FP4 tensor cores multiply; `None` where they are."""
    if hardware not in FP4_HARDWARE:
        return f"{hardware} has no FP4 products"
    if dtype != torch.bfloat16:
        return f"FP4 products have no output in {dtype}"
    if gemm != "fprop":
        return "FP4 products are those of the forward pass"
    return scheme.fp4_problem


def _runs_in_mxfp8(gemm: str, scheme: LinearScheme, hardware: str, dtype: torch.dtype, requested: str) -> bool:
    """Whether MXFP8 products are to multiply the operands of a product, if PyTorch has them on the device."""
    has_product = requested == "auto" and hardware in MXFP4_HARDWARE and dtype == torch.bfloat16
    return has_product and gemm == "fprop" and scheme.mxfp8_problem is None


def fp4_recipes(
    scheme: LinearScheme, hardware: str, dtype: torch.dtype, requested: str
) -> tuple[tuple[str, ...], str | None]:
    """Return the recipes by which FP4 tensor cores may multiply forward operands, the best first, and why there is
    none, where FP4 products were asked for by name."""
    if requested not in ("auto", "fp4") or requested == "auto" and hardware not in FP4_HARDWARE:
        return (), None
    if _runs_in_mxfp8("fprop", scheme, hardware, dtype, requested):
        return ("mxfp8",), None
    reason = _fp4_problem("fprop", scheme, hardware, dtype)
    if reason is not None:
        return (), reason if requested == "fp4" else None
    has_plain_scales = not scheme.fprop.left.mantissas and not scheme.fprop.right.mantissas
    if has_plain_scales and hardware in MXFP4_HARDWARE:
        return ("mxfp4", "nvfp4"), None
    return ("nvfp4",), None


def runs_on_fp8(
    gemm: str,
    scheme: LinearScheme,
    device: torch.device,
    dtype: torch.dtype,
    requested: str,
    columns: Sequence[int],
    experts: bool = False,
) -> bool:
    """Whether FP8 tensor cores multiply in a product.

    Args:
        gemm, scheme, dtype, requested, experts: as in [`select_matmul`].
        device: on which the operands are.
        columns: sizes of the right operand, and of what is summed over; tensor cores take multiples of 16.
    """
    if requested == "dense" or device.type == "cpu" and requested != "fp8" or 0 in columns:
        return False
    if device.type != "cpu" and any(size % 16 for size in columns):
        return False
    return select_matmul(gemm, scheme, hardware_of(device), dtype, requested, experts, codes=False).name == "fp8"
