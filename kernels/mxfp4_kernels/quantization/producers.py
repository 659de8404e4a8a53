# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and SwiGLU whose results leave as MXFP4: checks, tile shapes and launches."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common.checks import check_input, check_output, check_rotation, check_seed, unsupported_scheme
from ..common.plan import BLOCK, INTERPRETED, Packed, Scheme, Side, compile_constants, plan, unit_of
from .launch import alpha, as_stored, bits, check_device, empty_packed, launch, named, sizes, tiled
from .producer_kernels import rms_norm_kernel, swiglu_kernel


TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
#: Elements of a tile: what a program holds of a row, or of several short ones.
_TILE = 2048
#: The longest row that a program holds whole unless it must: 16 warps of 16 elements a thread.
_LONGEST_ROW = 8192
_SHORTEST_TILE = 256


class Normed(NamedTuple):
    """What [`rms_norm_quantize`] returns: ``values`` MXFP4 values ``[..., K']`` (K' is K, padded for a rotation),
    ``packed`` their codes and scale bytes as [`quantize`] returns them, ``normed`` what was quantized, ``[..., K]``;
    `None` where not asked for. ``hidden``: ``x + residual``, in their dtype, or `None` without a residual. ``rstd``:
    ``1 / sqrt(mean(hidden**2) + eps)``, float32 ``[...]``."""

    values: torch.Tensor | None
    packed: Packed | None
    normed: torch.Tensor | None
    hidden: torch.Tensor | None
    rstd: torch.Tensor


class Gated(NamedTuple):
    """What [`swiglu_quantize`] returns: ``values`` and ``packed`` as in [`Normed`], ``product`` what was quantized,
    ``[..., K]``; `None` where not asked for."""

    values: torch.Tensor | None
    packed: Packed | None
    product: torch.Tensor | None


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    outputs: Collection[str] = ("packed",),
    scale_rule: str = "rceil",
    macro_block: int | str | None = None,
    macro_search: str = "static",
    outlier_fallback: float | None = None,
    rounding: str = "nearest",
    seed: int | None = None,
    rotation: int | None = None,
    signs: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Normed:
    """RMSNorm of ``x`` (of ``x + residual``) along its last axis, quantized to MXFP4 in the same pass. No gradient
    flows, and nothing waits for the GPU.

    Rounds as transformers' modules (Qwen2RMSNorm, LlamaRMSNorm) do: ``weight * (h * rstd).to(h.dtype)``, the statistic
    and every product in float32. With noise as adaptive quantization noise does: all in float32, ``(weight + noise) *
    (h * rstd)``, then rounded to the dtype that the result has without it. Given ``rstd``, every result is bit for bit
    that of torch and [`fake_quantize`] or [`quantize`]. ``rstd`` itself depends on the order of a float32 sum, which
    follows from K, dtypes, options and outputs, not from the number of rows: a row's result is the same in any batch.
    Against other orders it may move by some units in the last place, which moves few 16-bit normed values by one.

    Bytes of memory moved per element of a 16-bit ``x``: 2 read, and what is asked for written (packed: 0.53). With
    [`quantize`] apart the normed values are written and read again, 4 more; a residual moves 4 (read, sum written), 2
    less than apart, where the norm reads the sum again.

    Args:
        x: float32, bfloat16 or float16 ``[..., K]`` on a GPU; a layout without unit stride along K is copied first.
        weight: ``[K]``, of the same dtypes. The result has the dtype of ``weight * x``.
        eps: added to the mean of squares, 0 or more.
        residual: as ``x``, of its shape and dtype, to add before, or `None`.
        noise: float32 ``[K]`` to add to the weight, or `None`.
        outputs: what to return, any of ``"packed"``, ``"values"``, ``"normed"``.
        scale_rule, macro_block, macro_search, outlier_fallback, rounding, seed, rotation, signs: as in
            [`fake_quantize`].
        dtype: of the values, by default that of the normed values.

    Raises:
        TypeError: no tensor, another dtype, or ``residual`` of another dtype than ``x``.
        ValueError: shapes or devices that do not fit together, no or unknown outputs, or options as in
            [`fake_quantize`].
    """
    _check_outputs(outputs, ("packed", "values", "normed"))
    scheme, side = _options(
        "rms_norm_quantize",
        x,
        (scale_rule, macro_block, macro_search, outlier_fallback),
        (rounding, seed, rotation, signs),
        dtype,
    )
    length = x.shape[-1]
    _check_partner("weight", weight, x, (length,))
    if residual is not None:
        _check_partner("residual", residual, x, tuple(x.shape), x.dtype)
    if noise is not None:
        _check_partner("noise", noise, x, (length,), torch.float32)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
        raise ValueError(f"eps={eps!r} must be a number, 0 or more")
    normed_dtype = torch.promote_types(x.dtype, weight.dtype)
    scheme = scheme.along(side.padded(length))
    result, arguments = _prepare(x, normed_dtype, dtype, scheme, side, outputs, "normed")
    hidden = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        rstd.fill_(math.nan)
        return Normed(*result, hidden, rstd)
    matrix = _matrix(x)
    rows, cols, steps = norm_tile(side.padded(length), unit_of(scheme, side))
    skip = None if residual is None else _matrix(residual)
    arguments |= {
        "grid": (triton.cdiv(matrix.shape[0], rows),),
        "n_rows": matrix.shape[0],
        "n_cols": side.padded(length),
        "ROWS": rows,
        "COLS": cols,
        "STEPS": steps,
        "x_ptr": bits(matrix),
        "x_row_stride": matrix.stride(0),
        "skip_ptr": None if skip is None else bits(skip),
        "skip_row_stride": 0 if skip is None else skip.stride(0),
        "weight_ptr": bits(weight.detach().contiguous()),
        "noise_ptr": None if noise is None else noise.detach().contiguous(),
        "hidden_ptr": None if hidden is None else as_stored(hidden),
        "rstd_ptr": rstd,
        "eps": float(eps),
        "length": float(length),
        "WEIGHT_BF16": weight.dtype == torch.bfloat16,
        "NORMED_DTYPE": TRITON_DTYPES[normed_dtype],
        "HAS_SKIP": residual is not None,
        "NOISY": noise is not None,
    }
    launch(rms_norm_kernel, arguments)
    return Normed(*result, hidden, rstd)


