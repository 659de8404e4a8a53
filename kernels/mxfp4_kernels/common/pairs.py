# SPDX-License-Identifier: Apache-2.0
"""Two 16-bit numbers in an int32 word, and what is computed on both at once: instructions of NVIDIA GPUs from sm_80 on.

The first element of a pair is in the low half. The interpreter, which has no assembler, computes each half in float64,
where what is asked of it here is exact or far from a tie, and rounds to nearest, ties to even.
"""

import triton
import triton.language as tl


LOW = tl.constexpr(0x0000FFFF)
HIGH = tl.constexpr(-0x10000)
# Magnitudes of both halves.
_MAGNITUDES = tl.constexpr(0x7FFF7FFF)


@triton.jit
def _low(words, F16: tl.constexpr):
    """Float64 values of the low halves."""
    if F16:
        return (words & LOW).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float64)
    else:
        return (words << 16).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _bits(value, F16: tl.constexpr):
    """16 bits (int32) of float64 values that are no NaN. bfloat16 is rounded from float32, whose further digits no
    value has that is near a tie."""
    if F16:
        return value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & LOW
    else:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & LOW


@triton.jit
def magnitudes(words, INTERPRETED: tl.constexpr):
    """The magnitudes of two bfloat16."""
    if INTERPRETED:
        return words & _MAGNITUDES
    else:
        return tl.inline_asm_elementwise("abs.bf16x2 $0, $1;", "=r,r", [words], tl.int32, is_pure=True, pack=1)


@triton.jit
def _larger(a, b):
    return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def larger(a, b, INTERPRETED: tl.constexpr):
    """Of both halves the larger of two magnitudes, NaN above infinity. As bfloat16, whose order is that of integers."""
    if INTERPRETED:
        return tl.maximum(a & LOW, b & LOW) | tl.maximum(a & HIGH, b & HIGH)
    else:
        return _larger(a, b)


@triton.jit
def largest(a, AXIS: tl.constexpr, INTERPRETED: tl.constexpr):
    """[`larger`] along an axis, which stays with a length of 1."""
    if INTERPRETED:
        return tl.max(a & LOW, axis=AXIS, keep_dims=True) | tl.max(a & HIGH, axis=AXIS, keep_dims=True)
    else:
        return tl.reduce(a, AXIS, _larger, keep_dims=True)


@triton.jit
def smaller(a, b, INTERPRETED: tl.constexpr):
    """Of both halves the smaller of two magnitudes; the other one where one is NaN."""
    if INTERPRETED:
        return tl.minimum(a & LOW, b & LOW) | tl.minimum(a & HIGH, b & HIGH)
    else:
        return tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def multiply_add(a, b, c, INTERPRETED: tl.constexpr, F16: tl.constexpr = False):
    """``a * b + c`` of finite bfloat16, or of float16, rounded once; subnormals are kept."""
    if INTERPRETED:
        low = _low(a, F16) * _low(b, F16) + _low(c, F16)
        high = _low(a >> 16, F16) * _low(b >> 16, F16) + _low(c >> 16, F16)
        return _bits(low, F16) | (_bits(high, F16) << 16)
    else:
        assembly: tl.constexpr = "fma.rn.f16x2 $0, $1, $2, $3;" if F16 else "fma.rn.bf16x2 $0, $1, $2, $3;"
        return tl.inline_asm_elementwise(assembly, "=r,r,r,r", [a, b, c], tl.int32, is_pure=True, pack=1)


@triton.jit
def multiply(a, b, INTERPRETED: tl.constexpr, F16: tl.constexpr = False):
    """``a * b`` as in [`multiply_add`]."""
    # -0, which added to a product changes no bit of it.
    return multiply_add(a, b, tl.full(a.shape, -0x7FFF8000, tl.int32), INTERPRETED, F16)


@triton.jit
def floats(words, F16: tl.constexpr, INTERPRETED: tl.constexpr):
    """Float32 of the low halves, bfloat16 or float16, and of the high ones."""
    if not F16:
        return (words << 16).to(tl.float32, bitcast=True), (words & HIGH).to(tl.float32, bitcast=True)
    elif INTERPRETED:
        return _low(words, F16).to(tl.float32), _low(words >> 16, F16).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=f,=f,r",
            [words],
            (tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def bfloat16_words(low, high, INTERPRETED: tl.constexpr):
    """Words of two bfloat16, rounded to nearest from float32."""
    if INTERPRETED:
        return _bits(low.to(tl.float64), False) | (_bits(high.to(tl.float64), False) << 16)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, is_pure=True, pack=1
        )


