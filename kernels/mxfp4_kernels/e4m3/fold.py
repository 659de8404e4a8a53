# SPDX-License-Identifier: Apache-2.0
"""MXFP4 quantization straight into the operands of FP8 products: checks, tile shapes and launches."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from ..common.arguments import (
    FoldBothLengths,
    FoldedPointers,
    FoldLengths,
    PackedPointers,
    RowBytes,
    SchemeConstants,
    Sides,
)
from ..common.checks import DTYPES, check_scheme, unsupported_dtype
from ..common.plan import (
    BLOCK,
    INTERPRETED,
    PLAIN,
    Packed,
    Scheme,
    Side,
    as_stored,
    bits,
    check_device,
    checked_side,
    empty_packed,
    has_pairs,
    launch,
    scheme_constants,
    takes_pairs,
)
from .both_kernel import fold_both_kernel
from .rows_kernel import fold_groups_kernel, fold_rows_kernel


GROUPS = ("row", 128)
#: How the second orientation of [`fold_e4m3_both`] is quantized.
COLUMNS = ("requantized", "reused")
GROUP = 128
#: Longest row that a program holds in registers: 16 warps of 16 elements a thread.
_LONGEST_TILE = 8192


class Folded(NamedTuple):
    """A matrix ready for FP8 tensor cores: ``elements`` ``float8_e4m3fn [rows, 128 * ceil(length/128)]``, contiguous,
    zero from column ``length`` on (NaN in a NaN block); ``scale`` float32 ``[rows, 1]`` or ``[rows, ceil(length/128)]``
    (that one is the transpose of a contiguous tensor, as products read it); ``n_inexact`` int32 scalar, the blocks that
    were rounded (`None` where there are none by definition); ``values`` those of MXFP4, where they were asked for;
    ``macro`` the macro bytes of a dynamic search, uint8 ``[rows, ceil(length/128)]``, with ``axis=1``."""

    elements: torch.Tensor
    scale: torch.Tensor
    n_inexact: torch.Tensor | None
    length: int
    values: torch.Tensor | None = None
    macro: torch.Tensor | None = None


def fold_e4m3(
    x: torch.Tensor,
    *,
    group: int | str = 128,
    axis: int = 1,
    scale_rule: str = "rceil",
    macro_block: int | None = None,
    macro_search: str = "static",
    block_rows: int = 1,
    rounding: str = "nearest",
    seed: int | None = None,
    rotation: int | None = None,
    signs: torch.Tensor | None = None,
    counter: torch.Tensor | None = None,
    values: bool = False,
) -> Folded:
    """``x`` quantized to MXFP4 along ``axis`` and folded into E4M3, contraction last: the bits of
    ``hf_mxfp4.numerics.fold`` on the definition's codes. No gradient flows, and nothing waits for the GPU.

    Args:
        x: float32, bfloat16 or float16 matrix ``[M, K]`` on a GPU, of any strides; of more axes ``[..., K]`` with
            ``axis=1``, which then means the last, and rows are those of ``x.reshape(-1, K)``.
        group: elements that share a float32 scale: 128, or ``"row"`` (all; a power of two then).
        axis: 1 for blocks along rows; 0 for blocks along columns, and results of ``[K, M]``.
        scale_rule, macro_block, macro_search, block_rows: as in [`mxfp4_kernels.fake_quantize`]; ``macro_block`` is
            `None` or 128 with ``group=128``, and not blockwise.
        rounding, seed, rotation, signs: as there; ``length`` is then that of the padded axis. Random numbers are those
            of the rows of the result.
        counter: int32 scalar on the same device, to which the number of rounded blocks is added; by default a new one.
        values: whether to write the values of [`mxfp4_kernels.fake_quantize`] besides. With ``axis=1``, rounded to
            nearest, without a rotation and ``block_rows=1``.

    Raises:
        TypeError: not a tensor, or another dtype; no integer as the seed of stochastic rounding.
        ValueError: options that do not fold, a tensor that is no matrix or not on a GPU, a seed or signs that have no
            effect, or signs of another length or device; values of what has none.
    """
    _check_group(group, macro_block, macro_search)
    scheme = Scheme(scale_rule, macro_block, macro_search, None, block_rows)
    matrix = matrix_of("fold_e4m3", x, axis, scheme)
    side = checked_side(matrix, matrix.shape[1], rounding, seed, rotation, signs)
    check_device(x)
    n_rows, length = matrix.shape[0], side.padded(matrix.shape[1])
    out, scale = outputs(n_rows, length, group, x.device)
    counter, found = counter_of(counter, x.device), None
    if values:
        if axis != 1 or side != PLAIN or block_rows != 1:
            raise ValueError("values=True needs axis=1, rounding='nearest', rotation=None and block_rows=1")
        found = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    macro = None
    if axis == 1 and macro_block is not None and macro_search == "dynamic":
        macro = torch.empty(n_rows, out.shape[1] // GROUP, dtype=torch.uint8, device=x.device)
    if matrix.numel():
        constants = scheme_constants(x.dtype, scheme, native=has_fp8(x.device))
        if group == "row":
            _launch_rows(matrix, out, scale, counter, side, constants, values=found)
        else:
            _launch_groups(matrix, out, scale, counter, side, scheme, constants, found, macro)
    else:
        scale.fill_(2.0**-125)
    return Folded(out, scale, counter, length, found, macro)


def fold_e4m3_both(
    x: torch.Tensor,
    *,
    columns: str = "requantized",
    rows: bool | str = True,
    scale_rule: str = "rceil",
    macro_block: int | None = None,
    macro_search: str = "static",
    rounding: tuple[str, str] = ("nearest", "nearest"),
    seed: tuple[int | None, int | None] = (None, None),
    rotation: tuple[int | None, int | None] = (None, None),
    signs: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    counter: torch.Tensor | None = None,
) -> tuple[Folded | Packed | None, Folded]:
    """[`fold_e4m3`] by 128 along rows and along columns, from one read of ``x [M, K]``.

    Arguments and errors as there, those given as pairs for ``x`` and for its transpose.

    Args:
        columns: ``"requantized"`` (blocks along the columns) or ``"reused"`` (the values that blocks along rows have,
            folded along the columns; without macro factors, which vary along the new contraction, without rotations,
            and rounded as along the rows).
        rows: whether what is along the rows is wanted; otherwise the first result is `None`; or ``"codes"`` for what
            [`mxfp4_kernels.quantize`] gives. These two only with ``"reused"``.

    Returns:
        Elements of ``[M, K]`` and of ``[K, M]``, rows padded as in [`fold_e4m3`]. They share one counter.
    """
    if columns not in COLUMNS:
        raise ValueError(f"columns={columns!r} is not supported; choose one of {', '.join(map(repr, COLUMNS))}")
    _check_group(GROUP, macro_block, macro_search)
    if columns == "reused" and macro_block is not None:
        raise ValueError("columns='reused' needs macro_block=None: macro factors vary along the columns' contraction")
    if columns == "reused" and (any(rotation) or rounding[1] != "nearest"):
        raise ValueError("columns='reused' needs rotation=(None, None), and takes the rounding of the rows")
    codes = rows == "codes"
    if not codes and not isinstance(rows, bool):
        raise ValueError(f"{rows=} must be True, False or 'codes'")
    if not rows and columns != "reused":
        raise ValueError("rows=False needs columns='reused'; fold_e4m3 with axis=0 gives columns alone")
    if codes and columns != "reused":
        raise ValueError("rows='codes' needs columns='reused'")
    scheme = Scheme(scale_rule, macro_block, macro_search)
    matrix = matrix_of("fold_e4m3_both", x, 1, scheme)
    sides = [
        checked_side(matrix, length, *of_side)
        for length, *of_side in zip(reversed(matrix.shape), rounding, seed, rotation, signs, strict=True)
    ]
    check_device(x)
    n_rows, n_cols = matrix.shape
    length, length_t = sides[0].padded(n_cols), sides[1].padded(n_rows)
    # Without rows what would take them is not made.
    out, scale = outputs(n_rows if rows and not codes else 0, n_cols, GROUP, x.device)
    packed = empty_packed(x.device, (n_rows, n_cols), scheme) if codes else None
    out_t, scale_t = outputs(n_cols, n_rows, GROUP, x.device)
    counter = counter_of(counter, x.device)
    if matrix.numel():
        constants = scheme_constants(x.dtype, scheme, native=has_fp8(x.device))
        tile, options = both_plan(*sides)
        col_tiles = triton.cdiv(n_cols, GROUP)
        farthest = max(out.shape[1], out_t.shape[1])
        pairs = sides == [PLAIN, PLAIN] and in_pairs(matrix, scheme, farthest) and (n_cols % BLOCK == 0 or not codes)
        stored_as = torch.int32 if pairs else torch.uint8
        stored_across = torch.uint8 if columns == "reused" else stored_as
        if pairs and INTERPRETED:
            # Fewer operations on more numbers.
            tile = {"STRIP": GROUP}
        arguments = (
            bits(matrix),
            _pointers(packed, stored_as) if codes else FoldedPointers(out.view(stored_as), scale.t()) if rows else None,
            FoldedPointers(out_t.view(stored_across), scale_t.t()),
            counter,
            (sides[0].signs, sides[1].signs),
            FoldBothLengths(n_rows, n_cols, length, length_t, out.shape[1], out_t.shape[1], *matrix.stride()),
            RowBytes(packed.codes.shape[1], *[packed.scale.shape[1]] * 2) if codes else None,
            col_tiles,
            *sides[0].halves,
            *sides[1].halves,
        )
        tile |= {
            "REUSED": columns == "reused",
            "PAIRS": pairs,
            "SCHEME": constants,
            "SIDES": Sides(sides[0].constants, sides[1].constants),
        }
        _run(fold_both_kernel, triton.cdiv(n_rows, GROUP) * col_tiles, x.device, arguments, tile, options)
    columns_folded = Folded(out_t, scale_t, counter, length_t)
    if codes:
        return packed, columns_folded
    return Folded(out, scale, counter, length) if rows else None, columns_folded


def _pointers(packed: Packed, stored_as: torch.dtype) -> PackedPointers:
    return PackedPointers(packed.codes.view(stored_as), packed.scale, None, None, None)


@functools.lru_cache(maxsize=64)
def has_fp8(device: torch.device) -> bool:
    """Whether the device converts to E4M3 (OCP) by itself."""
    if device.type == "cpu":
        return False
    if torch.version.hip:
        return "gfx95" in torch.cuda.get_device_properties(device).gcnArchName
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def rows_plan(n_rows: int, length: int, unit_columns: bool, tiles: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tile and compiler options of [`fold_rows_kernel`]; ``unit_columns`` says that elements of a row are adjacent."""
    longest = triton.next_power_of_2(max(length, 128))
    if tiles or not unit_columns:
        # Columns of an ordinary matrix: 32 of them together fill whole sectors of memory.
        return {"ROWS": 32, "COLS": 128, "ONE_TILE": length <= 128}, {"num_warps": 4}
    # A tile that is mostly padding computes for nothing: then the row is read twice, the second time from the cache.
    if longest <= _LONGEST_TILE and longest <= length + length // 3 or longest == 128:
        rows = max(1, 2048 // longest)
        return {"ROWS": rows, "COLS": longest, "ONE_TILE": True}, {"num_warps": max(4, longest // 512)}
    return {"ROWS": 1, "COLS": 2048, "ONE_TILE": False}, {"num_warps": 4}


def groups_plan(unit_columns: bool, tiles: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tile and compiler options of [`fold_groups_kernel`]."""
    rows, cols, warps = (32, 128, 8) if tiles or not unit_columns else (8, 256, 4)
    return {"ROWS": rows, "COLS": cols}, {"num_warps": warps}


def both_plan(*sides: Side) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tile and compiler options of [`fold_both_kernel`]."""
    # Rotations and random numbers take registers of their own.
    plain = all(side.seed is None and side.rotation is None for side in sides)
    return {"STRIP": 32}, {"num_warps": 4 if plain else 8}


def _launch_groups(
    matrix: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    counter: torch.Tensor,
    side: Side,
    scheme: Scheme,
    constants: SchemeConstants,
    values: torch.Tensor | None = None,
    macro: torch.Tensor | None = None,
) -> None:
    unit_columns = matrix.stride(1) == 1 or matrix.shape[1] == 1
    tile, options = groups_plan(unit_columns, constants.TILES)
    pairs = side == PLAIN and values is None and in_pairs(matrix if unit_columns else matrix.t(), scheme, out.shape[1])
    col_tiles = triton.cdiv(out.shape[1], tile["COLS"])
    first, pointers, values, *rest = _arguments(matrix, out, scale.t(), counter, side, values, pairs)
    arguments = (first, pointers, values, macro, *rest, col_tiles, *side.halves)
    tile |= {"PAIRS": pairs, "COLUMNS": not unit_columns, "SCHEME": constants, "SIDE": side.constants}
    grid = triton.cdiv(matrix.shape[0], tile["ROWS"]) * col_tiles
    _run(fold_groups_kernel, grid, matrix.device, arguments, tile, options)


def _launch_rows(
    matrix: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    counter: torch.Tensor | None,
    side: Side,
    constants: SchemeConstants,
    fp8: bool = False,
    values: torch.Tensor | None = None,
) -> None:
    tile, options = rows_plan(*matrix.shape, matrix.stride(1) == 1 or matrix.shape[1] == 1, constants.TILES)
    arguments = (*_arguments(matrix, out, scale, counter, side, values), *side.halves)
    steps = triton.cdiv(out.shape[1], tile["COLS"]) if INTERPRETED else 0
    tile |= {"STEPS": steps, "FP8": fp8, "SCHEME": constants, "SIDE": side.constants}
    _run(fold_rows_kernel, triton.cdiv(matrix.shape[0], tile["ROWS"]), matrix.device, arguments, tile, options)


def in_pairs(matrix: torch.Tensor, scheme: Scheme, farthest: int) -> bool:
    """Whether `e4m3/pairs.py` folds a matrix rounded to nearest: rows of whole words, in tiles that offsets of 32 bits
    reach; ``farthest`` is the largest length of rows of the result."""
    if not takes_pairs(scheme, PLAIN, matrix.dtype, GROUP) or not has_pairs(matrix.device):
        return False
    row_stride, col_stride = matrix.stride()
    in_words = col_stride == 1 and row_stride % 2 == 0 and matrix.shape[1] % 2 == 0 and matrix.data_ptr() % 4 == 0
    return in_words and max(row_stride, farthest) < 2**31 // GROUP


def _arguments(
    matrix: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    counter: torch.Tensor | None,
    side: Side,
    values: torch.Tensor | None,
    pairs: bool = False,
) -> tuple:
    """What the kernels along rows have in common, in their order; with ``pairs`` elements are words."""
    n_rows, n_cols = matrix.shape
    lengths = FoldLengths(n_cols, side.padded(n_cols), out.shape[1], *matrix.stride())
    pointers = FoldedPointers(out.view(torch.int32 if pairs else torch.uint8), scale)
    return bits(matrix), pointers, as_stored(values), counter, side.signs, n_rows, lengths


def _run(kernel: Any, grid: int, device: torch.device, arguments: tuple, constants: dict, options: dict) -> None:
    # Contracting a multiply and an add would change bits; see `common/blocks.py`.
    launch(kernel, (grid,), device, *arguments, **constants, **options, enable_fp_fusion=False)


def unit_columns(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix with neighbours of a row adjacent in memory."""
    return matrix if matrix.shape[1] <= 1 or matrix.stride(1) == 1 else matrix.contiguous()


def outputs(n_rows: int, length: int, group: int | str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    n_groups = triton.cdiv(length, GROUP)
    elements = torch.empty(n_rows, n_groups * GROUP, dtype=torch.float8_e4m3fn, device=device)
    shape = (1 if group == "row" else n_groups, n_rows)
    return elements, torch.empty(shape, dtype=torch.float32, device=device).t()


def counter_of(counter: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if counter is None:
        return torch.zeros((), dtype=torch.int32, device=device)
    if (counter.dtype, counter.dim(), counter.device) != (torch.int32, 0, device):
        raise ValueError(
            f"counter must be an int32 scalar on {device}; it is {counter.dtype} {list(counter.shape)} "
            f"on {counter.device}"
        )
    return counter


def _check_group(group: object, macro_block: object, macro_search: object) -> None:
    if group not in GROUPS:
        raise ValueError(f"group={group!r} is not supported; choose one of {', '.join(map(repr, GROUPS))}")
    if macro_block is None:
        return
    if group == "row" or macro_block != GROUP or macro_search == "blockwise":
        raise ValueError(
            f"{macro_block=}, {macro_search=} does not fold by group={group!r}: a factor per 128 elements joins a "
            "scale per 128 elements, and no other"
        )


def matrix_of(name: str, x: object, axis: int, scheme: Scheme) -> torch.Tensor:
    """``x`` as the matrix whose rows are to be folded. Raises as [`fold_e4m3`] says."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} needs a tensor, got {type(x).__name__}")
    if str(x.dtype) not in DTYPES:
        raise TypeError(unsupported_dtype(x.dtype))
    check_scheme(*scheme)
    if axis not in (0, 1):
        raise ValueError(f"axis={axis!r} must be 1 (blocks along rows) or 0 (along columns)")
    if x.dim() < 2 or axis == 0 and x.dim() != 2:
        raise ValueError(f"{name} with {axis=} needs a matrix, got {x.dim()} axes")
    if scheme.block_rows != 1 and x.dim() > 2 and x.shape[-2] % scheme.block_rows:
        raise ValueError(
            f"tiles of {scheme.block_rows} rows would reach from one matrix of {list(x.shape)} to the next"
        )
    x = x.detach()
    return x.t() if axis == 0 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
