# SPDX-License-Identifier: Apache-2.0
"""The products of all experts at once: in one launch, with operands quantized in one, and no count read back.

What each expert's product would compute by itself, up to the order of sums. Where that does not hold, or a GPU kernel
is missing, [`obstacle`] and [`uses_kernels`] say so and experts are computed one after the other.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from ..backends import triton as triton_kernels
from ..backends.select import choose_backend
from ..numerics import FP8, MXFP4Tensor, OperandScheme, QuantScheme
from ..numerics.packed import saturate
from .fast_experts import expert_scales
from .groups import Groups, PaddedRows
from .operands import BackwardProducts, quantize_operand, rotate_operand


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def uses_kernels(x: torch.Tensor, backend: str) -> bool:
    """Whether the grouped Triton kernels take operands like ``x``: on GPUs, and in Triton's interpreter where
    ``backend`` is ``"triton"``. Not while a graph is traced."""
    if backend not in ("auto", "triton") or x.dtype not in _DTYPES or type(x) is not torch.Tensor:
        return False
    if x.device.type == "cpu" and backend != "triton" or torch.compiler.is_compiling():
        return False
    return triton_kernels.unavailable(x.device.type) is None


def runs_grouped(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether PyTorch's grouped product takes these operands in one kernel launch for all experts: bfloat16 on CUDA
    devices of compute capability 9.0 and 10.0 (elsewhere it reads the counts back), rows of a multiple of 16 bytes."""
    return (
        left.device.type == "cuda"
        and left.dtype == right.dtype == torch.bfloat16
        and all(size % 8 == 0 for size in (*left.shape[1:], *right.shape[1:]))
        and torch.version.hip is None
        and torch.cuda.get_device_capability(left.device) in ((9, 0), (10, 0))
    )


def obstacle(products: Sequence[BackwardProducts] | None) -> str | None:
    """Why gradients cannot be computed for all experts at once; `None` when they can."""
    if products is None:
        return None
    scheme = products[0].scheme
    if scheme.is_random:
        return "every expert draws random numbers of its own"
    for gemm in (scheme.dgrad, scheme.wgrad):
        for operand in (gemm.left, gemm.right):
            if operand is FP8 and gemm is scheme.wgrad and gemm.rotation is not None:
                return "a rotated FP8 operand has one scale for all tokens of an expert"
            if isinstance(operand, QuantScheme) and operand.fallback_rate is not None:
                return "selective outlier fallback ranks the blocks of each expert"
            if isinstance(operand, QuantScheme) and operand.macro_block == "row" and gemm is scheme.wgrad:
                return "a macro block is all tokens of an expert"
    return None


