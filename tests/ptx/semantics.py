# SPDX-License-Identifier: Apache-2.0
"""What the arithmetic instructions of our kernels compute: the first rule whose pattern is the whole name. A name
without a rule is an error. Operands and results are numpy arrays of the types that stand in the name, rounded once
where the manual has it so; NaN is the manual's canonical NaN."""

import operator
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


_NAN = np.uint32(0x7FFFFFFF).view(np.float32)


def canonical(x: np.ndarray) -> np.ndarray:
    """Float32 with canonical NaN."""
    return np.where(np.isnan(x), _NAN, x)


def odd_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Float64 ``a * b + c`` of numbers with half the digits, rounded to odd, so that rounding once more to a shorter
    format errs nowhere."""
    product = a * b
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = (total.view(np.int64) & 1) == 0
    inexact = (error != 0) & even & np.isfinite(total)
    if inexact.any():
        total = np.where(inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return total


def to_bits16(x: np.ndarray, kind: str) -> np.ndarray:
    """Bits (uint16) of float64 values rounded to float16 or bfloat16."""
    if kind == "f16":
        bits = x.astype(np.float16).view(np.uint16)
    else:
        last = np.maximum(np.frexp(x)[1], -125) - 8
        nearest = np.ldexp(np.rint(np.ldexp(x, -last)), last).astype(np.float32)
        bits = (nearest.view(np.uint32) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


def of_bits16(bits: np.ndarray, kind: str, dtype: str = "f8") -> np.ndarray:
    """Values of bits (uint16), float64 by default."""
    if kind == "f16":
        return bits.view(np.float16).astype(dtype)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(dtype)


def halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low and high uint16 of uint32."""
    return (words & 0xFFFF).astype(np.uint16), (words >> 16).astype(np.uint16)


def joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Words (uint32) of low and high uint16."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << 16)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Float32 ``a * b + c``."""
    return canonical(odd_fma(*(x.astype(np.float64) for x in (a, b, c))).astype(np.float32))


def smaller(a: np.ndarray, b: np.ndarray, nan: bool) -> np.ndarray:
    """Of float32 the smaller; -0 is below +0. With ``nan``, NaN of NaN and a number, otherwise the number."""
    bits = np.where(a == b, a.view(np.uint32) | b.view(np.uint32), np.where(a < b, a, b).view(np.uint32))
    result = bits.view(np.float32)
    is_nan = (np.isnan(a) | np.isnan(b)) if nan else (np.isnan(a) & np.isnan(b))
    return np.where(is_nan, _NAN, np.where(np.isnan(a), b, np.where(np.isnan(b), a, result)))


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
    """``bfe`` of 32 bits."""
    start, length = (np.minimum(x & 0xFF, 32).astype(np.int64) for x in (start, length))
    fields = (a.astype(np.int64) >> start) & ((np.int64(1) << length) - 1)
    sign = (np.int64(1) << length) >> 1 if a.dtype.kind == "i" else 0
    return ((fields ^ sign) - sign).astype(a.dtype)


def inserted_field(a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """``bfi.b32``: the lowest bits of ``a`` in a field of ``b``."""
    start, length = (np.minimum(x & 0xFF, 32).astype(np.uint64) for x in (start, length))
    mask = ((np.uint64(1) << length) - np.uint64(1)) << start
    return ((b & ~mask) | ((a.astype(np.uint64) << start) & mask)).astype(np.uint32)


# ---- rules ----------------------------------------------------------------------------------------------------------


class Meaning(NamedTuple):
    """Types of the operands, type of the result, and the function of these operands."""

    sources: list[str]
    result: str
    compute: Callable[..., np.ndarray]


DTYPES = {
    f"{kind}{bits}": np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}") for kind in "sub" for bits in (8, 16, 32, 64)
}
DTYPES |= {"f32": np.dtype("f4"), "f16": np.dtype("u2"), "bf16": np.dtype("u2"), "pred": np.dtype("?")}
DTYPES |= {"bf16x2": np.dtype("u4"), "f16x2": np.dtype("u4"), "f32x2": np.dtype("u8")}


def _twice(kind: str) -> str:
    return kind[0] + str(2 * int(kind[1:]))


def _float_result(name: str) -> Callable:
    return lambda a, b: canonical(getattr(operator, name)(a, b))


def _pairs16(function: Callable, kind: str) -> Callable:
    """Of words the words with the function, from float64 to float64, of their halves."""

    def compute(*words: np.ndarray) -> np.ndarray:
        columns = zip(*map(halves, words), strict=True)
        return joined(*(to_bits16(function(*(of_bits16(x, kind) for x in column)), kind) for column in columns))

    return compute


