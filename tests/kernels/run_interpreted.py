# SPDX-License-Identifier: Apache-2.0
"""Compares the kernel with the eager definition on the CPU, bit for bit; prints a JSON list of
reports, one for each dtype.

    TRITON_INTERPRET=1 python run_interpreted.py bfloat16,float16        the interpreted kernel
    TRITON_INTERPRET=1 python run_interpreted.py bfloat16,float16 few    a shape for each scheme, a dtype for each case
    python run_interpreted.py bfloat16,float16 cuda                      the compiled kernel, on a GPU

A process of its own, because Triton decides when it is imported whether kernels are interpreted.
"""

import itertools
import json
import sys
from collections.abc import Iterator

import torch

import mxfp4_kernels
from hf_mxfp4 import numerics


RULES = ("rceil", "floor", "even")
MACROS = (None, 32, 64, 128, 256)
SHAPES = ((1, 1), (3, 32), (5, 33), (7, 129), (2, 300), (0, 64), (17, 256))
SCHEMES = [
    {"scale_rule": rule, "macro_block": macro, "outlier_fallback": alpha}
    for rule, macro, alpha in itertools.product(RULES, MACROS, (None, 0.5, 0.3))
    if alpha != 0.3 or macro in (None, 128)
]


def adversarial_rows(shape: tuple[int, int], dtype: torch.dtype, start: int, rng: torch.Generator) -> torch.Tensor:
    """Rows that cycle, from the kind ``start`` on, through the kinds of data that break quantizers."""
    n_rows, n_cols = shape
    finfo = torch.finfo(dtype)

    def normal() -> torch.Tensor:
        return torch.randn(n_cols, generator=rng, dtype=torch.float64)

    def choice(values: tuple[float, ...]) -> torch.Tensor:
        pick = torch.randint(len(values), (n_cols,), generator=rng)
        return torch.tensor(values, dtype=torch.float64)[pick]

    def exponents(low: float, high: float) -> torch.Tensor:
        return 2.0 ** (torch.rand(n_cols, generator=rng, dtype=torch.float64) * (high - low) + low).floor()

    grid_and_ties = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0)
    lowest = -149 if dtype != torch.float16 else -24
    kinds = (
        lambda: normal(),
        lambda: normal() * exponents(-12, 12),
        lambda: choice(grid_and_ties) * choice((-1.0, 1.0)) * 2.0**-3,
        lambda: choice((0.0, -0.0, 0.0, 3.0)),
        lambda: choice((*(1.0,) * 60, float("nan"), float("inf"), -float("inf"))) * normal(),
        lambda: normal() * exponents(lowest, lowest + 12),
        lambda: choice((finfo.max, -finfo.max, finfo.max / 2, finfo.max * 0.8, 1.0)),
        lambda: normal() * exponents(-124, 126) if dtype != torch.float16 else normal() * exponents(-24, 14),
        lambda: torch.full((n_cols,), finfo.max, dtype=torch.float64) * torch.rand(n_cols, generator=rng).double(),
        lambda: torch.zeros(n_cols, dtype=torch.float64),
    )
    rows = [kinds[(start + row) % len(kinds)]() for row in range(n_rows)]
    return torch.stack(rows).to(dtype) if rows else torch.empty(shape, dtype=dtype)


