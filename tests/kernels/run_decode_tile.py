# SPDX-License-Identifier: Apache-2.0
"""Decodes every code at every scale byte, and block mantissas, with the kernels' tile decoder; prints a JSON report.

TRITON_INTERPRET=1 python run_decode_tile.py
"""

import json

import torch
import triton
import triton.language as tl

from hf_mxfp4 import numerics
from mxfp4_kernels.common.arguments import DecodeConstants
from mxfp4_kernels.common.blocks import BLOCKWISE, NO_MACRO
from mxfp4_kernels.gemm.decode_tile import NARROW_BYTE, decode_tile, interleave


@triton.jit
def decode_kernel(
    words_ptr,
    byte_ptr,
    mantissa_ptr,
    out_ptr,
    order_ptr,
    WIDE: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Tiles ``[ROWS, 8 * WORDS]`` as float32, and the columns that they are of."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    blocks = rows * (WORDS // 4) + tl.arange(0, WORDS // 4)[None, :]
    columns = tl.arange(0, WORDS * 8)[None, :]
    words = tl.load(words_ptr + rows * WORDS + tl.arange(0, WORDS)[None, :])
    byte = tl.load(byte_ptr + blocks).to(tl.int32)
    mantissa = tl.load(mantissa_ptr + blocks).to(tl.int32)
    values = decode_tile(words, byte, mantissa, WIDE, WEIGHT)
    order = tl.broadcast_to(columns, values.shape)
    if not WEIGHT.NATURAL:
        order = interleave(order, WEIGHT.ORDER)
    tl.store(out_ptr + rows * WORDS * 8 + columns, values)
    tl.store(order_ptr + rows * WORDS * 8 + columns, order)


def decode(codes, scale, mantissa, order: int | None, blockwise: bool, wide: bool) -> torch.Tensor:
    n_rows, n_blocks = scale.shape
    out, places = torch.empty(n_rows, n_blocks * 32), torch.empty(n_rows, n_blocks * 32, dtype=torch.int32)
    search = (BLOCKWISE if blockwise else NO_MACRO).value
    weight = DecodeConstants(128, search, CUDA=False, INTERPRETED=True, NATURAL=order is None, ORDER=order or 0)
    words = codes.view(torch.int32)
    decode_kernel[(n_rows // 8,)](words, scale, mantissa, out, places, wide, weight, ROWS=8, WORDS=4 * n_blocks)
    return torch.empty_like(out).scatter_(1, places.long(), out)


def main() -> dict:
    report = {"cases": 0, "wrong": []}
    rng = torch.Generator().manual_seed(0)
    # Each row has one scale byte and every code: 4 blocks with 32 codes in random order.
    codes = torch.stack([torch.randperm(128, generator=rng) % 16 for _ in range(256)]).to(torch.uint8)
    codes = codes[:, ::2] | codes[:, 1::2] << 4
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 4)
    mantissa = torch.randint(4, (256, 4), generator=rng, dtype=torch.uint8)
    plain = numerics.dequantize(codes, scale, length=128, dtype=torch.float64)
    for order in (None, 0, 1, 2):
        for blockwise in (True, False):
            for wide in (True, False):
                expected = plain
                if blockwise:
                    expected = plain * (1 + mantissa / 4).repeat_interleave(32, dim=1)
                values = decode(codes, scale, mantissa, order, blockwise, wide).double()
                expected = expected.where(expected.abs() < 2.0**128, expected.sign() * torch.inf)
                rows = 256 if wide else NARROW_BYTE.value + 1
                same = (values == expected) | (values.isnan() & expected.isnan())
                report["cases"] += 1
                if not same[:rows].all():
                    row = int((~same).nonzero()[0, 0])
                    report["wrong"].append(f"{order=} {blockwise=} {wide=} byte {row}: {values[row]} {expected[row]}")
    return report


if __name__ == "__main__":
    print(json.dumps(main()))
