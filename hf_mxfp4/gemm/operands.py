# SPDX-License-Identifier: Apache-2.0
"""Operands of the three products of a linear layer, rotated and quantized along the contraction axis."""

import functools

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..backends import functional
from ..backends import select as backends
from ..backends import triton as triton_kernels
from ..numerics import (
    FP8,
    MXFP4Tensor,
    OperandScheme,
    QuantScheme,
    Rotation,
    unrotate,
)
from .counts import count_weight
from .groups import Groups
from .layer_rng import LayerRng
from .state import GemmState
from .storage.copies import codes_of_operand, quantized_at_once, rows_first, step_keeps_codes, values_of
from .storage.packed_weight import cat_rows, pack_rows, part_sizes
from .weight_cache import nothing_keeps_weights, step_form_in_force


def rotation_signs(
    rotation: Rotation, gemm: str, length: int, rng: LayerRng, device: torch.device
) -> torch.Tensor | None:
    """Signs of a random rotation of an axis of ``length`` elements, padding included; `None` without signs."""
    return rng.signs(gemm, length + -length % rotation.size, device) if rotation.random else None


def rotate_operand(
    x: torch.Tensor, rotation: Rotation | None, gemm: str, rng: LayerRng, backend: str = "auto"
) -> torch.Tensor:
    """An operand of a product in the domain in which it is quantized; see [`hf_mxfp4.backends.select.rotate_rows`]."""
    if rotation is None:
        return x
    signs = rotation_signs(rotation, gemm, x.shape[-1], rng, x.device)
    return backends.rotate_rows(x, rotation.size, backend, signs=signs)


def rotate_back(x: torch.Tensor, rotation: Rotation | None, gemm: str, length: int, rng: LayerRng) -> torch.Tensor:
    """The inverse of [`rotate_operand`] for an axis that had ``length`` elements, in float32 (float64 stays)."""
    if rotation is None:
        return x
    x = x if x.dtype == torch.float64 else x.float()
    signs = rotation_signs(rotation, gemm, length, rng, x.device)
    return unrotate(x, rotation.size, signs=signs)[..., :length]


