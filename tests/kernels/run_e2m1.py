# SPDX-License-Identifier: Apache-2.0
"""What the interpreter takes for the instruction that makes E2M1 codes, on numbers that tell roundings apart; a JSON
report of codes by float32 bits.

TRITON_INTERPRET=1 python run_e2m1.py
"""

import json

import torch
import triton
import triton.language as tl

from mxfp4_kernels.quantization.e2m1 import _codes_of_floats, _values_of_codes


@triton.jit
def _codes(y_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, _codes_of_floats(tl.load(y_ptr + at)))


@triton.jit
def _values(codes_ptr, out_ptr):
    at = tl.arange(0, 32)
    v0, v1, v2, v3 = _values_of_codes(tl.load(codes_ptr + at), True)
    tl.store(out_ptr + at, v0)
    tl.store(out_ptr + 32 + at, v1)
    tl.store(out_ptr + 64 + at, v2)
    tl.store(out_ptr + 96 + at, v3)


def numbers() -> torch.Tensor:
    """Every bfloat16, and the float32 numbers on and next to every tie."""
    every = torch.arange(2**16, dtype=torch.int32) << 16
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0]).view(torch.int32)
    near = torch.cat([ties + step for step in (-1, 0, 1)])
    both = torch.cat((every, near, near | -(2**31)))
    return torch.cat((both, both.new_zeros(-len(both) % 2**17)))


def main() -> dict:
    bits = numbers()
    codes = torch.empty_like(bits)
    _codes[(1,)](bits.view(torch.float32), codes, len(bits))
    pairs = torch.arange(256, dtype=torch.int32)
    words = (pairs[0::2] | pairs[1::2] << 8).view(-1, 2)
    words = words[:, 0] | words[:, 1] << 16
    values = torch.empty(4, len(words) // 2, dtype=torch.int32)
    found = []
    for half in words.view(2, 32):
        _values[(1,)](half.contiguous(), values)
        found.append(values.t().clone())
    return {"bits": bits.tolist(), "codes": codes.tolist(), "values": torch.cat(found).flatten().tolist()}


if __name__ == "__main__":
    print(json.dumps(main()))
