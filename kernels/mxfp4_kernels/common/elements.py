# SPDX-License-Identifier: Apache-2.0
"""Elements on their way in and out: loaded ones as float32, float32 as what is stored, values of codes.

Triton's interpreter calculates with no bfloat16 and truncates when it converts to it: elements of that type pass as
int16 bits there.
"""

import triton
import triton.language as tl


@triton.jit
def to_float(x, BF16: tl.constexpr):
    """Float32 of loaded elements; with ``BF16`` these are int16 bits of bfloat16."""
    if BF16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def as_stored(values, out_ptr, INTERPRETED: tl.constexpr):
    """Float32 values as the output holds them; interpreted, int16 is bfloat16, whose NaN is 0x7FC0."""
    if INTERPRETED and out_ptr.dtype.element_ty == tl.int16:
        bits = values.to(tl.int32, bitcast=True)
        values = tl.where(values == values, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
    return values.to(out_ptr.dtype.element_ty)


@triton.jit
def e2m1_values(codes):
    """Float32 values of packed codes ``[...]`` (two in each byte, the even element's in the low half), ``[..., 2]``."""
    wide = codes.to(tl.int32)
    code = tl.join(wide & 0xF, wide >> 4)
    magnitude = code & 7
    # Exponent and mantissa as they stand from 1 up; 0 and 0.5, the subnormal, apart.
    bits = tl.where(magnitude > 1, (magnitude + 252) << 22, tl.where(magnitude == 1, 0x3F000000, 0))
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)