@triton.jit
def permute(a, b, SELECT: tl.constexpr, INTERPRETED: tl.constexpr):
    """Four bytes of eight, those of ``a`` and then of ``b``: the lowest is the one that the last hexadecimal digit of
    ``SELECT`` names."""
    if INTERPRETED:
        out = tl.zeros_like(a)
        for place in tl.static_range(4):
            source = b if (SELECT >> (4 * place)) & 4 else a
            out = out | (((source >> (8 * ((SELECT >> (4 * place)) & 3))) & 0xFF) << (8 * place))
        return out
    else:
        select = tl.full(a.shape, SELECT, tl.int32)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, select], tl.int32, is_pure=True, pack=1
        )


@triton.jit
def look_up(low, high, selectors, INTERPRETED: tl.constexpr):
    """For each of the lowest four hexadecimal digits, up to 7, of ``selectors`` the byte of that number of eight, those
    of ``low`` and then of ``high``."""
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


@triton.jit
def reciprocal(x, INTERPRETED: tl.constexpr):
    """``1 / x`` of float32 in [1, 2), to ``2**-23``."""
    if INTERPRETED:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _half_of_words(x_ptr, row_stride, n_rows, n_cols, shape: tl.constexpr, HALF: tl.constexpr):
    """Words 0 to 3 of every eight (``HALF`` 0), or 4 to 7 (1), of a tile of rows that start with a word."""
    eighths = tl.arange(0, shape[1] * 8)[None, :, None]
    offsets = eighths * 8 + 4 * HALF + tl.arange(0, 4)[None, None, :]
    rows = tl.arange(0, shape[0])[:, None, None]
    pointers = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + rows * (row_stride >> 1).to(tl.int32) + offsets
    words = tl.load(pointers, mask=(rows < n_rows) & (offsets < n_cols >> 1), other=0)
    even, odd = tl.split(tl.reshape(words, [shape[0], shape[1], 4, 2, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def words_of_rows(x_ptr, row_stride, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The eight words of every sixteen neighbours in a tile of rows that start with a word, zero from ``n_rows`` and
    ``n_cols`` (even) on."""
    w0, w1, w2, w3 = _half_of_words(x_ptr, row_stride, n_rows, n_cols, [ROWS, COLS // 128], 0)
    w4, w5, w6, w7 = _half_of_words(x_ptr, row_stride, n_rows, n_cols, [ROWS, COLS // 128], 1)
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def words_of_columns(x_ptr, row_stride, n_rows, n_cols, COLS: tl.constexpr):
    """The same of a tile of 128 rows, in its columns."""
    rows, cols = tl.arange(0, 128)[:, None], tl.arange(0, COLS)[None, :]
    x = tl.load(x_ptr + rows * row_stride + cols, mask=(rows < n_rows) & (cols < n_cols), other=0)
    # Taking them apart makes the compiler move neighbours in a column into one thread, in their narrow type.
    low, high = tl.split(tl.reshape(tl.trans(x), [COLS, 1, 4, 2, 2, 2, 2, 2]))
    even, odd = tl.split((low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16))
    w04, w26 = tl.split(even)
    w15, w37 = tl.split(odd)
    w0, w4 = tl.split(w04)
    w1, w5 = tl.split(w15)
    w2, w6 = tl.split(w26)
    w3, w7 = tl.split(w37)
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def four_magnitudes(w, INTERPRETED: tl.constexpr):
    """The magnitudes of four words."""
    m0, m1 = magnitudes(w[0], INTERPRETED), magnitudes(w[1], INTERPRETED)
    m2, m3 = magnitudes(w[2], INTERPRETED), magnitudes(w[3], INTERPRETED)
    return m0, m1, m2, m3


@triton.jit
def largest_of_four(m, INTERPRETED: tl.constexpr):
    """Of both halves the largest of four magnitudes."""
    return larger(larger(m[0], m[1], INTERPRETED), larger(m[2], m[3], INTERPRETED), INTERPRETED)


@triton.jit
def eight_magnitudes(words, INTERPRETED: tl.constexpr):
    """The magnitudes of the eight words of [`words_of_rows`]."""
    w0, w1, w2, w3, w4, w5, w6, w7 = words
    m0, m1, m2, m3 = four_magnitudes((w0, w1, w2, w3), INTERPRETED)
    m4, m5, m6, m7 = four_magnitudes((w4, w5, w6, w7), INTERPRETED)
    return m0, m1, m2, m3, m4, m5, m6, m7


@triton.jit
def maxima_of_blocks(m, INTERPRETED: tl.constexpr):
    """The largest of the magnitudes of [`eight_magnitudes`] in each block, ``[.., 1]``, in both halves of a word."""
    m0, m1, m2, m3, m4, m5, m6, m7 = m
    low, high = largest_of_four((m0, m1, m2, m3), INTERPRETED), largest_of_four((m4, m5, m6, m7), INTERPRETED)
    maxima = larger(low, high, INTERPRETED)
    maxima = larger(maxima, permute(maxima, maxima, 0x1032, INTERPRETED), INTERPRETED)
    return largest(maxima, 3, INTERPRETED)
