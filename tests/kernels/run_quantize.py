# SPDX-License-Identifier: Apache-2.0
"""Compares all three kernels with the eager definition, bit for bit; prints a JSON report.

    TRITON_INTERPRET=1 python run_quantize.py schemes         interpreted: every scheme, on one dtype and shape each
    TRITON_INTERPRET=1 python run_quantize.py few_schemes     interpreted: with the fallback or without
    TRITON_INTERPRET=1 python run_quantize.py layouts         interpreted: shapes, strides, special values
    TRITON_INTERPRET=1 python run_quantize.py property        interpreted: any shape, scheme and range
    TRITON_INTERPRET=1 python run_quantize.py package         interpreted: layers of hf_mxfp4 with backend="triton"
    python run_quantize.py schemes cuda                       compiled, on a GPU: every scheme, dtype and shape
    python run_quantize.py schemes-mse cuda                   those of one scale rule; also property-mse

A process of its own, because Triton decides when it is imported whether kernels are interpreted.
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from factors import factors_config
from hypothesis import given, settings
from hypothesis import strategies as st
from run_interpreted import adversarial_rows

import hf_mxfp4
import mxfp4_kernels
from hf_mxfp4 import MXFP4Linear, numerics
from hf_mxfp4.backends.select import dequantize
from hf_mxfp4.layers import MXFP4PackedLinear
from hf_mxfp4.numerics import QuantScheme


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MACROS = (
    (None, "static"),
    (32, "static"),
    (128, "static"),
    (64, "dynamic"),
    (128, "dynamic"),
    (256, "dynamic"),
    (128, "blockwise"),
)
SCHEMES = [
    QuantScheme(rule, macro, search, alpha)
    for rule, (macro, search), alpha in itertools.product(("rceil", "floor", "even", "mse"), MACROS, (None, 0.3))
]
TILES = [
    QuantScheme("rceil", block_rows=32),
    QuantScheme("mse", None, "static", 1.0, block_rows=32),
    QuantScheme("even", 128, "static", 0.5, block_rows=32),
    QuantScheme("floor", 256, "dynamic", block_rows=32),
    QuantScheme("rceil", 128, "blockwise", 0.3, block_rows=32),
    QuantScheme("mse", 64, "dynamic", block_rows=32),
]
PARTS = ("codes", "scale", "macro", "residual_codes", "residual_scale")
WHAT, _, RULE = sys.argv[1].partition("-")
DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cpu"


def asked_for(scheme: QuantScheme) -> bool:
    return RULE in ("", scheme.scale_rule.value)


def every_scheme() -> Iterator[tuple[str, torch.Tensor, QuantScheme]]:
    rng = torch.Generator().manual_seed(11)
    shapes = ((5, 270), (8, 256), (3, 33), (40, 1000))
    for number, scheme in enumerate(SCHEMES + TILES):
        every = list(itertools.product(DTYPES, shapes))
        # Of few, the next macro block or search has the other fallback.
        if WHAT == "few_schemes" and number < len(SCHEMES) and (number // 2 + number) % 2 or not asked_for(scheme):
            continue
        for dtype, shape in [(DTYPES[number % 3], shapes[number // 3 % 3])] if DEVICE == "cpu" else every:
            yield f"{dtype} {shape}", adversarial_rows(shape, dtype, number, rng), scheme


def layouts() -> Iterator[tuple[str, torch.Tensor, QuantScheme]]:
    rng = torch.Generator().manual_seed(12)
    fallback = QuantScheme("rceil", 128, "static", 0.5)
    tiles = QuantScheme("mse", block_rows=32)
    wide = adversarial_rows((11, 700), torch.bfloat16, 0, rng)
    for label, x, scheme in (
        ("row stride", wide[::2, 100:421], fallback),
        ("transposed", wide[:, :40].T, fallback),
        ("every second column", wide[:3, 0:512:2], fallback),
        ("vector", wide[2], fallback),
        ("three axes", wide[:10, :384].reshape(2, 5, 384), fallback),
        ("three axes, permuted", wide[:10, :384].reshape(2, 5, 384).transpose(0, 1), fallback),
        ("expanded", wide[:1, :128].expand(9, 128), fallback),
        ("one column", wide[:, :1], fallback),
        ("no columns", wide[:, :0], fallback),
        ("no rows", wide[:0], fallback),
        ("a parameter", torch.nn.Parameter(wide[:2, :128].clone()), fallback),
        ("matrices of ragged tiles", wide[:10, :350].reshape(2, 5, 350), tiles),
        ("matrices of whole tiles", torch.randn(2, 64, 50, generator=rng), tiles),
        ("no rows of tiles", wide[:0], tiles),
    ):
        yield label, x, scheme
    # The largest magnitudes: scales at the end of the range, products and sums that leave float32.
    largest = torch.linspace(0.5, 1.0, 512, dtype=torch.float64) * torch.finfo(torch.float32).max
    for scheme in ("rceil", "mse", "even+mbs128-blockwise+of1", "mse+mbs128-dynamic+of1", "rceil+mbs32-dynamic+of1"):
        x = torch.stack((largest, -largest.flip(0), largest / 2)).float()
        yield "largest numbers", x, numerics.parse_scheme(scheme)
    # Just below 2**127, where factors are still tried.
    for scheme in ("rceil+mbs128-dynamic+of1", "mse+mbs32-dynamic+of1", "floor+mbs128-static+of1"):
        x = (torch.rand(4, 256, generator=rng, dtype=torch.float64) * 2.0**127 * (1 - 2.0**-24)).float()
        yield "below 2**127", x, numerics.parse_scheme(scheme)
    # The smallest: subnormal inputs, scales, values and quotients.
    for scheme in ("rceil+of0.5", "mse+mbs128-dynamic+of0.3", "even+mbs128-blockwise", "rceil+mbs128-static+of0.7"):
        x = torch.randn(8, 128, generator=rng) * 2.0 ** torch.linspace(-140, -100, 8)[:, None]
        yield "smallest numbers", x, numerics.parse_scheme(scheme)
    # Ties of errors: equal magnitudes, in which every candidate may do as well.
    for scheme in ("mse", "even+mbs128-dynamic", "rceil+mbs128-blockwise"):
        yield "ties", torch.full((2, 256), 3.0), numerics.parse_scheme(scheme)
        yield "powers of two", 2.0 ** torch.arange(256).remainder(7).float().repeat(2, 1), numerics.parse_scheme(scheme)


def same(actual: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """Equal bits, NaN and NaN apart."""
    if actual is None or expected is None:
        return actual is expected
    actual = actual.cpu()
    if (actual.shape, actual.dtype, actual.requires_grad) != (expected.shape, expected.dtype, False):
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    equal = actual.contiguous().view(integers) == expected.contiguous().view(integers)
    return bool((equal | (actual.isnan() & expected.isnan())).all())


def differences(x: torch.Tensor, scheme: QuantScheme, outputs: tuple = DTYPES) -> list[str]:
    """What of the results is not that of the definition."""
    stored = {name: getattr(scheme, name) for name in ("macro_block", "macro_search", "outlier_fallback")}
    options = {**stored, "scale_rule": scheme.scale_rule.value, "block_rows": scheme.block_rows}
    on_device = x.to(DEVICE)
    expected = numerics.quantize(x, **vars(scheme))
    values = mxfp4_kernels.fake_quantize(on_device, **options)
    wrong = [] if same(values, numerics.apply_scheme(x, scheme)) else ["values"]
    packed = mxfp4_kernels.quantize(on_device, **options)
    wrong += [name for name in PARTS if not same(getattr(packed, name), getattr(expected, name))]
    for dtype in outputs:
        parts = {name: part for name in PARTS if (part := getattr(packed, name)) is not None}
        out = mxfp4_kernels.dequantize(**parts, length=x.shape[-1], dtype=dtype, **stored)
        if not same(out, expected.dequantize(dtype)):
            wrong.append(f"dequantized as {dtype}")
    return wrong


@settings(max_examples=15 if DEVICE == "cpu" else 125 if RULE else 500, deadline=None, database=None, derandomize=True)
@given(
    rows=st.integers(1, 10),
    columns=st.integers(1, 300),
    scheme=st.sampled_from([scheme for scheme in SCHEMES + TILES if asked_for(scheme)]),
    dtype=st.sampled_from(DTYPES),
    out=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    spread=st.integers(0, 40),
)
def any_shape_and_spread(rows, columns, scheme, dtype, out, seed, spread):
    rng = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread, spread + 1, (rows, columns), generator=rng)
    x = (torch.randn(rows, columns, generator=rng) * torch.exp2(exponents.float())).clamp(-6e4, 6e4).to(dtype)
    assert differences(x, scheme, (out,)) == []


def compare(cases: Iterator[tuple[str, torch.Tensor, QuantScheme]]) -> dict:
    report = {"cases": 0, "labels": [], "mismatches": []}
    for number, (label, x, scheme) in enumerate(cases):
        before = x.detach().clone()
        wrong = differences(x, scheme, (DTYPES[number % 3],) if DEVICE == "cpu" else DTYPES)
        if not torch.equal(before.nan_to_num(), x.detach().nan_to_num()):
            wrong.append("the input was changed")
        report["cases"] += 1
        report["labels"].append(label)
        report["mismatches"] += [f"{label}, {scheme}: {what}" for what in wrong]
    return report


def package() -> dict:
    """Results of layers and functions by name: whether they are those of backend="eager", and kernel launches."""
    launches = Counter()
    for name in ("fake_quantize", "fake_quantize_e4m3", "fake_quantize_e4m3_both", "quantize", "dequantize"):
        setattr(mxfp4_kernels, name, counted(getattr(mxfp4_kernels, name), name, launches))

    def both(compute: Callable[[str], list[torch.Tensor]]) -> dict:
        launches.clear()
        equal = all(same(*pair) for pair in zip(compute("triton"), compute("eager"), strict=True))
        return {"equal": equal, "launches": dict(launches)}

    rng = torch.Generator().manual_seed(13)
    w, x = torch.randn(12, 70, generator=rng), torch.randn(5, 70, generator=rng)
    options = {"scale_rule": "mse", "macro_block": 128, "macro_search": "dynamic", "outlier_fallback": 0.5}

    def functions(backend: str) -> list[torch.Tensor]:
        packed = hf_mxfp4.quantize(x, axis=0, backend=backend, **options)
        values = hf_mxfp4.fake_quantize(x, axis=0, backend=backend, **options)
        return [getattr(packed, name) for name in PARTS] + [values, dequantize(packed, x.dtype, backend)]

    def selective(backend: str) -> list[torch.Tensor]:
        found = []
        for text in ("rceil+of1@0.1", "even+mbs128-blockwise+of0.5@0.3", "mse+mbs64-dynamic+of1@0.2"):
            scheme = numerics.parse_scheme(text)
            wide = torch.cat([w, w.square()], dim=-1)
            wide[1, 3] = torch.nan
            tensor = hf_mxfp4.quantize(wide, backend=backend, **vars(scheme))
            found += [getattr(tensor, name) for name in PARTS]
            found.append(hf_mxfp4.fake_quantize(wide, backend=backend, **vars(scheme)))
        return found

    def trained(backend: str) -> list[torch.Tensor]:
        layer = MXFP4Linear(70, 12, config=factors_config(saved_activations="mxfp4", backend=backend))
        with torch.no_grad():
            layer.weight.copy_(w)
            layer.bias.zero_()
        out = layer(x)
        out.square().sum().backward()
        return [out.detach(), layer.weight.grad]

    def gradients(backend: str) -> list[torch.Tensor]:
        config = factors_config(preset="w4a4g8", macro_block=128, backend=backend)
        layer = MXFP4Linear(70, 12, bias=False, config=config)
        with torch.no_grad():
            layer.weight.copy_(w)
        leaf = x.clone().requires_grad_()
        layer(leaf).square().sum().backward()
        return [leaf.grad, layer.weight.grad]

    def packed(backend: str) -> list[torch.Tensor]:
        linear = torch.nn.Linear(70, 12, bias=False)
        with torch.no_grad():
            linear.weight.copy_(w)
        config = factors_config(mode="packed", backend=backend)
        layer = MXFP4PackedLinear.from_linear(linear, config)
        with torch.no_grad():
            return [layer.weight, layer.weight_macro, layer(x)]

    return {compute.__name__: both(compute) for compute in (functions, selective, trained, gradients, packed)}


def counted(function: Callable, name: str, launches: Counter) -> Callable:
    def call(*arguments, **options):
        launches[name] += 1
        return function(*arguments, **options)

    return call


if __name__ == "__main__":
    if WHAT == "package":
        print(json.dumps(package()))
    elif WHAT == "property":
        any_shape_and_spread()
        print("{}")
    else:
        print(json.dumps(compare(layouts() if WHAT == "layouts" else every_scheme())))
