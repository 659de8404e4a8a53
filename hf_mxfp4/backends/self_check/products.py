# SPDX-License-Identifier: Apache-2.0
"""Checks of the kernels that multiply, against float64 on the CPU: few rows with packed weights, and all experts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ... import numerics
from ...numerics import MXFP4Tensor, QuantScheme
from .. import triton as kernels
from .comparison import few, normal, product_problem
from .quantizing import PARTS, check_expert_gradients, on_device


#: Calls of a product that is summed by several programs, which must all give the same bits.
_REPEATS = 16
_PLAIN, _MACRO = QuantScheme(), QuantScheme("rceil", 128)
_MANTISSAS, _FALLBACK = QuantScheme("rceil", 128, "blockwise"), QuantScheme("rceil", 128, "static", 0.5)


def check_decode(device: torch.device) -> str | None:
    """Products of up to 40 rows with a packed weight, in one part and in several that programs add up."""
    # One tile of the weight leaves all other programs for splits of its rows, on every GPU.
    long = few(8192, 2048, device)
    for number, (n_tokens, n_rows, length, scheme, dtype) in enumerate(
        (
            (1, 64, long, _MACRO, torch.bfloat16),
            (5, 200, 256, _PLAIN, torch.bfloat16),
            (8, 70, 1288, _FALLBACK, torch.float16),
            (16, 64, 1024, _MANTISSAS, torch.bfloat16),
            (40, 130, 512, _MACRO, torch.bfloat16),
            (2, 64, 512, _PLAIN, torch.float32),
        )
    ):
        x, bias = normal(number, n_tokens, length, dtype=dtype), normal(20, n_rows, dtype=dtype)
        weight = _weight(number + 10, n_rows, length, scheme)
        inputs = x.to(device), on_device(device, weight), bias.to(device)
        found = kernels.linear(*inputs)
        name = f"{n_tokens} rows, {length} columns, {scheme}"
        wrong = product_problem(name, found, x, weight.dequantize(torch.float32), bias)
        if wrong is not None:
            return wrong
        for _ in range(few(_REPEATS, 0, device)):
            if not torch.equal(kernels.linear(*inputs), found):
                return f"{name}: another result at every call"
    return None


def check_packed_experts(device: torch.device) -> str | None:
    """Products of experts with packed weights: of few rows each, whose columns several programs share, and of more."""
    n, length = few(96, 40, device), 416
    for counts, scheme in (((3, 0, 5), _MACRO), ((40, 0, few(60, 3, device)), _FALLBACK)):
        x, bias = normal(0, sum(counts), length), normal(1, len(counts), n)
        weight = _weight(2, len(counts) * n, length, scheme)
        stack = _stacked(weight, len(counts))
        offsets = ends_of(counts, device)
        inputs = x.to(device), on_device(device, stack), offsets, bias.to(device)
        found = kernels.grouped_matmul_packed(*inputs)
        values = weight.dequantize(torch.float32).unflatten(0, (len(counts), n))
        for expert, rows in rows_of(counts):
            name = f"{counts[expert]} rows of an expert, {scheme}"
            wrong = product_problem(name, found[rows], x[rows], values[expert], bias[expert])
            if wrong is not None:
                return wrong
        for _ in range(few(_REPEATS, 0, device)):
            if not torch.equal(kernels.grouped_matmul_packed(*inputs), found):
                return f"{counts} rows, {scheme}: another result at every call"
    return None


def check_experts(device: torch.device) -> str | None:
    """Products of experts with dense weights, forward and backward, and gradients in E4M3 for these."""
    n, k = few(72, 40, device), few(200, 72, device)
    for counts in ((3, 0, 5), (40, 0, few(150, 20, device))):
        x, grad, weight = normal(0, sum(counts), k), normal(1, sum(counts), n), normal(2, len(counts), n, k)
        offsets = ends_of(counts, device)
        gpu_x, gpu_grad = x.to(device), grad.to(device)
        out = kernels.grouped_matmul(gpu_x, weight.to(device), offsets)
        back = kernels.grouped_matmul(gpu_grad, weight.to(device).transpose(1, 2), offsets)
        of_weight = kernels.grouped_wgrad(gpu_grad, gpu_x, offsets, torch.float32)
        of_bias = kernels.grouped_sum(gpu_grad, offsets, torch.float32)
        for expert, rows in rows_of(counts):
            ones = torch.ones(1, counts[expert], device="cpu")
            for name, found, left, right in (
                ("forward", out[rows], x[rows], weight[expert]),
                ("gradient of x", back[rows], grad[rows], weight[expert].t()),
                ("gradient of the weight", of_weight[expert], grad[rows].t(), x[rows].t()),
                ("gradient of the bias", of_bias[expert : expert + 1], ones, grad[rows].t()),
            ):
                wrong = product_problem(f"{name}, {counts[expert]} rows", found, left, right)
                if wrong is not None:
                    return wrong
        if of_weight[1].any() or of_bias[1].any():
            return "an expert without rows has a gradient"
    return check_expert_gradients(device)


def ends_of(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32: where the rows of each expert end."""
    return torch.tensor(counts, device="cpu").cumsum(0, dtype=torch.int32).to(device)


def rows_of(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, and the rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _weight(seed: int, n_rows: int, length: int, scheme: QuantScheme) -> MXFP4Tensor:
    """A packed weight with a block of magnitudes above 12, whose codes take another way through the kernels."""
    values = normal(seed, n_rows, length)
    values[n_rows // 2, :32] *= 64
    return numerics.quantize(values, **vars(scheme), axis=1)


def _stacked(weight: MXFP4Tensor, n_experts: int) -> MXFP4Tensor:
    """Experts below each other as ``[E, N, K]``."""
    found = {name: getattr(weight, name) for name in PARTS}
    return replace(weight, **{n: None if p is None else p.unflatten(0, (n_experts, -1)) for n, p in found.items()})
