# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights at the edges: extreme scale bytes, NaN, infinity, empty and strided operands, repeated
calls. Prints a JSON report of what went wrong.

TRITON_INTERPRET=1 python run_linear_special.py
"""

import json

import torch
from run_linear_w4a16 import problem

from hf_mxfp4 import numerics
from mxfp4_kernels import linear_w4a16
from mxfp4_kernels.gemm import decode


def packed_rows(n_rows: int, n_cols: int, byte: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(2)
    codes = torch.randint(256, (n_rows, n_cols // 2), generator=rng, dtype=torch.uint8)
    return codes, torch.full((n_rows, n_cols // 32), byte, dtype=torch.uint8)


def main() -> dict:
    report: dict = {}
    rng = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).bfloat16()

    x = random(3, 512)
    for byte in (0, 128, 129, 250):
        codes, scale = packed_rows(9, 512, byte)
        shifted = x * 2.0 ** (-60 if byte > 128 else 0)
        weight = numerics.dequantize(codes, scale, length=512)
        report[f"byte {byte}"] = problem(shifted, weight, None, linear_w4a16(shifted, codes, scale, length=512))

    codes, scale = packed_rows(70, 512, 120)
    plain = linear_w4a16(x, codes, scale, length=512)
    marred = scale.clone()
    marred[5, 3] = 255
    y = linear_w4a16(x, codes, marred, length=512)
    others = torch.arange(70) != 5
    if not (y[:, 5].isnan().all() and torch.equal(y[:, others], plain[:, others])):
        report["scale byte 255"] = "NaN is not in its row of the weight alone"

    strange = x.clone()
    strange[0, 7], strange[1, 7] = torch.inf, torch.nan
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        y = linear_w4a16(strange.to(dtype), codes, scale, length=512).float()
        expected = strange.double() @ numerics.dequantize(codes, scale, length=512).double().T
        same = y.isnan() == expected.isnan()
        same &= y.isinf() == expected.isinf()
        same &= ~y.isinf() | (y.sign() == expected.sign())
        if not same.all():
            report[f"not finite {dtype}"] = f"{y} {expected}"

    for shape in ((0, 512), (2, 0, 512)):
        if linear_w4a16(torch.empty(shape), codes, scale, length=512).shape != (*shape[:-1], 70):
            report["no tokens"] = str(shape)
    bias = random(4).float()
    y = linear_w4a16(torch.empty(2, 0), *(torch.empty(4, 0, dtype=torch.uint8),) * 2, length=0, bias=bias)
    if not torch.equal(y, bias.expand(2, 4)):
        report["no columns"] = str(y)

    wide = random(3, 1024)
    layouts = {"row stride": wide[:, 256:768], "transposed": random(512, 3).T, "three axes": x[:, None]}
    for name, tensor in layouts.items():
        y = linear_w4a16(tensor, codes, scale, length=512)
        if not torch.equal(y, linear_w4a16(tensor.contiguous(), codes, scale, length=512)):
            report[name] = "differs from a contiguous copy"
    spread = torch.zeros(70, 513, dtype=torch.uint8)
    spread[:, 1:257] = codes
    shifted_bytes = torch.cat([codes.new_zeros(1), codes.flatten()])[1:].view_as(codes)
    for name, tensor in {"strided codes": spread[:, 1:257], "codes that are no words": shifted_bytes}.items():
        y = linear_w4a16(x, tensor, scale, length=512)
        if (y.float() - plain.float()).abs().max() > 0.02 * plain.float().abs().max():
            report[name] = "differs from codes at a multiple of four"

    for name, bias in {"strided bias": random(140)[::2], "expanded bias": random(1).expand(70)}.items():
        y = linear_w4a16(x, codes, scale, length=512, bias=bias)
        if not torch.equal(y, linear_w4a16(x, codes, scale, length=512, bias=bias.contiguous())):
            report[name] = "differs from a contiguous copy"

    out = torch.empty(3, 70, dtype=torch.bfloat16)
    if linear_w4a16(x, codes, scale, length=512, out=out) is not out or not torch.equal(out, plain):
        report["out"] = "is not the result"
    # Counters are zero again: a second call with the same ones gives the same.
    kept = torch.zeros(64, dtype=torch.int32)
    decode.zeros_of_a_launch = lambda count, device: kept[:count]
    long = random(2, 4096)
    codes, scale = packed_rows(40, 4096, 120)
    first, second = (linear_w4a16(long, codes, scale, length=4096) for _ in range(2))
    if not torch.equal(first, second) or kept.any():
        report["counters"] = "were left set"
    if problem(long, numerics.dequantize(codes, scale, length=4096), None, first):
        report["splits"] = "wrong sums"
    return report | {"checks": 10}


if __name__ == "__main__":
    print(json.dumps(main()))
