# SPDX-License-Identifier: Apache-2.0
"""Checks of the kernels that quantize, read back and fold: their bits against the definition on the CPU."""

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from ... import numerics
from ...numerics import MXFP4Tensor, QuantScheme
from .. import triton as kernels
from .comparison import few, first_difference, normal, of_all_sizes


Pair = tuple[str, torch.Tensor | None, torch.Tensor | None]

_PLAIN, _MACRO = QuantScheme(), QuantScheme("rceil", 128)
_FALLBACK = QuantScheme("rceil", 128, "static", 0.5)
_PLAIN_FALLBACK = QuantScheme(outlier_fallback=0.5)
_SEARCH = QuantScheme("even", 128, "dynamic")
_MANTISSAS = QuantScheme("even", 128, "blockwise", 1.0)
#: Tensors of a packed one.
PARTS = ("codes", "scale", "macro", "residual_codes", "residual_scale")


def check_quantize(device: torch.device) -> str | None:
    """Quantized values, codes and scale bytes; along rows and columns, rotated and rounded at random."""
    return first_difference(_quantized(device))


def check_codes(device: torch.device) -> str | None:
    """Codes and scale bytes by the instruction that makes E2M1: every bfloat16 number, and blocks of all sizes."""
    return first_difference(_converted(device))


def check_dequantize(device: torch.device) -> str | None:
    """Values of codes."""
    return first_difference(_dequantized(device))


def check_folds(device: torch.device) -> str | None:
    """Operands of FP8 products, also of those of experts."""
    return first_difference(itertools.chain(_folded(device), _folded_experts(device)))


def _quantized(device: torch.device) -> Iterator[Pair]:
    import mxfp4_kernels

    # Whole blocks, which are cut into long tiles, and rows with a rest.
    for number, (scheme, dtype, n_cols) in enumerate(
        (
            (_PLAIN, torch.bfloat16, 1056),
            (_FALLBACK, torch.bfloat16, 650),
            (_SEARCH, torch.float32, 256),
            (_FALLBACK, torch.bfloat16, 1152),
            (_PLAIN_FALLBACK, torch.bfloat16, 1056),
            (_MANTISSAS, torch.bfloat16, 1152),
        )
    ):
        x = of_all_sizes(number, few(33, 5, device), n_cols, dtype)
        yield f"values ({scheme})", kernels.fake_quantize(x.to(device), scheme), numerics.apply_scheme(x, scheme)
        yield from _packed_parts(x, device, scheme, False)
        if scheme.macro_search == "dynamic":
            there, values = x.to(device), numerics.apply_scheme(x, scheme)
            expected = numerics.quantize(x, **vars(scheme), axis=1).macro
            found, macro = kernels.fake_quantize_with_macro(there, scheme, dtype)
            yield "values beside macro bytes", found, values
            yield "macro bytes beside values", macro, expected
            found = kernels.fake_quantize_by_macro(there, expected.to(device), scheme, dtype)
            yield "values by macro bytes", found, values
    # Two elements an instruction where the GPU has them, and one.
    for scheme, dtype, n_cols in (
        (_PLAIN, torch.bfloat16, 1056),
        (_MACRO, torch.bfloat16, 1152),
        (_MACRO, torch.float32, 200),
    ):
        x = of_all_sizes(10 + n_cols, few(33, 5, device), n_cols, dtype)
        options = {"scale_rule": scheme.scale_rule.value, "macro_block": scheme.macro_block}
        found, values = mxfp4_kernels.quantize_with_values(x.to(device), **options)
        expected = numerics.quantize(x, **vars(scheme), axis=1)
        yield f"codes beside values ({scheme})", found.codes, expected.codes
        yield f"scales beside values ({scheme})", found.scale, expected.scale
        yield f"macro bytes beside codes and values ({scheme})", found.macro, expected.macro
        yield f"values beside codes ({scheme})", values, numerics.apply_scheme(x, scheme)
    x, rounded = of_all_sizes(3, few(130, 40, device), 200), QuantScheme("rceil", 128, rounding="stochastic")
    none = (None, None)
    rows, columns = kernels.fake_quantize_both(x.to(device), (_MACRO, rounded), (None, 7), none, none, x.dtype)
    yield "values along rows", rows, numerics.apply_scheme(x, _MACRO)
    yield "values along columns", columns, numerics.apply_scheme(x.t().contiguous(), rounded, seed=7)
    x = of_all_sizes(9, few(160, 64, device), few(288, 32, device))
    parts = mxfp4_kernels.quantize_both(x.to(device))
    for name, found, matrix in zip(("rows", "columns"), parts, (x, x.t().contiguous()), strict=True):
        expected = numerics.quantize(matrix, axis=1)
        yield f"codes along {name}", found.codes, expected.codes
        yield f"scales along {name}", found.scale, expected.scale
    x = normal(4, 9, 192)
    turned = numerics.rotate(x.float(), 32)
    values = kernels.fake_quantize_rotated(x.to(device), _PLAIN, None, 32, None, torch.float32)
    yield "rotated values", values, numerics.apply_scheme(turned, _PLAIN)
    x = of_all_sizes(8, few(140, 9, device), few(300, 40, device))
    there = x.to(device)
    yield "E4M3 values", kernels.fake_quantize_e4m3(there), numerics.fake_quantize_e4m3(x)
    for name, found, expected in zip(
        ("elements", "scale bytes"), kernels.quantize_e4m3(there), numerics.quantize_e4m3(x), strict=True
    ):
        yield f"E4M3 {name} of rows", found, expected
    rows, columns = kernels.fake_quantize_e4m3_both(there)
    yield "E4M3 values along rows", rows, numerics.fake_quantize_e4m3(x)
    yield "E4M3 values along columns", columns, numerics.fake_quantize_e4m3(x.t())


