# SPDX-License-Identifier: Apache-2.0
"""The kernels that compute what is quantized: RMSNorm and SwiGLU, each with its result quantized in registers.

They round where transformers' modules round, and hand the float32 value of what was rounded to the tile functions that
all quantize kernels share: the result is that of the unfused kernels, bit for bit, on the same normed value or product.
"""

import triton
import triton.language as tl

from ..common.tile import (
    as_float,
    fake_tile,
    load,
    offsets_in_tile,
    pack_tile,
    rotated,
    store,
    store_values,
    tile_start,
)


@triton.jit
def round_to(value, DTYPE: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr):
    """Float32 values rounded to a dtype, as float32. ``PTX``: for CUDA; every thread then has pairs of neighbours."""
    if DTYPE == tl.float32:
        return value
    elif INTERPRETED and DTYPE == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return tl.where(value == value, bits.to(tl.float32, bitcast=True), value)
    elif PTX and DTYPE == tl.bfloat16:
        # Two at a time. What is not stored the compiler converts one by one, on a unit with a fraction of the rate.
        convert: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        pairs = tl.inline_asm_elementwise(convert, "=r,r,r", [value], dtype=tl.bfloat16, is_pure=True, pack=2)
        return pairs.to(tl.float32)
    else:
        return value.to(DTYPE).to(tl.float32)


@triton.jit
def _load_row(pointer, col_start, offsets, n_cols, BF16: tl.constexpr):
    """What there is one of for each column, as float32 ``[1, ...]``; zero past the last."""
    return as_float(tl.load(pointer + col_start + offsets, mask=offsets < n_cols - col_start, other=0), BF16)


