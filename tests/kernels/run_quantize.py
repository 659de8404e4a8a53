# SPDX-License-Identifier: Apache-2.0
"""Compares the kernels that quantize with the eager definition, bit for bit; prints a JSON report.

    TRITON_INTERPRET=1 python run_quantize.py schemes         interpreted: every scheme, on one dtype and shape each
    TRITON_INTERPRET=1 python run_quantize.py layouts         interpreted: shapes, strides, special values
    TRITON_INTERPRET=1 python run_quantize.py pairs           interpreted: bfloat16 in whole blocks, two at a time
    TRITON_INTERPRET=1 python run_quantize.py sides           interpreted: random numbers, rotations, both directions
    TRITON_INTERPRET=1 python run_quantize.py fp8             interpreted: conversion to FP8 and back
    TRITON_INTERPRET=1 python run_quantize.py outputs         interpreted: results written to given tensors
    TRITON_INTERPRET=1 python run_quantize.py property        interpreted: any shape, scheme and range
    python run_quantize.py schemes cuda                       compiled, on a GPU: every scheme

A process of its own, because Triton decides when it is imported whether kernels are interpreted.
"""

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import mxfp4_kernels
from hf_mxfp4 import numerics
from hf_mxfp4.numerics import QuantScheme
from hf_mxfp4.ops import quantization as by_scheme
from hf_mxfp4.ops import to_fp4, to_fp8
from mxfp4_kernels import Scheme, Side, quantization
from mxfp4_kernels.scale_rules import SCALE_RULES


def adversarial_rows(shape: tuple[int, int], dtype: torch.dtype, start: int, rng: torch.Generator) -> torch.Tensor:
    """Rows that cycle, from the kind ``start`` on, through the kinds of data that break quantizers."""
    n_rows, n_cols = shape
    finfo = torch.finfo(dtype)

    def normal() -> torch.Tensor:
        return torch.randn(n_cols, generator=rng).double()

    def choice(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (n_cols,), generator=rng)]

    def exponents(low: float, high: float) -> torch.Tensor:
        return 2.0 ** (torch.rand(n_cols, generator=rng).double() * (high - low) + low).floor()

    grid_and_ties = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0)
    lowest = -149 if dtype != torch.float16 else -24
    kinds = (
        lambda: normal(),
        lambda: normal() * exponents(-12, 12),
        lambda: choice(*grid_and_ties) * choice(-1.0, 1.0) * 2.0**-3,
        lambda: choice(0.0, -0.0, 0.0, 3.0),
        lambda: choice(*(1.0,) * 60, float("nan"), float("inf"), -float("inf")) * normal(),
        lambda: normal() * exponents(lowest, lowest + 12),
        lambda: choice(finfo.max, -finfo.max, finfo.max / 2, finfo.max * 0.8, 1.0),
        lambda: normal() * exponents(-124, 126) if dtype != torch.float16 else normal() * exponents(-24, 14),
        lambda: finfo.max * torch.rand(n_cols, generator=rng).double(),
        lambda: torch.zeros(n_cols, dtype=torch.float64),
    )
    rows = [kinds[(start + row) % len(kinds)]() for row in range(n_rows)]
    return torch.stack(rows).to(dtype) if rows else torch.empty(shape, dtype=dtype)