def _packed_parts(x: torch.Tensor, device: torch.device, scheme: QuantScheme, converts: bool) -> Iterator[Pair]:
    found = kernels.quantize(x.to(device), scheme, 1, converts=converts)
    expected = numerics.quantize(x, **vars(scheme), axis=1)
    for part in PARTS:
        yield f"{part} ({scheme})", getattr(found, part), getattr(expected, part)


def _converted(device: torch.device) -> Iterator[Pair]:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)
    every = every[every.abs() <= 6][: 124 * 256].view(-1, 31)
    # Blocks whose scale is 1: each number that can stand there, ties among them.
    at_scale_one = torch.cat((torch.full_like(every[:, :1], 6.0), every), dim=1).view(-1, 128)
    for number, scheme in enumerate((_PLAIN, _MACRO, _FALLBACK, _PLAIN_FALLBACK, QuantScheme("floor"))):
        yield from _packed_parts(at_scale_one, device, scheme, True)
        yield from _packed_parts(of_all_sizes(8 + number, few(260, 5, device), 1152), device, scheme, True)


def _dequantized(device: torch.device) -> Iterator[Pair]:
    for scheme, made, dtype, n_cols in (
        (_PLAIN, torch.bfloat16, torch.bfloat16, 1056),
        (_FALLBACK, torch.float32, torch.float32, 650),
        (_MACRO, torch.bfloat16, torch.float16, 1024),
    ):
        tensor = numerics.quantize(of_all_sizes(5, few(33, 5, device), n_cols, made), **vars(scheme), axis=1)
        yield f"values ({scheme})", kernels.dequantize(on_device(device, tensor), dtype), tensor.dequantize(dtype)
    # Every element, with the scales of all sizes.
    every = (
        torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).expand(few(256, 32, device), 256)
    )
    byte = torch.linspace(0, 255, every.shape[0], device="cpu").to(torch.uint8)[:, None]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = kernels.dequantize_e4m3(every.to(device), byte.to(device), dtype)
        yield f"values of E4M3 as {dtype}", found, numerics.dequantize_e4m3(every, byte, dtype)


