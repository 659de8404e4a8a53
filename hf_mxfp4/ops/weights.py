# SPDX-License-Identifier: Apache-2.0
"""The weight of a layer as products take it: values, codes, or operands of FP8 and FP4 tensor cores, each kept by the
cache that is open for the layer, if any."""

import functools
from collections import Counter

import torch

from ..numerics import FULL, MXFP4Tensor
from . import quantization
from .fp4 import FP4Operand, to_fp4
from .fp8 import FP8Operand, WeightConversion
from .operands import quantize_operand, rotate_back
from .packed_weight import of_expert, packed_tensor, quantize_experts, quantize_weight
from .spec import GemmSpec
from .state import GemmState


#: By product, weight matrices that were quantized since the process began.
_quantized: Counter[str] = Counter()


def weight_quantizations() -> Counter[str]:
    """Return by product how many weight matrices were quantized since the process began; each expert's is one."""
    return Counter(_quantized)


def count_weight(weight: torch.Tensor, gemm: str = "fprop") -> None:
    """Count one quantization of a weight ``[N, K]``, or of those of all experts, for a product: ``"fprop"``, or
    ``"dgrad"`` where that one takes another operand than the forward product does."""
    _quantized[gemm] += 1 if weight.dim() == 2 else weight.shape[0]


def rows_first(weight: torch.Tensor, spec: GemmSpec) -> torch.Tensor:
    """Return a master weight as ``[N, K]`` or ``[E, N, K]``, the same memory."""
    return weight.transpose(1, 2) if spec.transposed else weight


# ---- operands -------------------------------------------------------------------------------------------------------


def weight_operand(weight: torch.Tensor, dtype: torch.dtype, state: GemmState) -> torch.Tensor:
    """Return the weight as the forward product takes it, in ``dtype``: ``Q(W)`` ``[N, K]`` or, of experts, ``[E, N,
    K]``, of the rotated and padded weight where the scheme rotates. Where a cache is open the tensor may be the
    cache's, whose values change after it is cleared."""
    spec = state.spec
    cache = state.cache
    if spec.scheme.fprop.right is FULL and spec.rotation_size == 1:
        return rows_first(weight.detach(), spec).to(dtype)
    make = functools.partial(_weight_values, weight, dtype, state)
    if cache is None or not _keeps_values(weight, dtype, state):
        return make()
    return cache.get(weight, (state, dtype), make, _step(state))


def is_cached(operand: torch.Tensor, weight: torch.Tensor, state: GemmState) -> bool:
    """Whether the cache that is open, if any, keeps what [`weight_operand`] returned."""
    cache = state.cache
    return cache is not None and cache.find(weight, (state, operand.dtype), _step(state)) is operand


def fp8_weight(
    weight: torch.Tensor, dtype: torch.dtype, state: GemmState, conversion: WeightConversion, has_dgrad: bool
) -> FP8Operand | None:
    """Return [`weight_operand`] as E4M3 elements, which Fprop takes, and transposed if it ``has_dgrad`` that does too;
    `None` where some would be rounded, as the ``conversion`` of the layer finds."""

    def make(stale: tuple[FP8Operand | None] | None) -> tuple[FP8Operand | None]:
        out = None if stale is None else stale[0]
        return (conversion(_weight_values(weight, dtype, state), has_dgrad, out),)

    if not keeps_fp8(weight, dtype, state):
        return make(None)[0]
    return state.cache.get(weight, (state, dtype, "fp8"), make, _step(state))[0]


def keeps_fp8(weight: torch.Tensor, dtype: torch.dtype, state: GemmState) -> bool:
    """Whether the cache that is open keeps what [`fp8_weight`] returns."""
    return state.cache is not None and _keeps_values(weight, dtype, state, is_fp8=True)


def _keeps_values(weight: torch.Tensor, dtype: torch.dtype, state: GemmState, is_fp8: bool = False) -> bool:
    """Whether the cache that is open keeps values of a weight, or its FP8 elements, beside codes if there are any."""
    cache = state.cache
    if cache is None or cache.form == "none":
        return False
    # Values of all experts are another model, which the memory of a GPU may not hold.
    if _has_codes(weight, dtype, state):
        return cache.form == "auto" and (weight.is_cpu or is_fp8 and weight.dim() == 2)
    return cache.form != "auto" or weight.is_cpu or weight.dim() == 2


def weight_codes(weight: torch.Tensor, state: GemmState) -> MXFP4Tensor:
    """Return codes and scales of a master weight, those of experts ``[E, N, ...]``, under a scheme that can be
    packed."""
    spec = state.spec
    cache = state.cache

    def make(out: MXFP4Tensor | None) -> MXFP4Tensor:
        count_weight(weight)
        rows = rows_first(weight.detach(), spec)
        scheme = spec.weight_scheme
        is_whole = rows.dim() == 2 or _quantizes_at_once(rows, spec)
        if is_whole and out is not None:
            return quantization.quantize(rows, scheme, spec.backend, out=out)
        pack = quantize_weight if is_whole else quantize_experts
        return packed_tensor(pack(rows, scheme, spec.backend), rows.shape[-1], scheme, weight.dtype)

    if cache is None or cache.form == "none":
        return make(None)
    return cache.get(weight, (state, "codes"), make)