def cases(dtype: torch.dtype, few: bool) -> Iterator[tuple[str, torch.Tensor, dict]]:
    """Label, input and options."""
    rng = torch.Generator().manual_seed(7)
    # Of few, every dtype gives a scheme another shape.
    first = (torch.float32, torch.bfloat16, torch.float16).index(dtype)
    for number, (scheme, shape) in enumerate(itertools.product(SCHEMES, SHAPES)):
        if few and (number // len(SHAPES) + first) % len(SHAPES) != number % len(SHAPES):
            continue
        yield f"matrix {shape}", adversarial_rows(shape, dtype, number, rng), scheme

    default = {"scale_rule": "rceil", "macro_block": 128, "outlier_fallback": 0.5}
    if dtype != torch.float32:
        patterns = torch.randperm(2**16, generator=rng).to(torch.int32).to(torch.int16).view(dtype)
        patterns = patterns[torch.isfinite(patterns)].clone()
        yield "every finite 16-bit pattern", patterns, default
    if dtype != torch.float32 and not few:
        by_size = patterns[patterns.abs().float().argsort()].clone()
        yield "every finite 16-bit pattern, sorted", by_size, default | {"scale_rule": "even"}

    # One macro block for every factor 1 + m8 / 256.
    factors = 1 + torch.arange(256, dtype=torch.float64)[:, None] / 256
    blocks = torch.rand((256, 128), generator=rng, dtype=torch.float64)
    blocks[:, 77] = 1.0
    for number, exponent in enumerate((0, -120, -124, -130) if dtype != torch.float16 else (0, -10)):
        if few and number % 3 != first:
            continue
        x = (blocks * 5.9999 / factors * 2.0**exponent).to(dtype)
        for alpha in (None, 0.7):
            yield f"every factor, around 2**{exponent}", x, default | {"outlier_fallback": alpha}
    # The cheap division is not exact below 2**-116: a minute weight, or a minute residual of an ordinary block, whose
    # other values are on the grid (factor 1.5), must not get it.
    for alpha in (1e-7, 1e-36):
        yield f"alpha {alpha}", (blocks * 5.9999 / factors).to(dtype), default | {"outlier_fallback": alpha}
    residuals = torch.tensor([4.0, -2.0, 1.0, 0.0], dtype=torch.float64).repeat(64, 32)
    residuals[:, 3::8] = torch.rand((64, 16), generator=rng, dtype=torch.float64) * 2.0**-120
    yield "minute residuals", residuals.to(dtype), default | {"outlier_fallback": 0.7}
    for rule in RULES:
        yield (
            "full fallback of the largest numbers",
            adversarial_rows((20, 128), dtype, 6, rng),
            {"scale_rule": rule, "macro_block": 128, "outlier_fallback": 1.0},
        )

    wide = adversarial_rows((19, 2500), dtype, 0, rng)
    layouts = {
        "several tiles each way": wide,
        "tiles of one long row": adversarial_rows((5, 1024), dtype, 0, rng),
        "one long row, cut": adversarial_rows((1, 4100), dtype, 0, rng),
        "row stride": wide[:, 100:740],
        "row stride, odd start": wide[1::2, 3:261],
        "transposed": wide[:, :40].T,
        "every second column": wide[:, 0:512:2],
        "vector": wide[2],
        "three axes": wide[:18, :384].reshape(3, 6, 384),
        "three axes, permuted": wide[:18, :384].reshape(3, 6, 384).transpose(0, 1),
        "expanded": wide[:1, :128].expand(9, 128),
        "one column": wide[:, :1],
        "no columns": wide[:, :0],
        "a parameter": torch.nn.Parameter(wide[:2, :128].clone()),
    }
    for label, x in layouts.items():
        yield label, x, default


def compare(dtype: torch.dtype, device: str, few: bool) -> dict:
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    report = {"cases": 0, "elements": 0, "nan": 0, "zeros": 0, "labels": [], "mismatches": []}
    for label, x, options in cases(dtype, few):
        before = x.detach().clone()
        expected = numerics.fake_quantize(x, **options)
        actual = mxfp4_kernels.fake_quantize(x.to(device), **options).cpu()
        report["cases"] += 1
        report["elements"] += x.numel()
        report["nan"] += int(expected.isnan().sum())
        report["zeros"] += int((expected == 0).sum())
        if label not in report["labels"]:
            report["labels"].append(label)
        problem = None
        if (actual.shape, actual.dtype, actual.requires_grad) != (x.shape, dtype, False):
            problem = f"shape, dtype or requires_grad: {actual.shape}, {actual.dtype}, {actual.requires_grad}"
        elif not actual.is_contiguous():
            problem = "not contiguous"
        elif not torch.equal(before.nan_to_num(), x.detach().nan_to_num()):
            problem = "the input was changed"
        else:
            same = actual.view(bits) == expected.contiguous().view(bits)
            same |= actual.isnan() & expected.isnan()
            if not same.all():
                where = tuple((~same).nonzero()[0].tolist())
                values = [tensor[where].item() for tensor in (x.detach(), expected, actual)]
                problem = f"{int((~same).sum())} differ; at {where} x, eager, kernel = {values}"
        if problem:
            report["mismatches"].append(f"{label} {options}: {problem}")
    return report


if __name__ == "__main__":
    device, few = "cuda" if "cuda" in sys.argv else "cpu", "few" in sys.argv
    print(json.dumps([compare(getattr(torch, dtype), device, few) for dtype in sys.argv[1].split(",")]))