def _folded(device: torch.device) -> Iterator[Pair]:
    import mxfp4_kernels

    x = of_all_sizes(6, few(140, 9, device), few(300, 150, device))
    there = x.to(device)
    of_rows, of_columns = numerics.quantize(x, axis=1), numerics.quantize(x, axis=0)
    for group, axis, tensor in (("row", 1, of_rows), (128, 1, of_rows), (128, 0, of_columns)):
        folded = mxfp4_kernels.fold_e4m3(there, group=group, axis=axis)
        yield from _parts(f"by {group} along axis {axis}", folded, numerics.fold(tensor, group))
    macro = {"scale_rule": "rceil", "macro_block": 128}
    both = mxfp4_kernels.fold_e4m3_both(there, **macro)
    for axis, folded in zip((1, 0), both, strict=True):
        yield from _parts(f"of both, axis {axis}", folded, numerics.fold(numerics.quantize(x, **macro, axis=axis), 128))
    reused = mxfp4_kernels.fold_e4m3_both(there, columns="reused")[1]
    yield from _parts("across rows", reused, numerics.fold_across(of_rows))
    # Of whole blocks by pairs, and of rows with a rest.
    for n_cols in (few(288, 32, device), few(300, 150, device)):
        x = of_all_sizes(16, few(140, 9, device), n_cols)
        found, across = mxfp4_kernels.fold_e4m3_both(x.to(device), columns="reused", rows="codes")
        expected = numerics.quantize(x, axis=1)
        yield f"codes beside {n_cols} columns", found.codes, expected.codes
        yield f"scales beside {n_cols} columns", found.scale, expected.scale
        yield from _parts(f"of {n_cols} columns beside codes", across, numerics.fold_across(expected))
    x = normal(7, few(40, 9, device), 300)
    elements, byte = numerics.quantize_e4m3(x)
    folded = mxfp4_kernels.quantize_e4m3(x.to(device))
    yield "E4M3 elements", folded.elements.view(torch.uint8), F.pad(elements.view(torch.uint8), (0, 84))
    yield "their scales", folded.scale, numerics.decode_e8m0(byte)
    both = mxfp4_kernels.quantize_e4m3_both(x.to(device))
    for name, matrix, folded in zip(("rows", "columns"), (x, x.t()), both, strict=True):
        elements, byte = numerics.quantize_e4m3(matrix)
        padded = F.pad(elements.view(torch.uint8), (0, -matrix.shape[1] % 128))
        yield f"E4M3 elements of both, {name}", folded.elements.view(torch.uint8), padded
        yield f"their scales, {name}", folded.scale, numerics.decode_e8m0(byte).expand_as(folded.scale)


def check_expert_gradients(device: torch.device) -> str | None:
    """E4M3 values along the tokens of each expert."""
    return first_difference(_expert_values(device))


def _experts(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, list[slice]]:
    """Rows of experts, of which one has none and one several slots; where they end; and those of each."""
    x, counts = of_all_sizes(17, few(2500, 150, device), few(300, 34, device)), (3, 0, 5)
    ends = torch.tensor((*counts, len(x) - sum(counts)), device="cpu").cumsum(0, dtype=torch.int32)
    starts = [0, *ends.tolist()]
    return x, ends.to(device), [slice(*pair) for pair in itertools.pairwise(starts)]


def _expert_values(device: torch.device) -> Iterator[Pair]:
    x, ends, experts = _experts(device)
    values = kernels.grouped_fake_quantize_e4m3(x.to(device), ends)
    for rows in experts:
        yield f"E4M3 values of rows {rows}", values[rows], numerics.fake_quantize_e4m3(x[rows].t()).t()


def _folded_experts(device: torch.device) -> Iterator[Pair]:
    import mxfp4_kernels

    x, ends, experts = _experts(device)
    there, first = x.to(device), 0
    by_row, along, padded = mxfp4_kernels.grouped_quantize_e4m3(there, ends)
    folded = mxfp4_kernels.grouped_fold_e4m3(there, ends)
    elements, byte = numerics.quantize_e4m3(x)
    yield "E4M3 elements of experts, rows", by_row.elements[:, : x.shape[1]], elements
    yield "their scales", by_row.scale, numerics.decode_e8m0(byte)
    for rows in experts:
        own = F.pad(x[rows], (0, 0, 0, -len(x[rows]) % 128))
        tokens, slots = slice(first, first + len(own)), slice(first // 128, (first + len(own)) // 128)
        elements, byte = numerics.quantize_e4m3(own.t())
        yield f"E4M3 elements along rows {rows}", along.elements[:, tokens], elements
        yield f"their scales, {rows}", along.scale[:, slots], numerics.decode_e8m0(byte).expand(-1, len(own) // 128)
        if len(own):
            wanted, first = numerics.fold_across(numerics.quantize(own)), first + len(own)
            yield f"elements folded along rows {rows}", folded.elements[:, tokens], wanted.elements
            yield f"their scales along rows {rows}", folded.scale[:, slots], wanted.scale
    yield "the last token", padded[-1:].cpu(), torch.tensor([first], dtype=torch.int32, device="cpu")


def _parts(name: str, found, expected: numerics.FoldedOperand) -> Iterator[Pair]:
    yield f"elements {name}", found.elements, expected.elements
    yield f"scales {name}", found.scale, expected.scale


def on_device(device: torch.device, tensor: MXFP4Tensor) -> MXFP4Tensor:
    """The same codes and scales on a device."""
    parts = {part: getattr(tensor, part) for part in PARTS}
    moved = {part: None if value is None else value.to(device) for part, value in parts.items()}
    return MXFP4Tensor(**moved, length=tensor.length, axis=tensor.axis, scheme=tensor.scheme, dtype=tensor.dtype)
