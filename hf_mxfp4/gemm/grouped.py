# SPDX-License-Identifier: Apache-2.0
"""The products of all experts at once: in one launch, with operands quantized in one, and no count read back.

What each expert's product would compute by itself, up to the order of sums. Where that does not hold, or a GPU kernel
is missing, [`unsupported_reason`] and [`uses_kernels`] say so and experts are computed one after the other.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from ..backends import self_check
from ..backends import triton as triton_kernels
from ..backends.select import choose_backend
from ..numerics import FP8, MXFP4Tensor, OperandScheme, QuantScheme
from . import dense
from .counts import count_weight
from .groups import Groups, PaddedRows
from .operands import quantize_operand, rotate_operand, rows_first
from .spec import GemmSpec
from .state import GemmState


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def uses_kernels(x: torch.Tensor, backend: str, *families: str) -> bool:
    """Whether the grouped Triton kernels take operands like ``x``: on GPUs, and in Triton's interpreter where
    ``backend`` is ``"triton"``. Not while a graph is traced. With ``"auto"`` where they work there, and those of other
    ``families``; see [`hf_mxfp4.backends.self_check`]."""
    if backend not in ("auto", "triton") or x.dtype not in _DTYPES or type(x) is not torch.Tensor:
        return False
    if x.device.type == "cpu" and backend != "triton" or torch.compiler.is_compiling():
        return False
    if triton_kernels.unavailable(x.device.type) is not None:
        return False
    return backend != "auto" or self_check.problem(x.device, "experts", *families) is None


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


def unsupported_reason(spec: GemmSpec) -> str | None:
    """Why gradients cannot be computed for all experts at once; `None` when they can."""
    scheme = spec.scheme
    if spec.is_random:
        return "every expert draws random numbers of its own"
    for gemm in (scheme.dgrad, scheme.wgrad):
        for operand in (gemm.left, gemm.right):
            if operand is FP8 and gemm is scheme.wgrad and gemm.rotation is not None:
                return "a rotated FP8 operand has one scale for all tokens of an expert"
            if isinstance(operand, QuantScheme) and operand.fallback_rate is not None:
                return "selective outlier fallback has no kernel for all experts"
            if isinstance(operand, QuantScheme) and operand.macro_block == "row" and gemm is scheme.wgrad:
                return "a macro block is all tokens of an expert"
    return None


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: Groups, backend: str
) -> torch.Tensor:
    """``x [S, K] weight[e, N, K]^T + bias[e, N]`` for the rows of each expert: ``[S, N]``."""
    if uses_kernels(x, backend):
        return product(x, weight, groups, bias)
    return each(x, bias, groups, weight.__getitem__, weight.shape[1])


def each(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    groups: Groups,
    weight_of: Callable[[int], torch.Tensor],
    out_features: int,
) -> torch.Tensor:
    """One product for each expert that has rows; ``weight_of`` gives the weight ``[N, K]`` of one."""
    out = x.new_empty(x.shape[0], out_features)
    for expert, rows in groups:
        out[rows] = F.linear(x[rows], weight_of(expert), None if bias is None else bias[expert])
    return out


def product(left: torch.Tensor, right: torch.Tensor, groups: Groups, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``left [S, C] right[e, D, C]^T + bias[e, D]`` for the rows of each expert: ``[S, D]``."""
    offsets = groups.offsets(left.device)
    if runs_grouped(left, right):
        out = F.grouped_mm(left.contiguous(), right.transpose(1, 2), offs=offsets)
        return out if bias is None else out + groups.per_row(bias)
    return triton_kernels.grouped_matmul(left, right, offsets, bias)


def reads_packed(weight: MXFP4Tensor, x: torch.Tensor) -> bool:
    """Whether the kernels read weights of this scheme."""
    return _read_unsupported_reason(weight.scheme, x.device.type, x.dtype) is None


def reads_packed_on_gpus(scheme: QuantScheme, backend: str) -> bool:
    """Whether the kernels are certain to multiply with weights of this scheme on a CUDA device, so that a CUDA graph
    can hold the product."""
    return backend in ("auto", "triton") and all(
        _read_unsupported_reason(scheme, "cuda", dtype) is None for dtype in _DTYPES
    )


def _read_unsupported_reason(made_by: QuantScheme, device_type: str, dtype: torch.dtype) -> str | None:
    scheme = QuantScheme("rceil", made_by.macro_block, made_by.macro_search, made_by.outlier_fallback)
    return triton_kernels.unsupported_reason(device_type, dtype, scheme)


