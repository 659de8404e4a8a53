# SPDX-License-Identifier: Apache-2.0
"""Compares stochastic rounding, rotations and both directions of the kernels with the eager definition, bit for bit;
prints a JSON report.

    TRITON_INTERPRET=1 python run_variants.py MODE,MODE  interpreted: a scheme and a shape each
    TRITON_INTERPRET=1 python run_variants.py package    interpreted: a layer of hf_mxfp4
    python run_variants.py MODE cuda                     compiled, on a GPU: 15 times as many

A mode is stochastic, rotated, both, whole_rows or converted.
A process of its own, because Triton decides when it is imported whether kernels are interpreted.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from run_interpreted import adversarial_rows
from run_quantize import DEVICE, DTYPES, PARTS, counted, differences, same
from spread_cases import spread_cases

import mxfp4_kernels
from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig, numerics
from hf_mxfp4.backends import triton
from hf_mxfp4.numerics import QuantScheme


SCHEMES = [
    QuantScheme("rceil"),
    QuantScheme("even", 128, "static", 0.5),
    QuantScheme("mse", None, "static", 1.0),
    QuantScheme("floor", 64, "dynamic", 0.3),
    QuantScheme("rceil", 128, "blockwise"),
    QuantScheme("even", block_rows=32),
    QuantScheme("rceil", 256, "static", 0.5, block_rows=32),
    QuantScheme("floor", 256, "static"),
]
SHAPES = ((3, 45), (5, 256), (1, 33), (33, 130), (7, 1))
#: Shapes for both directions: blocks, strips and tiles cut short on either axis.
MATRICES = ((37, 70), (1, 40), (130, 66), (2, 5, 33), (64, 1), (0, 32))
SEEDS = (0, 2**31, 2**64 - 1)
Side = dict[str, Any]


def on_device(side: Side) -> Side:
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in side.items()}


def options_of(scheme: QuantScheme) -> dict[str, Any]:
    names = ("macro_block", "macro_search", "outlier_fallback", "block_rows")
    return {"scale_rule": scheme.scale_rule.value, **{name: getattr(scheme, name) for name in names}}


def eager(x: torch.Tensor, scheme: QuantScheme, side: Side, dtype: torch.dtype) -> tuple[torch.Tensor, list]:
    """Values as ``dtype``, and parts, of what the kernels are asked for."""
    if size := side.get("rotation"):
        x = numerics.rotate(F.pad(x.float(), (0, -x.shape[-1] % size)), size, signs=side.get("signs"))
    random = {"rounding": side["rounding"], "seed": side["seed"]} if "seed" in side else {}
    packed = numerics.quantize(x, **options_of(scheme), **random)
    return packed.dequantize(dtype), [getattr(packed, name) for name in PARTS]


def wrong(x: torch.Tensor, scheme: QuantScheme, side: Side, dtype: torch.dtype) -> list[str]:
    """What of the results along the last axis is not that of the definition."""
    values, parts = eager(x, scheme, side, dtype)
    arguments = options_of(scheme) | on_device(side)
    found = mxfp4_kernels.fake_quantize(x.to(DEVICE), dtype=dtype, **arguments)
    packed = mxfp4_kernels.quantize(x.to(DEVICE), **arguments)
    bad = [] if same(found, values) and found.is_contiguous() else ["values"]
    return bad + [name for name, part, expected in zip(PARTS, packed, parts, strict=True) if not same(part, expected)]


def wrong_both(x: torch.Tensor, scheme: QuantScheme, sides: tuple[Side, Side], dtype: torch.dtype) -> list[str]:
    """What of the results for ``x`` and its transpose is not that of the definition."""
    names = ("rounding", "seed", "rotation", "signs")
    defaults = {"rounding": "nearest"}
    pairs = {name: tuple(on_device(side).get(name, defaults.get(name)) for side in sides) for name in names}
    arguments = options_of(scheme) | pairs
    found = mxfp4_kernels.fake_quantize_both(x.to(DEVICE), dtype=dtype, **arguments)
    packed = mxfp4_kernels.quantize_both(x.to(DEVICE), **arguments)
    bad = []
    for label, view, side, actual, parts in zip("xt", (x, x.mT), sides, found, packed, strict=True):
        values, expected = eager(view, scheme, side, dtype)
        bad += [] if same(actual, values) and actual.is_contiguous() else [f"{label} values"]
        bad += [f"{label} {n}" for n, part, e in zip(PARTS, parts, expected, strict=True) if not same(part, e)]
    return bad


def combinations(*choices: Sequence) -> Iterator[tuple]:
    """Interpreted, as many as the longest of the choices has, running through each; on a GPU 15 times as many, in which
    any two of the choices meet in every way."""
    return spread_cases(max(map(len, choices)) * (1 if DEVICE == "cpu" else 15), *choices)


def stochastic() -> Iterator[tuple[str, list[str]]]:
    rng = torch.Generator().manual_seed(21)
    for number, (scheme, shape, dtype, seed) in enumerate(combinations(SCHEMES, SHAPES, DTYPES, SEEDS)):
        x = adversarial_rows(shape, dtype, number, rng)
        yield f"{scheme} {shape} {dtype} {seed}", wrong(x, scheme, {"rounding": "stochastic", "seed": seed}, dtype)
    side = {"rounding": "stochastic", "seed": 5}
    wide = adversarial_rows((5, 2112), torch.float32, 0, rng)
    yield "several tiles of one long row", wrong(wide, SCHEMES[0], side, torch.float32)
    yield "several tiles each way", wrong(wide[:, :530], SCHEMES[1], side, torch.float32)
    yield "matrices of ragged tiles", wrong(wide[:4, :70].reshape(2, 2, 70), SCHEMES[5], side, torch.float32)
    yield "a transpose", wrong(wide[:, :90].t(), SCHEMES[0], side, torch.float32)
    yield "transposes", wrong(wide[:4, :120].reshape(2, 4, 60).mT, SCHEMES[0], side, torch.float32)


def rotated() -> Iterator[tuple[str, list[str]]]:
    rng = torch.Generator().manual_seed(22)
    sizes, random = (16, 32, 64, 128), (False, True, True)
    for number, (scheme, shape, dtype, size, out, signed) in enumerate(
        combinations(SCHEMES, SHAPES, DTYPES, sizes, (*DTYPES[1:], DTYPES[0]), random)
    ):
        length = shape[-1] + -shape[-1] % size
        side = {"rotation": size} | ({"signs": numerics.random_signs(length, number)} if signed else {})
        x = adversarial_rows(shape, dtype, number, rng)
        yield f"{scheme} {shape} {dtype} {size} {signed}", wrong(x, scheme, side, out)
    x = torch.randn(6, 512, generator=rng)
    side = {"rotation": 128, "rounding": "stochastic", "seed": 3}
    yield "rows of whole blocks", wrong(x, SCHEMES[1], side, torch.bfloat16)
    yield "a transpose", wrong(x[:, :100].t(), SCHEMES[1], side, torch.bfloat16)
    yield "row stride", wrong(x[::2, 16:300], SCHEMES[1], side, torch.float16)


def whole_rows() -> Iterator[tuple[str, list[str]]]:
    rng = torch.Generator().manual_seed(25)
    schemes = [
        QuantScheme(rule, "row", search, alpha)
        for rule, search, alpha in (("rceil", "static", 0.5), ("floor", "dynamic", None), ("mse", "static", None))
    ]
    shapes = ((5, 1), (9, 70), (3, 300), (2, 256), (3, 1030), (2, 2048), (2, 2500), (2, 4096))
    for number, (scheme, shape, dtype) in enumerate(combinations(schemes, shapes, DTYPES)):
        x = adversarial_rows(shape, dtype, number, rng)
        bad = wrong(x, scheme, {}, dtype) + [f"dequantized {part}" for part in differences(x, scheme, (dtype,))]
        yield f"{scheme} {shape} {dtype}", bad
    x = torch.randn(300, 40, generator=rng)
    yield "a transpose", wrong(x.t(), schemes[0], {"rotation": 64}, torch.bfloat16)
    yield (
        "rotated, of one tile a row",
        wrong(torch.randn(2, 4000, generator=rng), schemes[0], {"rotation": 128}, torch.float32),
    )
    side = {"rounding": "stochastic", "seed": 3}
    yield "both", wrong_both(x[:50], schemes[0], ({}, side), torch.float32)


def converted() -> Iterator[tuple[str, list[str]]]:
    """Float32 values that the kernel writes in another dtype, as those that are cast after it, also where these
    overflow."""
    rng = torch.Generator().manual_seed(26)
    schemes = (*SCHEMES, QuantScheme("rceil", "row", "dynamic", 1.0), QuantScheme("mse", 128, "dynamic", 1.0))
    for number, (scheme, shape, dtype) in enumerate(combinations(schemes, SHAPES, (torch.bfloat16, torch.float16))):
        x = adversarial_rows(shape, torch.float32, number, rng)
        x[0, 0] = torch.finfo(torch.float32).max
        for label, rows in (("rows", x), ("a transpose", x.t().contiguous().t())):
            found = triton.fake_quantize(rows.to(DEVICE), scheme, dtype=dtype)
            expected = numerics.apply_scheme(x, scheme).to(dtype)
            written = found.dtype == dtype and same(found, expected)
            yield f"{scheme} {shape} {dtype} {label}", [] if written else ["values"]


def both() -> Iterator[tuple[str, list[str]]]:
    rng = torch.Generator().manual_seed(23)
    for number, (scheme, shape, dtype, size) in enumerate(combinations(SCHEMES, MATRICES, DTYPES, (None, 16, 64))):
        *stack, rows, cols = shape
        x = adversarial_rows((rows * (stack or [1])[0], cols), dtype, number, rng).view(shape)
        second = {"rounding": "stochastic", "seed": number}
        if size is not None:
            second |= {"rotation": size, "signs": numerics.random_signs(rows + -rows % size, number)}
        yield f"{scheme} {shape} {dtype} {size}", wrong_both(x, scheme, ({}, second), dtype)
    x = adversarial_rows((140, 150), torch.bfloat16, 0, rng)
    yield "row stride", wrong_both(x[::2, 3:80], SCHEMES[0], ({"rotation": 32}, {}), torch.bfloat16)
    yield "neither axis has unit stride", wrong_both(x[:40, :80:2], SCHEMES[0], ({}, {}), torch.bfloat16)
    yield "a transpose", wrong_both(x[:40, :50].t(), SCHEMES[0], ({}, {}), torch.bfloat16)
    side = {"rounding": "stochastic", "seed": 9}
    yield "several tiles", wrong_both(x, SCHEMES[1], (side, {"rotation": 128}), torch.float32)


def package() -> Iterator[tuple[str, list[str]]]:
    """A layer with every operand quantized: backend="triton" against "eager", and how often kernels are launched."""
    launches = Counter()
    for name in ("fake_quantize", "fake_quantize_both"):
        setattr(mxfp4_kernels, name, counted(getattr(mxfp4_kernels, name), name, launches))
    rng = torch.Generator().manual_seed(24)
    x, weight, grad = (torch.randn(*shape, generator=rng) for shape in ((2, 5, 50), (12, 50), (2, 5, 12)))
    r16, r32 = {"rotation": "random-16"}, {"rotation": "random-32"}
    random, of = {"grad": "rceil+stochastic"} | r16, "even+of0.5"
    for label, dtype, dgrad, wgrad, expected in (
        ("both", torch.bfloat16, {"grad": "rceil", "weight": "rceil"}, random | {"x": "rceil"}, (4, 1)),
        ("both rotated", torch.float32, {"grad": of} | r32, {"grad": of} | r16, (2, 1)),
        ("differing", torch.float32, {"grad": "even"}, random, (4, 0)),
        ("mixed", torch.float16, {"grad": "rceil"}, random, (4, 0)),
    ):
        full = {"weight": "full"}, {"x": "full"}
        dgrad, wgrad = (rest | given for rest, given in zip(full, (dgrad, wgrad), strict=True))
        options = {"macro_block": None, "outlier_fallback": None, "dgrad": dgrad, "wgrad": wgrad}
        results = {}
        for backend in ("eager", "triton"):
            launches.clear()
            config = MXFP4RLConfig(backend=backend, fprop={"rotation": "random-64"}, **options)
            layer = MXFP4Linear(50, 12, False, config=config).to(dtype)
            with torch.no_grad():
                layer.weight.copy_(weight)
            leaf = x.to(dtype).requires_grad_()
            out = layer(leaf)
            out.backward(grad.to(dtype))
            results[backend] = out.detach(), leaf.grad, layer.weight.grad
        bad = [name for name, *pair in zip(("y", "dx", "dw"), *results.values(), strict=True) if not same(*pair)]
        found = launches["fake_quantize"], launches["fake_quantize_both"]
        yield label, bad + ([] if found == expected else [f"launches {found}, not {expected}"])


MODES = {
    "stochastic": stochastic,
    "rotated": rotated,
    "both": both,
    "whole_rows": whole_rows,
    "converted": converted,
    "package": package,
}

if __name__ == "__main__":
    report = {"cases": {}, "mismatches": []}
    for name in sys.argv[1].split(","):
        found = list(MODES[name]())
        report["cases"][name] = len(found)
        report["mismatches"] += [f"{label}: {', '.join(bad)}" for label, bad in found if bad]
    print(json.dumps(report))
