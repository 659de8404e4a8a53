# SPDX-License-Identifier: Apache-2.0
"""Compares the products of quantized operands with float64; prints a JSON report.

TRITON_INTERPRET=1 python run_matmul.py          interpreted
python run_matmul.py cuda                        compiled, on a GPU, with larger shapes
"""

import json
import sys
from collections.abc import Iterator

import torch

import mxfp4_kernels
from hf_mxfp4 import numerics
from hf_mxfp4.numerics import MXFP4Tensor, QuantScheme, fold


DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
SHAPES = ((1, 1, 1), (5, 3, 40), (17, 20, 129), (33, 18, 300), (2, 31, 512), (0, 4, 64), (4, 0, 64), (3, 4, 0))
LARGE = ((1, 4096, 4096), (64, 4096, 14336), (1000, 1552, 4096), (128, 256, 14336), (300, 500, 777))
PLAIN, STATIC, DYNAMIC = QuantScheme(), QuantScheme("rceil", 128), QuantScheme("even", 128, "dynamic")
#: Unit roundoff of float32, which sums are held in, times two for sums of both the tensor cores and the kernel.
UNIT = 2.0**-23
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def operand(rows: int, length: int, kind: int, rng: torch.Generator) -> torch.Tensor:
    x = torch.randn(rows, length, generator=rng)
    if kind % 3 == 1:
        x = x.abs()
    if kind % 3 == 2:
        x = x * torch.exp2(torch.randint(-6, 3, (length,), generator=rng).float())
    return x


def cases() -> Iterator[tuple[tuple[int, int, int], int]]:
    yield from ((shape, number) for number, shape in enumerate(SHAPES if DEVICE == "cpu" else SHAPES + LARGE))


