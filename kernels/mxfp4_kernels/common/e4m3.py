# SPDX-License-Identifier: Apache-2.0
"""E4M3 elements (float8_e4m3fn) in registers, and the powers of two by which rows are scaled so that none of their
finite elements clips.

GPUs of NVIDIA from sm_89 on convert two elements in one instruction (``HAS_E4M3``); elsewhere integer arithmetic does.
"""

import torch
import triton
import triton.language as tl

from .blocks import EXPONENT_FIELD, MAGNITUDE_FIELD, NAN_BITS, NAN_BYTE
from .tensors import INTERPRETED


# 2**-6, the smallest normal E4M3 number, as float32 bits; and half of 1.5 * 2**23 over the 2**3 steps of a binade.
_SMALLEST_NORMAL = tl.constexpr(0x3C800000)
_ROUND_MAGIC = tl.constexpr(1.5 * 2.0**20)


def has_e4m3(device: torch.device) -> bool:
    """Return whether a GPU has instructions that convert to E4M3 and back."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def e4m3_bits(value, HAS_E4M3: tl.constexpr):
    """E4M3 (float8_e4m3fn) bytes of float32 values in [-448, 448], to nearest, ties to even; NaN of all others."""
    if HAS_E4M3:
        # The instruction cuts infinity to 448. Times zero it is NaN, and numbers are zeros of their own sign.
        value = tl.fma(value, 0.0, value)
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = value.to(tl.int32, bitcast=True)
    binade = tl.maximum(bits & EXPONENT_FIELD, _SMALLEST_NORMAL).to(tl.float32, bitcast=True)
    # The products are exact, so that it does not matter whether the sums are fused.
    rounded = tl.fma(binade, -_ROUND_MAGIC, tl.fma(binade, _ROUND_MAGIC, value))
    magnitude = rounded.to(tl.int32, bitcast=True) & MAGNITUDE_FIELD
    subnormal = (tl.abs(rounded) * 512.0).to(tl.int32)
    code = tl.where(magnitude >= _SMALLEST_NORMAL, (magnitude >> 20) - 960, subnormal)
    code = tl.where((bits & MAGNITUDE_FIELD) >= EXPONENT_FIELD, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_values(bits, HAS_E4M3: tl.constexpr):
    """Float32 values of E4M3 bytes."""
    if HAS_E4M3:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = bits.to(tl.int32)
    # The fields of E4M3 at the place of those of float32, whose exponent is larger by 120 for the same number.
    fields = tl.where((bits & 0x7F) == 0x7F, NAN_BITS, ((bits & 0x7F) << 20) | ((bits & 0x80) << 24))
    return fields.to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def magnitude_bits(x, NAN_ROWS: tl.constexpr):
    """Bits of magnitudes, whose order is that of the numbers. Those of NaN and infinity are the largest with
    ``NAN_ROWS``, otherwise zero."""
    magnitude = x.to(tl.int32, bitcast=True) & MAGNITUDE_FIELD
    if NAN_ROWS:
        return magnitude
    else:
        return tl.where(magnitude < EXPONENT_FIELD, magnitude, 0)


@triton.jit
def row_scale_byte(top):
    """Scale bytes (int32) of rows, given the bits of their largest magnitudes; `NAN_BYTE` for NaN and infinity."""
    # The largest E4M3 value is 1.75 * 2**8.
    byte = tl.maximum(((tl.minimum(top, EXPONENT_FIELD) + 0x1FFFFF) >> 23) - 8, 1)
    return tl.where(top >= EXPONENT_FIELD, NAN_BYTE, byte)


@triton.jit
def inverse_scale(byte):
    """Float32 ``2**(127 - byte)`` of scale bytes from 1 on; NaN for `NAN_BYTE`."""
    return tl.where(byte == NAN_BYTE, NAN_BITS, (254 - byte) << 23).to(tl.float32, bitcast=True)