def _pairs32(function: Callable) -> Callable:
    """Of uint64 words those with the function of their float32 halves."""

    def compute(*words: np.ndarray) -> np.ndarray:
        parts = [np.ascontiguousarray(word).view(np.float32).reshape(-1, 2) for word in words]
        return np.stack([function(*(part[:, side] for part in parts)) for side in (0, 1)], 1).view(np.uint64)[:, 0]

    return compute


def _of_bf16(function: Callable) -> Callable:
    """Of words those with the function, from float32 to float32, of their halves."""
    return _pairs16(lambda a, b: function(a.astype(np.float32), b.astype(np.float32)).astype(np.float64), "bf16")


def _magnitude(function: Callable) -> Callable:
    """Of magnitudes, with the exclusive or of both signs (``.xorsign.abs``)."""

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        sign = (a.view(np.uint32) ^ b.view(np.uint32)) & np.uint32(0x80000000)
        result = function(np.abs(a), np.abs(b))
        return np.where(np.isnan(result), result, (result.view(np.uint32) | sign).view(np.float32))

    return compute


def _shift(name: str, bits: int) -> Callable:
    def compute(a: np.ndarray, count: np.ndarray) -> np.ndarray:
        near = np.minimum(count, bits - 1).astype(a.dtype)
        if name == "shl":
            return np.where(count >= bits, a.dtype.type(0), a << near)
        shifted = a >> near
        return shifted if a.dtype.kind == "i" else np.where(count >= bits, a.dtype.type(0), shifted)

    return compute


def _to_integer(x: np.ndarray) -> np.ndarray:
    x = np.trunc(np.where(np.isnan(x), 0, x).astype(np.float64))
    return np.clip(x, -(2.0**31), 2.0**31 - 1).astype(np.int32)


def _reciprocal(x: np.ndarray) -> np.ndarray:
    """``rcp.approx.ftz.f32``: a unit off at most; subnormals are zeros."""
    x = np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)
    found = approximate(1.0 / x.astype(np.float64), 1)
    return np.where(np.abs(found) < 2.0**-126, np.copysign(np.float32(0), found), found)


