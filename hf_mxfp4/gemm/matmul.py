# SPDX-License-Identifier: Apache-2.0
"""One product of two operands, of one weight or of all experts: which backend multiplies them, why, and how often each
did.

* ``dense``: an ordinary product of the quantized values, in the dtype of the model. Always possible. Of codes, those of
  few rows are multiplied without values in memory.
* ``fp8``: the same values as E4M3 elements with one scale per row ([`FP8Operand`]), on FP8 tensor cores by
  `torch.nn.functional.scaled_mm`. Differs from the dense product by the rounding of sums and of the output, and by
  elements too small for E4M3 beside the largest of their row, which are counted.
* ``fp4``: the codes of forward operands as they are, on FP4 tensor cores; see [`hf_mxfp4.gemm.block_scaled`].
"""

import functools
import os
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .._logging import get_logger
from ..backends import cpu as on_cpu
from ..backends import dispatch
from ..backends import triton as triton_kernels
from ..numerics import (
    FP8,
    FULL,
    GEMM_OPERANDS,
    NVFP4,
    REUSE,
    GemmScheme,
    LinearScheme,
    MXFP4Tensor,
    OperandScheme,
    QuantScheme,
)
from .block_scaled import FP4_HARDWARE, FP4Operand, choose_recipe, fit, fp4_product, to_fp4
from .groups import Groups
from .packed_weight import of_expert
from .state import GemmSpec, PackedSpec


#: Hardware with FP8 tensor cores; what `hf-mxfp4 env` lists.
FP8_HARDWARE = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "gfx950")
_LARGEST_E4M3 = 448.0

_counts: Counter[tuple[str, str]] = Counter()
#: Per device, elements that E4M3 rounded: a scalar that is added to without waiting for the device.
_inexact: dict[torch.device, torch.Tensor] = {}


class FP8Operand(NamedTuple):
    """``elements [R, C]``, float8_e4m3fn, times ``scale [R, 1]``, float32 powers of two."""

    elements: torch.Tensor
    scale: torch.Tensor


def to_fp8(values: torch.Tensor) -> FP8Operand:
    """A matrix of quantized values as elements and scales of its rows. NaN and infinite values become NaN."""
    if dispatch.supports_e4m3(values):
        elements, scale, inexact = triton_kernels.to_fp8(values)
        _count_inexact(inexact)
        return FP8Operand(elements, scale)
    wide = values.float()
    finite = wide.isfinite()
    top = torch.where(finite, wide.abs(), 0).amax(dim=1, keepdim=True)
    _, exponent = torch.frexp(top)
    scale = torch.ldexp(torch.ones_like(top), (exponent - 9).clamp(-126, 126))
    scale = torch.where(top > scale * _LARGEST_E4M3, scale * 2, scale)
    elements = torch.where(finite, wide / scale, torch.nan).to(torch.float8_e4m3fn)
    _count_inexact((elements.float() * scale != wide).logical_and(finite).sum())
    return FP8Operand(elements.contiguous(), scale)


#: Values in the dtype of the product, codes and scale bytes, or E4M3 elements and scales of rows.
Operand = torch.Tensor | MXFP4Tensor | FP8Operand


def matmul(
    a: torch.Tensor | FP8Operand,
    b: Operand,
    bias: torch.Tensor | None = None,
    groups: Groups | None = None,
    *,
    dtype: torch.dtype | None = None,
    spec: GemmSpec | PackedSpec | None = None,
    reader: str | None = None,
) -> torch.Tensor:
    """``a [..., C] b[D, C]^T + bias[D]``, without gradients. With groups ``a [S, C] b[e, D, C]^T + bias[e, D]`` for the
    rows of each expert.

    All ways give the same up to the order of sums; on codes, exact products are summed in float32, while values are
    rounded to the dtype of ``a`` first, so that with macro factors or residuals the two differ by about one rounding.

    Args:
        a: values, or E4M3 elements where ``b`` is such.
        b: values, codes, or E4M3 elements.
        bias: in the dtype of the product, or `None`.
        groups: the rows of each expert; `None` for one weight.
        dtype: of a product of E4M3 elements; otherwise that of ``a``.
        spec: of a product with codes: what reads them, and what multiplies those of one weight with many rows.
        reader: the backend that was chosen to multiply with them, where the caller has asked for it already.
    """
    if isinstance(b, FP8Operand):
        out = F.scaled_mm(
            a.elements,
            b.elements.t(),
            a.scale,
            F.ScalingType.RowWise,
            b.scale.t(),
            F.ScalingType.RowWise,
            output_dtype=dtype,
            use_fast_accum=False,  # which would keep 14 bits of the sums
        )
        return out if bias is None else out + bias
    if isinstance(b, MXFP4Tensor):
        reader = reader or dispatch.choose_backend(a, b.scheme, spec.backend, family="decode")
        return _on_codes(a, b, bias, groups, spec, reader)
    if groups is None:
        return F.linear(a, b, bias)
    if _runs_grouped(a, b):
        out = F.grouped_mm(a.contiguous(), b.transpose(1, 2), offs=groups.offsets(a.device))
        return out if bias is None else out + groups.per_row(bias)
    out = a.new_empty(a.shape[0], b.shape[1])
    for expert, rows in groups:
        out[rows] = F.linear(a[rows], b[expert], None if bias is None else bias[expert])
    return out


