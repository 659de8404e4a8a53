# SPDX-License-Identifier: Apache-2.0
"""Compare every family of Triton kernels, and every kind of product on tensor cores, with the eager functions:
`hf-mxfp4 doctor`."""

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


_PLAIN = QuantScheme()
_BLOCK_MANTISSAS = QuantScheme(macro_block=128, macro_search="block_mantissas")


@dataclass(frozen=True)
class KernelCheck:
    """The ``name`` of a comparison, the ``problem`` that it found, if any, and the ``seconds`` it took, compiling
    included."""

    name: str
    problem: str | None
    seconds: float


def check_kernels(device: str | torch.device) -> Iterator[KernelCheck]:
    """Compare all kernels on a GPU (or, under ``TRITON_INTERPRET=1``, on the CPU) with the eager functions on small
    tensors: equal bits, and sums of whole numbers, which are exact in any order.

    These are the comparisons of [`hf_mxfp4.ops.self_check`], which run before a kernel is used, and those of the
    families that have none there. Products of FP8 and FP4 tensor cores are compared where the hardware has them.
    """
    device = torch.device(device)
    families = {**self_check.FAMILIES, **_FAMILIES, **_products(hardware_of(device))}
    for name, check in families.items():
        start = time.perf_counter()
        problem = self_check.compare(check, device)
        yield KernelCheck(name, problem, time.perf_counter() - start)


def _stochastic(device: torch.device) -> Iterator[Check]:
    x = example(640)
    for scheme in (replace(_PLAIN, rounding="stochastic"), replace(_BLOCK_MANTISSAS, rounding="stochastic")):
        found = kernels.quantize(x.to(device), scheme, 1, 7)
        expected = numerics.quantize(x, **vars(scheme), seed=7)
        for part in PARTS:
            yield f"{part} ({scheme})", getattr(found, part), getattr(expected, part)


def _rows_and_columns(device: torch.device) -> Iterator[Check]:
    x = example(640)
    stochastic = replace(_PLAIN, rounding="stochastic")
    rows, columns = kernels.fake_quantize_rows_and_columns(
        x.to(device), (_PLAIN, stochastic), (None, 7), (None, None), (None, None), torch.bfloat16
    )
    yield "rows", rows, numerics.apply_scheme(x, _PLAIN)
    yield "columns", columns, numerics.apply_scheme(x.t(), stochastic, seed=7)


def _rotated(device: torch.device) -> Iterator[Check]:
    x = example(640).nan_to_num(1, 1, 1)
    for size in (16, 128):
        signs = numerics.random_signs(640, size)
        found = kernels.fake_quantize(x.to(device), _PLAIN, None, size, signs.to(device))
        rotated = numerics.rotate(x.float(), size, signs=signs)
        yield f"values (H{size})", found, numerics.apply_scheme(rotated, _PLAIN)


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
        for name, part, reference in zip(("NVFP4 scales", "factors", "misfits"), found, expected, strict=True):
            yield name, _bits(part), _bits(reference)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return FP8 numbers as bytes, which compare by their bits; others as they are."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


def _fp8_products(device: torch.device) -> Iterator[Check]:
    rng = torch.Generator().manual_seed(0)
    operands = []
    factors = []
    for rows in (64, 48):
        values = torch.randint(-4, 5, (rows, 640), generator=rng).float()
        scales = torch.randint(-2, 3, (rows, 1), generator=rng).float().exp2()
        operands.append(FP8Operand(values.to(torch.float8_e4m3fn).to(device), scales.to(device)))
        factors.append(values.double() * scales)
    found = multiply_fp8(operands[0], operands[1], None, None, torch.bfloat16)
    yield "FP8 products", found, (factors[0] @ factors[1].t()).bfloat16()


def _fp4_products(recipe: str, device: torch.device) -> Iterator[Check]:
    """Raise the problem that products of FP4 tensor cores have on a device; they are compared when it is asked for."""
    problem = fp4.problem(recipe, device)
    if problem:
        raise ArithmeticError(problem)
    yield from ()


def _products(hardware: str) -> dict[str, Callable[[torch.device], Iterator[Check]]]:
    """Return the comparisons of the products that the hardware has."""
    products: dict[str, Callable[[torch.device], Iterator[Check]]] = {}
    if hardware in FP8_HARDWARE:
        products["FP8 products"] = _fp8_products
    if hardware in fp4.MXFP4_HARDWARE:
        products["MXFP4 products"] = partial(_fp4_products, "mxfp4")
        products["MXFP8 products"] = partial(_fp4_products, "mxfp8")
    if hardware in fp4.FP4_HARDWARE:
        products["NVFP4 products"] = partial(_fp4_products, "nvfp4")
    return products


_FAMILIES = {
    "stochastic rounding": _stochastic,
    "rows and columns": _rows_and_columns,
    "rotation": _rotated,
    "FP8 operands": _to_fp8,
    "NVFP4 scales": _nvfp4_scales,
}
