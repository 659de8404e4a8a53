# SPDX-License-Identifier: Apache-2.0
"""Calls of the Triton kernels (`mxfp4_kernels`, imported when first used) on torch tensors."""

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch

from ..numerics import MXFP4Tensor, QuantScheme
from ..numerics.blocks import keep_selected


def unsupported_reason(device_type: str, dtype: torch.dtype, scheme: QuantScheme, length: int = 0) -> str | None:
    """Why the kernels cannot quantize tensors of this device and dtype along an axis of ``length`` (0: any) under this
    scheme, or read what it makes of them; `None` when they can. On the CPU they run in Triton's interpreter, under
    TRITON_INTERPRET=1, and slowly."""
    reason = unavailable(device_type)
    if reason is not None:
        return reason
    if scheme.fallback_rate is not None and scheme.block_rows != 1:
        return "selective outlier fallback (fallback_rate) of tiles has no Triton kernel"
    import mxfp4_kernels

    return mxfp4_kernels.supports(dtype, rounding=scheme.rounding, length=length, **_options(scheme))


def unavailable(device_type: str) -> str | None:
    """Why no kernel can run on such a device; `None` when they can."""
    if device_type not in ("cuda", "xpu") and not (device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"the tensor is on {device_type}"
    try:
        import triton  # noqa: F401

        import mxfp4_kernels  # noqa: F401
    except ImportError as error:
        return f"Triton is not installed ({error})"
    return None


def fake_quantize(
    x: torch.Tensor, scheme: QuantScheme, seed: int | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """[`hf_mxfp4.numerics.apply_scheme`] along the last axis of a tensor that the kernels take, converted to ``dtype``;
    of float32 in the kernel, to the bit as after it."""
    import mxfp4_kernels

    if scheme.fallback_rate is not None:
        return dequantize(quantize(x, scheme, x.dim() - 1, seed), x.dtype).to(dtype or x.dtype)
    options = {**_options(scheme), **_written(x, dtype)}
    values = mxfp4_kernels.fake_quantize(x, **options, rounding=scheme.rounding, seed=seed)
    return values if dtype is None else values.to(dtype)


def fake_quantize_with_macro(
    x: torch.Tensor, scheme: QuantScheme, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`fake_quantize`] to nearest of a scheme with macro blocks of a fixed length, and their bytes."""
    import mxfp4_kernels

    options = {name: value for name, value in _options(scheme).items() if name != "block_rows"}
    values, macro = mxfp4_kernels.fake_quantize_with_macro(x, **options, **_written(x, dtype))
    return values.to(dtype), macro


def fake_quantize_by_macro(
    x: torch.Tensor, macro: torch.Tensor, scheme: QuantScheme, dtype: torch.dtype
) -> torch.Tensor:
    """What [`fake_quantize_with_macro`] gives, by the bytes that it found."""
    import mxfp4_kernels

    options = {name: value for name, value in _options(scheme).items() if name not in ("block_rows", "macro_search")}
    return mxfp4_kernels.fake_quantize_by_macro(x, macro, **options, **_written(x, dtype)).to(dtype)


def _written(x: torch.Tensor, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Arguments for values of float32 that the kernel converts, to the bit as after it."""
    return {"dtype": dtype, "limit": torch.float32} if dtype is not None and x.dtype == torch.float32 else {}


def fake_quantize_e4m3(x: torch.Tensor) -> torch.Tensor:
    """[`hf_mxfp4.numerics.fake_quantize_e4m3`] of a tensor that the kernels take."""
    import mxfp4_kernels

    return mxfp4_kernels.fake_quantize_e4m3(x)


def quantize_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[`hf_mxfp4.numerics.quantize_e4m3`] of a tensor that the kernels take."""
    import mxfp4_kernels

    return mxfp4_kernels.quantize_e4m3_rows(x)


def dequantize_e4m3(elements: torch.Tensor, byte: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[`hf_mxfp4.numerics.dequantize_e4m3`] in a dtype that the kernels take."""
    import mxfp4_kernels

    return mxfp4_kernels.dequantize_e4m3(elements, byte, dtype)


def fake_quantize_e4m3_both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[`fake_quantize_e4m3`] of a matrix and of its transpose."""
    import mxfp4_kernels

    return mxfp4_kernels.fake_quantize_e4m3_both(x)


def fake_quantize_rotated(
    x: torch.Tensor,
    scheme: QuantScheme,
    seed: int | None,
    rotation: int,
    signs: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[`fake_quantize`] of ``x`` padded and rotated along its last axis, as ``dtype``."""
    import mxfp4_kernels

    written = written_dtype(scheme, dtype)
    options = {**_options(scheme), "rounding": scheme.rounding, "seed": seed, "rotation": rotation, "signs": signs}
    return mxfp4_kernels.fake_quantize(x, dtype=written, **options).to(dtype)


def written_dtype(scheme: QuantScheme, dtype: torch.dtype) -> torch.dtype:
    """Return what a kernel shall write so that casting it to ``dtype`` is casting float32 values: kernels saturate,
    casts do not, and only values without a residual are within bfloat16 always."""
    return torch.bfloat16 if dtype == torch.bfloat16 and scheme.outlier_fallback is None else torch.float32


def fake_quantize_both(
    x: torch.Tensor,
    schemes: tuple[QuantScheme, QuantScheme],
    seeds: tuple[int | None, int | None],
    rotations: tuple[int | None, int | None],
    signs: tuple[torch.Tensor | None, torch.Tensor | None],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of ``x [M, K]`` and of its transpose from one read, as ``dtype``; schemes differ in their rounding."""
    import mxfp4_kernels

    rounding = tuple(scheme.rounding for scheme in schemes)
    options = {**_options(schemes[0]), "rounding": rounding, "seed": seeds, "rotation": rotations, "signs": signs}
    written = written_dtype(schemes[0], dtype) if any(rotations) else None
    return tuple(values.to(dtype) for values in mxfp4_kernels.fake_quantize_both(x, dtype=written, **options))


def quantize(
    x: torch.Tensor, scheme: QuantScheme, axis: int, seed: int | None = None, converts: bool | None = None
) -> MXFP4Tensor:
    """[`hf_mxfp4.numerics.quantize`] of a tensor that the kernels take; ``axis`` is not negative. ``converts``: by the
    GPU's instruction for codes; `None`: where it has one that was found right."""
    import mxfp4_kernels

    if converts is None:
        converts = converts_codes(x.device)
    options = {**_options(scheme), "rounding": scheme.rounding, "seed": seed, "converts": converts}
    packed = mxfp4_kernels.quantize(x.movedim(axis, -1), **options)
    tensor = MXFP4Tensor(*packed, length=x.shape[axis], axis=axis, scheme=scheme, dtype=x.dtype)
    return tensor if scheme.fallback_rate is None else keep_selected(x.movedim(axis, -1), tensor)


def dequantize(tensor: MXFP4Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[`MXFP4Tensor.dequantize`] of what [`unsupported_reason`] does not refuse."""
    import mxfp4_kernels

    out = mxfp4_kernels.dequantize(
        tensor.codes,
        tensor.scale,
        length=tensor.length,
        macro=tensor.macro,
        residual_codes=tensor.residual_codes,
        residual_scale=tensor.residual_scale,
        dtype=dtype,
        **_stored(tensor.scheme),
    )
    return out.movedim(-1, tensor.axis)


def linear(x: torch.Tensor, weight: MXFP4Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x Q(W)^T + b`` for a weight ``[N, K]`` that [`unsupported_reason`] does not refuse in the dtype of ``x``."""
    import mxfp4_kernels

    return mxfp4_kernels.linear_w4a16(
        x,
        weight.codes,
        weight.scale,
        length=weight.length,
        macro=weight.macro,
        residual_codes=weight.residual_codes,
        residual_scale=weight.residual_scale,
        bias=bias,
        **_stored(weight.scheme),
    )


def plan_linear(n_tokens: int, out_features: int, in_features: int, scheme: QuantScheme, dtype: torch.dtype) -> Any:
    """Return the `mxfp4_kernels.LinearPlan` that [`linear`] follows."""
    import mxfp4_kernels

    name = str(dtype).removeprefix("torch.")
    return mxfp4_kernels.plan_linear_w4a16(n_tokens, out_features, in_features, **_stored(scheme), dtype=name)


def converts_codes(device: torch.device) -> bool:
    """Whether a GPU has the instruction for codes, and it was found right."""
    import mxfp4_kernels

    from . import self_check

    return mxfp4_kernels.has_e2m1(device) and self_check.problem(device, "codes by instruction") is None


@functools.lru_cache(maxsize=64)
def _options(scheme: QuantScheme) -> Mapping[str, Any]:
    """A scheme as arguments of the kernels that quantize."""
    return {"scale_rule": scheme.scale_rule.value, "block_rows": scheme.block_rows, **_stored(scheme)}


@functools.lru_cache(maxsize=64)
def _stored(scheme: QuantScheme) -> Mapping[str, Any]:
    """What dequantization needs to know."""
    return {
        "macro_block": scheme.macro_block,
        "macro_search": scheme.macro_search,
        "outlier_fallback": scheme.outlier_fallback,
    }


def grouped_matmul(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Call [`mxfp4_kernels.grouped_matmul`]."""
    import mxfp4_kernels

    return mxfp4_kernels.grouped_matmul(x, weight, offsets, bias)


def grouped_matmul_packed(
    x: torch.Tensor, weight: MXFP4Tensor, offsets: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[`mxfp4_kernels.grouped_matmul_packed`] with weights ``[E, N, K]``."""
    import mxfp4_kernels

    return mxfp4_kernels.grouped_matmul_packed(
        x,
        weight.codes,
        weight.scale,
        offsets,
        bias,
        length=weight.length,
        macro=weight.macro,
        residual_codes=weight.residual_codes,
        residual_scale=weight.residual_scale,
        **_stored(weight.scheme),
    )


def grouped_wgrad(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Call [`mxfp4_kernels.grouped_wgrad`]."""
    import mxfp4_kernels

    return mxfp4_kernels.grouped_wgrad(left, right, offsets, dtype)


def grouped_sum(x: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Call [`mxfp4_kernels.grouped_sum`]."""
    import mxfp4_kernels

    return mxfp4_kernels.grouped_sum(x, offsets, dtype)


def grouped_fake_quantize_e4m3(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Call [`mxfp4_kernels.grouped_fake_quantize_e4m3`]."""
    import mxfp4_kernels

    return mxfp4_kernels.grouped_fake_quantize_e4m3(x, offsets)