@triton.jit
def _quantize_tile(
    x,
    out_ptr,
    codes_ptr,
    scale_ptr,
    macro_ptr,
    residual_codes_ptr,
    residual_scale_ptr,
    signs_ptr,
    rows,
    col_start,
    n_rows,
    n_cols,
    n_codes,
    n_blocks,
    n_macros,
    seed_low,
    seed_high,
    alpha,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    VALUES: tl.constexpr,
    PACKED: tl.constexpr,
    MACRO: tl.constexpr,
    SEARCH: tl.constexpr,
    HAS_FALLBACK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROTATION: tl.constexpr,
    ROTATION_SCALE: tl.constexpr,
    HAS_SIGNS: tl.constexpr,
    CARRY: tl.constexpr,
    CLIPS: tl.constexpr,
    LEAST_SQUARES: tl.constexpr,
    LIMITED: tl.constexpr,
    LARGEST: tl.constexpr,
    OUT_BF16: tl.constexpr,
    TILES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write MXFP4 values (``VALUES``), codes and scale bytes (``PACKED``) or both of a tile. The compiler computes what
    both have in common once, but for a search's loop."""
    x = rotated(x, col_start, n_cols, signs_ptr, COLS, MACRO, ROTATION, ROTATION_SCALE, HAS_SIGNS)
    if VALUES:
        fake_tile(
            x,
            out_ptr,
            rows,
            col_start,
            n_rows,
            n_cols,
            alpha,
            0,
            seed_low,
            seed_high,
            ROWS,
            COLS,
            MACRO,
            SEARCH,
            HAS_FALLBACK,
            STOCHASTIC,
            CARRY,
            CLIPS,
            LEAST_SQUARES,
            LIMITED,
            LARGEST,
            OUT_BF16,
            TILES,
            INTERPRETED,
        )
    if PACKED:
        pack_tile(
            x,
            codes_ptr,
            scale_ptr,
            macro_ptr,
            residual_codes_ptr,
            residual_scale_ptr,
            rows,
            col_start,
            n_rows,
            n_cols,
            n_codes,
            n_blocks,
            n_macros,
            0,
            seed_low,
            seed_high,
            ROWS,
            COLS,
            MACRO,
            SEARCH,
            HAS_FALLBACK,
            STOCHASTIC,
            CARRY,
            CLIPS,
            LEAST_SQUARES,
            LIMITED,
            TILES,
            INTERPRETED,
        )


@triton.jit
def _hidden(
    x_ptr,
    skip_ptr,
    rows,
    col_start,
    offsets,
    n_rows,
    n_read,
    x_row_stride,
    skip_row_stride,
    DTYPE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    PTX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """What is normed: ``x``, plus the residual stream where there is one, rounded to their dtype."""
    x = load(x_ptr, rows, col_start, offsets, n_rows, n_read, x_row_stride, DTYPE == tl.bfloat16)
    if HAS_SKIP:
        skip = load(skip_ptr, rows, col_start, offsets, n_rows, n_read, skip_row_stride, DTYPE == tl.bfloat16)
        x = round_to(x + skip, DTYPE, PTX, INTERPRETED)
    return x


@triton.jit(do_not_specialize=["n_rows", "seed_low", "seed_high"])
def rms_norm_kernel(
    x_ptr,
    skip_ptr,
    weight_ptr,
    noise_ptr,
    hidden_ptr,
    rstd_ptr,
    normed_ptr,
    out_ptr,
    codes_ptr,
    scale_ptr,
    macro_ptr,
    residual_codes_ptr,
    residual_scale_ptr,
    signs_ptr,
    n_rows,
    n_cols,
    n_read,
    x_row_stride,
    skip_row_stride,
    n_codes,
    n_blocks,
    n_macros,
    seed_low,
    seed_high,
    alpha,
    eps,
    length,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEPS: tl.constexpr,
    DTYPE: tl.constexpr,
    WEIGHT_BF16: tl.constexpr,
    NORMED_DTYPE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    NOISY: tl.constexpr,
    NORMED: tl.constexpr,
    VALUES: tl.constexpr,
    PACKED: tl.constexpr,
    MACRO: tl.constexpr,
    SEARCH: tl.constexpr,
    HAS_FALLBACK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROTATION: tl.constexpr,
    ROTATION_SCALE: tl.constexpr,
    HAS_SIGNS: tl.constexpr,
    CARRY: tl.constexpr,
    CLIPS: tl.constexpr,
    LEAST_SQUARES: tl.constexpr,
    LIMITED: tl.constexpr,
    LARGEST: tl.constexpr,
    OUT_BF16: tl.constexpr,
    TILES: tl.constexpr,
    PTX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """RMSNorm of ``x[n_rows, n_read]`` (plus ``skip``, of the same shape and dtype), quantized along its rows with
    ``n_cols`` elements, of which those from ``n_read`` on are zero before a rotation. One program per ``ROWS`` rows.

    ``STEPS`` tiles of ``COLS`` columns make a row. One is kept in registers; of more the inputs are read twice, the
    second time from the cache. ``length`` is ``n_read`` as float32.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None, None]
    offsets = offsets_in_tile(COLS, MACRO, 32, 32)
    squares = tl.zeros([ROWS, COLS // MACRO, MACRO // 32, 32], tl.float32)
    h = squares
    # Asked for before the sum is waited for.
    weight = _load_row(weight_ptr, 0, offsets, n_read, WEIGHT_BF16)
    for step in range(STEPS):
        at = step * COLS
        h = _hidden(
            x_ptr,
            skip_ptr,
            rows,
            at,
            offsets,
            n_rows,
            n_read,
            x_row_stride,
            skip_row_stride,
            DTYPE,
            HAS_SKIP,
            PTX,
            INTERPRETED,
        )
        if HAS_SKIP:
            store_values(hidden_ptr, rows, at, offsets, n_rows, n_read, h, DTYPE == tl.bfloat16, INTERPRETED)
        squares += h * h
    total = tl.sum(tl.sum(tl.sum(squares, axis=3, keep_dims=True), axis=2, keep_dims=True), axis=1, keep_dims=True)
    variance = tl.div_rn(total, tl.full(total.shape, 1.0, tl.float32) * length)
    # Correctly rounded, unlike the reciprocal root of a GPU: the same on all.
    rstd = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    store(rstd_ptr, rows, 0, offsets_in_tile(MACRO, MACRO, MACRO, 1), n_rows, 1, rstd)
    for step in range(STEPS):
        at = step * COLS
        if STEPS > 1:
            h = _hidden(
                x_ptr,
                skip_ptr,
                rows,
                at,
                offsets,
                n_rows,
                n_read,
                x_row_stride,
                skip_row_stride,
                DTYPE,
                HAS_SKIP,
                PTX,
                INTERPRETED,
            )
            weight = _load_row(weight_ptr, at, offsets, n_read, WEIGHT_BF16)
        y = h * rstd
        if NOISY:
            y = (weight + _load_row(noise_ptr, at, offsets, n_read, False)) * y
        else:
            y = weight * round_to(y, DTYPE, PTX, INTERPRETED)
        y = round_to(y, NORMED_DTYPE, PTX, INTERPRETED)
        if NORMED:
            store_values(normed_ptr, rows, at, offsets, n_rows, n_read, y, NORMED_DTYPE == tl.bfloat16, INTERPRETED)
        _quantize_tile(
            y,
            out_ptr,
            codes_ptr,
            scale_ptr,
            macro_ptr,
            residual_codes_ptr,
            residual_scale_ptr,
            signs_ptr,
            rows,
            at,
            n_rows,
            n_cols,
            n_codes,
            n_blocks,
            n_macros,
            seed_low,
            seed_high,
            alpha,
            ROWS,
            COLS,
            VALUES,
            PACKED,
            MACRO,
            SEARCH,
            HAS_FALLBACK,
            STOCHASTIC,
            ROTATION,
            ROTATION_SCALE,
            HAS_SIGNS,
            CARRY,
            CLIPS,
            LEAST_SQUARES,
            LIMITED,
            LARGEST,
            OUT_BF16,
            TILES,
            INTERPRETED,
        )


@triton.jit(do_not_specialize=["n_rows", "col_tiles", "seed_low", "seed_high"])
def swiglu_kernel(
    gate_ptr,
    up_ptr,
    product_ptr,
    out_ptr,
    codes_ptr,
    scale_ptr,
    macro_ptr,
    residual_codes_ptr,
    residual_scale_ptr,
    signs_ptr,
    n_rows,
    n_cols,
    n_read,
    gate_row_stride,
    up_row_stride,
    n_codes,
    n_blocks,
    n_macros,
    col_tiles,
    seed_low,
    seed_high,
    alpha,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRODUCT: tl.constexpr,
    VALUES: tl.constexpr,
    PACKED: tl.constexpr,
    MACRO: tl.constexpr,
    SEARCH: tl.constexpr,
    HAS_FALLBACK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROTATION: tl.constexpr,
    ROTATION_SCALE: tl.constexpr,
    HAS_SIGNS: tl.constexpr,
    CARRY: tl.constexpr,
    CLIPS: tl.constexpr,
    LEAST_SQUARES: tl.constexpr,
    LIMITED: tl.constexpr,
    LARGEST: tl.constexpr,
    OUT_BF16: tl.constexpr,
    TILES: tl.constexpr,
    PTX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``silu(gate) * up`` of matrices ``[n_rows, n_read]``, quantized as in [`rms_norm_kernel`]. One program per
    tile, of which ``col_tiles`` lie side by side."""
    row_start, col_start = tile_start(col_tiles, ROWS, COLS)
    rows = row_start + tl.arange(0, ROWS)[:, None, None, None]
    offsets = offsets_in_tile(COLS, MACRO, 32, 32)
    gate = load(gate_ptr, rows, col_start, offsets, n_rows, n_read, gate_row_stride, DTYPE == tl.bfloat16)
    up = load(up_ptr, rows, col_start, offsets, n_rows, n_read, up_row_stride, DTYPE == tl.bfloat16)
    silu = round_to(gate / (1.0 + tl.exp(-gate)), DTYPE, PTX, INTERPRETED)
    y = round_to(silu * up, DTYPE, PTX, INTERPRETED)
    if PRODUCT:
        store_values(product_ptr, rows, col_start, offsets, n_rows, n_read, y, DTYPE == tl.bfloat16, INTERPRETED)
    _quantize_tile(
        y,
        out_ptr,
        codes_ptr,
        scale_ptr,
        macro_ptr,
        residual_codes_ptr,
        residual_scale_ptr,
        signs_ptr,
        rows,
        col_start,
        n_rows,
        n_cols,
        n_codes,
        n_blocks,
        n_macros,
        seed_low,
        seed_high,
        alpha,
        ROWS,
        COLS,
        VALUES,
        PACKED,
        MACRO,
        SEARCH,
        HAS_FALLBACK,
        STOCHASTIC,
        ROTATION,
        ROTATION_SCALE,
        HAS_SIGNS,
        CARRY,
        CLIPS,
        LEAST_SQUARES,
        LIMITED,
        LARGEST,
        OUT_BF16,
        TILES,
        INTERPRETED,
    )
