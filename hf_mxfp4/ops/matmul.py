# SPDX-License-Identifier: Apache-2.0
"""One product of two operands, of one weight or of all experts: which backend multiplies them, why, and how often each
did.

* ``dense``: an ordinary product of the quantized values, in the dtype of the model. Always possible. Of codes, those of
  few rows are multiplied without values in memory.
* ``fp8``: the same values as E4M3 elements and scales ([`FP8Operand`]), on FP8 tensor cores by `scaled_mm`, or
  `scaled_grouped_mm` of experts. Differs from the dense product by the rounding of sums and of the output, and by
  elements of MXFP4 activations too small for E4M3 beside the largest of their row, which are counted.
* ``fp4``: the codes of forward operands as they are, on FP4 tensor cores; see [`hf_mxfp4.ops.fp4`].
* ``mxfp8``: inputs in MXFP8 and codes of weights that become such elements; see there.
"""

import functools
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from ..numerics import (
    GEMM_OPERANDS,
    LinearScheme,
    MXFP4Tensor,
    QuantScheme,
)
from . import cpu as on_cpu
from . import fp4, quantization
from . import triton as triton_kernels
from .fp4 import FP4_HARDWARE, FP4Operand, to_fp4
from .fp8 import FP8Operand, inexact, multiply_fp8, to_fp8
from .groups import Groups
from .packed_weight import of_expert
from .spec import GemmSpec


#: Hardware with FP8 tensor cores; what `hf-mxfp4 env` lists.
FP8_HARDWARE = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "gfx950")
#: Of these, what has FP8 products of all experts in one launch.
GROUPED_FP8_HARDWARE = ("sm_90",)
#: Whether PyTorch has FP8 products on the CPU, as 2.11 has not.
HAS_FP8_ON_CPU = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")

_counts: Counter[tuple[str, str]] = Counter()

#: Values in the dtype of the product, codes and scale bytes, or E4M3 elements and scales of rows.
Operand: TypeAlias = torch.Tensor | MXFP4Tensor | FP8Operand


def matmul(
    a: torch.Tensor | FP8Operand,
    b: Operand,
    bias: torch.Tensor | None = None,
    groups: Groups | None = None,
    *,
    dtype: torch.dtype | None = None,
    spec: GemmSpec | None = None,
    reader: str | None = None,
) -> torch.Tensor:
    """Return ``a [..., C] b[D, C]^T + bias[D]``, without gradients. With groups ``a [S, C] b[e, D, C]^T + bias[e, D]``
    for the rows of each expert.

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
        return multiply_fp8(a, b, bias, groups, dtype)
    if isinstance(b, MXFP4Tensor):
        reader = reader or quantization.choose_backend(a, b.scheme, spec.backend, family="decode")
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


def is_dense_on(x: torch.Tensor, spec: GemmSpec) -> bool:
    """Whether all products are ordinary ones on the device of ``x``, whatever their operands are."""
    return spec.matmul_backend == "dense" or x.is_cpu and spec.matmul_backend != "fp8"


def runs_on_fp8(
    gemm: str, spec: GemmSpec, like: torch.Tensor, dtype: torch.dtype, size: Sequence[int], groups: Groups | None = None
) -> bool:
    """Whether FP8 tensor cores multiply in the product ``gemm`` under a spec, with groups all experts at once, on the
    device of ``like`` and with an output in ``dtype``; ``size`` is that of the left rows and the two other axes."""
    if is_dense_on(like, spec):
        return False
    hardware, experts = hardware_of(like.device), groups is not None
    choice = select_matmul(gemm, spec.scheme, hardware, dtype, spec.matmul_backend, experts, codes=False)
    if choice.name != "fp8" or 0 in size or not quantization.is_torchs_own(like):
        return False
    return like.is_cpu or size[1] % 16 == 0 and size[2] % 16 == 0


def multiply(
    gemm: str,
    left: torch.Tensor | FP8Operand,
    right: torch.Tensor | FP8Operand,
    spec: GemmSpec,
    bias: torch.Tensor | None = None,
    groups: Groups | None = None,
    fp8_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply as [`matmul`] does, counted where the spec leaves a choice; with ``fp8_dtype``, that of the output, on
    FP8 tensor cores, for which values become E4M3 elements."""
    if spec.matmul_backend != "dense":
        _counts[gemm, "fp8" if fp8_dtype else "dense"] += 1
    if fp8_dtype:
        left, right = (each if isinstance(each, FP8Operand) else to_fp8(each) for each in (left, right))
    return matmul(left, right, bias, groups, dtype=fp8_dtype)


