# SPDX-License-Identifier: Apache-2.0
"""Operands of the three products of a linear layer, rotated and quantized along the contraction axis.

An operand is values in the dtype of the product, a [`MXFP4Tensor`] of codes and scale bytes, an [`FP8Operand`], or an
[`FP4Operand`]; see [`hf_mxfp4.ops.matmul`].
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..numerics import (
    FP8,
    FULL,
    MXFP8,
    NVFP4,
    MXFP4Tensor,
    OperandScheme,
    QuantScheme,
    Rotation,
    fake_quantize_nvfp4,
    nvfp4_tensor_scale,
    unrotate,
)
from . import quantization
from . import triton as triton_kernels
from .fp4 import FP4Operand, to_fp4
from .fp8 import FP8Operand, weight_to_fp8
from .groups import Groups
from .packed_weight import of_expert, packed_tensor, quantize_experts, quantize_weight
from .rng import LayerRng
from .spec import GemmSpec
from .state import GemmState


#: By product, weight matrices that were quantized since the process began.
_quantized: Counter[str] = Counter()


def rotation_signs(
    rotation: Rotation, gemm: str, length: int, rng: LayerRng | None, device: torch.device
) -> torch.Tensor | None:
    """Signs of a random rotation of an axis of ``length`` elements, padding included; `None` without signs."""
    return rng.signs(gemm, length + -length % rotation.size, device) if rotation.random else None


def rotate_operand(
    x: torch.Tensor, rotation: Rotation | None, gemm: str, rng: LayerRng | None, backend: str = "auto"
) -> torch.Tensor:
    """Return an operand of a product in the domain in which it is quantized; see [`hf_mxfp4.ops.rotate_rows`]."""
    if rotation is None:
        return x
    signs = rotation_signs(rotation, gemm, x.shape[-1], rng, x.device)
    return quantization.rotate_rows(x, rotation.size, backend, signs=signs)


def rotate_back(
    x: torch.Tensor, rotation: Rotation | None, gemm: str, length: int, rng: LayerRng | None
) -> torch.Tensor:
    """Return the inverse of [`rotate_operand`] for an axis that had ``length`` elements, in float32 (float64 stays)."""
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
    rng: LayerRng | None,
    backend: str = "auto",
    *,
    rotation: Rotation | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Quantized values of an operand along its last axis, rotated before ([`rotate_operand`]) where there is a
    rotation; without quantization where the scheme has none. As ``dtype`` if one is given."""
    if not isinstance(scheme, QuantScheme):
        x = rotate_operand(x, rotation, gemm, rng, backend)
        if scheme is FP8:
            return quantization.fake_quantize_e4m3(x, backend, dtype)
        if scheme is MXFP8:
            return quantization.fake_quantize_mxfp8(x, backend, dtype)
        if scheme is NVFP4:  # rows of activations, tokens, do not depend on each other
            x = fake_quantize_nvfp4(x, nvfp4_tensor_scale(x.detach(), per_row=operand == "x"))
        return x if dtype is None else x.to(dtype)
    x, seed = x.detach() if x.requires_grad else x, operand_seed(scheme, gemm, operand, rng)
    if rotation is None:
        return quantization.fake_quantize(x, scheme, backend, seed=seed, dtype=dtype)
    signs = rotation_signs(rotation, gemm, x.shape[-1], rng, x.device)
    return quantization.fake_quantize(x, scheme, backend, seed=seed, rotation=rotation.size, signs=signs, dtype=dtype)


def operand_seed(scheme: QuantScheme, gemm: str, operand: str, rng: LayerRng | None) -> int | None:
    """Return the seed of an operand that is rounded stochastically."""
    return rng.seed_of(gemm, operand) if scheme.rounding == "stochastic" else None