def swiglu_quantize(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    outputs: Collection[str] = ("packed",),
    scale_rule: str = "rceil",
    macro_block: int | str | None = None,
    macro_search: str = "static",
    outlier_fallback: float | None = None,
    rounding: str = "nearest",
    seed: int | None = None,
    rotation: int | None = None,
    signs: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Gated:
    """``silu(gate) * up``, quantized to MXFP4 along its last axis in the same pass. No gradient flows, and nothing
    waits for the GPU.

    Rounds as transformers' Qwen2MLP does: silu in float32 to the dtype of ``gate``, then the product to it. The product
    is bit for bit that of torch given silu, and the results are bit for bit those of [`fake_quantize`] or [`quantize`]
    on it. silu, whose exponential is the GPU's own, is within one unit in the last place in 16 bits; in float32 within
    ``2**-16`` of its value.

    Bytes of memory moved per element of the product of 16-bit tensors: 4 read, and what is asked for written (packed:
    0.53). With [`quantize`] apart the product is written and read again, 4 more, and silu as well in eager torch, 8.

    Args:
        gate: float32, bfloat16 or float16 ``[..., K]`` on a GPU; without ``up`` ``[..., 2 * K]``, gate first. Layouts
            without unit stride along the last axis are copied first.
        up: as ``gate``, of its shape and dtype, or `None`.
        outputs: what to return, any of ``"packed"``, ``"values"``, ``"product"``.
        scale_rule, macro_block, macro_search, outlier_fallback, rounding, seed, rotation, signs, dtype: as in
            [`fake_quantize`].

    Raises as [`rms_norm_quantize`] does, and `ValueError` for an odd last axis without ``up``.
    """
    _check_outputs(outputs, ("packed", "values", "product"))
    check_input("swiglu_quantize", gate, 1)
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"gate and up in one tensor need an even last axis, got {gate.shape[-1]}; or give up=")
        half = gate.shape[-1] // 2
        gate, up = gate[..., :half], gate[..., half:]
    else:
        _check_partner("up", up, gate, tuple(gate.shape), gate.dtype)
    scheme, side = _options(
        "swiglu_quantize",
        gate,
        (scale_rule, macro_block, macro_search, outlier_fallback),
        (rounding, seed, rotation, signs),
        dtype,
    )
    length = gate.shape[-1]
    scheme = scheme.along(side.padded(length))
    result, arguments = _prepare(gate, gate.dtype, dtype, scheme, side, outputs, "product")
    if gate.numel() == 0:
        return Gated(*result)
    gate, up = _matrix(gate), _matrix(up)
    n_rows, padded = gate.shape[0], side.padded(length)
    gapless = n_rows == 1 or gate.stride(0) == up.stride(0) == length
    at = plan(n_rows, padded, padded, unit_of(scheme, side), flat=gapless and padded == length and side.signs is None)
    arguments |= tiled(at, arguments) | sizes(at.n_cols, arguments["MACRO"])
    arguments |= {
        "n_read": length if at.n_cols == padded else at.n_cols,
        "gate_ptr": bits(gate),
        "up_ptr": bits(up),
        "gate_row_stride": gate.stride(0),
        "up_row_stride": up.stride(0),
    }
    launch(swiglu_kernel, arguments)
    return Gated(*result)