_INT = "([su](?:16|32|64))"
#: Pattern, and a function of the groups that gives the meaning. ``div.full`` is two units off at most.
_RULES: list[tuple[str, Callable[..., Meaning]]] = [
    (rf"(add|sub)\.{_INT}", lambda op, t: Meaning([t, t], t, getattr(operator, op))),
    (rf"mul\.lo\.{_INT}", lambda t: Meaning([t, t], t, operator.mul)),
    (rf"mad\.lo\.{_INT}", lambda t: Meaning([t, t, t], t, lambda a, b, c: a * b + c)),
    (r"mul\.wide\.([su](?:16|32))", lambda t: Meaning([t, t], _twice(t), _wide(t))),
    (r"mad\.wide\.([su](?:16|32))", lambda t: Meaning([t, t, _twice(t)], _twice(t), _wide(t))),
    (r"mul\.hi\.u32", lambda: Meaning(["u32"] * 2, "u32", lambda a, b: (a.astype("u8") * b) >> np.uint64(32))),
    (rf"div\.{_INT}", lambda t: Meaning([t, t], t, lambda a, b: (a - np.fmod(a, b)) // b)),
    (rf"(min|max)\.{_INT}", lambda op, t: Meaning([t, t], t, getattr(np, f"{op}imum"))),
    (r"neg\.(s32|s64)", lambda t: Meaning([t], t, operator.neg)),
    (r"(and|or|xor)\.(b16|b32|b64|pred)", lambda op, t: Meaning([t, t], t, getattr(np, f"bitwise_{op}"))),
    (r"not\.(pred|b32)", lambda t: Meaning([t], t, operator.invert)),
    (r"(shl|shr)\.([bsu])(16|32|64)", lambda op, t, n: Meaning([t + n, "u32"], t + n, _shift(op, int(n)))),
    (r"bfe\.([su]32)", lambda t: Meaning([t, "u32", "u32"], t, bit_field)),
    (r"bfi\.b32", lambda: Meaning(["b32"] * 4, "b32", inserted_field)),
    (r"popc\.b32", lambda: Meaning(["b32"], "u32", lambda a: np.bitwise_count(a).astype(np.uint32))),
    (r"prmt\.b32", lambda: Meaning(["b32"] * 3, "b32", permuted_bytes)),
    (r"dp4a\.u32\.([su])32", lambda t: Meaning(["b32"] * 3, "b32", lambda a, b, c: byte_products(a, b, c, t == "s"))),
    (r"selp\.(b16|b32|b64|f32)", lambda t: Meaning([t, t, "pred"], t, lambda a, b, p: np.where(p, a, b))),
    (r"setp\.(eq|ne|lt|le|gt|ge)\.([bsu]\d\d)", lambda op, t: Meaning([t, t], "pred", getattr(operator, op))),
    (r"setp\.(eq|lt|le|gt|ge)\.f32", lambda op: Meaning(["f32", "f32"], "pred", getattr(operator, op))),
    (r"setp\.ne\.f32", lambda: Meaning(["f32"] * 2, "pred", lambda a, b: (a < b) | (a > b))),
    (r"setp\.neu\.f32", lambda: Meaning(["f32"] * 2, "pred", operator.ne)),
    (r"cvt\.([su]\d+)\.([su]\d+)", lambda to, t: Meaning([t], to, lambda a: a.astype(DTYPES[to]))),
    (r"cvt\.rn\.f32\.u32", lambda: Meaning(["u32"], "f32", lambda a: a.astype(np.float32))),
    (r"cvt\.rzi\.s32\.f32", lambda: Meaning(["f32"], "s32", _to_integer)),
    (r"cvt\.f32\.(b?f16)", lambda t: Meaning([t], "f32", lambda a: canonical(of_bits16(a, t, "f4")))),
    (r"cvt\.rn\.(b?f16)x2\.f32", lambda t: Meaning(["f32"] * 2, t + "x2", _to_pair(t))),
    (r"cvt\.rn\.(b?f16)\.f32", lambda t: Meaning(["f32"], t, lambda a: to_bits16(a.astype(np.float64), t))),
    (r"(add|sub|mul)(?:\.rn)?\.f32", lambda op: Meaning(["f32"] * 2, "f32", _float_result(op))),
    (
        r"(add|sub)\.rn\.f32\.(b?f16)",
        lambda op, t: Meaning([t, "f32"], "f32", lambda a, b: _float_result(op)(of_bits16(a, t, "f4"), b)),
    ),
    (r"(add|sub|mul)(?:\.rn)?\.f32x2", lambda op: Meaning(["f32x2"] * 2, "f32x2", _pairs32(_float_result(op)))),
    (r"fma\.rn\.f32", lambda: Meaning(["f32"] * 3, "f32", fma)),
    (r"fma\.rn\.f32x2", lambda: Meaning(["f32x2"] * 3, "f32x2", _pairs32(fma))),
    (r"fma\.rn\.(b?f16)x2", lambda t: Meaning([t + "x2"] * 3, t + "x2", _pairs16(odd_fma, t))),
    (r"div\.rn\.f32", lambda: Meaning(["f32"] * 2, "f32", _float_result("truediv"))),
    (r"div\.full\.f32", lambda: Meaning(["f32"] * 2, "f32", lambda a, b: approximate(a.astype("f8") / b, 2))),
    (r"rcp\.approx\.ftz\.f32", lambda: Meaning(["f32"], "f32", _reciprocal)),
    (r"abs\.f32", lambda: Meaning(["f32"], "f32", np.abs)),
    (r"neg\.f32", lambda: Meaning(["f32"], "f32", operator.neg)),
    (r"abs\.(b?f16)x2", lambda t: Meaning([t + "x2"], t + "x2", lambda a: a & np.uint32(0x7FFF7FFF))),
    (r"(min|max)(\.NaN)?\.f32", lambda op, nan: Meaning(["f32"] * 2, "f32", _extreme(op, nan))),
    (r"(min)(\.NaN)?\.xorsign\.abs\.f32", lambda op, nan: Meaning(["f32"] * 2, "f32", _magnitude(_extreme(op, nan)))),
    (r"(min|max)(\.NaN)?\.bf16x2", lambda op, nan: Meaning(["bf16x2"] * 2, "bf16x2", _of_bf16(_extreme(op, nan)))),
]


def _wide(kind: str) -> Callable:
    wide = DTYPES[_twice(kind)]
    return lambda a, b, c=0: a.astype(wide) * b.astype(wide) + c


def _to_pair(kind: str) -> Callable:
    return lambda high, low: joined(to_bits16(low.astype(np.float64), kind), to_bits16(high.astype(np.float64), kind))


def _extreme(op: str, nan: str | None) -> Callable:
    if op == "min":
        return lambda a, b: smaller(a, b, bool(nan))
    return lambda a, b: canonical(-smaller(-a, -b, bool(nan)))


def meaning_of(op: str) -> Meaning | None:
    """Return the meaning of an arithmetic instruction, `None` for a name without one."""
    matches = ((re.fullmatch(pattern, op), rule) for pattern, rule in _RULES)
    return next((rule(*found.groups()) for found, rule in matches if found), None)