def excess(actual: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> float:
    """The largest error over its bound: the sum of magnitudes times float32's unit and the number of sums, plus the
    rounding to the output's dtype. ``a``, ``b``: the exact values, float64."""
    expected, magnitude = a @ b.T, a.abs() @ b.abs().T
    if bias is not None:
        expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
    bound = UNIT * (8 + a.shape[1] / 128 + 128 / 8) * magnitude
    bound += torch.finfo(actual.dtype).eps / 2 * (expected.abs() + bound) + 1e-30
    return float(((actual.cpu().double() - expected).abs() / bound).max()) if actual.numel() else 0.0


def fp8(a: MXFP4Tensor, b: MXFP4Tensor, groups: tuple, dtype: torch.dtype, bias: torch.Tensor | None) -> float:
    left, right = fold(a, groups[0]), fold(b, groups[1])
    parts = [part.to(DEVICE) for part in (left.elements, left.scale, right.elements, right.scale)]
    on_device = None if bias is None else bias.to(DEVICE)
    out = mxfp4_kernels.matmul_e4m3(*parts, out_dtype=dtype, bias=on_device)
    assert (out.shape, out.dtype) == ((a.codes.shape[0], b.codes.shape[0]), dtype)
    return excess(out, left.dequantize(torch.float64), right.dequantize(torch.float64), bias)


def mxf4(a: MXFP4Tensor, b: MXFP4Tensor, dtype: torch.dtype, bias: torch.Tensor | None) -> float:
    parts = [part.to(DEVICE) for part in (a.codes, a.scale, b.codes, b.scale)]
    macros = {} if a.macro is None else {"a_macro": a.macro.to(DEVICE), "b_macro": b.macro.to(DEVICE)}
    on_device = None if bias is None else bias.to(DEVICE)
    out = mxfp4_kernels.matmul_mxf4(*parts, **macros, out_dtype=dtype, bias=on_device)
    values = [t.dequantize(torch.float64 if t.macro is None else torch.float32).double() for t in (a, b)]
    return excess(out, *values, bias)


def compare() -> dict:
    found = {}
    for (m, n, k), number in cases():
        rng = torch.Generator().manual_seed(number)
        x, w = operand(m, k, number, rng), operand(n, k, number + 1, rng)
        bias = torch.randn(n, generator=rng) if number % 2 else None
        dtype = DTYPES[number % 3]
        plain = numerics.quantize(x, **vars(PLAIN)), numerics.quantize(w, **vars(PLAIN))
        macro = numerics.quantize(x, **vars(STATIC)), numerics.quantize(w, **vars(DYNAMIC))
        for name, value in {
            "row": fp8(*plain, ("row", "row"), dtype, bias),
            "row bf16": fp8(*plain, ("row", "row"), torch.bfloat16, None),
            "128": fp8(*plain, (128, 128), dtype, bias),
            "mixed": fp8(*plain, ("row", 128), dtype, None),
            "macro": fp8(*macro, (128, 128), dtype, bias),
            "mxf4": mxf4(*plain, dtype, bias),
            "mxf4 macro": mxf4(*macro, dtype, bias),
        }.items():
            found[name] = max(found.get(name, 0.0), value)
    return {"excess": found, "nan": nan_rows(), "extremes": extremes(), "biases": strided_biases()}


def nan_rows() -> bool:
    """NaN in a block makes its row NaN, and no other."""
    x, w = torch.ones(4, 200), torch.ones(5, 200)
    x[2, 150] = float("inf")
    a, b = numerics.quantize(x), numerics.quantize(w)
    left, right = fold(a, 128), fold(b, 128)
    parts = [part.to(DEVICE) for part in (left.elements, left.scale, right.elements, right.scale)]
    outs = [mxfp4_kernels.matmul_e4m3(*parts, out_dtype=torch.float32)]
    codes = [part.to(DEVICE) for part in (a.codes, a.scale, b.codes, b.scale)]
    outs.append(mxfp4_kernels.matmul_mxf4(*codes, out_dtype=torch.float32))
    expected = torch.tensor([False, False, True, False])[:, None].expand(4, 5)
    return all(torch.equal(out.cpu().isnan(), expected) for out in outs)


def extremes() -> bool:
    """Scales at both ends of their range cancel: exact results."""
    x, w = torch.full((2, 128), 2.0**-120), torch.full((3, 128), 2.0**120)
    a, b = numerics.quantize(x), numerics.quantize(w)
    codes = [part.to(DEVICE) for part in (a.codes, a.scale, b.codes, b.scale)]
    outs = [mxfp4_kernels.matmul_mxf4(*codes, out_dtype=torch.float32)]
    for group in ("row", 128):
        left, right = fold(a, group), fold(b, group)
        parts = [part.to(DEVICE) for part in (left.elements, left.scale, right.elements, right.scale)]
        outs.append(mxfp4_kernels.matmul_e4m3(*parts, out_dtype=torch.float32))
    return all(bool((out == 128).all()) for out in outs)


def strided_biases() -> bool:
    """Biases that are no plain vectors in memory count as what they hold."""
    rng = torch.Generator().manual_seed(1)
    a, b = (numerics.quantize(torch.randn(rows, 96, generator=rng)) for rows in (5, 20))
    codes = [part.to(DEVICE) for part in (a.codes, a.scale, b.codes, b.scale)]
    numbers = torch.randn(40, generator=rng).to(DEVICE)
    for bias in (numbers[::2], numbers[:1].expand(20)):
        for group in (128, "row"):
            left, right = fold(a, group), fold(b, group)
            parts = [part.to(DEVICE) for part in (left.elements, left.scale, right.elements, right.scale)]
            for multiply, operands in ((mxfp4_kernels.matmul_e4m3, parts), (mxfp4_kernels.matmul_mxf4, codes)):
                outs = [multiply(*operands, out_dtype=torch.float32, bias=given) for given in (bias, bias.contiguous())]
                plain = multiply(*operands, out_dtype=torch.float32)
                if not torch.equal(*outs) or not torch.allclose(outs[0], plain + bias):
                    return False
    return True


if __name__ == "__main__":
    print(json.dumps(compare()))