def fp4_recipe(x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, spec: GemmSpec) -> str | None:
    """How FP4 tensor cores multiply the codes of an input and of a weight of ``shape`` (N, K), in ``dtype``, or those
    of MXFP8 such an input; `None` where they do not. Says why where the spec asks for them by name."""
    hardware, requested = hardware_of(x.device), spec.matmul_backend
    if requested not in ("auto", "fp4") or hardware not in FP4_HARDWARE and requested == "auto":
        return None
    if _runs_in_mxfp8("fprop", spec.scheme, hardware, dtype, requested):
        is_usable = not (fp4.unsupported_operands(x, shape) or fp4.problem("mxfp8", x.device))
        return "mxfp8" if is_usable else None
    reason = _fp4_problem("fprop", spec.scheme, hardware, dtype) or fp4.unsupported_operands(x, shape)
    if reason is None:
        is_plain = not spec.scheme.fprop.left.mantissas and not spec.scheme.fprop.right.mantissas
        for recipe in ("mxfp4", "nvfp4") if is_plain and hardware in fp4.MXFP4_HARDWARE else ("nvfp4",):
            reason = fp4.problem(recipe, x.device)
            if reason is None:
                return recipe
    if requested == "fp4":
        warnings.warn(f"matmul_backend='fp4', but a product is not in FP4: {reason}", stacklevel=2)
    return None