def product(left: torch.Tensor, right: torch.Tensor, groups: Groups, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``left [S, C] right[e, D, C]^T + bias[e, D]`` for the rows of each expert: ``[S, D]``."""
    offsets = groups.offsets(left.device)
    if runs_grouped(left, right):
        out = F.grouped_mm(left.contiguous(), right.transpose(1, 2), offs=offsets)
        return out if bias is None else out + groups.per_row(bias)
    return triton_kernels.grouped_matmul(left, right, offsets, bias)


def packed_product(
    x: torch.Tensor, weight: MXFP4Tensor, groups: Groups, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[`product`] with the packed weights ``[E, N, K]`` of all experts."""
    return triton_kernels.grouped_matmul_packed(x, weight, groups.offsets(x.device), bias)


def reads_packed(weight: MXFP4Tensor, x: torch.Tensor) -> bool:
    """Whether the kernels read weights of this scheme."""
    return _read_obstacle(weight.scheme, x.device.type, x.dtype) is None


def reads_packed_on_gpus(scheme: QuantScheme, backend: str) -> bool:
    """Whether the kernels are certain to multiply with weights of this scheme on a CUDA device, so that a CUDA graph
    can hold the product."""
    return backend in ("auto", "triton") and all(_read_obstacle(scheme, "cuda", dtype) is None for dtype in _DTYPES)


def _read_obstacle(made_by: QuantScheme, device_type: str, dtype: torch.dtype) -> str | None:
    scheme = QuantScheme("rceil", made_by.macro_block, made_by.macro_search, made_by.outlier_fallback)
    return triton_kernels.obstacle(device_type, dtype, scheme)


def dequantized(weight: MXFP4Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values ``[E, N, K]`` of packed weights, in one launch."""
    return triton_kernels.dequantize(replace(weight, axis=2), dtype)


def grad_x(
    products: BackwardProducts | None,
    grad: torch.Tensor,
    masters: torch.Tensor,
    reused: torch.Tensor | None,
    groups: Groups,
) -> torch.Tensor:
    """``[S, K]`` from ``grad [S, N]`` and the masters ``[E, N, K]`` or what the forward product used of them.

    Args:
        products: of any expert: all have the same scheme. `None` for what the forward pass used.
        reused: where the scheme takes that.
    """
    right = (masters if reused is None else reused).transpose(1, 2)
    if products is None:
        return product(grad, right, groups)
    scheme = products.scheme.dgrad
    if reused is not None:
        right = products.reused(reused, masters.shape[2]).transpose(1, 2)
    left = _quantized(products, "dgrad", "grad", grad, scheme.left)
    right = _quantized_stack(products, right, scheme.right, grad.dtype)
    return product(left.to(grad.dtype), right.to(grad.dtype), groups)


def grad_weight(
    products: BackwardProducts | None,
    grad: torch.Tensor,
    kept: torch.Tensor,
    in_features: int,
    groups: Groups,
    dtype: torch.dtype,
    transposed: bool,
) -> torch.Tensor:
    """``[E, N, K]`` (``[E, K, N]`` if ``transposed``) in ``dtype`` from ``grad [S, N]`` and what the forward pass kept
    of its input, ``[S, K]``.

    Operands that are quantized along the tokens, or rotated, are those of each expert by itself: its rows are padded
    with zeros to whole blocks, and all experts are quantized in one launch.
    """
    offsets, left, right = groups.offsets(grad.device), grad, kept
    if products is not None:
        scheme = products.scheme.wgrad
        right = kept if products.keeps_input else products.reused(kept, in_features)
        if unit := _rows_per_block(scheme.left, scheme.right, scheme.rotation):
            padded = PaddedRows(groups, unit, grad.device)
            offsets = padded.offsets
        else:
            padded = None
        left = _along_tokens(products, "grad", left, scheme.left, groups, padded).to(grad.dtype)
        right = _along_tokens(products, "x", right, scheme.right, groups, padded).to(grad.dtype)
    left, right = (right, left) if transposed else (left, right)
    return triton_kernels.grouped_wgrad(left, right, offsets, dtype)


def grad_bias(grad: torch.Tensor, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    """``[E, N]``, the sums of each expert's rows."""
    return triton_kernels.grouped_sum(grad, groups.offsets(grad.device), dtype)


def _rows_per_block(left: OperandScheme, right: OperandScheme, rotation) -> int:
    """Tokens that are quantized or rotated together; 0 where none are. All are powers of two."""
    units = [max(32, scheme.macro_block or 32) for scheme in (left, right) if isinstance(scheme, QuantScheme)]
    return max([*units, *([rotation.size] if rotation else [])], default=0)


def _quantized(
    products: BackwardProducts, gemm: str, operand: str, values: torch.Tensor, scheme: OperandScheme
) -> torch.Tensor:
    """An operand ``[..., C]`` rotated and quantized along its last axis."""
    rotation = getattr(products.scheme, gemm).rotation
    if rotation is None and not (isinstance(scheme, QuantScheme) or scheme is FP8):
        return values
    values = rotate_operand(values.contiguous(), rotation, gemm, products.draws)
    return quantize_operand(values, scheme, gemm, operand, products.draws, products.backend)


def _along_tokens(
    products: BackwardProducts,
    operand: str,
    rows: torch.Tensor,
    scheme: OperandScheme,
    groups: Groups,
    padded: PaddedRows | None,
) -> torch.Tensor:
    """An operand of Wgrad ``[S, D]``, padded and quantized along its rows: ``[padded S, D]``, in any layout."""
    if scheme is FP8:
        rows = _fake_quantize_e4m3(rows, groups)
    if padded is None:
        return rows
    rows = padded.pad(rows)
    if scheme is FP8:
        return rows
    return _quantized(products, "wgrad", operand, rows.t(), scheme).t()


def _fake_quantize_e4m3(rows: torch.Tensor, groups: Groups) -> torch.Tensor:
    """[`hf_mxfp4.numerics.fake_quantize_e4m3`] of each expert's rows along the tokens: one scale for a column of an
    expert."""
    scale = groups.per_row(expert_scales(rows, groups))
    values = rows.detach().float()
    return saturate((values / scale).to(torch.float8_e4m3fn).float() * scale, rows.dtype).to(rows.dtype)


def _quantized_stack(
    products: BackwardProducts, weights: torch.Tensor, scheme: OperandScheme, dtype: torch.dtype
) -> torch.Tensor:
    """The weights ``[E, K, N]`` in Dgrad, rotated and quantized along their last axis; in one launch where a kernel
    does that, and one at a time otherwise: what lies between input and output is then several times their size."""
    rotation = products.scheme.dgrad.rotation
    fused = isinstance(scheme, QuantScheme) and choose_backend(weights, scheme, products.backend) != "eager"
    if rotation is None and (fused or not isinstance(scheme, QuantScheme) and scheme is not FP8):
        return _quantized(products, "dgrad", "weight", weights, scheme)
    out = None
    for expert, weight in enumerate(weights):
        values = _quantized(products, "dgrad", "weight", weight, scheme)
        out = values.new_empty(len(weights), *values.shape, dtype=dtype) if out is None else out
        out[expert] = values
    return out