def multiply(
    gemm: str, left: torch.Tensor, right: torch.Tensor, spec: GemmSpec | PackedSpec, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``left [..., C] right[D, C]^T + bias`` of quantized values by the backend that the spec names."""
    if spec.matmul_backend == "dense":
        return F.linear(left, right, bias)
    # What is multiplied as values has no codes along this axis, or none that FP4 tensor cores take.
    choice = select_matmul(gemm, spec.scheme, hardware_of(left.device), left.dtype, spec.matmul_backend, codes=False)
    is_fp8 = choice.name == "fp8" and dispatch.is_torchs_own(left) and _fits_fp8(left, right)
    _counts[gemm, "fp8" if is_fp8 else "dense"] += 1
    if not is_fp8:
        return F.linear(left, right, bias)
    rows = to_fp8(left.reshape(-1, left.shape[-1]))
    return matmul(rows, to_fp8(right), bias, dtype=left.dtype).view(*left.shape[:-1], right.shape[0])


def fp4_recipe(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, spec: GemmSpec) -> str | None:
    """How FP4 tensor cores multiply the codes of an input and a weight ``[N, K]``, in ``dtype``; `None` where they do
    not. Says why, once for each reason, where the spec asks for them by name."""
    hardware, requested = hardware_of(x.device), spec.matmul_backend
    if requested not in ("auto", "fp4") or hardware not in FP4_HARDWARE and requested == "auto":
        return None
    recipe, reason = None, _fp4_problem("fprop", spec.scheme, hardware, dtype)
    if reason is None and dispatch.is_torchs_own(x):
        recipe, reason = choose_recipe(x, weight, hardware, (spec.input_scheme, spec.weight_scheme))
    if reason and requested == "fp4":
        _warn_once(reason)
    return recipe


@functools.lru_cache(maxsize=64)
def _warn_once(reason: str) -> None:
    get_logger().warning("matmul_backend='fp4': some products are not computed in FP4: %s", reason)


def multiply_packed(
    packed: MXFP4Tensor, weight: FP4Operand, recipe: str, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """The forward product of codes ``[..., K]`` and a weight ``[N, K]``, plus ``bias``; `None` where the recipe holds
    the scales of the codes neither with one factor nor with one for each row, or those of the weight not."""
    for by_rows in (False, True):
        left = to_fp4(packed, recipe, by_rows)
        if fit(left, weight):
            _counts["fprop", "fp4"] += 1
            out = fp4_product(left, weight, dtype).view(*packed.codes.shape[:-1], -1)
            return out if bias is None else out + bias
    return None


def _fits_fp8(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether FP8 tensor cores multiply operands of these shapes, ``a [..., C] b[D, C]^T``: C and D multiples of 16."""
    if 0 in (*a.shape, *b.shape):
        return False
    return a.is_cpu or b.shape[1] % 16 == 0 and b.shape[0] % 16 == 0


def matmul_tokens(a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``a[rows]^T b[rows]`` for the rows of each expert: ``[E, N, K]`` from ``a [S, N]`` and ``b [S, K]``."""
    if _runs_grouped(a, b):
        return F.grouped_mm(a.t().contiguous(), b.contiguous(), offs=groups.offsets(a.device))
    out = a.new_zeros(groups.n_experts, a.shape[1], b.shape[1])
    for expert, rows in groups:
        torch.mm(a[rows].t(), b[rows], out=out[expert])
    return out


def _runs_grouped(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether PyTorch's grouped product takes these operands in one launch for all experts: bfloat16 on CUDA devices of
    compute capability 9.0 and 10.0 (elsewhere it reads the counts back), rows of a multiple of 16 bytes."""
    return (
        a.device.type == "cuda"
        and a.dtype == b.dtype == torch.bfloat16
        and all(size % 8 == 0 for size in (*a.shape[1:], *b.shape[1:]))
        and torch.version.hip is None
        and torch.cuda.get_device_capability(a.device) in ((9, 0), (10, 0))
    )


def _on_codes(
    a: torch.Tensor,
    b: MXFP4Tensor,
    bias: torch.Tensor | None,
    groups: Groups | None,
    spec: GemmSpec | PackedSpec,
    reader: str,
    is_expert: bool = False,
) -> torch.Tensor:
    """All experts at once where a kernel takes their rows; otherwise the values of one expert at a time."""
    if groups is None and reader == "cpu" and (is_expert or spec.matmul_backend != "fp8"):
        return on_cpu.product(a, b, bias)
    rows, experts = a.shape[:-1].numel(), None if groups is None else len(b.codes)
    if reader == "triton" and triton_kernels.unsupported_product(rows, b.length, a.dtype, experts) is None:
        return triton_kernels.linear(a, b, bias, *(() if groups is None else (groups.offsets(a.device),)))
    if groups is None:
        values = dispatch.dequantize(b, a.dtype, spec.backend)
        return F.linear(a, values, bias) if is_expert else multiply("fprop", a, values, spec, bias)
    if reader == "cpu" and max(groups.counts, default=0) <= on_cpu.most_rows():
        return on_cpu.grouped_product(a, b, groups.offsets(a.device), bias)
    out = a.new_empty(a.shape[0], b.codes.shape[1])
    for expert, own in groups:
        own_bias = None if bias is None else bias[expert]
        out[own] = _on_codes(a[own], of_expert(b, expert), own_bias, None, spec, reader, is_expert=True)
    return out


def reads_packed_on_gpus(scheme: QuantScheme, backend: str) -> bool:
    """Return whether the kernels are certain to multiply with weights of this scheme on a CUDA device, so that a CUDA
    graph can hold the product."""
    reason = triton_kernels.unsupported_reason("cuda", torch.bfloat16, dispatch.as_read(scheme))
    return backend in ("auto", "triton") and reason is None


# ---- the choice -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatmulBackend:
    """``name``: ``"dense"``, ``"fp8"`` or ``"fp4"``; ``reason``: why that one, in words."""

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
    if experts:
        return MatmulBackend("dense", "experts are multiplied in 16 bits")
    if codes and requested != "fp8" and _fp4_problem(gemm, scheme, hardware, dtype) is None:
        return MatmulBackend("fp4", "the operands are E2M1 codes and one scale per block")
    on_cpu = hardware in ("cpu", "interpreter")
    if on_cpu and requested != "fp8":
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


@functools.lru_cache(maxsize=1024)
def _fp4_problem(gemm: str, scheme: LinearScheme, hardware: str, dtype: torch.dtype) -> str | None:
    """Why the operands of a product are no codes that FP4 tensor cores multiply; `None` where they are."""
    if hardware not in FP4_HARDWARE:
        return f"{hardware} has no FP4 products"
    if gemm != "fprop" or scheme.fprop.rotation is not None:
        return "FP4 products are those of forward operands without rotation"
    if dtype != torch.bfloat16:
        return f"FP4 products have no output in {dtype}"
    for operand, precision in zip(GEMM_OPERANDS[gemm], (scheme.fprop.left, scheme.fprop.right), strict=True):
        if not isinstance(precision, QuantScheme):
            return f"{operand} is not in 4 bits"
        if precision.fp4_problem is not None:
            return f"FP4 products have no {precision.fp4_problem}, as {operand} has"
    return "the weight is rounded stochastically" if scheme.fprop.right.rounding != "nearest" else None


def _operand_problem(operand: str, precision: OperandScheme, scheme: LinearScheme) -> str | None:
    """Why the values of an operand are no E4M3 numbers times one power of two per row; `None` where they are."""
    if precision is REUSE:
        if scheme.fprop.rotation is not None:
            return f"the reused {operand} is rotated along the other axis"
        precision = scheme.fprop.right if operand == "weight" else scheme.fprop.left
        if precision is FP8 and (operand == "weight" or not scheme.folds_scales):
            return f"the scales of the reused {operand} lie on the axis that is summed over"
    if precision is FULL:
        return f"{operand} is in full precision"
    if precision is NVFP4:
        return f"NVFP4 scales of {operand} have more digits than E4M3"
    problem = precision.e4m3_problem if isinstance(precision, QuantScheme) else None
    return None if problem is None else f"{problem} of {operand} have more digits than E4M3"


def _count_inexact(number: torch.Tensor) -> None:
    """Add elements that were rounded, a scalar on their device, to [`matmul_counts`]."""
    if number.device not in _inexact:
        with torch.inference_mode(False):  # under which vLLM may be the first to count
            _inexact[number.device] = torch.zeros((), dtype=torch.int64, device=number.device)
    _inexact[number.device].add_(number)


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
