# SPDX-License-Identifier: Apache-2.0
"""Which backend multiplies the operands of a product, why, and how often each did.

* ``dense``: an ordinary product of the quantized values, in the dtype of the model. Always possible.
* ``fp8``: the same values as E4M3 elements with one scale per row ([`hf_mxfp4.gemm.fp8`]), on FP8 tensor cores by
  `torch.nn.functional.scaled_mm`. Differs from the dense product by the rounding of sums and of the output, and by
  elements too small for E4M3 beside the largest of their row, which are counted.
"""

import functools
import os
from collections import Counter
from dataclasses import dataclass

import torch

from ..numerics import FULL, GEMM_OPERANDS, REUSE, GemmScheme, LinearScheme, OperandScheme, QuantScheme


#: Hardware with FP8 tensor cores; what `hf-mxfp4 env` lists.
FP8_HARDWARE = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "gfx950")

_counts: Counter[tuple[str, str]] = Counter()
#: Per device, elements that E4M3 rounded: a scalar that is added to without waiting for the device.
_inexact: dict[torch.device, torch.Tensor] = {}


@dataclass(frozen=True)
class MatmulBackend:
    """``name``: ``"dense"`` or ``"fp8"``; ``reason``: why that one, in words."""

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
) -> MatmulBackend:
    """Choose the backend of one product.

    Args:
        gemm: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        scheme: of the layer's products.
        hardware: see [`hardware_of`].
        dtype: of the output.
        requested: ``"dense"``, ``"fp8"``, or ``"auto"`` for the fastest that multiplies the very values; on the CPU
            that is the dense one, whose FP8 products are for tests.
        experts: whether the product is that of all experts of a layer.
    """
    if requested == "dense":
        return MatmulBackend("dense", "matmul_backend='dense' was asked for")
    if experts:
        return MatmulBackend("dense", "experts are multiplied in 16 bits")
    on_cpu = hardware in ("cpu", "interpreter")
    if on_cpu and requested == "auto":
        return MatmulBackend("dense", "on the CPU there is nothing faster")
    if not on_cpu and hardware not in FP8_HARDWARE:
        return MatmulBackend("dense", f"{hardware} has no FP8 products")
    if dtype != (torch.float32 if on_cpu else torch.bfloat16):
        return MatmulBackend("dense", f"FP8 products on {hardware} have no output in {dtype}")
    product: GemmScheme = getattr(scheme, gemm)
    for operand, precision in zip(GEMM_OPERANDS[gemm], (product.left, product.right), strict=True):
        reason = _operand_problem(operand, precision, scheme)
        if reason is not None:
            return MatmulBackend("dense", reason)
    return MatmulBackend("fp8", "the values are E4M3 numbers times a scale per row")


def _operand_problem(operand: str, precision: OperandScheme, scheme: LinearScheme) -> str | None:
    """Why the values of an operand are no E4M3 numbers times one power of two per row; `None` where they are."""
    if precision is REUSE:
        if scheme.fprop.rotation is not None:
            return f"the reused {operand} is rotated along the other axis"
        precision = scheme.fprop.right if operand == "weight" else scheme.fprop.left
    if precision is FULL:
        return f"{operand} is in full precision"
    if isinstance(precision, QuantScheme) and precision.macro_block is not None:
        return f"macro factors of {operand} have more digits than E4M3"
    if isinstance(precision, QuantScheme) and precision.outlier_fallback is not None:
        return f"residuals of {operand} have more digits than E4M3"
    return None


def count_product(gemm: str, backend: str) -> None:
    """Add one to [`matmul_counts`]."""
    _counts[gemm, backend] += 1


def count_inexact(number: torch.Tensor) -> None:
    """Add elements that were rounded, a scalar on their device, to [`matmul_counts`]."""
    total = _inexact.setdefault(number.device, torch.zeros((), dtype=torch.int64, device=number.device))
    total.add_(number)


def matmul_counts() -> dict[str, dict[str, int] | int]:
    """Products of this process so far whose backend was chosen: by product and backend, as ``{"fprop": {"fp8": 12,
    "dense": 3}, ...}``, and under ``"inexact_elements"`` those that E4M3 rounded. Waits for the GPU."""
    found: dict[str, dict[str, int] | int] = {gemm: {} for gemm in GEMM_OPERANDS}
    for (gemm, name), count in sorted(_counts.items()):
        found[gemm][name] = count
    return found | {"inexact_elements": sum(int(number) for number in _inexact.values())}


def reset_matmul_counts() -> None:
    """Count from zero."""
    _counts.clear()
    _inexact.clear()