def rows_and_columns(
    grad: torch.Tensor, spec: GemmSpec, rng: LayerRng | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the left operands of Dgrad and Wgrad, of ``grad [M, N]`` and of its transpose, from one read of it; `None`
    twice where the Triton kernels do not make both, or the schemes differ in more than rounding and rotation."""
    products = spec.scheme.dgrad, spec.scheme.wgrad
    schemes = [each.left for each in products if isinstance(each.left, QuantScheme)]
    rotations = [each.rotation for each in products]
    if len(schemes) < 2 or (rotations[0] is None) != (rotations[1] is None):
        return None, None
    nearest = [replace(scheme, rounding="nearest") for scheme in schemes]
    if nearest[0] != nearest[1]:
        return None, None
    seeds, signs = [], []
    for gemm, scheme, rotation, length in zip(("dgrad", "wgrad"), schemes, rotations, grad.shape[::-1], strict=True):
        seeds.append(operand_seed(scheme, gemm, "grad", rng))
        if quantization.choose_backend(grad, scheme, spec.backend, seeds[-1]) != "triton":
            return None, None
        signs.append(rotation and rotation_signs(rotation, gemm, length, rng, grad.device))
    sizes: list[Any] = [rotation and rotation.size for rotation in rotations]
    return triton_kernels.fake_quantize_rows_and_columns(grad.detach(), schemes, seeds, sizes, signs, grad.dtype)


# ---- the input ------------------------------------------------------------------------------------------------------


def input_operand(
    x: torch.Tensor, dtype: torch.dtype, state: GemmState, groups: Groups | None = None, fp8: bool = False
) -> torch.Tensor | FP8Operand:
    """Return ``Q(x)`` along the last axis in ``dtype``, of the rotated and padded input where the forward product
    rotates; with ``fp8`` E4M3 inputs as elements and scales. Where random numbers are drawn, each group has its own."""
    spec, fprop = state.spec, state.spec.scheme.fprop
    if fp8 and fprop.left is FP8:
        return FP8Operand.of_bytes(*fp8_input(x, state, groups))

    def quantize(rows: torch.Tensor, rng: LayerRng | None) -> torch.Tensor:
        return quantize_operand(rows, fprop.left, "fprop", "x", rng, spec.backend, rotation=fprop.rotation, dtype=dtype)

    if groups is None or not spec.draws_forward:
        return quantize(x, state.rng_of(0))
    return torch.cat([quantize(*each) for each in _groups_of(x, state, groups)])


def _groups_of(x: torch.Tensor, state: GemmState, groups: Groups | None) -> list[tuple[torch.Tensor, LayerRng | None]]:
    """Rows and their random numbers: by group where the forward product draws any."""
    if groups is None or not state.spec.draws_forward:
        return [(x, state.rng_of(0))]
    return [(x[rows], state.rng_of(group)) for group, rows in groups] or [(x, state.rng_of(0))]


def quantize_input(
    x: torch.Tensor,
    dtype: torch.dtype,
    scheme: OperandScheme | None,
    backend: str = "auto",
    rotation: Rotation | None = None,
) -> torch.Tensor:
    """``Q(x)`` along the last axis in ``dtype``, rounded to nearest; ``x`` itself without a scheme. A deterministic
    ``rotation``, whose size divides the axis, is done before, as [`input_operand`] does it."""
    return quantize_operand(x, scheme or FULL, "fprop", "x", None, backend, rotation=rotation, dtype=dtype)


def packed_input(x: torch.Tensor, state: GemmState) -> Any:
    """[`input_operand`] as a [`MXFP4Tensor`], or in MXFP8 as [`fp8_input`] gives it. Only under a scheme that quantizes
    activations so."""
    spec, scheme, rng = state.spec, state.spec.input_scheme, state.rng_of(0)
    if scheme is MXFP8:
        return fp8_input(x, state)
    assert isinstance(scheme, QuantScheme)
    rows = rotate_operand(x.detach(), spec.scheme.fprop.rotation, "fprop", rng, spec.backend)
    return quantization.quantize(rows, scheme, spec.backend, seed=operand_seed(scheme, "fprop", "x", rng))


def fp8_input(x: torch.Tensor, state: GemmState, groups: Groups | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """[`input_operand`] as E4M3 elements and the scale bytes of its rows, or of their blocks. Only under a scheme with
    activations in FP8 or MXFP8."""
    rotation, backend = state.spec.scheme.fprop.rotation, state.spec.backend
    quantize = quantization.quantize_e4m3 if state.spec.input_scheme is FP8 else quantization.quantize_mxfp8
    parts = [
        quantize(rotate_operand(rows.detach(), rotation, "fprop", rng, backend), backend)
        for rows, rng in _groups_of(x, state, groups)
    ]
    if len(parts) == 1:
        return parts[0]
    elements, scales = zip(*parts, strict=True)
    return torch.cat([each.view(torch.uint8) for each in elements]).view(torch.float8_e4m3fn), torch.cat(scales)


def padded_length(length: int, spec: GemmSpec) -> int:
    """Return the columns of the forward operands of an axis of ``length`` elements: more where a rotation pads it."""
    return length + -length % spec.rotation_size


# ---- the weight -----------------------------------------------------------------------------------------------------


def rows_first(weight: torch.Tensor, spec: GemmSpec) -> torch.Tensor:
    """Return a master weight as ``[N, K]`` or ``[E, N, K]``, the same memory."""
    return weight.transpose(1, 2) if spec.transposed else weight


def weight_operand(weight: torch.Tensor, dtype: torch.dtype, state: GemmState) -> torch.Tensor:
    """Return the weight as the forward product takes it, in ``dtype``: ``Q(W)`` ``[N, K]`` or, of experts, ``[E, N,
    K]``, of the rotated and padded weight where the scheme rotates. Kept by the cache that is open, if any."""
    spec = state.spec
    if spec.scheme.fprop.right is FULL and spec.rotation_size == 1:
        return rows_first(weight.detach(), spec).to(dtype)
    return _kept_operand(weight, dtype, state)


def fp8_weight(weight: torch.Tensor, dtype: torch.dtype, state: GemmState) -> FP8Operand | None:
    """Return [`weight_operand`] as E4M3 elements, which Fprop and Dgrad take; `None` where some would be rounded, as
    [`hf_mxfp4.ops.fp8.weight_to_fp8`] finds."""
    return _kept_operand(weight, dtype, state, as_fp8=True)[0]


def _kept_operand(weight: torch.Tensor, dtype: torch.dtype, state: GemmState, as_fp8: bool = False) -> Any:
    spec, cache = state.spec, state.cache
    key = state, dtype, _step(state), as_fp8
    kept = None if cache is None else cache.find(weight, key)
    if kept is not None:
        return kept
    is_open = cache is not None and cache.form != "none"
    on_codes = is_open and weight.is_leaf and reader_of_codes(weight, dtype, state) is not None

    def make() -> Any:
        codes = weight_codes(weight, state) if on_codes else None
        values = _weight_values(weight, dtype, state) if codes is None else values_of(codes, dtype, spec)
        return (weight_to_fp8(values),) if as_fp8 else values

    if on_codes:
        keeps = cache.form == "auto" and (weight.is_cpu or as_fp8 and weight.dim() == 2)
    else:  # values of all experts are another model, which the memory of a GPU may not hold
        keeps = is_open and (cache.form != "auto" or weight.is_cpu or weight.dim() == 2)
    return cache.get(weight, key, make) if keeps else make()


def weight_codes(weight: torch.Tensor, state: GemmState) -> MXFP4Tensor:
    """Codes and scales of a master weight, those of experts ``[E, N, ...]``, kept by the cache that is open, if any. Of
    a scheme that can be packed."""
    spec = state.spec

    def make() -> MXFP4Tensor:
        count_weight(weight)
        rows, scheme = rows_first(weight.detach(), spec), spec.weight_scheme
        whole = rows.dim() == 2 or _quantized_at_once(rows, spec)
        parts = (quantize_weight if whole else quantize_experts)(rows, scheme, spec.backend)
        return packed_tensor(parts, rows.shape[-1], scheme, weight.dtype)

    return _kept(weight, state, "codes", make)


def fp4_weight(weight: torch.Tensor, state: GemmState, recipe: str) -> FP4Operand:
    """[`weight_codes`] of a weight ``[N, K]`` as FP4 tensor cores take them, kept by the cache that is open, if any."""
    return _kept(weight, state, recipe, lambda: to_fp4(weight_codes(weight, state), recipe))


def _kept(weight: torch.Tensor, state: GemmState, name: str, make: Callable[[], Any]) -> Any:
    cache = state.cache
    return make() if cache is None or cache.form == "none" else cache.get(weight, (state, name), make)


def reader_of_codes(x: torch.Tensor, dtype: torch.dtype, state: GemmState) -> str | None:
    """Return the backend that multiplies operands like ``x`` in ``dtype`` with the codes of a weight; `None` where the
    cache that is open, if any, keeps no codes."""
    spec, cache = state.spec, state.cache
    if cache is None or cache.form in ("none", "dense") or not spec.packs_weight:
        return None
    name = quantization.choose_backend(x, spec.weight_scheme, spec.backend, family="decode", dtype=dtype)
    return None if name == "eager" and cache.form != "packed" else name


def values_of(packed: MXFP4Tensor, dtype: torch.dtype, spec: GemmSpec) -> torch.Tensor:
    """Return the operand ``[N, K]`` or ``[E, N, K]`` in ``dtype`` of the codes of a master weight, to the bit."""
    # By way of the master's dtype, in which an operand is quantized: of float32 that is rounding once.
    made = dtype if packed.dtype == torch.float32 else packed.dtype
    if packed.codes.dim() == 2:
        return quantization.dequantize(packed, made, spec.backend).to(dtype)
    out = packed.codes.new_empty(*packed.codes.shape[:2], packed.length, dtype=dtype)
    for expert, values in enumerate(out):  # the eager functions take several times the memory of what they make
        values.copy_(quantization.dequantize(of_expert(packed, expert), made, spec.backend))
    return out


@torch.no_grad()
def _weight_values(weight: torch.Tensor, dtype: torch.dtype, state: GemmState) -> torch.Tensor:
    spec = state.spec
    if spec.scheme.fprop.right is not FULL:
        count_weight(weight)
    rows = rows_first(weight.detach(), spec)
    if rows.dim() == 2 or spec.rotation_size == 1 and _quantized_at_once(rows, spec):
        return matrix_operand(rows, state, 0, dtype)
    out = None
    for group in range(len(rows)):  # the eager functions take several times the memory of their input
        values = matrix_operand(rows[group], state, group, dtype)
        out = values.new_empty(len(rows), *values.shape, dtype=dtype) if out is None else out
        out[group] = values
    return out


def _quantized_at_once(rows: torch.Tensor, spec: GemmSpec) -> bool:
    """Whether the weights of all experts are quantized in one launch: where rows are independent, each expert has no
    random numbers of its own, and no eager function, which takes several times its input, does it."""
    scheme = spec.weight_scheme
    if scheme is None or scheme.block_rows != 1 or scheme.rounding != "nearest":
        return False
    return quantization.choose_backend(rows, scheme, spec.backend) != "eager"


def _step(state: GemmState) -> int | None:
    """Return what else than the weight its operand depends on."""
    return state.rngs[0].step if state.spec.draws_forward else None


@torch.no_grad()
def matrix_operand(
    weight: torch.Tensor, state: GemmState, group: int = 0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``Q(W)`` of rows along the last axis, in ``dtype``, by default that which it is computed in."""
    fprop, spec = state.spec.scheme.fprop, state.spec
    options = {"rotation": fprop.rotation, "dtype": dtype}
    return quantize_operand(
        weight.detach(), fprop.right, "fprop", "weight", state.rng_of(group), spec.backend, **options
    )


@torch.no_grad()
def effective_rows(rows: torch.Tensor, state: GemmState, group: int = 0) -> torch.Tensor:
    """Return the values ``[n, K]`` that the forward product takes for rows of a weight, rotated back."""
    values, rotation = matrix_operand(rows, state, group), state.spec.scheme.fprop.rotation
    return rotate_back(values, rotation, "fprop", rows.shape[-1], state.rng_of(group)).to(rows.dtype)


def count_weight(weight: torch.Tensor, gemm: str = "fprop") -> None:
    """Count one quantization of a weight ``[N, K]``, or of those of all experts, for a product: ``"fprop"``, or
    ``"dgrad"`` where that one takes another operand than the forward product does."""
    _quantized[gemm] += 1 if weight.dim() == 2 else weight.shape[0]


def weight_quantizations() -> Counter[str]:
    """Return by product how many weight matrices were quantized since the process began; each expert's is one."""
    return Counter(_quantized)
