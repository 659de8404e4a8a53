# SPDX-License-Identifier: Apache-2.0
"""What products of E4M3 operands with float32 scales have in common: the 128 elements that share a scale, along the
contraction.

Partial sums of 128 products leave the tensor cores, which keep few bits of them, and are added up in float32.
"""

import triton
import triton.language as tl


@triton.jit
def _values(bits):
    """Float32 values of E4M3 bytes."""
    wide = bits.to(tl.int32)
    magnitude = wide & 0x7F
    normal = ((magnitude + 960) << 20).to(tl.float32, bitcast=True)
    value = tl.where(magnitude >= 8, normal, magnitude.to(tl.float32) * 0.001953125)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(wide >= 0x80, -value, value)


@triton.jit
def e4m3_operand(elements, INTERPRETED: tl.constexpr):
    """Loaded elements as a matrix product takes them; interpreted, they pass as bytes."""
    if INTERPRETED:
        return _values(elements)
    else:
        return elements


@triton.jit
def add_group(total, left_at, left_scale_at, right_at, right_scale_at, INTERPRETED: tl.constexpr):
    """``total``, and the products of the 128 columns at pointers ``[M, 128]`` and ``[128, N]`` with the scales at
    ``[M]`` and ``[N]``."""
    scale = tl.load(left_scale_at)[:, None] * tl.load(right_scale_at)[None, :]
    left, right = e4m3_operand(tl.load(left_at), INTERPRETED), e4m3_operand(tl.load(right_at), INTERPRETED)
    return total + tl.dot(left, right) * scale