def dequantized(weight: MXFP4Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values ``[E, N, K]`` of packed weights, in one launch."""
    return triton_kernels.dequantize(replace(weight, axis=2), dtype)


def grad_x(
    grad: torch.Tensor, weight: torch.Tensor, reused: torch.Tensor | None, groups: Groups, state: GemmState
) -> torch.Tensor:
    """``[S, K]`` from ``grad [S, N]``.

    Args:
        weight: the master weights ``[E, N, K]``, or ``[E, K, N]`` if the layer's are transposed.
        reused: what the forward product used of them, where the scheme takes that.
    """
    spec, masters = state.spec, rows_first(weight, state)
    if not _at_once(grad, spec):
        out = grad.new_empty(grad.shape[0], masters.shape[2])
        for expert, rows in groups:
            own = None if reused is None else reused[expert]
            out[rows] = dense.grad_x(grad[rows], masters[expert], own, spec, state.rng_of(expert))
        return out
    scheme, right = spec.scheme.dgrad, masters
    if reused is not None:
        right = dense.forward_values(reused, masters.shape[2], spec, state.rng_of(0))
    left = _quantized(state, "dgrad", "grad", grad, scheme.left)
    right = _quantized_stack(state, right.transpose(1, 2), scheme.right, grad.dtype)
    return product(left.to(grad.dtype), right.to(grad.dtype), groups)


def grad_weight(
    grad: torch.Tensor, saved: torch.Tensor, weight: torch.Tensor, groups: Groups, state: GemmState
) -> torch.Tensor:
    """The gradient of the master weights, like them, from ``grad [S, N]`` and what the forward pass saved of its input,
    ``[S, K]``.

    Operands that are quantized along the tokens, or rotated, are those of each expert by itself: its rows are padded
    with zeros to whole blocks, and all experts are quantized in one launch.
    """
    spec, scheme = state.spec, state.spec.scheme.wgrad
    in_features = rows_first(weight, state).shape[2]
    if not _at_once(grad, spec):
        out = torch.zeros_like(weight)
        for expert, rows in groups:
            own = grad[rows], saved[rows], in_features, spec, state.rng_of(expert)
            rows_first(out, state)[expert] = dense.grad_weight(*own)
        return out
    offsets, padded = groups.offsets(grad.device), None
    right = saved if spec.saves_raw_input else dense.forward_values(saved, in_features, spec, state.rng_of(0))
    if unit := _rows_per_block(scheme.left, scheme.right, scheme.rotation):
        padded = PaddedRows(groups, unit, grad.device)
        offsets = padded.offsets
    left = _along_tokens(state, "grad", grad, scheme.left, groups, padded).to(grad.dtype)
    right = _along_tokens(state, "x", right, scheme.right, groups, padded).to(grad.dtype)
    left, right = (right, left) if spec.transposed else (left, right)
    return triton_kernels.grouped_wgrad(left, right, offsets, weight.dtype)


def _at_once(grad: torch.Tensor, spec: GemmSpec) -> bool:
    return uses_kernels(grad, spec.backend) and unsupported_reason(spec) is None


def grad_bias(grad: torch.Tensor, groups: Groups, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """``[E, N]``, the sums of each expert's rows."""
    if uses_kernels(grad, backend):
        return triton_kernels.grouped_sum(grad, groups.offsets(grad.device), dtype)
    out = grad.new_zeros(groups.n_experts, grad.shape[1], dtype=dtype)
    for expert, rows in groups:
        out[expert] = grad[rows].sum(dim=0)
    return out


def _rows_per_block(left: OperandScheme, right: OperandScheme, rotation) -> int:
    """Tokens that are quantized or rotated together; 0 where none are. All are powers of two."""
    units = [max(32, scheme.macro_block or 32) for scheme in (left, right) if isinstance(scheme, QuantScheme)]
    return max([*units, *([rotation.size] if rotation else [])], default=0)


def _quantized(state: GemmState, gemm: str, operand: str, values: torch.Tensor, scheme: OperandScheme) -> torch.Tensor:
    """An operand ``[..., C]`` rotated and quantized along its last axis."""
    rotation, rng = getattr(state.spec.scheme, gemm).rotation, state.rng_of(0)
    if rotation is None and not (isinstance(scheme, QuantScheme) or scheme is FP8):
        return values
    values = rotate_operand(values.contiguous(), rotation, gemm, rng)
    return quantize_operand(values, scheme, gemm, operand, rng, state.spec.backend)


def _along_tokens(
    state: GemmState,
    operand: str,
    rows: torch.Tensor,
    scheme: OperandScheme,
    groups: Groups,
    padded: PaddedRows | None,
) -> torch.Tensor:
    """An operand of Wgrad ``[S, D]``, padded and quantized along its rows: ``[padded S, D]``, in any layout."""
    if scheme is FP8:
        rows = triton_kernels.grouped_fake_quantize_e4m3(rows, groups.offsets(rows.device))
    if padded is None:
        return rows
    rows = padded.pad(rows)
    if scheme is FP8:
        return rows
    return _quantized(state, "wgrad", operand, rows.t(), scheme).t()


def _quantized_stack(
    state: GemmState, weights: torch.Tensor, scheme: OperandScheme, dtype: torch.dtype
) -> torch.Tensor:
    """The weights ``[E, K, N]`` in Dgrad, rotated and quantized along their last axis; in one launch where a kernel
    does that, and one at a time otherwise: what lies between input and output is then several times their size."""
    rotation = state.spec.scheme.dgrad.rotation
    if isinstance(scheme, QuantScheme) or scheme is FP8:
        count_weight(weights, "dgrad")
    fused = isinstance(scheme, QuantScheme) and choose_backend(weights, scheme, state.spec.backend) != "eager"
    if rotation is None and (fused or not isinstance(scheme, QuantScheme) and scheme is not FP8):
        return _quantized(state, "dgrad", "weight", weights, scheme)
    out = None
    for expert, weight in enumerate(weights):
        values = _quantized(state, "dgrad", "weight", weight, scheme)
        out = values.new_empty(len(weights), *values.shape, dtype=dtype) if out is None else out
        out[expert] = values
    return out
