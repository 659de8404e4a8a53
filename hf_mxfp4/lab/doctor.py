# SPDX-License-Identifier: Apache-2.0
"""Every family of Triton kernels, and every kind of product on tensor cores, against the eager functions."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from .. import numerics
from ..numerics import PARTS, QuantScheme, decode_e8m0
from ..numerics.formats import e4m3_scale_byte
from ..ops import fp4, hardware_of, self_check
from ..ops import triton as kernels
from ..ops.choice import FP8_HARDWARE
from ..ops.fp8 import FP8Operand, multiply_fp8
from ..ops.self_check import Check, example


_PLAIN, _BLOCK_MANTISSAS = QuantScheme(), QuantScheme(macro_block=128, macro_search="block_mantissas")


@dataclass(frozen=True)
class KernelCheck:
    """What was compared: ``name``, the ``problem`` that was found, if any, and the ``seconds`` it took, with those of
    the compiler."""

    name: str
    problem: str | None
    seconds: float


def check_kernels(device: str | torch.device) -> Iterator[KernelCheck]:
    """Compare all kernels on a GPU (or, under ``TRITON_INTERPRET=1``, on the CPU) with the eager functions on small
    tensors: equal bits, and sums of whole numbers, which are exact in any order.

    Products of FP8 and FP4 tensor cores are compared where the hardware has them.
    """
    device = torch.device(device)
    for name, check in {**self_check.FAMILIES, **_FAMILIES, **_products(hardware_of(device))}.items():
        start = time.perf_counter()
        problem = self_check.compare(check, device)
        yield KernelCheck(name, problem, time.perf_counter() - start)


def _stochastic(device: torch.device) -> Iterator[Check]:
    for scheme in (_PLAIN, _BLOCK_MANTISSAS):
        x, scheme = example(640), replace(scheme, rounding="stochastic")
        found, expected = kernels.quantize(x.to(device), scheme, 1, 7), numerics.quantize(x, **vars(scheme), seed=7)
        for part in PARTS:
            yield f"{part} ({scheme})", getattr(found, part), getattr(expected, part)


def _rows_and_columns(device: torch.device) -> Iterator[Check]:
    x, schemes = example(640), (_PLAIN, replace(_PLAIN, rounding="stochastic"))
    both = kernels.fake_quantize_rows_and_columns(
        x.to(device), schemes, (None, 7), (None, None), (None, None), torch.bfloat16
    )
    yield "rows", both[0], numerics.apply_scheme(x, schemes[0])
    yield "columns", both[1], numerics.apply_scheme(x.t(), schemes[1], seed=7)


def _rotated(device: torch.device) -> Iterator[Check]:
    for size in (16, 128):
        x, signs = example(640).nan_to_num(1, 1, 1), numerics.random_signs(640, size)
        found = kernels.fake_quantize(x.to(device), _PLAIN, None, size, signs.to(device))
        yield f"values (H{size})", found, numerics.apply_scheme(numerics.rotate(x.float(), size, signs=signs), _PLAIN)


def _to_fp8(device: torch.device) -> Iterator[Check]:
    x = numerics.apply_scheme(example(640).nan_to_num(1, 1, 1), _BLOCK_MANTISSAS)
    scale = decode_e8m0(e4m3_scale_byte(x.float().abs().amax(dim=1, keepdim=True)))
    elements = (x / scale).to(torch.float8_e4m3fn).float()
    found, found_scale, rounded = kernels.to_fp8(x.to(device))
    yield "FP8 elements", found.float(), elements
    yield "FP8 scales", found_scale, scale
    yield "numbers of rounded elements", rounded, (elements * scale != x).sum(dtype=rounded.dtype)


def _nvfp4_scales(device: torch.device) -> Iterator[Check]:
    x = torch.randn(33, 640, generator=torch.Generator().manual_seed(0))
    packed = numerics.quantize(x, **vars(_BLOCK_MANTISSAS))
    macro = packed.macro.reshape(33, -1)
    for by_rows in (False, True):
        found = kernels.nvfp4_scales(packed.scale.to(device), macro.to(device), by_rows)
        expected = fp4.nvfp4_scales(packed.scale, macro, by_rows)
        for name, *pair in zip(("NVFP4 scales", "factors", "misfits"), found, expected, strict=True):
            yield name, *(each.view(torch.uint8) if each.itemsize == 1 else each for each in pair)


def _fp8_products(device: torch.device) -> Iterator[Check]:
    rng = torch.Generator().manual_seed(0)
    values = [torch.randint(-4, 5, (rows, 640), generator=rng).float() for rows in (64, 48)]
    scales = [torch.randint(-2, 3, (rows, 1), generator=rng).float().exp2() for rows in (64, 48)]
    a, b = (FP8Operand(x.to(torch.float8_e4m3fn).to(device), s.to(device)) for x, s in zip(values, scales, strict=True))
    left, right = (x.double() * s for x, s in zip(values, scales, strict=True))
    yield "FP8 products", multiply_fp8(a, b, None, None, torch.bfloat16), (left @ right.t()).bfloat16()


def _fp4_products(recipe: str, device: torch.device) -> Iterator[Check]:
    if problem := fp4.problem(recipe, device):
        raise ArithmeticError(problem)
    yield from ()


def _products(hardware: str) -> dict[str, Callable[[torch.device], Iterator[Check]]]:
    found: dict[str, Callable[[torch.device], Iterator[Check]]] = {}
    if hardware in FP8_HARDWARE:
        found["FP8 products"] = _fp8_products
    if hardware in fp4.MXFP4_HARDWARE:
        found["MXFP4 products"] = partial(_fp4_products, "mxfp4")
        found["MXFP8 products"] = partial(_fp4_products, "mxfp8")
    if hardware in fp4.FP4_HARDWARE:
        found["NVFP4 products"] = partial(_fp4_products, "nvfp4")
    return found


_FAMILIES = {
    "stochastic rounding": _stochastic,
    "rows and columns": _rows_and_columns,
    "rotation": _rotated,
    "FP8 operands": _to_fp8,
    "NVFP4 scales": _nvfp4_scales,
}