def norm_tile(length: int, unit: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and tiles in a row, for rows of ``length`` in which ``unit`` elements
    belong together. Not a function of the number of rows: the order in which a row is summed shall not be one."""
    whole = triton.next_power_of_2(max(length, unit))
    widths = [cols for cols in (_TILE, _TILE // 2, _TILE // 4, _SHORTEST_TILE) if unit <= cols < whole]
    if widths:
        # The least padding; reading twice, the second time from the cache, is cheaper than an eighth of it.
        cols = min(widths, key=lambda cols: (triton.cdiv(length, cols) * cols, -cols))
        if whole > _LONGEST_ROW or 7 * whole > 8 * triton.cdiv(length, cols) * cols:
            return _TILE // cols, cols, triton.cdiv(length, cols)
    return max(_TILE // whole, 1), whole, 1


def _options(name: str, x: torch.Tensor, scheme: tuple, side: tuple, dtype: torch.dtype | None) -> tuple[Scheme, Side]:
    """The scheme and the side of these options. Raises as [`rms_norm_quantize`] says."""
    rounding, seed, rotation, signs = side
    if (reason := unsupported_scheme(*scheme, 1, rounding)) is not None:
        raise ValueError(reason)
    check_input(name, x, 1)
    check_output(dtype)
    check_seed(rounding, seed)
    return Scheme(*scheme), Side(seed, rotation, check_rotation(x, x.shape[-1], rotation, signs))


def _check_outputs(outputs: object, known: tuple[str, ...]) -> None:
    if isinstance(outputs, str) or not outputs or not set(outputs) <= set(known):
        raise ValueError(f"outputs={outputs!r} must be a tuple of one or more of {', '.join(map(repr, known))}")


def _check_partner(
    name: str, tensor: object, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    """Raise unless a tensor has this shape, this dtype (`None`: one that the kernels read), and the device of ``x``."""
    check_input(name, tensor, 1)
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has the shape {list(tensor.shape)}; it must be {list(shape)}")
    if tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device}, the tensor is on {x.device}; move it there")


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a matrix of its rows, with unit stride along them."""
    x = x.detach().reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _prepare(
    x: torch.Tensor,
    computed: torch.dtype,
    dtype: torch.dtype | None,
    scheme: Scheme,
    side: Side,
    outputs: Collection[str],
    plain: str,
) -> tuple[tuple[torch.Tensor | None, Packed | None, torch.Tensor | None], dict[str, Any]]:
    """Empty values, parts and unquantized values (named ``plain``) for rows of ``x`` whose results have the dtype
    ``computed``; and the arguments that both kernels have, but for the tiles."""
    check_device(x)
    length = side.padded(x.shape[-1])
    values = packed = unquantized = None
    if "values" in outputs:
        values = torch.empty(*x.shape[:-1], length, dtype=dtype or computed, device=x.device)
    if "packed" in outputs:
        packed = empty_packed(x, x.shape[:-1], length, scheme)
    if plain in outputs:
        unquantized = torch.empty(x.shape, dtype=computed, device=x.device)
    seed_low, seed_high = side.halves
    return (values, packed, unquantized), compile_constants(computed, scheme, side, out=dtype) | {
        **named(packed or (None,) * 5),
        **sizes(length, scheme.macro_block or BLOCK),
        "out_ptr": None if values is None else as_stored(values),
        f"{plain}_ptr": None if unquantized is None else as_stored(unquantized),
        "signs_ptr": side.signs,
        "n_read": x.shape[-1],
        "seed_low": seed_low,
        "seed_high": seed_high,
        "alpha": alpha(scheme),
        "PTX": torch.version.hip is None and not INTERPRETED,
        "DTYPE": TRITON_DTYPES[x.dtype],
        "VALUES": values is not None,
        "PACKED": packed is not None,
        plain.upper(): unquantized is not None,
    }
