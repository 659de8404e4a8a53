# SPDX-License-Identifier: Apache-2.0
"""What the arithmetic instructions of our kernels compute: the first rule whose pattern is the whole name. A name
without a rule is an error. Operands and results are numpy arrays of the types that stand in the name."""

import operator
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .arithmetic import (
    approximate,
    bit_field,
    byte_products,
    canonical,
    fma,
    halves,
    inserted_field,
    joined,
    larger,
    odd_sum,
    of_bits16,
    permuted_bytes,
    smaller,
    smaller_magnitude,
    to_bits16,
    truncated_quotient,
)


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

_COMPARISONS = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt}
_COMPARISONS["ge"] = operator.ge
_BITS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_SUMS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


def _twice(kind: str) -> str:
    return kind[0] + str(2 * int(kind[1:]))


def _float_result(function: Callable) -> Callable:
    return lambda *operands: canonical(function(*operands))


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


def _of_numbers(function: Callable) -> Callable:
    """``max`` and ``min`` of float64 through float32, which holds both 16-bit formats."""
    return lambda a, b: function(a.astype(np.float32), b.astype(np.float32)).astype(np.float64)


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


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``div.full.f32``: two units off at most."""
    return approximate(a.astype(np.float64) / b.astype(np.float64), 2)


def _fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return odd_sum(a * b, c)


def _popc(x: np.ndarray) -> np.ndarray:
    return np.bitwise_count(x).astype(np.uint32)


_INT = "([su](?:16|32|64))"
#: Pattern, and a function of the groups that gives the meaning.
_RULES: list[tuple[str, Callable[..., Meaning]]] = [
    (rf"(add|sub)\.{_INT}", lambda op, t: Meaning([t, t], t, _SUMS[op])),
    (rf"mul\.lo\.{_INT}", lambda t: Meaning([t, t], t, operator.mul)),
    (rf"mad\.lo\.{_INT}", lambda t: Meaning([t, t, t], t, lambda a, b, c: a * b + c)),
    (r"mul\.wide\.([su](?:16|32))", lambda t: Meaning([t, t], _twice(t), _wide(t))),
    (r"mad\.wide\.([su](?:16|32))", lambda t: Meaning([t, t, _twice(t)], _twice(t), _wide(t))),
    (
        r"mul\.hi\.u32",
        lambda: Meaning(["u32"] * 2, "u32", lambda a, b: ((a.astype("u8") * b) >> np.uint64(32)).astype("u4")),
    ),
    (rf"div\.{_INT}", lambda t: Meaning([t, t], t, truncated_quotient)),
    (rf"(min|max)\.{_INT}", lambda op, t: Meaning([t, t], t, np.minimum if op == "min" else np.maximum)),
    (r"neg\.(s32|s64)", lambda t: Meaning([t], t, operator.neg)),
    (r"(and|or|xor)\.(b16|b32|b64|pred)", lambda op, t: Meaning([t, t], t, _BITS[op])),
    (r"not\.(pred|b32)", lambda t: Meaning([t], t, operator.invert)),
    (r"(shl|shr)\.([bsu])(16|32|64)", lambda op, t, n: Meaning([t + n, "u32"], t + n, _shift(op, int(n)))),
    (r"bfe\.([su]32)", lambda t: Meaning([t, "u32", "u32"], t, bit_field)),
    (r"bfi\.b32", lambda: Meaning(["b32"] * 4, "b32", inserted_field)),
    (r"popc\.(b32)", lambda t: Meaning([t], "u32", _popc)),
    (r"prmt\.b32", lambda: Meaning(["b32"] * 3, "b32", permuted_bytes)),
    (r"dp4a\.u32\.([su])32", lambda t: Meaning(["b32"] * 3, "b32", lambda a, b, c: byte_products(a, b, c, t == "s"))),
    (r"selp\.(b16|b32|b64|f32)", lambda t: Meaning([t, t, "pred"], t, lambda a, b, p: np.where(p, a, b))),
    (r"setp\.(eq|ne|lt|le|gt|ge)\.([bsu]\d\d)", lambda op, t: Meaning([t, t], "pred", _COMPARISONS[op])),
    (r"setp\.(eq|lt|le|gt|ge)\.f32", lambda op: Meaning(["f32", "f32"], "pred", _COMPARISONS[op])),
    (r"setp\.ne\.f32", lambda: Meaning(["f32"] * 2, "pred", lambda a, b: (a < b) | (a > b))),
    (r"setp\.neu\.f32", lambda: Meaning(["f32"] * 2, "pred", operator.ne)),
    (r"mov\.([bsuf]\d\d|pred)", lambda t: Meaning([t], t, lambda a: a)),
    (r"cvt\.([su]\d+)\.([su]\d+)", lambda to, t: Meaning([t], to, lambda a: a.astype(DTYPES[to]))),
    (r"cvt\.rn\.f32\.u32", lambda: Meaning(["u32"], "f32", lambda a: a.astype(np.float32))),
    (r"cvt\.rzi\.s32\.f32", lambda: Meaning(["f32"], "s32", _to_integer)),
    (r"cvt\.f32\.(b?f16)", lambda t: Meaning([t], "f32", lambda a: canonical(of_bits16(a, t).astype(np.float32)))),
    (r"cvt\.rn\.(b?f16)x2\.f32", lambda t: Meaning(["f32"] * 2, t + "x2", _to_pair(t))),
    (r"cvt\.rn\.(b?f16)\.f32", lambda t: Meaning(["f32"], t, lambda a: to_bits16(a.astype(np.float64), t))),
    (r"(add|sub|mul)(?:\.rn)?\.f32", lambda op: Meaning(["f32"] * 2, "f32", _float_result(_SUMS[op]))),
    (
        r"add\.rn\.f32\.bf16",
        lambda: Meaning(["bf16", "f32"], "f32", lambda a, b: canonical(of_bits16(a, "bf16").astype("f4") + b)),
    ),
    (r"(add|sub|mul)(?:\.rn)?\.f32x2", lambda op: Meaning(["f32x2"] * 2, "f32x2", _pairs32(_float_result(_SUMS[op])))),
    (r"fma\.rn\.f32", lambda: Meaning(["f32"] * 3, "f32", fma)),
    (r"fma\.rn\.f32x2", lambda: Meaning(["f32x2"] * 3, "f32x2", _pairs32(fma))),
    (r"fma\.rn\.(b?f16)x2", lambda t: Meaning([t + "x2"] * 3, t + "x2", _pairs16(_fma64, t))),
    (r"div\.rn\.f32", lambda: Meaning(["f32"] * 2, "f32", _float_result(operator.truediv))),
    (r"div\.full\.f32", lambda: Meaning(["f32"] * 2, "f32", _quotient)),
    (r"rcp\.approx\.ftz\.f32", lambda: Meaning(["f32"], "f32", _reciprocal)),
    (r"abs\.f32", lambda: Meaning(["f32"], "f32", np.abs)),
    (r"abs\.(b?f16)x2", lambda t: Meaning([t + "x2"], t + "x2", lambda a: a & np.uint32(0x7FFF7FFF))),
    (r"(min|max)(\.NaN)?\.f32", lambda op, nan: Meaning(["f32"] * 2, "f32", _extreme(op, nan))),
    (
        r"min(\.NaN)?\.xorsign\.abs\.f32",
        lambda nan: Meaning(["f32"] * 2, "f32", lambda a, b: smaller_magnitude(a, b, bool(nan))),
    ),
    (
        r"(min|max)(\.NaN)?\.bf16x2",
        lambda op, nan: Meaning(["bf16x2"] * 2, "bf16x2", _pairs16(_of_numbers(_extreme(op, nan)), "bf16")),
    ),
]


def _wide(kind: str) -> Callable:
    wide = DTYPES[_twice(kind)]
    return lambda a, b, c=0: a.astype(wide) * b.astype(wide) + c


def _to_pair(kind: str) -> Callable:
    return lambda high, low: joined(to_bits16(low.astype(np.float64), kind), to_bits16(high.astype(np.float64), kind))


def _extreme(op: str, nan: str | None) -> Callable:
    function = smaller if op == "min" else larger
    return lambda a, b: function(a, b, bool(nan))


def meaning_of(op: str) -> Meaning | None:
    """Return the meaning of an arithmetic instruction, `None` for a name without one."""
    for pattern, rule in _RULES:
        if (found := re.fullmatch(pattern, op)) is not None:
            return rule(*found.groups())
    return None
