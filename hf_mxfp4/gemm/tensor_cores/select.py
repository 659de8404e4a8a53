# SPDX-License-Identifier: Apache-2.0
"""Which GEMM kernel multiplies the operands of a product, why, and how often each did.

* ``dense``: an ordinary product of the quantized values, in the dtype of the model. Always possible.
* ``fp8``: operands folded into E4M3 ([`hf_mxfp4.numerics.fold`]), for FP8 tensor cores. The same values, but for blocks
  that do not fit, which are counted, and sums in float32.
* ``mxfp4``: packed operands, on the tensor cores for MXFP4. The same values.

The result of either differs from the dense one by the rounding of sums and of the output alone. FP8 tensor cores add up
folded MXFP4 exactly in nearly all cases; with FP8 gradients those of sm_90 may lose about 2**-13 of the largest product
at every 32 elements (what a model of the hardware says, not measured).
"""

import functools
import os
from collections import Counter
from dataclasses import dataclass

import torch

from ...backends import triton as triton_kernels
from ...numerics import FP8, FULL, GEMM_OPERANDS, REUSE, GemmScheme, LinearScheme, OperandScheme, QuantScheme
from ...numerics.fold import fold_unsupported_reason


#: Hardware with each kind of tensor core; what `hf-mxfp4 env` lists.
FP8_HARDWARE = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "gfx950")
MXFP4_HARDWARE = ("sm_100", "sm_103", "sm_120", "sm_121", "gfx950")
INTERPRETER = "interpreter"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_counts: Counter[tuple[str, str]] = Counter()
#: Per device, blocks that were rounded when folded: an int32 scalar that kernels add to.
_inexact: dict[torch.device, torch.Tensor] = {}


@dataclass(frozen=True)
class GemmKernel:
    """``name``: ``"dense"``, ``"fp8"`` or ``"mxfp4"``; ``reason``: why that one, in words."""

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
        return INTERPRETER
    return device.type


@functools.lru_cache(maxsize=1024)
def select_kernel(
    gemm: str,
    scheme: LinearScheme,
    hardware: str,
    dtype: torch.dtype = torch.bfloat16,
    requested: str = "auto",
    experts: bool = False,
) -> GemmKernel:
    """Choose the kernel of one product.

    Args:
        gemm: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        scheme: of the layer's products.
        hardware: see [`hardware_of`].
        dtype: of the output.
        requested: a kernel, or ``"auto"`` for the fastest that multiplies the very values; on the CPU that is the
            dense one, also in the interpreter, where others are for tests.
        experts: whether the product is that of all experts of a layer. No kernel multiplies packed operands of those;
            hardware for MXFP4 has FP8 products too.
    """
    if requested == "dense":
        return GemmKernel("dense", "engine='dense' was asked for")
    if experts and requested == "mxfp4":
        return GemmKernel("dense", "no kernel multiplies packed operands of all experts")
    names = (("fp8",) if experts else ("mxfp4", "fp8")) if requested == "auto" else (requested,)
    if requested == "auto" and hardware in (INTERPRETER, "cpu"):
        return GemmKernel("dense", "on the CPU there is nothing faster")
    reasons = []
    for name in names:
        reason = _hardware_problem(name, hardware) or dtype_problem(dtype) or _scheme_problem(name, gemm, scheme)
        if experts and reason is None and _draws(gemm, scheme):
            reason = "every expert draws random numbers of its own"
        if reason is None:
            return GemmKernel(name, "native MXFP4 products" if name == "mxfp4" else "folded exactly into E4M3")
        reasons.append(reason)
    # Of several the last is about the kernel that asks least.
    return GemmKernel("dense", reasons[-1])


def gemm_kernel_counts() -> dict[str, dict[str, int] | int]:
    """Products of this process so far: by product and kernel, as ``{"fprop": {"fp8": 12, "dense": 3}, ...}``, and under
    ``"inexact_blocks"`` the blocks that did not fold exactly. Waits for the GPU."""
    found: dict[str, dict[str, int] | int] = {gemm: {} for gemm in GEMM_OPERANDS}
    for (gemm, name), count in sorted(_counts.items()):
        found[gemm][name] = count
    return found | {"inexact_blocks": sum(int(counter) for counter in _inexact.values())}


def reset_gemm_kernel_counts() -> None:
    """Count from zero."""
    _counts.clear()
    for counter in _inexact.values():
        counter.zero_()


def count_product(gemm: str, kernel: str) -> None:
    """Add one to [`gemm_kernel_counts`]."""
    _counts[gemm, kernel] += 1


def inexact_counter(device: torch.device) -> torch.Tensor:
    """The counter of a device that folding kernels add to; it never moves, so that CUDA graphs can hold it."""
    if device not in _inexact:
        _inexact[device] = torch.zeros((), dtype=torch.int32, device=device)
    return _inexact[device]


def _hardware_problem(name: str, hardware: str) -> str | None:
    if hardware == INTERPRETER or hardware in (MXFP4_HARDWARE if name == "mxfp4" else FP8_HARDWARE):
        return triton_kernels.unavailable("cuda")
    return f"{hardware} has no {'MXFP4' if name == 'mxfp4' else 'FP8'} products"


def dtype_problem(dtype: torch.dtype) -> str | None:
    """Why no kernel but the dense one takes tensors of a dtype; `None` where others do."""
    return None if dtype in _DTYPES else f"{dtype} has more digits than these engines"


def _scheme_problem(name: str, gemm: str, scheme: LinearScheme) -> str | None:
    """Why operands of a product do not fit a kernel."""
    product: GemmScheme = getattr(scheme, gemm)
    schemes = []
    for operand, precision in zip(GEMM_OPERANDS[gemm], (product.left, product.right), strict=True):
        reason = _operand_problem(name, operand, precision, scheme)
        if reason is not None:
            return reason
        if product.rotation is not None and not isinstance(precision, QuantScheme):
            return f"{operand} is rotated ({product.rotation}) and {precision}, which no kernel does in one pass"
        schemes.append(precision)
    macros = {operand.macro_block for operand in schemes if isinstance(operand, QuantScheme)}
    if name == "mxfp4" and len(macros) > 1:
        return "one operand has macro factors and the other has none"
    return None


def _draws(gemm: str, scheme: LinearScheme) -> bool:
    """Whether operands of a product depend on random numbers."""
    product: GemmScheme = getattr(scheme, gemm)
    reused = scheme.fprop.left if gemm == "wgrad" else scheme.fprop.right
    used = (product.left, reused if product.right is REUSE else product.right)
    random = any(isinstance(operand, QuantScheme) and operand.rounding != "nearest" for operand in used)
    return random or product.rotation is not None and product.rotation.random


def _operand_problem(name: str, operand: str, precision: OperandScheme, scheme: LinearScheme) -> str | None:
    if precision is FULL:
        return f"{operand} is in full precision"
    if precision is FP8:
        return f"{operand} is FP8" if name == "mxfp4" else None
    if precision is REUSE:
        if name == "mxfp4":
            return f"blocks of the reused {operand} run along the other axis"
        used = scheme.fprop.right if operand == "weight" else scheme.fprop.left
        if not isinstance(used, QuantScheme):
            return f"{operand} is in full precision"
        if scheme.fprop.rotation is not None:
            return f"the reused {operand} is rotated along the other axis"
        if used.macro_block is not None:
            return f"macro factors of the reused {operand} vary along this product's contraction"
        if operand == "weight" and used.block_rows != 1:
            return "tiles of the reused weight have no kernel that folds them across"
        precision = used
    return fold_unsupported_reason(precision, 128)
