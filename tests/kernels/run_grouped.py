# SPDX-License-Identifier: Apache-2.0
"""Compares the grouped products with float64 products of their operands, expert by expert; prints a JSON report.

    TRITON_INTERPRET=1 python run_grouped.py dense bfloat16      interpreted
    python run_grouped.py packed bfloat16 cuda                   compiled, on a GPU, also in the sizes of Qwen3-30B-A3B

A result may be off by its rounding, and by that of float32 sums: ``eps |y| + 2 C 2**-24 sum |x_i w_i|`` for C terms; in
E4M3 on a GPU by another ``2**-13 sum |x_i w_i|``. Reported are errors in units of this.
"""

import json
import sys
from collections.abc import Iterator

import torch

import mxfp4_kernels
from hf_mxfp4 import numerics


COUNTS = ((5, 0, 33, 2, 0), (16,), (0, 0, 1), (0, 49, 0, 0, 0, 17, 1), (0, 0))
SIZES = ((50, 40), (1, 1), (33, 135), (37, 168))
SCHEMES = (
    {},
    {"macro_block": 128},
    {"macro_block": 128, "macro_search": "blockwise"},
    {"macro_block": 128, "macro_search": "dynamic", "outlier_fallback": 0.5},
    {"macro_block": 32, "outlier_fallback": 0.3},
    {"macro_block": 256},
)
#: No more rows than experts, within a tile and beyond it.
FEW_ROWS = (0, 3, 0, 0, 1, 0, 2, 0), (0, 0, 18, 1, *[0] * 16)
_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}
_LEAST = {torch.bfloat16: 1e-38, torch.float16: 2.0**-25, torch.float32: 1e-38}
_GENERATOR = torch.Generator().manual_seed(5)


def normal(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=_GENERATOR)


def excess(found, left, right, bias=None, besides: float = 0.0) -> float:
    """Largest error of ``left @ right + bias`` in units of what is allowed; infinite unless NaN is where it is due.
    ``besides``: what is allowed besides float32 sums, in units of the sum of magnitudes."""
    rounding, found_dtype = _ROUNDING[found.dtype], found.dtype
    found, left, right = (tensor.double().cpu() for tensor in (found, left, right))
    exact, size = left @ right, left.abs() @ right.abs()
    if bias is not None:
        exact, size = exact + bias.double().cpu(), size + bias.double().cpu().abs()
    if not torch.equal(found.isnan(), exact.isnan()):
        return float("inf")
    allowed = rounding * exact.abs() + (2 * (left.shape[1] + 1) * 2.0**-24 + besides) * size + _LEAST[found_dtype]
    error = ((found - exact).abs() / allowed).nan_to_num(0.0)
    return error.max().item() if error.numel() else 0.0


def slices(counts) -> Iterator[tuple[int, slice]]:
    end = 0
    for expert, count in enumerate(counts):
        yield expert, slice(end, end := end + count)