def quantize_operand(
    x: torch.Tensor,
    scheme: OperandScheme,
    gemm: str,
    operand: str,
    rng: LayerRng,
    backend: str = "auto",
    *,
    rotation: Rotation | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Quantized values of an operand along its last axis, rotated before ([`rotate_operand`]) where there is a
    rotation; without quantization where the scheme has none. As ``dtype`` if one is given."""
    if not isinstance(scheme, QuantScheme):
        x = rotate_operand(x, rotation, gemm, rng, backend)
        x = backends.fake_quantize_e4m3(x, backend) if scheme is FP8 else x
        return x if dtype is None else x.to(dtype)
    seed = None if scheme.rounding == "nearest" else operand_seed(scheme, gemm, operand, rng)
    if rotation is None:
        return backends.fake_quantize(x.detach(), scheme, backend, seed=seed, dtype=dtype)
    signs = rotation_signs(rotation, gemm, x.shape[-1], rng, x.device)
    options = {"seed": seed, "rotation": rotation.size, "signs": signs, "dtype": dtype}
    return backends.fake_quantize(x.detach(), scheme, backend, **options)


def operand_seed(scheme: QuantScheme, gemm: str, operand: str, rng: LayerRng) -> int | None:
    """The seed of an operand that is rounded stochastically."""
    return rng.seed_of(gemm, operand) if scheme.rounding == "stochastic" else None


# ---- the input ------------------------------------------------------------------------------------------------------


def input_operand(x: torch.Tensor, dtype: torch.dtype, state: GemmState, groups: Groups | None = None) -> torch.Tensor:
    """``Q(x)`` along the last axis in ``dtype``, of the rotated and padded input where the forward product rotates.
    Where random numbers are drawn, each group has its own. Of a tensor without memory one of that shape."""
    spec = state.spec
    if spec.keeps_input:
        return x.to(dtype)
    if isinstance(x, FakeTensor):
        return x.new_empty(*x.shape[:-1], padded_length(x.shape[-1], state), dtype=dtype)
    if groups is None or not spec.draws_forward:
        return _input(x, dtype, state, state.rngs[0])
    parts = [_input(x[rows], dtype, state, state.rngs[group]) for group, rows in groups]
    parts = parts or [_input(x, dtype, state, state.rngs[0])]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _input(x: torch.Tensor, dtype: torch.dtype, state: GemmState, rng: LayerRng) -> torch.Tensor:
    spec, fprop = state.spec, state.spec.scheme.fprop
    if not spec.quantizes_input:
        return rotate_operand(x, fprop.rotation, "fprop", rng, spec.backend).to(dtype)
    return quantize_operand(x, fprop.left, "fprop", "x", rng, spec.backend, rotation=fprop.rotation, dtype=dtype)


def nearest_input(
    x: torch.Tensor,
    dtype: torch.dtype,
    scheme: QuantScheme | None,
    backend: str = "auto",
    rotation: Rotation | None = None,
) -> torch.Tensor:
    """``Q(x)`` along the last axis in ``dtype``, rounded to nearest; ``x`` itself without a scheme. A deterministic
    ``rotation``, whose size divides the axis, is done before, as [`input_operand`] does it. Return an uninitialized
    result of the right shape for fake tensors."""
    if isinstance(x, FakeTensor) and (scheme is not None or rotation is not None):
        return x.new_empty(x.shape, dtype=dtype)
    if rotation is not None and scheme is not None:
        return backends.fake_quantize(x, scheme, backend, rotation=rotation.size, dtype=dtype)
    if rotation is not None:
        return backends.rotate_rows(x, rotation.size, backend, dtype=dtype)
    if scheme is None:
        return x.to(dtype)
    return backends.fake_quantize(x, scheme, backend).to(dtype)


def unrotated_gradient(grad: torch.Tensor, rotation: Rotation | None, backend: str = "auto") -> torch.Tensor:
    """The gradient of an input from that of its rotated values, in float32 (float64 stays) where there is a rotation:
    its inverse is its transpose, and itself. A deterministic one, whose size divides the axis."""
    return grad if rotation is None else backends.rotate_rows(grad, rotation.size, backend)


def packed_input(x: torch.Tensor, state: GemmState, groups: Groups | None = None) -> MXFP4Tensor:
    """[`input_operand`] as codes and scale bytes. Only under a scheme that quantizes activations."""
    if isinstance(x, FakeTensor):
        return _shapes_of_input(x, state)
    if groups is None or not state.spec.draws_forward:
        return _packed(x, state, state.rngs[0])
    parts = [_packed(x[rows], state, state.rngs[group]) for group, rows in groups]
    return cat_rows(parts or [_packed(x, state, state.rngs[0])])


def _packed(x: torch.Tensor, state: GemmState, rng: LayerRng) -> MXFP4Tensor:
    fprop, backend = state.spec.scheme.fprop, state.spec.backend
    x = rotate_operand(x.detach(), fprop.rotation, "fprop", rng, backend)
    if fprop.left.rounding == "stochastic":
        return functional.quantize(x, **vars(fprop.left), seed=rng.seed_of("fprop", "x"), backend=backend)
    return pack_rows(x, fprop.left, backend)


def padded_length(length: int, state: GemmState) -> int:
    """The columns of the forward operands of an axis of ``length`` elements: more where a rotation pads it."""
    return length + -length % state.spec.rotation_size


def _shapes_of_input(x: torch.Tensor, state: GemmState) -> MXFP4Tensor:
    length, scheme = padded_length(x.shape[-1], state), state.spec.scheme.fprop.left
    parts = {
        part: None if size is None else x.new_empty(*x.shape[:-1], size, dtype=torch.uint8)
        for part, size in part_sizes(scheme, length).items()
    }
    return MXFP4Tensor(**parts, length=length, axis=x.dim() - 1, scheme=scheme, dtype=x.dtype)


# ---- the weight -----------------------------------------------------------------------------------------------------


def kept_weight_operand(weight: torch.Tensor, dtype: torch.dtype, state: GemmState) -> torch.Tensor:
    """Return [`weight_operand`], kept as [`WeightCache`] says."""
    if state.spec.keeps_weight:
        return rows_first(weight.detach(), state).to(dtype)
    if isinstance(weight, FakeTensor):
        return weight.new_empty(*weight.shape[:-1], padded_length(weight.shape[-1], state), dtype=dtype)
    kept = state.cache.find(weight, dtype)
    if kept is not None:
        return kept
    packed = codes_of_operand(weight, dtype, state)
    if packed is None:
        return state.cache.get(weight, dtype, functools.partial(weight_operand, weight, dtype, state))
    values = functools.partial(values_of, packed, dtype, state.spec.backend)
    return state.values.get(weight, dtype, values, of_step=not step_keeps_codes(weight, dtype, state.spec))


def passing_weight_operand(weight: torch.Tensor, dtype: torch.dtype, state: GemmState) -> torch.Tensor:
    """[`kept_weight_operand`] for who makes something else of it and keeps that: no more of it is kept than
    [`StepWeights`] do."""
    packed = codes_of_operand(weight, dtype, state)
    if packed is not None:
        return values_of(packed, dtype, state.spec.backend)
    is_kept = step_form_in_force() is not None and not state.spec.keeps_weight
    return (kept_weight_operand if is_kept else weight_operand)(weight, dtype, state)


@torch.no_grad()
def weight_operand(weight: torch.Tensor, dtype: torch.dtype, state: GemmState) -> torch.Tensor:
    """The weight as the forward product takes it, in ``dtype``: ``Q(W)`` ``[N, K]`` or, of experts, ``[E, N, K]``, of
    the rotated and padded weight where the scheme rotates."""
    spec, scheme = state.spec, state.spec.scheme.fprop.right
    if isinstance(scheme, QuantScheme):
        count_weight(weight)
    if weight.dim() == 2:
        return matrix_operand(weight, state, state.rngs[0], dtype)
    weight = rows_first(weight.detach(), state)
    at_once = isinstance(scheme, QuantScheme) and quantized_at_once(scheme, weight, spec.backend)
    if at_once and spec.rotation_size == 1:
        return matrix_operand(weight, state, state.rngs[0], dtype)
    out = None
    for group, rng in enumerate(state.rngs):  # the eager functions take several times the memory of their input
        values = matrix_operand(weight[group], state, rng, dtype)
        out = values.new_empty(len(state.rngs), *values.shape, dtype=dtype) if out is None else out
        out[group] = values
    return out


def weight_with_macro(
    weight: torch.Tensor, dtype: torch.dtype, state: GemmState
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[`kept_weight_operand`] of a matrix, and the macro bytes that a search for this use found, by which
    [`weight_by_macro`] makes the same operand without one. `None` where nothing was searched, and where the operand
    itself is kept."""
    if not _gives_macro(weight, state):
        return kept_weight_operand(weight, dtype, state), None
    count_weight(weight)
    return triton_kernels.fake_quantize_with_macro(weight.detach(), state.spec.scheme.fprop.right, dtype)


def weight_by_macro(
    weight: torch.Tensor, macro: torch.Tensor | None, dtype: torch.dtype, state: GemmState
) -> torch.Tensor:
    """[`kept_weight_operand`], by the macro bytes of an earlier use if there are any. Who calls it knows that the
    weight is the same: one that was written since is an error of autograd's, but through ``.data``."""
    if macro is None or not _gives_macro(weight, state):
        return kept_weight_operand(weight, dtype, state)
    count_weight(weight)
    return triton_kernels.fake_quantize_by_macro(weight.detach(), macro, state.spec.scheme.fprop.right, dtype)


def _gives_macro(weight: torch.Tensor, state: GemmState) -> bool:
    """Whether kernels search the macro factors of this weight anew at each use."""
    spec, scheme = state.spec, state.spec.scheme.fprop.right
    if not isinstance(scheme, QuantScheme) or spec.rotation_size != 1 or weight.dim() != 2:
        return False
    if not isinstance(scheme.macro_block, int) or scheme.macro_search != "dynamic" or scheme.block_rows != 1:
        return False
    if scheme.rounding != "nearest" or scheme.fallback_rate is not None or not nothing_keeps_weights():
        return False
    return backends.choose_backend(weight, scheme, spec.backend) == "triton"


@torch.no_grad()
def matrix_operand(
    weight: torch.Tensor, state: GemmState, rng: LayerRng, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``Q(W)`` of rows along the last axis, in ``dtype``, by default that which it is computed in."""
    fprop, backend = state.spec.scheme.fprop, state.spec.backend
    options = {"rotation": fprop.rotation, "dtype": dtype}
    return quantize_operand(weight.detach(), fprop.right, "fprop", "weight", rng, backend, **options)


@torch.no_grad()
def effective_rows(rows: torch.Tensor, state: GemmState, group: int = 0) -> torch.Tensor:
    """The values ``[n, K]`` that the forward product takes for rows of a weight, rotated back, in their dtype."""
    rng = state.rngs[group]
    values = matrix_operand(rows, state, rng)
    return rotate_back(values, state.spec.scheme.fprop.rotation, "fprop", rows.shape[-1], rng).to(rows.dtype)