def same(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """Equal bits, NaN and NaN apart, and no gradient."""
    if found is None or expected is None:
        return found is expected
    found = found.cpu()
    if (found.shape, found.dtype, found.requires_grad) != (expected.shape, expected.dtype, False):
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    equal = found.contiguous().view(integers) == expected.contiguous().view(integers)
    if found.is_floating_point():
        equal |= found.float().isnan() & expected.float().isnan()
    return bool(equal.all())


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MACROS = (
    (None, "static"),
    (32, "static"),
    (128, "static"),
    (64, "dynamic"),
    (256, "dynamic"),
    (128, "block_mantissas"),
)
MACROS += ((128, "block_mantissas_fp8"),)
SCHEMES = [
    QuantScheme(rule, macro, search, alpha)
    for rule, (macro, search), alpha in itertools.product(SCALE_RULES, MACROS, (None, 0.3))
]
TILES = [
    QuantScheme("rceil", block_rows=32),
    QuantScheme("even", 256, "static", 0.5, block_rows=32),
    QuantScheme("mse", 128, "dynamic", 1.0, block_rows=32),
    QuantScheme("rceil", 128, "block_mantissas", 0.3, block_rows=32),
    QuantScheme("even", 128, "block_mantissas_fp8", block_rows=32),
]
PARTS = ("codes", "scale", "macro", "residual_codes", "residual_scale")
DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cpu"
Case = tuple[str, list[str]]


def of_kernels(scheme: QuantScheme) -> Scheme:
    rule = scheme.scale_rule.value
    search = scheme.macro_search
    return Scheme(rule, scheme.macro_block, search, scheme.outlier_fallback, scheme.block_rows)


def on_device(side: dict[str, Any]) -> Side:
    return Side(**{name: part.to(DEVICE) if isinstance(part, torch.Tensor) else part for name, part in side.items()})


def eager(x: torch.Tensor, scheme: QuantScheme, side: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, list]:
    """Values as ``dtype``, and parts, of what the kernels are asked for."""
    if size := side.get("rotation"):
        x = numerics.rotate(F.pad(x.float(), (0, -x.shape[-1] % size)), size, signs=side.get("signs"))
    random = {"rounding": "stochastic", "seed": side["seed"]} if "seed" in side else {}
    packed = numerics.quantize(x, **vars(scheme) | random)
    return packed.dequantize(dtype), [getattr(packed, name) for name in PARTS]


def wrong(x: torch.Tensor, scheme: QuantScheme, side: dict[str, Any], dtype: torch.dtype) -> list[str]:
    """What of the results along the last axis is not the definition's."""
    values, parts = eager(x, scheme, side, dtype)
    arguments = x.to(DEVICE), of_kernels(scheme), on_device(side)
    found = mxfp4_kernels.fake_quantize(*arguments, dtype)
    packed = mxfp4_kernels.quantize(*arguments)
    bad = [] if same(found, values) and found.is_contiguous() else ["values"]
    bad += [name for name, *pair in zip(PARTS, packed, parts, strict=True) if not same(*pair)]
    length = values.shape[-1]
    if not same(mxfp4_kernels.dequantize(packed, length, of_kernels(scheme), dtype), values):
        bad.append("dequantized")
    return bad


def wrong_both(x: torch.Tensor, scheme: QuantScheme, sides: tuple[dict, dict], dtype: torch.dtype) -> list[str]:
    """What of the results for ``x`` and its transpose is not the definition's."""
    arguments = x.to(DEVICE), of_kernels(scheme), *map(on_device, sides)
    found = mxfp4_kernels.fake_quantize_rows_and_columns(*arguments, dtype)
    bad = []
    packed = mxfp4_kernels.quantize_rows_and_columns(*arguments)
    for label, view, side, actual, parts in zip("xt", (x, x.mT), sides, found, packed, strict=True):
        values, expected = eager(view, scheme, side, dtype)
        bad += [] if same(actual, values) and actual.is_contiguous() else [f"{label} values"]
        bad += [f"{label} {name}" for name, *pair in zip(PARTS, parts, expected, strict=True) if not same(*pair)]
    return bad


def schemes() -> Iterator[Case]:
    rng = torch.Generator().manual_seed(11)
    shapes = ((5, 270), (8, 256), (3, 33), (20, 300))
    # Interpreted, every rule with every search, and a residual with half of them.
    few = [scheme for number, scheme in enumerate(SCHEMES) if (number // 14 + number // 2 + number) % 2 == 0]
    for number, scheme in enumerate((few if DEVICE == "cpu" else SCHEMES) + TILES):
        every = list(itertools.product(DTYPES, shapes))
        # Compiled, a quarter of them: each has kernels of its own, which take a second or more.
        for dtype, shape in (
            [(DTYPES[number % 3], shapes[number // 3 % 4])] if DEVICE == "cpu" else every[number % 4 :: 4]
        ):
            x = adversarial_rows(shape, dtype, number, rng)
            yield f"{scheme} {dtype} {shape}", wrong(x, scheme, {}, DTYPES[(number + 1) % 3] if number % 2 else dtype)


def layouts() -> Iterator[Case]:
    rng = torch.Generator().manual_seed(12)
    fallback = QuantScheme("rceil", 128, "static", 0.5)
    tiles = QuantScheme("mse", block_rows=32)
    wide = adversarial_rows((11, 700), torch.bfloat16, 0, rng)
    for label, x, scheme in (
        ("row stride", wide[::2, 100:421], fallback),
        ("transposed", wide[:, :40].T, fallback),
        ("every second column", wide[:3, 0:512:2], fallback),
        ("vector", wide[2], fallback),
        ("three axes, permuted", wide[:10, :384].reshape(2, 5, 384).transpose(0, 1), fallback),
        ("expanded", wide[:1, :128].expand(9, 128), fallback),
        ("one column", wide[:, :1], fallback),
        ("no columns", wide[:, :0], fallback),
        ("no rows", wide[:0], fallback),
        ("a parameter", torch.nn.Parameter(wide[:2, :128].clone()), fallback),
        ("matrices of ragged tiles", wide[:10, :350].reshape(2, 5, 350), tiles),
        ("matrices of whole tiles", torch.randn(2, 64, 50, generator=rng), tiles),
    ):
        yield label, wrong(x, scheme, {}, x.dtype)
    with mock.patch.object(quantization, "_MOST_MATRICES", 2):
        yield "matrices in several launches", wrong(torch.randn(5, 33, 40, generator=rng).mT, fallback, {}, DTYPES[0])
    # The largest magnitudes: scales at the end of the range, products and sums that leave float32.
    largest = torch.linspace(0.5, 1.0, 512, dtype=torch.float64) * torch.finfo(torch.float32).max
    x = torch.stack((largest, -largest.flip(0), largest / 2)).float()
    for text in ("rceil", "mse", "even+mbs128-blockwise+of1", "rceil+mbs32-static+of1", "mse+mbs128-dynamic+of1"):
        yield "largest numbers", wrong(x, numerics.parse_scheme(text), {}, torch.float32)
    # Just below 2**127, where factors are still tried.
    x = (torch.rand(4, 256, generator=rng, dtype=torch.float64) * 2.0**127 * (1 - 2.0**-24)).float()
    for text in ("mse+mbs32-dynamic+of1", "floor+mbs128-static+of1"):
        yield "below 2**127", wrong(x, numerics.parse_scheme(text), {}, torch.float32)
    # The smallest: subnormal inputs, scales, values and quotients.
    x = torch.randn(8, 128, generator=rng) * 2.0 ** torch.linspace(-140, -100, 8)[:, None]
    for text in ("rceil+of0.5", "even+mbs128-blockwise", "rceil+mbs128-static+of0.7"):
        yield "smallest numbers", wrong(x, numerics.parse_scheme(text), {}, torch.float32)
    # Ties of errors: equal magnitudes, in which every candidate may do as well.
    for text in ("mse", "even+mbs128-dynamic", "rceil+mbs128-blockwise"):
        scheme = numerics.parse_scheme(text)
        yield "ties", wrong(torch.full((2, 256), 3.0), scheme, {}, torch.float32)
        yield "powers of two", wrong(2.0 ** torch.arange(256).remainder(7).float().repeat(2, 1), scheme, {}, DTYPES[1])


def pairs() -> Iterator[Case]:
    rng = torch.Generator().manual_seed(14)

    def up_to(most: float) -> torch.Tensor:
        """Blocks of any exponents below a maximum near the end of the range, and ties."""
        top = torch.rand(12, 8, 1, generator=rng, dtype=torch.float64) * most
        parts = torch.rand(12, 8, 32, generator=rng, dtype=torch.float64) ** 2
        ties = torch.randint(0, 29, (12, 8, 32), generator=rng) / 28
        return (torch.where(torch.rand(12, 8, 1, generator=rng) < 0.5, parts, ties) * top).flatten(1).bfloat16()

    mantissas = "even+mbs128-blockwise"
    for text in ("rceil", "even", mantissas, "rceil+of0.3", "floor+of1", f"{mantissas}+of1", f"{mantissas}_fp8+of1"):
        scheme = numerics.parse_scheme(text)
        rows = adversarial_rows((32, 256), torch.bfloat16, 0, rng)
        yield f"{text} rows", wrong(rows[:20], scheme, {}, torch.bfloat16)
        yield f"{text} a part", wrong(rows[:9, 4:164], scheme, {}, torch.bfloat16)
        if DEVICE != "cpu" or text in ("rceil", "rceil+of0.3", mantissas):  # the others take seconds, interpreted
            both = rows[:, : 192 if text == "rceil" else 64]
            yield f"{text} both", wrong_both(both, scheme, ({}, {}), torch.bfloat16)
        yield f"{text} largest", wrong(up_to(3.38e38), scheme, {}, torch.bfloat16)


def sides() -> Iterator[Case]:
    rng = torch.Generator().manual_seed(21)
    some = [*SCHEMES[::9], *TILES[:2]]
    for number, scheme in enumerate(some):
        x = adversarial_rows(((5, 256), (17, 130), (7, 1))[number % 3], DTYPES[number % 3], number, rng)
        seed = (0, 2**31, 2**64 - 1)[number % 3]
        yield f"stochastic {scheme}", wrong(x, scheme, {"seed": seed}, x.dtype)
        size = (16, 32, 64, 128)[number % 4]
        signs = {"signs": numerics.random_signs(x.shape[1] + -x.shape[1] % size, number)} if number % 2 else {}
        yield f"rotated {scheme}", wrong(x, scheme, {"rotation": size, **signs}, DTYPES[(number + 1) % 3])
    wide = adversarial_rows((140, 530), torch.float32, 0, rng)
    random = {"seed": 5}
    turned = {"rotation": 128, "seed": 3}
    yield "several tiles each way", wrong(wide[:20], SCHEMES[5], random, torch.float32)
    yield "matrices of ragged tiles", wrong(wide[:4, :70].reshape(2, 2, 70), TILES[0], random, torch.float32)
    yield "transposes", wrong(wide[:4, :120].reshape(2, 4, 60).mT, some[0], random, torch.float32)
    yield "a rotated transpose", wrong(wide[:6, :100].t(), some[1], turned, torch.bfloat16)
    # Blocks, strips and tiles cut short on either axis.
    ragged = ((37, 70), 0), ((1, 40), 2), ((130, 66), 7), ((2, 5, 33), 3), ((64, 1), 8), ((0, 32), 5)
    for number, (shape, place) in enumerate(ragged):
        x = torch.randn(shape, generator=rng).to(DTYPES[number % 3])
        second = {"seed": number} | ({"rotation": 64} if number % 2 else {})
        yield f"both {shape}", wrong_both(x, some[place], ({}, second), x.dtype)
    yield "both, row stride", wrong_both(wide[::2, 3:80], some[0], ({"rotation": 32}, {}), torch.bfloat16)
    yield "both, neither axis has unit stride", wrong_both(wide[:40, :80:2], some[0], ({}, {}), torch.float32)
    yield "both, several tiles", wrong_both(wide[:, :150], SCHEMES[5], (random, {"rotation": 128}), torch.float32)


def wrong_fp8(x: torch.Tensor) -> list[str]:
    """What of operands of FP8 products is not the definition's."""
    if x.numel() == 0:
        return []
    counter = torch.zeros((), dtype=torch.int32, device=DEVICE)
    expected = to_fp8(x)
    found = [part.cpu().float() for part in mxfp4_kernels.to_fp8(x.to(DEVICE), inexact=counter)]
    values = found[0] * found[1]
    wanted = expected.elements.float() * expected.scale
    bad = [] if torch.equal(values.nan_to_num(7e38), wanted.nan_to_num(7e38)) else ["operand"]
    differing = (wanted != x.float()) & x.float().isfinite()
    return bad if int(counter) == int(differing.sum()) else [*bad, "count"]


def fp8() -> Iterator[Case]:
    rng = torch.Generator().manual_seed(25)
    weights = torch.randn(3, 37, 70, generator=rng) * torch.tensor([1.0, 2.0**-9, 3.0])[:, None, None]
    weights[1, 2, 3] = 448 * 2.0**-4
    for dtype in DTYPES:
        x = weights.to(dtype)
        tops = weights.to(dtype).float().abs().amax(dim=(1, 2))
        scale = torch.tensor([2.0 ** (math.ceil(math.log2(top / 448))) for top in tops.tolist()])[:, None, None]
        counter = torch.zeros((), dtype=torch.int32, device=DEVICE)
        elements, found = mxfp4_kernels.to_fp8(x.to(DEVICE), inexact=counter, top=tops.to(DEVICE))
        wanted = (x.float() / scale).to(torch.float8_e4m3fn)
        bad = [] if same(elements.view(torch.uint8), wanted.view(torch.uint8)) else ["elements"]
        bad += [] if same(found, scale.expand(3, 37, 1)) else ["scale"]
        bad += [] if int(counter) == int((wanted.float() * scale != x.float()).sum()) else ["count"]
        yield f"matrices {dtype}", bad
    for number, shape in enumerate(((3, 33), (7, 300), (2, 3, 1100), (1, 1), (0, 8), (4, 0))):
        dtype = DTYPES[number % 3]
        x = adversarial_rows((int(torch.tensor(shape[:-1]).prod()), shape[-1]), dtype, number, rng).view(shape)
        for label, rows in (("rows", x), ("columns", x[..., :300].mT), ("row stride", x[..., ::2])):
            elements, byte = numerics.quantize_e4m3(rows)
            there = rows.to(DEVICE)
            found, scale = mxfp4_kernels.to_fp8(there, torch.uint8)
            bad = [] if same(found, elements) else ["elements"]  # of NaN the sign too is free
            bad += [] if same(scale, byte) else ["scale bytes"]
            bad += [] if rows.dim() > 2 else wrong_fp8(rows)
            values = mxfp4_kernels.from_fp8(found, scale, dtype)
            bad += [] if same(values, numerics.fake_quantize_e4m3(rows)) else ["values"]
            yield f"{shape} {dtype} {label}", bad
            elements, byte = numerics.quantize_mxfp8(rows)
            found, scale = by_scheme.quantize_mxfp8(there, "triton")
            bad = [] if same(found, elements) and same(scale, byte) else ["elements or scale bytes"]
            values = by_scheme.dequantize_mxfp8(found, scale, dtype, "triton")
            bad += [] if same(values, numerics.dequantize_mxfp8(elements, byte, dtype)) else ["values"]
            yield f"MXFP8 {shape} {dtype} {label}", bad
    yield from nvfp4(rng)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).expand(32, 256)
    byte = torch.linspace(0, 255, 32).to(torch.uint8)[:, None]
    for dtype in DTYPES:
        found = mxfp4_kernels.from_fp8(every.to(DEVICE), byte.to(DEVICE), dtype)
        right = same(found, numerics.dequantize_e4m3(every, byte, dtype))
        yield f"every element as {dtype}", [] if right else ["values"]


def nvfp4(rng: torch.Generator) -> Iterator[Case]:
    """Scales of operands of NVFP4 products in ragged tiles, with a factor or one a row; 15 binades fit."""
    sizes = (130, 5, 140, 15), (1, 1, 256, 9), (300, 37, 255, 15), (9, 32, 20, 25), (3, 4, 1, 1)
    for rows, blocks, top, spread in sizes:
        packed = numerics.quantize(torch.zeros(rows, 32 * blocks), macro_block=128, macro_search="block_mantissas")
        packed.scale[:] = torch.randint(max(0, top - spread), top, packed.scale.shape, generator=rng)
        packed.macro[:] = torch.randint(256, packed.macro.shape, generator=rng)
        for macro, by_rows in ((packed.macro, False), (packed.macro, True), (None, False)):
            there = None if macro is None else macro.to(DEVICE)
            found = mxfp4_kernels.nvfp4_scales(packed.scale.to(DEVICE), there, by_rows)
            expected = to_fp4(replace(packed, macro=macro), "nvfp4", by_rows)[1:]
            right = same(found[1], expected[1]) and int(found[2]) == int(expected[2])
            if spread <= 15:  # others are rounded by the one and cut off by the other
                right &= int(found[2]) == 0 and same(found[0].view(torch.uint8), expected[0].view(torch.uint8))
            yield f"NVFP4 scales {rows} x {blocks}, below {top}, {by_rows}", [] if right else ["operand"]


def outputs() -> Iterator[Case]:
    """Results that are written to given tensors: the tensors themselves come back, with the bits of new ones."""
    rng = torch.Generator().manual_seed(29)
    scheme = Scheme("even", 128, "block_mantissas", 1.0)
    x = adversarial_rows((6, 270), torch.bfloat16, 0, rng).to(DEVICE)
    packed = mxfp4_kernels.quantize(x, scheme)
    mantissas = mxfp4_kernels.quantize(x[:, :256], Scheme("even", 128, "block_mantissas"))
    for label, function, arguments in (
        ("values", mxfp4_kernels.fake_quantize, (x, scheme)),
        ("values along columns", mxfp4_kernels.fake_quantize, (x.mT, scheme)),
        ("rotated values", mxfp4_kernels.fake_quantize, (x, scheme, Side(rotation=32), torch.float32)),
        ("codes", mxfp4_kernels.quantize, (x, scheme)),
        ("codes along columns", mxfp4_kernels.quantize, (x.mT, Scheme())),
        ("dequantized", mxfp4_kernels.dequantize, (packed, 270, scheme, torch.bfloat16)),
        ("FP8", mxfp4_kernels.to_fp8, (x,)),
        ("FP8 with scale bytes", mxfp4_kernels.to_fp8, (x, torch.uint8)),
        ("FP8 by rows and columns", mxfp4_kernels.to_fp8_rows_and_columns, (x,)),
        ("transposed FP8", mxfp4_kernels.transpose_fp8, (mxfp4_kernels.to_fp8(x)[0],)),
        ("gradients", mxfp4_kernels.gradient_to_fp8, (x, torch.ones(6, device=DEVICE))),
        ("FP8 of nothing", mxfp4_kernels.to_fp8, (x[:, :0],)),
        ("FP8 values", mxfp4_kernels.from_fp8, (*mxfp4_kernels.to_fp8(x, torch.uint8), torch.float32)),
        ("NVFP4 scales", mxfp4_kernels.nvfp4_scales, (mantissas.scale, mantissas.macro, True)),
    ):
        yield label, wrong_output(function, arguments)


def wrong_output(function: Callable, arguments: tuple) -> list[str]:
    """What of results that are written to given tensors is wrong."""
    expected = function(*arguments)
    if isinstance(expected, torch.Tensor):
        buffer = other_bits(expected)
        found = function(*arguments, out=buffer)
        return [] if found is buffer and same(found, expected.cpu()) else ["values"]
    buffers = [None if part is None else other_bits(part) for part in expected]
    out = mxfp4_kernels.Packed(*buffers) if function is mxfp4_kernels.quantize else tuple(buffers)
    bad = []
    for number, part in enumerate(function(*arguments, out=out)):
        wanted = None if part is None else expected[number].cpu()
        if part is not buffers[number] or not same(part, wanted):
            bad.append(f"result {number}")
    return bad


def other_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one, in which each bit differs."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return (~tensor.view(integers)).view(tensor.dtype)


@settings(max_examples=12 if DEVICE == "cpu" else 60, deadline=None, database=None, derandomize=True)
@given(
    rows=st.integers(1, 10),
    columns=st.integers(1, 300),
    scheme=st.sampled_from(SCHEMES + TILES),
    dtype=st.sampled_from(DTYPES),
    out=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    spread=st.integers(0, 40),
)
def any_shape_and_spread(rows, columns, scheme, dtype, out, seed, spread):
    rng = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread, spread + 1, (rows, columns), generator=rng)
    x = (torch.randn(rows, columns, generator=rng) * torch.exp2(exponents.float())).clamp(-6e4, 6e4).to(dtype)
    assert wrong(x, scheme, {}, out) == []


def compare(cases: Iterator[Case]) -> dict:
    found = list(cases)
    return {"cases": len(found), "mismatches": [f"{label}: {', '.join(bad)}" for label, bad in found if bad]}


if __name__ == "__main__":
    if sys.argv[1] == "property":
        any_shape_and_spread()
        print("{}")
    else:
        modes = {"schemes": schemes, "layouts": layouts, "pairs": pairs, "sides": sides, "fp8": fp8, "outputs": outputs}
        print(json.dumps(compare(modes[sys.argv[1]]())))