def cases(device: str) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Counts, N and K."""
    for number, counts in enumerate(COUNTS):
        for n, k in SIZES if number == 0 else SIZES[3:]:
            yield counts, n, k
    if device != "cpu":
        for tokens in (1, 7, 64, 8192):
            ids = torch.stack([torch.randperm(128, generator=_GENERATOR)[:8] for _ in range(tokens)])
            counts = tuple(torch.bincount(ids.flatten(), minlength=128).tolist())
            yield counts, 1536, 2048
            yield counts, 2048, 768


def dense(dtype: torch.dtype, device: str) -> dict[str, float]:
    report = {}
    for counts, n, k in cases(device):
        rows, experts = sum(counts), len(counts)
        offsets = torch.tensor(counts).cumsum(0, dtype=torch.int32).to(device)
        x, weight, bias, grad = (
            normal(*size).to(dtype).to(device) for size in ((rows, k), (experts, n, k), (experts, n), (rows, n))
        )
        if rows > 3 and k > 8:
            x[1, 3], weight[0, 0, 5] = float("nan"), float("inf")
        strided = torch.cat([x, x], dim=1)[:, :k]
        out = mxfp4_kernels.grouped_matmul(strided, weight, offsets, bias)
        backward = mxfp4_kernels.grouped_matmul(grad, weight.transpose(1, 2), offsets)
        turned = mxfp4_kernels.grouped_matmul(x.t().contiguous().t(), weight.transpose(1, 2).contiguous().mT, offsets)
        wgrad = mxfp4_kernels.grouped_wgrad(grad, x, offsets)
        wgrad_turned = mxfp4_kernels.grouped_wgrad(x, grad.t().contiguous().t(), offsets, torch.float32)
        sums = mxfp4_kernels.grouped_sum(grad, offsets)
        assert all(tensor.is_contiguous() for tensor in (out, backward, wgrad, sums))
        worst = {}
        for e, own in slices(counts):
            ones = torch.ones(1, own.stop - own.start, device=device)
            found = {
                "forward": excess(out[own], x[own], weight[e].t(), bias[e]),
                "strides": excess(turned[own], x[own], weight[e].t()),
                "dgrad": excess(backward[own], grad[own], weight[e]),
                "wgrad": excess(wgrad[e], grad[own].t(), x[own]),
                "wgrad turned": excess(wgrad_turned[e], x[own].t(), grad[own]),
                "sum": excess(sums[e][None], ones, grad[own]),
            }
            if own.start == own.stop:
                found["zeros"] = 0.0 if wgrad[e].eq(0).all() and sums[e].eq(0).all() else float("inf")
            worst = {name: max(value, worst.get(name, 0.0)) for name, value in found.items()}
        report |= {f"{name} {counts if experts < 9 else rows} {n} {k}": value for name, value in worst.items()}
    return report


def packed(dtype: torch.dtype, device: str) -> dict[str, float]:
    report = {}
    # The last one's columns are split between programs, also where kernels are interpreted; those before have a slot
    # for each row, of which tiles take several.
    for counts, n, k in (*cases(device), *((counts, 7, 40) for counts in FEW_ROWS), (COUNTS[0], 37, 904)):
        rows, experts = sum(counts), len(counts)
        if device == "cpu" and counts in (COUNTS[1], COUNTS[3]):
            continue
        offsets = torch.tensor(counts).cumsum(0, dtype=torch.int32).to(device)
        x, bias = normal(rows, k).to(dtype).to(device), normal(experts, n).to(dtype).to(device)
        weight = (normal(experts, n, k) * 4.0 ** normal(experts, n, 1)).to(device)
        weight[0] = 0
        if rows > 30 and n > 3:
            # A scale above 2 (an exponent byte that takes a second multiply), the largest, the least, and NaN.
            weight[2, 0] *= 1.0 if dtype == torch.float16 else 2.0**60
            weight[2, 1] *= 2.0**-90
            weight[2, 2, 0] = float("nan")
        for number, scheme in enumerate(SCHEMES if (counts, k) == (COUNTS[0], 168) else SCHEMES[1:4:2]):
            parts = numerics.quantize(weight, **scheme)
            options = {
                "length": k,
                "macro": parts.macro,
                "residual_codes": parts.residual_codes,
                "residual_scale": parts.residual_scale,
                **scheme,
            }
            bias_or_none = bias if number % 2 == 0 else None
            out = mxfp4_kernels.grouped_matmul_packed(x, parts.codes, parts.scale, offsets, bias_or_none, **options)
            values = parts.dequantize(torch.float32)
            # Where weights are dequantized first they are rounded to the dtype of the product.
            rounding = 0.0 if dtype == torch.bfloat16 and k % 8 == 0 and rows < 8192 else _ROUNDING[dtype]
            for e, own in slices(counts):
                value = excess(out[own], x[own], values[e].t(), None if bias_or_none is None else bias[e], rounding)
                label = f"{counts if experts < 9 else rows} {n} {k} {scheme}"
                report[label] = max(value, report.get(label, 0.0))
    return report


def folded(rows: int, length: int, per_row: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Random E4M3 elements, contraction last, and scales of 128 or of the row, as transposes."""
    scale = 2.0 ** normal(1 if per_row else length // 128, rows)
    return normal(rows, length).to(torch.float8_e4m3fn), scale.t()


def values_of(elements: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return elements.cpu().double() * scale.cpu().double().repeat_interleave(elements.shape[1] // scale.shape[1], dim=1)


def elsewhere(x, x_scale, weight, weight_scale, offsets, bias, dtype: torch.dtype) -> torch.Tensor:
    """The same product with rows of ``x`` in another order, and weights of experts side by side."""
    places = torch.randperm(len(x), generator=torch.Generator().manual_seed(1)).to(x.device)
    moved = [torch.empty_like(side.view(torch.uint8) if side is x else side) for side in (x, x_scale)]
    for to, side in zip(moved, (x, x_scale), strict=True):
        to[places] = side.view(to.dtype)
    experts, n, k = weight.shape
    beside = weight.view(torch.uint8).transpose(0, 1).contiguous().view(weight.dtype).transpose(0, 1)
    scale = weight_scale.unflatten(0, (experts, n)).transpose(0, 1).contiguous().transpose(0, 1)
    moved[0] = moved[0].view(x.dtype)
    return mxfp4_kernels.grouped_matmul_e4m3(*moved, beside, scale, offsets, bias, rows=places, out_dtype=dtype)


def e4m3(dtype: torch.dtype, device: str) -> dict[str, float]:
    report = {}
    # FP8 tensor cores of sm_90 keep about 14 bits of a sum.
    besides = 0.0 if device == "cpu" else 2.0**-13
    for number, (counts, n, k) in enumerate(cases(device)):
        rows, experts, k = sum(counts), len(counts), -(-k // 128) * 128
        offsets = torch.tensor(counts).cumsum(0, dtype=torch.int32).to(device)
        bias = normal(experts, n).to(dtype).to(device) if number % 2 else None
        x, weight = folded(rows, k, number % 3 == 1), folded(experts * n, k, number % 3 == 1)
        on_device = (x[0], x[1], weight[0].view(experts, n, k), weight[1])
        on_device = [tensor.to(device) for tensor in on_device]
        out = mxfp4_kernels.grouped_matmul_e4m3(*on_device, offsets, bias, out_dtype=dtype)
        if not number % 3:
            label = f"other places {counts if experts < 9 else rows} {n} {k}"
            report[label] = float(not torch.equal(elsewhere(*on_device, offsets, bias, dtype), out))
        padded = [-(-count // 128) * 128 for count in counts]
        ends = torch.tensor(padded).cumsum(0, dtype=torch.int32).to(device)
        left, right = folded(n, sum(padded) + 128), folded(k // 4, sum(padded) + 128)
        operands = [tensor.to(device) for tensor in (*left, *right)]
        wgrad = mxfp4_kernels.grouped_wgrad_e4m3(*operands, ends, out_dtype=dtype)
        x, weight, left, right = (values_of(*pair) for pair in (x, weight, left, right))
        weight = weight.view(experts, n, k)
        for (e, own), (_, tokens) in zip(slices(counts), slices(padded), strict=True):
            label = f"{counts if experts < 9 else rows} {n} {k}"
            value = excess(out[own], x[own], weight[e].t(), None if bias is None else bias[e], besides)
            report[label] = max(value, report.get(label, 0.0))
            value = excess(wgrad[e], left[:, tokens], right[:, tokens].t(), besides=besides)
            report[f"wgrad {label}"] = max(value, report.get(f"wgrad {label}", 0.0))
    return report


if __name__ == "__main__":
    what, dtype, *device = sys.argv[1:]
    print(
        json.dumps(
            {"dense": dense, "packed": packed, "e4m3": e4m3}[what](
                getattr(torch, dtype), device[0] if device else "cpu"
            )
        )
    )
