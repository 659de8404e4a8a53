# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of PTX on numpy arrays, with a single rounding where the manual has one. NaN is the manual's canonical
NaN."""

import numpy as np


#: Of a format: bits of its significand, exponent of the smallest normal number, the largest number.
FORMATS = {
    "f32": (24, -126, float(np.finfo(np.float32).max)),
    "f16": (11, -14, 65504.0),
    "bf16": (8, -126, (2 - 2.0**-7) * 2.0**127),
}
_NAN = np.uint32(0x7FFFFFFF).view(np.float32)


def canonical(x: np.ndarray) -> np.ndarray:
    """Float32 with canonical NaN."""
    return np.where(np.isnan(x), _NAN, x)


def odd_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Float64 ``a + b`` rounded to odd, so that rounding once more to a shorter format errs nowhere."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    even = (total.view(np.int64) & 1) == 0
    inexact = (error != 0) & even & np.isfinite(total)
    if inexact.any():
        total = np.where(inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return total


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """Float64 values to the nearest numbers of a format, ties to even, as float64; beyond the largest, infinity."""
    digits, least, largest = FORMATS[kind]
    exponent = np.maximum(np.frexp(x)[1] - 1, least) - digits + 1
    result = np.ldexp(np.rint(np.ldexp(x, -exponent)), exponent)
    return np.where(np.abs(result) > largest, np.copysign(np.inf, x), result)


def to_bits16(x: np.ndarray, kind: str) -> np.ndarray:
    """Bits (uint16) of float64 values rounded to float16 or bfloat16."""
    x = rounded(x, kind)
    if kind == "f16":
        bits = x.astype(np.float16).view(np.uint16)
    else:
        bits = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


def of_bits16(bits: np.ndarray, kind: str) -> np.ndarray:
    """Float64 values of bits (uint16)."""
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low and high uint16 of uint32."""
    return (words & 0xFFFF).astype(np.uint16), (words >> 16).astype(np.uint16)


def joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Words (uint32) of low and high uint16."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << 16)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Float32 ``a * b + c``."""
    product = a.astype(np.float64) * b.astype(np.float64)
    return canonical(odd_sum(product, c.astype(np.float64)).astype(np.float32))


def smaller(a: np.ndarray, b: np.ndarray, nan: bool) -> np.ndarray:
    """Of float32 the smaller; -0 is below +0. With ``nan``, NaN of NaN and a number, otherwise the number."""
    bits = np.where(a == b, a.view(np.uint32) | b.view(np.uint32), np.where(a < b, a, b).view(np.uint32))
    result = bits.view(np.float32)
    is_nan = (np.isnan(a) | np.isnan(b)) if nan else (np.isnan(a) & np.isnan(b))
    return np.where(is_nan, _NAN, np.where(np.isnan(a), b, np.where(np.isnan(b), a, result)))


def larger(a: np.ndarray, b: np.ndarray, nan: bool) -> np.ndarray:
    """As [`smaller`], the larger."""
    return canonical(-smaller(-a, -b, nan))


def smaller_magnitude(a: np.ndarray, b: np.ndarray, nan: bool) -> np.ndarray:
    """The smaller magnitude with the exclusive or of both signs (``.xorsign.abs``)."""
    sign = (a.view(np.uint32) ^ b.view(np.uint32)) & np.uint32(0x80000000)
    result = smaller(np.abs(a), np.abs(b), nan)
    return np.where(np.isnan(result), result, (result.view(np.uint32) | sign).view(np.float32))


def approximate(exact: np.ndarray, ulps: int) -> np.ndarray:
    """Float32 off the exact float64 values by up to ``ulps`` units, the same for the same values: what an approximate
    instruction may return. Next to powers of two, where units differ, and for these, the nearest number."""
    nearest = exact.astype(np.float32)
    bits = nearest.view(np.int32)
    below = bits - (np.abs(nearest) > np.abs(exact))
    noise = ((bits.view(np.uint32) * np.uint32(2654435761)) >> 16).astype(np.int32) % (2 * ulps) + 1 - ulps
    fraction = bits & 0x7FFFFF
    free = (fraction > ulps) & (fraction < 0x7FFFFF - ulps) & np.isfinite(nearest)
    return canonical(np.where(free, below + noise, bits).astype(np.int32).view(np.float32))


def truncated_quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integer quotient towards zero."""
    return (a - np.fmod(a, b)) // b


def permuted_bytes(a: np.ndarray, b: np.ndarray, selectors: np.ndarray) -> np.ndarray:
    """``prmt.b32`` in its default mode: bit 3 of a digit repeats the sign of the byte."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros(np.broadcast(a, b, selectors).shape, np.uint32)
    for place in range(4):
        digit = (selectors >> np.uint32(4 * place)) & np.uint32(15)
        byte = ((both >> (8 * (digit & 7)).astype(np.uint64)) & np.uint64(0xFF)).astype(np.uint32)
        byte = np.where(digit > 7, (byte >> 7) * np.uint32(0xFF), byte)
        out |= byte << np.uint32(8 * place)
    return out


def byte_products(a: np.ndarray, b: np.ndarray, total: np.ndarray, signed: bool) -> np.ndarray:
    """``dp4a`` of unsigned bytes with bytes, modulo 2**32."""
    bytes_b = np.ascontiguousarray(np.broadcast_to(b, total.shape)).view(np.int8 if signed else np.uint8)
    bytes_a = np.ascontiguousarray(np.broadcast_to(a, total.shape)).view(np.uint8)
    products = bytes_a.astype(np.int64) * bytes_b.astype(np.int64)
    return (products.reshape(*total.shape, 4).sum(-1) + total.astype(np.int64)).astype(np.uint32)


def bit_field(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """``bfe`` of int64 or uint64 holding 32-bit numbers."""
    start, length = (start & 0xFF).astype(np.int64), (length & 0xFF).astype(np.int64)
    signed = a.dtype.kind == "i"
    a = a.astype(np.int64)
    fields = (a >> np.minimum(start, 63)) & ((np.int64(1) << np.minimum(length, 32)) - 1)
    if signed:
        last = np.minimum(start + length - 1, 31)
        sign = np.where(length > 0, (a >> np.maximum(last, 0)) & 1, 0)
        return np.where(sign == 1, fields | (np.int64(-1) << np.minimum(length, 32)), fields).astype(np.int32)
    return fields.astype(np.uint32)


def inserted_field(a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """``bfi.b32``: the lowest bits of ``a`` in a field of ``b``."""
    start, length = (np.minimum(x & 0xFF, 32).astype(np.uint64) for x in (start, length))
    mask = ((np.uint64(1) << length) - np.uint64(1)) << start
    return ((b & ~mask) | ((a.astype(np.uint64) << start) & mask)).astype(np.uint32)