def fp4_weight(weight: torch.Tensor, state: GemmState, recipe: str) -> FP4Operand:
    """Return [`weight_codes`] of a weight ``[N, K]`` as FP4 tensor cores take them."""
    if state.cache is None or state.cache.form == "none":
        return to_fp4(weight_codes(weight, state), recipe)
    return state.cache.get(weight, (state, recipe), lambda _: to_fp4(weight_codes(weight, state), recipe))


def backend_of_codes(like: torch.Tensor, dtype: torch.dtype, state: GemmState) -> str | None:
    """Return the backend that multiplies operands like this tensor in ``dtype`` with the codes of a weight; `None`
    where the cache that is open, if any, keeps no codes."""
    spec = state.spec
    cache = state.cache
    if cache is None or cache.form in ("none", "dense") or not spec.packs_weight:
        return None
    name = quantization.choose_backend(like, spec.weight_scheme, spec.backend, family="decode", dtype=dtype)
    return None if name == "eager" and cache.form != "packed" else name


def _has_codes(weight: torch.Tensor, dtype: torch.dtype, state: GemmState) -> bool:
    """Whether the cache that is open keeps codes of this weight, from which values are made."""
    return weight.is_leaf and backend_of_codes(weight, dtype, state) is not None


def _step(state: GemmState) -> int | None:
    """Return the optimizer step where the values of the weight depend on it."""
    return state.step if state.spec.draws_forward else None


# ---- values ---------------------------------------------------------------------------------------------------------


def values_of_codes(
    packed: MXFP4Tensor, dtype: torch.dtype, spec: GemmSpec, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the operand ``[N, K]`` or ``[E, N, K]`` in ``dtype`` of the codes of a master weight, to the bit."""
    # By way of the master's dtype, in which an operand is quantized: of float32 that is rounding once.
    computed = dtype if packed.dtype == torch.float32 else packed.dtype
    if packed.codes.dim() == 2:
        reused = out if computed == dtype else None
        return quantization.dequantize(packed, computed, spec.backend, out=reused).to(dtype)
    if out is None:
        out = packed.codes.new_empty(*packed.codes.shape[:2], packed.length, dtype=dtype)
    for expert, values in enumerate(out):  # the eager functions take several times the memory of their result
        values.copy_(quantization.dequantize(of_expert(packed, expert), computed, spec.backend))
    return out


def _weight_values(
    weight: torch.Tensor, dtype: torch.dtype, state: GemmState, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``Q(W)``, of codes where a cache keeps those. ``out`` may be written to, or not."""
    spec = state.spec
    if state.cache is not None and _has_codes(weight, dtype, state):
        return values_of_codes(weight_codes(weight, state), dtype, spec, out)
    if spec.scheme.fprop.right is not FULL:
        count_weight(weight)
    rows = weight.detach()
    if rows.dim() == 2:
        return matrix_operand(rows, state, 0, dtype, out)
    rows = rows_first(rows, spec)
    if spec.rotation_size == 1 and _quantizes_at_once(rows, spec):
        return matrix_operand(rows, state, 0, dtype, out)
    for expert, matrix in enumerate(rows):  # the eager functions take several times the memory of their input
        values = matrix_operand(matrix, state, expert, dtype)
        if out is None:
            out = values.new_empty(len(rows), *values.shape, dtype=dtype)
        out[expert] = values
    return out


def _quantizes_at_once(rows: torch.Tensor, spec: GemmSpec) -> bool:
    """Whether the weights of all experts are quantized in one launch: where rows are independent, each expert has no
    random numbers of its own, and no eager function, which takes several times its input, does it."""
    scheme = spec.weight_scheme
    if scheme is None or scheme.block_rows != 1 or scheme.rounding != "nearest":
        return False
    return quantization.choose_backend(rows, scheme, spec.backend) != "eager"


def matrix_operand(
    weight: torch.Tensor,
    state: GemmState,
    expert: int = 0,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``Q(W)`` of detached rows of a weight along the last axis, in ``dtype``, by default that which it is
    computed in."""
    fprop = state.spec.scheme.fprop
    backend = state.spec.backend
    rng = state.rng if expert == 0 else state.rng_of(expert)
    return quantize_operand(
        weight, fprop.right, "fprop", "weight", rng, backend, rotation=fprop.rotation, dtype=dtype, out=out
    )


@torch.no_grad()
def effective_rows(rows: torch.Tensor, state: GemmState, expert: int = 0) -> torch.Tensor:
    """Return the values ``[n, K]`` that the forward product takes for rows of a weight, rotated back."""
    values = matrix_operand(rows.detach(), state, expert)
    rotation = state.spec.scheme.fprop.rotation
    return rotate_back(values, rotation, "fprop", rows.shape[-1], state.rng_of(expert)).to(rows.dtype)
