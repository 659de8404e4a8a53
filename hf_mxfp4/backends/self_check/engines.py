# SPDX-License-Identifier: Apache-2.0
"""Checks of the products of operands that go straight into FP8 or MXFP4 tensor cores, against float64 on the CPU.

300 rows have the tiles, warps and stages that 8,000 have, which follow from the height of a tile.
"""

from collections.abc import Iterator

import torch

from ... import numerics
from ...numerics import QuantScheme
from .. import scaled_mm
from .comparison import few, normal, product_problem
from .products import ends_of, rows_of


#: Rows of both operands, and columns: several programs of each with a rest, and multiples of 16, for which PyTorch's
#: own product takes scales of rows, and where both are, of groups.
_SIZES = ((33, 300, 300), (300, 304, 600), (304, 304, 600))
_INTERPRETED_SIZES = ((9, 20, 150),)
_SCHEMES = (QuantScheme(), QuantScheme("rceil", 128))
_GROUP = 128


def check_fp8(device: torch.device) -> str | None:
    """Products of folded operands, with a scale for each row and for each group of 128."""
    import mxfp4_kernels

    for sizes, scheme, sides, values in _operands(device):
        for group in ("row", _GROUP) if scheme.macro_block is None else (_GROUP,):
            options = {"group": group, "scale_rule": "rceil", "macro_block": scheme.macro_block}
            a, b = (mxfp4_kernels.fold_e4m3(side, **options) for side in sides)
            found = mxfp4_kernels.matmul_e4m3(a.elements, a.scale, b.elements, b.scale)
            wrong = product_problem(f"{sizes}, {scheme}, scales by {group}", found, *values)
            if wrong is not None:
                return wrong
    return None


def check_fp8_of_torch(device: torch.device) -> str | None:
    """PyTorch's products with a scale for each group of 128, of few rows and of many, in one group and in several."""
    import mxfp4_kernels

    for m, n, k in ((4, 16, 128), (300, 304, 600)) if device.type != "cpu" else ((8, 16, 150),):
        for scheme, dtype in zip(_SCHEMES, (torch.bfloat16, torch.float32), strict=True):
            sides = normal(0, m, k), normal(1, n, k)
            options = {"group": _GROUP, "scale_rule": "rceil", "macro_block": scheme.macro_block}
            a, b = (mxfp4_kernels.fold_e4m3(side.to(device), **options) for side in sides)
            found = scaled_mm.multiply(a.elements, a.scale, b.elements, b.scale, dtype)
            values = (numerics.apply_scheme(side.float(), scheme) for side in sides)
            wrong = product_problem(f"{m} x {n} x {k}, {scheme}, torch", found, *values)
            if wrong is not None:
                return wrong
    return None


def check_mxfp4(device: torch.device) -> str | None:
    """Products of packed operands."""
    import mxfp4_kernels

    for sizes, scheme, sides, values in _operands(device):
        options = {"scale_rule": "rceil", "macro_block": scheme.macro_block}
        a, b = (mxfp4_kernels.quantize(side, **options) for side in sides)
        macros = {"a_macro": a.macro, "b_macro": b.macro}
        found = mxfp4_kernels.matmul_mxf4(a.codes, a.scale, b.codes, b.scale, **macros)
        wrong = product_problem(f"{sizes}, {scheme}", found, *values)
        if wrong is not None:
            return wrong
    return None


def check_fp8_experts(device: torch.device) -> str | None:
    """Products of all experts, forward and that of the weights' gradients: of few rows and of many, one without any."""
    import mxfp4_kernels

    n, k = few(96, 20, device), few(300, 40, device)
    for counts, group in (((3, 0, 5), _GROUP), ((few(300, 7, device), 0, few(150, 5, device)), "row")):
        scheme, many = QuantScheme(), len(counts)
        padded = tuple(count + -count % _GROUP for count in counts)
        x, grad, weight = normal(0, sum(counts), k), normal(1, sum(counts), n), normal(2, many * n, k)
        a, b = (mxfp4_kernels.fold_e4m3(side.to(device), group=group) for side in (x, weight))
        stack = b.elements.view(many, n, -1), b.scale.view(many, n, -1)
        out = mxfp4_kernels.grouped_matmul_e4m3(a.elements, a.scale, *stack, ends_of(counts, device))
        left, right = (_padded(side, counts, padded).to(device) for side in (grad, x))
        left, right = (mxfp4_kernels.fold_e4m3(side, axis=0) for side in (left, right))
        along = left.elements, left.scale, right.elements, right.scale
        of_weight = mxfp4_kernels.grouped_wgrad_e4m3(*along, ends_of(padded, device))
        for expert, rows in rows_of(counts):
            values = (
                numerics.apply_scheme(x[rows], scheme),
                numerics.apply_scheme(weight.view(many, n, k)[expert], scheme),
            )
            columns = (numerics.apply_scheme(side[rows].t().contiguous(), scheme) for side in (grad, x))
            name = f"{counts[expert]} rows of an expert, scales by {group}"
            wrong = product_problem(name, out[rows], *values) or product_problem(
                f"gradient of the weight, {name}", of_weight[expert], *columns
            )
            if wrong is not None:
                return wrong
        if of_weight[1].any():
            return "an expert without rows has a gradient"
    return None


def _operands(device: torch.device) -> Iterator[tuple]:
    """Sizes, a scheme, two matrices on the device, and their quantized values on the CPU."""
    for m, n, k in _SIZES if device.type != "cpu" else _INTERPRETED_SIZES:
        x, weight = normal(0, m, k), normal(1, n, k)
        for scheme in _SCHEMES:
            values = [numerics.apply_scheme(side, scheme) for side in (x, weight)]
            yield f"{m} x {n} x {k}", scheme, (x.to(device), weight.to(device)), values


def _padded(rows: torch.Tensor, counts: tuple[int, ...], padded: tuple[int, ...]) -> torch.Tensor:
    """The rows of each expert, with zeros up to its padded count."""
    out, start = rows.new_zeros(sum(padded), rows.shape[1]), 0
    for (_, places), count in zip(rows_of(counts), (count for count in padded if count), strict=True):
        own = rows[places]
        out[start : start + len(own)] = own
        start += count
    return out
