# SPDX-License-Identifier: Apache-2.0
"""Compares products with packed weights with float64 products of the exact dequantized weight; prints a JSON report of
what is wrong, by case.

    TRITON_INTERPRET=1 python run_decode.py few      the interpreted kernel
    python run_decode.py all cuda                    the compiled kernel, on a GPU
"""

import itertools
import json
import sys
from collections.abc import Iterator

import torch

from hf_mxfp4 import numerics
from hf_mxfp4.numerics import QuantScheme
from mxfp4_kernels import Packed, Scheme, linear_w4a16
from mxfp4_kernels.decode.counters import Counters


PLAIN = Scheme()
STATIC = Scheme("rceil", 128)
SCHEMES = (
    PLAIN,
    STATIC,
    Scheme("rceil", 256, "static", 0.5),
    Scheme("rceil", 32, "static", 0.3),
    Scheme("even", 128, "block_mantissas"),
    Scheme("even", 128, "block_mantissas", 1.0),
    Scheme("even", 128, "block_mantissas_fp8"),
)
DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cpu"
RNG = torch.Generator().manual_seed(1)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=RNG)


def problem(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, found: torch.Tensor) -> str | None:
    """What is wrong with ``found``, or `None`: each sum of K float32 products has an error of at most K ulp of their
    magnitudes' sum, and the result is rounded to bfloat16 once."""
    found = found.cpu()
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact = exact + bias.double()
        magnitude = magnitude + bias.double().abs()
    if found.dtype != torch.bfloat16 or found.shape != exact.shape:
        return f"{found.dtype} {tuple(found.shape)}"
    if not torch.equal(found.isnan(), exact.isnan()):
        return "NaN elsewhere"
    bound = (x.shape[1] + 8) * 2.0**-23 * magnitude + 2.0**-8 * exact.abs() + 2.0**-149
    error = (found.double() - exact).abs()
    return None if (error <= bound)[~exact.isnan()].all() else f"off by {float((error / bound).nan_to_num().max())}"


def packed(weight: torch.Tensor, scheme: Scheme) -> tuple[Packed, torch.Tensor]:
    """A packed weight on the device, and its exact values."""
    options = {"macro_block": scheme.macro_block, "outlier_fallback": scheme.outlier_fallback}
    found = numerics.quantize(weight, scale_rule=scheme.scale_rule, macro_search=scheme.macro_search, **options)
    return Packed(*(part if part is None else part.to(DEVICE) for part in found.parts)), found.dequantize(torch.float32)


def linear() -> Iterator[tuple[str, str | None]]:
    few = [(1, 64, 256, 0, False), (3, 65, 512, 1, True), (17, 33, 264, 2, True), (4, 1, 1032, 4, True)]
    few += [(1, 40, 4096, 5, False), (40, 7, 288, 3, False), (70, 31, 128, 1, True), (5, 33, 384, 6, False)]
    every = itertools.product(
        (1, 4, 9, 16, 33, 70), (1, 31, 130), (8, 56, 128, 320, 1152), range(len(SCHEMES)), (True, False)
    )
    # Of all, one in eleven, which has every pair with a scheme: most have a kernel of their own to compile.
    for rows, n, k, number, has_bias in few if sys.argv[1] == "few" else itertools.islice(every, 0, None, 11):
        weight = normal(n, k) * 0.05
        # Some blocks need the second multiply of the decoder.
        weight[0, : min(40, k)] *= 4000 if n % 2 else 1
        x = normal(rows, k).bfloat16()
        bias = normal(n).bfloat16() if has_bias else None
        codes, values = packed(weight, SCHEMES[number])
        found = linear_w4a16(x.to(DEVICE), codes, k, SCHEMES[number], None if bias is None else bias.to(DEVICE))
        yield f"{rows}x{n}x{k} {SCHEMES[number]}", problem(x, values, bias, found)


