# SPDX-License-Identifier: Apache-2.0
"""Two 16-bit numbers in an int32 word, and what is computed on both at once: instructions of NVIDIA GPUs from sm_80 on.

The first element of a pair is in the low half. The interpreter, which has no assembler, computes each half in float64,
where what is asked of it here is exact or far from a tie, and rounds to nearest, ties to even.
"""

import triton
import triton.language as tl


LOW = tl.constexpr(0x0000FFFF)
HIGH = tl.constexpr(-0x10000)


@triton.jit
def words_of(x, BLOCKS: tl.constexpr):
    """Return the four words, each ``[ROWS, macro blocks, BLOCKS, 4]``, of every eight neighbours in a row of int16 bits
    ``[ROWS, COLS]``, given the blocks of a macro block."""
    low, high = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // (32 * BLOCKS), BLOCKS, 4, 2, 2, 2]))
    even, odd = tl.split((low.to(tl.int32) & LOW) | (high.to(tl.int32) << 16))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _four(a, b, c, d):
    """Four tensors side by side along a new axis, in one thread."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [a.shape[0], a.shape[1], a.shape[2], 4])


@triton.jit
def _load_eight(pointers, mask, FIRST: tl.constexpr):
    even, odd = tl.split(
        tl.reshape(tl.load(pointers + FIRST, mask=mask, other=0), [mask.shape[0], mask.shape[1], mask.shape[2], 2, 2])
    )
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def read_words(
    x_ptr,
    row_start,
    col_start,
    n_rows,
    n_cols,
    x_row_stride,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """[`words_of`] bfloat16 in memory, in rows that start with a word, zero outside of the matrix. A thread reads whole
    blocks, so that what is found for a block is found once."""
    rows = (row_start + tl.arange(0, ROWS))[:, None, None, None]
    macros = tl.arange(0, COLS // (32 * BLOCKS))[None, :, None, None] * BLOCKS
    offsets = (macros + tl.arange(0, BLOCKS)[None, None, :, None]) * 16 + tl.arange(0, 4)[None, None, None, :]
    mask = (rows < n_rows) & (offsets < (n_cols - col_start) // 2)
    pointers = (x_ptr + col_start).to(tl.pointer_type(tl.int32), bitcast=True) + rows * (x_row_stride // 2) + offsets
    a, b = _load_eight(pointers, mask, 0), _load_eight(pointers, mask, 4)
    c, d = _load_eight(pointers, mask, 8), _load_eight(pointers, mask, 12)
    return (
        _four(a[0], b[0], c[0], d[0]),
        _four(a[1], b[1], c[1], d[1]),
        _four(a[2], b[2], c[2], d[2]),
        _four(a[3], b[3], c[3], d[3]),
    )


@triton.jit
def _number(words, F16: tl.constexpr):
    """Float64 values of the low halves, float16 or bfloat16."""
    if F16:
        return (words & LOW).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float64)
    else:
        return (words << 16).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _bits(value, F16: tl.constexpr):
    """16 bits (int32) of float64 values. bfloat16 is rounded from float32, whose further digits matter near no tie."""
    if F16:
        return value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & LOW
    else:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & LOW


@triton.jit
def larger(a, b, INTERPRETED: tl.constexpr):
    """Of both halves the larger of two bfloat16 magnitudes, NaN above infinity."""
    if INTERPRETED:
        return tl.maximum(a & LOW, b & LOW) | tl.maximum(a & HIGH, b & HIGH)
    else:
        return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def smaller(a, b, INTERPRETED: tl.constexpr):
    """Of both halves the smaller of two magnitudes, float16 or bfloat16, whose order is the same; the other one where
    one is NaN as bfloat16."""
    if INTERPRETED:
        return tl.minimum(a & LOW, b & LOW) | tl.minimum(a & HIGH, b & HIGH)
    else:
        return tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def multiply_add(a, b, c, INTERPRETED: tl.constexpr, F16: tl.constexpr = False):
    """Return ``a * b + c`` of bfloat16 or float16, rounded once with subnormals. Constants may be `tl.constexpr`."""
    b, c = tl.full(a.shape, 0, tl.int32) + b, tl.full(a.shape, 0, tl.int32) + c
    if INTERPRETED:
        low = _number(a, F16) * _number(b, F16) + _number(c, F16)
        high = _number(a >> 16, F16) * _number(b >> 16, F16) + _number(c >> 16, F16)
        return _bits(low, F16) | (_bits(high, F16) << 16)
    else:
        assembly: tl.constexpr = "fma.rn.f16x2 $0, $1, $2, $3;" if F16 else "fma.rn.bf16x2 $0, $1, $2, $3;"
        return tl.inline_asm_elementwise(assembly, "=r,r,r,r", [a, b, c], tl.int32, is_pure=True, pack=1)


@triton.jit
def multiply(a, b, INTERPRETED: tl.constexpr, F16: tl.constexpr = False):
    """Return ``a * b`` as in [`multiply_add`]."""
    # -0, which added to a product changes no bit of it.
    return multiply_add(a, b, -0x7FFF8000, INTERPRETED, F16)


@triton.jit
def bytes_of(low, high, selectors, INTERPRETED: tl.constexpr):
    """For each of the lowest four hexadecimal digits of ``selectors``, up to 7, the byte of that number of eight: those
    of ``low``, then those of ``high``."""
    selectors = tl.full(high.shape, 0, tl.int32) + selectors
    if INTERPRETED:
        out = tl.zeros_like(selectors)
        for place in tl.static_range(4):
            digit = (selectors >> (4 * place)) & 7
            byte = tl.where(digit < 4, low, high) >> ((digit & 3) * 8)
            out = out | ((byte & 0xFF) << (8 * place))
        return out
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selectors], tl.int32, is_pure=True, pack=1
        )


@triton.jit
def dot(a, b, total, SIGNED: tl.constexpr, INTERPRETED: tl.constexpr):
    """``total`` and the products of the four bytes of ``a`` with those of ``b``, which may be ``SIGNED``."""
    if INTERPRETED:
        for place in tl.static_range(4):
            byte = (b >> (8 * place)) & 0xFF
            if SIGNED:
                byte = (byte ^ 0x80) - 0x80
            total = total + ((a >> (8 * place)) & 0xFF) * byte
        return total
    else:
        assembly: tl.constexpr = "dp4a.u32.s32 $0, $1, $2, $3;" if SIGNED else "dp4a.u32.u32 $0, $1, $2, $3;"
        return tl.inline_asm_elementwise(assembly, "=r,r,r,r", [a, b, total], tl.int32, is_pure=True, pack=1)