def multiply_packed(
    packed: MXFP4Tensor | fp4.MXFP8,
    weight: FP4Operand,
    recipe: str,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Return the forward product of codes, or MXFP8 elements, ``[..., K]`` and a weight ``[N, K]``, plus ``bias``;
    `None` where the recipe holds the scales of the codes neither with one factor nor with one for each row, or those of
    the weight not."""
    elements = packed.codes if isinstance(packed, MXFP4Tensor) else packed[0]
    for by_rows in (False, True):
        left = to_fp4(packed, recipe, by_rows)
        if fp4.fit(left, weight):
            _counts["fprop", "mxfp8" if recipe == "mxfp8" else "fp4"] += 1
            out = fp4.fp4_product(left, weight, dtype).view(*elements.shape[:-1], -1)
            return out if bias is None else out + bias
    return None


def matmul_tokens(a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``a[rows]^T b[rows]`` for the rows of each expert: ``[E, N, K]`` from ``a [S, N]`` and ``b [S, K]``."""
    if _runs_grouped(a, b):
        # Transposed last: where tokens are neighbours in memory, CUDA asserts that each expert has a multiple of 8.
        return F.grouped_mm(a.contiguous().t(), b.contiguous(), offs=groups.offsets(a.device))
    out = a.new_zeros(groups.n_experts, a.shape[1], b.shape[1])
    for expert, rows in groups:
        torch.mm(a[rows].t(), b[rows], out=out[expert])
    return out


def _runs_grouped(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether PyTorch's grouped product takes these operands in one launch for all experts: bfloat16 on CUDA devices of
    compute capability 9.0 and 10.0 (elsewhere it reads the counts back), rows of a multiple of 16 bytes."""
    return (
        a.device.type == "cuda"
        and len(a) > 0
        and a.dtype == b.dtype == torch.bfloat16
        and all(size % 8 == 0 for size in (*a.shape[1:], *b.shape[1:]))
        and torch.version.hip is None
        and torch.cuda.get_device_capability(a.device) in ((9, 0), (10, 0))
    )


def decodes(a: torch.Tensor, dtype: torch.dtype, reader: str, groups: Groups | None) -> bool:
    """Whether a Triton kernel multiplies these rows with the codes of weights, in ``dtype``."""
    if reader != "triton":
        return False
    sizes = a.shape[:-1].numel(), a.shape[-1], dtype, None if groups is None else groups.n_experts
    return triton_kernels.unsupported_product(*sizes) is None


def _on_codes(
    a: torch.Tensor,
    b: MXFP4Tensor,
    bias: torch.Tensor | None,
    groups: Groups | None,
    spec: GemmSpec,
    reader: str,
    is_expert: bool = False,
) -> torch.Tensor:
    """All experts at once where a kernel takes their rows; otherwise the values of one expert at a time."""
    if groups is None and reader == "cpu" and (is_expert or spec.matmul_backend != "fp8"):
        return on_cpu.product(a, b, bias)
    if decodes(a, a.dtype, reader, groups):
        return triton_kernels.linear(a, b, bias, *(() if groups is None else (groups.offsets(a.device),)))
    if groups is None:
        values = quantization.dequantize(b, a.dtype, spec.backend)
        if is_expert:
            return F.linear(a, values, bias)
        fp8 = runs_on_fp8("fprop", spec, a, a.dtype, (a.shape[:-1].numel(), *values.shape))
        return multiply("fprop", a, values, spec, bias, fp8_dtype=a.dtype if fp8 else None)
    if reader == "cpu" and max(groups.counts, default=0) <= on_cpu.most_rows():
        return on_cpu.product(a, b, bias, groups.offsets(a.device))
    out = a.new_empty(a.shape[0], b.codes.shape[1])
    for expert, own in groups:
        own_bias = None if bias is None else bias[expert]
        out[own] = _on_codes(a[own], of_expert(b, expert), own_bias, None, spec, reader, is_expert=True)
    return out


def reads_packed_on_gpus(scheme: QuantScheme, backend: str) -> bool:
    """Return whether the kernels are certain to multiply with weights of this scheme on a CUDA device, so that a CUDA
    graph can hold the product."""
    reason = triton_kernels.unsupported_reason("cuda", torch.bfloat16, quantization.as_read(scheme))
    return backend in ("auto", "triton") and reason is None


# ---- the choice -----------------------------------------------------------------------------------------------------


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
    """Why the operands of a product are no codes that FP4 tensor cores multiply; `None` where they are."""
    if hardware not in FP4_HARDWARE:
        return f"{hardware} has no FP4 products"
    if dtype != torch.bfloat16:
        return f"FP4 products have no output in {dtype}"
    if gemm != "fprop":
        return "FP4 products are those of the forward pass"
    return scheme.fp4_problem


def _runs_in_mxfp8(gemm: str, scheme: LinearScheme, hardware: str, dtype: torch.dtype, requested: str) -> bool:
    """Whether MXFP8 products are to multiply the operands of a product, if PyTorch has them on the device."""
    has_product = requested == "auto" and hardware in fp4.MXFP4_HARDWARE and dtype == torch.bfloat16
    return has_product and gemm == "fprop" and scheme.mxfp8_problem is None


def matmul_counts() -> dict[str, dict[str, int] | int]:
    """Products of this process so far whose backend was chosen: by product and backend, as ``{"fprop": {"fp8": 12,
    "dense": 3}, ...}``, and under ``"inexact_elements"`` those that E4M3 rounded. Waits for the GPU."""
    found: dict[str, Any] = {gemm: {} for gemm in GEMM_OPERANDS}
    for (gemm, name), count in sorted(_counts.items()):
        found[gemm][name] = count
    return found | {"inexact_elements": sum(int(number) for number in inexact.values())}


def reset_matmul_counts() -> None:
    """Count from zero."""
    _counts.clear()
    for count in inexact.values():
        count.zero_()  # in its memory, to which CUDA graphs add