def experts() -> Iterator[tuple[str, str | None]]:
    many = (5, 0, 33, 2, 0), (0, 49, 0, 0, 0, 17, 1), (0, 0, 18, 1, *[0] * 16), (0, 3, 0, 0, 1, 0, 2, 0), (0, 0)
    for number, (counts, n, k) in enumerate(zip(many, (50, 37, 7, 33, 8), (40, 392, 40, 136, 64), strict=True)):
        offsets = torch.tensor(counts).cumsum(0, dtype=torch.int32)
        x = normal(sum(counts), k).bfloat16()
        bias = normal(len(counts), n).bfloat16()
        weight = normal(len(counts), n, k) * 4.0 ** normal(len(counts), n, 1)
        weight[0] = 0
        if sum(counts) > 30:
            # A scale above 2, the least, and NaN.
            weight[2, 0] *= 2.0**60
            weight[2, 1] *= 2.0**-90
            weight[2, 2, 0] = torch.nan
        scheme = SCHEMES[number + 1]
        codes, values = packed(weight, scheme)
        found = linear_w4a16(x.to(DEVICE), codes, k, scheme, bias.to(DEVICE), offsets.to(DEVICE))
        start = 0
        for expert, end in enumerate(offsets.tolist()):
            wrong = problem(x[start:end], values[expert], bias[expert], found[start:end])
            yield f"expert {expert} of {counts} {scheme}", wrong
            start = end


def plain_values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    length = 2 * codes.shape[1]
    return numerics.MXFP4Tensor(codes, scale, None, None, None, length, 1, QuantScheme(), torch.float32).dequantize()


def special() -> Iterator[tuple[str, str | None]]:
    x = normal(3, 512).bfloat16()
    codes = torch.randint(256, (70, 256), generator=RNG, dtype=torch.uint8)

    def call(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return linear_w4a16(x.to(DEVICE), Packed(codes.to(DEVICE), scale.to(DEVICE)), x.shape[-1], PLAIN).cpu()

    for byte in (0, 128, 129, 250):
        scale = torch.full((70, 16), byte, dtype=torch.uint8)
        shifted = x * 2.0 ** (-60 if byte > 128 else 0)
        weight = plain_values(codes, scale)
        yield f"byte {byte}", problem(shifted, weight, None, call(shifted, codes, scale))
    scale = torch.full((70, 16), 120, dtype=torch.uint8)
    plain = call(x, codes, scale)
    wide = normal(3, 1024).bfloat16()
    layouts = {"row stride": wide[:, 256:768], "transposed": normal(512, 3).bfloat16().T, "three axes": x[:, None]}
    for name, tensor in layouts.items():
        same = torch.equal(call(tensor, codes, scale), call(tensor.contiguous(), codes, scale))
        yield name, None if same else "differs from a contiguous copy"
    spread = torch.zeros(70, 513, dtype=torch.uint8)
    spread[:, 1:257] = codes
    shifted_bytes = torch.cat([codes.new_zeros(1), codes.flatten()])[1:].view_as(codes)
    for name, tensor in {"strided codes": spread[:, 1:257], "codes that are no words": shifted_bytes}.items():
        yield name, None if torch.equal(call(x, tensor, scale), plain) else "differs from aligned codes"
    yield "no rows", None if call(x[:0], codes, scale).shape == (0, 70) else "shape"
    # Counters are zero again: a second call with the same ones gives the same.
    kept = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    original = Counters.zeros
    Counters.zeros = lambda self, count, device: kept[:count]
    long = normal(2, 4096).bfloat16()
    codes = codes.view(-1)[:16384].view(8, 2048)
    scale = torch.full((8, 128), 120, dtype=torch.uint8)
    first = call(long, codes, scale)
    second = call(long, codes, scale)
    Counters.zeros = original
    yield "counters", None if torch.equal(first, second) and not kept.any() else "were left set"
    yield "splits", problem(long, plain_values(codes, scale), None, first)


if __name__ == "__main__":
    print(json.dumps(dict([*linear(), *experts(), *special()])))
