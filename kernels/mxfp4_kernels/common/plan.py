# SPDX-License-Identifier: Apache-2.0
"""What to launch: schemes, tile shapes and compile-time arguments of the fused kernels."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton

from . import blocks
from .arguments import SchemeConstants, SideConstants
from .checks import check_rotation, check_scheme, check_seed, unsupported_row
from .tile import LONGEST_FLAT_TILE


#: Added to the float32 bits of a block maximum so that its exponent rounds up where the scale rule says.
_CARRY = {"rceil": 0x3FFFFF, "floor": 0, "even": 0x200000, "mse": 0}
_SEARCH = {name: getattr(blocks, name.upper()).value for name in ("static", "dynamic", "blockwise", "given")}
BLOCK = 32
# Two (16-bit) or four (32-bit) vectors of 16 bytes per thread of a program with 4 warps: enough loads in flight to
# stream, few enough registers to keep the multiprocessor full. Both tiles are multiples of the largest macro block.
_FLAT_TILE = (1, LONGEST_FLAT_TILE.value)
_ROW_TILE = (8, 256)
#: Elements that a program of `quantization/pairs.py` owns, and how it is compiled.
PAIRS_TILE = 2048
#: Of `quantization/mantissas.py`, compiled alike.
MANTISSAS_TILE = 4096
PAIRS_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
#: Of `quantization/pairs_both.py`: rows and columns of a program, and those that it goes over at a time.
PAIRS_BOTH_TILE, PAIRS_BOTH_STRIP = 128, 32
# AMD's warps have 64 threads, and blocks 1024 at most.
_MOST_WARPS = 16
#: Whether TRITON_INTERPRET=1 was set when the kernels were defined, which is what counts.
INTERPRETED = not isinstance(blocks.clamp, triton.JITFunction)


class Scheme(NamedTuple):
    """What to do to each block: the arguments of [`mxfp4_kernels.fake_quantize`]."""

    scale_rule: str = "rceil"
    macro_block: int | str | None = None
    macro_search: str = "static"
    outlier_fallback: float | None = None
    block_rows: int = 1

    def along(self, length: int) -> Scheme:
        """The scheme for an axis of ``length``: a macro block of a whole row is a power of two that covers it. Raises
        `ValueError` for one that is too long."""
        if self.macro_block != "row":
            return self
        if (reason := unsupported_row(self.scale_rule, self.macro_block, self.macro_search, length)) is not None:
            raise ValueError(reason)
        return self._replace(macro_block=triton.next_power_of_2(max(length, BLOCK)))


class Side(NamedTuple):
    """What blocks along one axis have of their own: random numbers and the rotation before."""

    seed: int | None = None
    rotation: int | None = None
    signs: torch.Tensor | None = None

    def padded(self, length: int) -> int:
        """Elements of an axis of ``length`` after the rotation."""
        return length + -length % (self.rotation or 1)

    @property
    def constants(self) -> SideConstants:
        """Compile-time arguments."""
        rotation = self.rotation or 0
        return SideConstants(self.seed is not None, rotation, (rotation or 1) ** -0.5, self.signs is not None)

    @property
    def halves(self) -> tuple[int, int]:
        """The seed as the bits of two int32 numbers."""
        if self.seed is None:
            return 0, 0
        low, high = self.seed & 0xFFFFFFFF, self.seed >> 32
        return low - (low >> 31 << 32), high - (high >> 31 << 32)


PLAIN = Side()


class Plan(NamedTuple):
    """A matrix as the kernel shall see it, cut into tiles; columns are elements."""

    n_rows: int
    n_cols: int
    row_stride: int
    tile_rows: int
    tile_cols: int

    @property
    def col_tiles(self) -> int:
        """Tiles side by side."""
        return triton.cdiv(self.n_cols, self.tile_cols)

    @property
    def tiles(self) -> int:
        """All of them."""
        return triton.cdiv(self.n_rows, self.tile_rows) * self.col_tiles


class Packed(NamedTuple):
    """Codes, scale bytes and macro bytes, as [`mxfp4_kernels.quantize`] returns them."""

    codes: torch.Tensor
    scale: torch.Tensor
    macro: torch.Tensor | None
    residual_codes: torch.Tensor | None
    residual_scale: torch.Tensor | None

    def contiguous(self) -> Packed:
        """The same, every part contiguous."""
        parts = []
        for part in self:
            parts.append(None if part is None else part.contiguous())
        return Packed(*parts)


def empty_packed(device: torch.device, shape: tuple[int, ...], scheme: Scheme) -> Packed:
    """Of results of a shape."""

    def empty(per_byte: int | None) -> torch.Tensor | None:
        if per_byte is None:
            return None
        return torch.empty(*shape[:-1], -(-shape[-1] // per_byte), dtype=torch.uint8, device=device)

    residual = scheme.outlier_fallback is not None
    return Packed(
        codes=empty(2),
        scale=empty(BLOCK),
        macro=empty(scheme.macro_block),
        residual_codes=empty(2 if residual else None),
        residual_scale=empty(BLOCK if residual else None),
    )


def checked_side(
    x: torch.Tensor, length: int, rounding: object, seed: object, rotation: object, signs: torch.Tensor | None
) -> Side:
    """What belongs to the blocks along an axis of ``length`` of ``x``. Raises `TypeError` or `ValueError` for what
    there is not, or has no effect."""
    if rounding == "nearest" and seed is None and rotation is None and signs is None:
        return PLAIN
    check_scheme("rceil", None, "static", None, 1, rounding)
    check_seed(rounding, seed)
    return Side(seed, rotation, check_rotation(x, length, rotation, signs))


@functools.lru_cache(maxsize=1024)
def scheme_constants(
    dtype: torch.dtype,
    scheme: Scheme,
    out: torch.dtype | None = None,
    native: bool = False,
    limit: torch.dtype | None = None,
    converts: bool = False,
) -> SchemeConstants:
    """Compile-time arguments of a scheme, for a dtype and that of the output. ``native``: the GPU knows E4M3.
    ``limit``: the dtype whose largest number values saturate at; by default that of the output. ``converts``: by the
    instruction that makes E2M1 codes."""
    least_squares = scheme.scale_rule == "mse"
    carry = _CARRY[scheme.scale_rule]
    return SchemeConstants(
        MACRO=scheme.macro_block or BLOCK,
        SEARCH=0 if scheme.macro_block is None else _SEARCH[scheme.macro_search],
        HAS_FALLBACK=scheme.outlier_fallback is not None,
        CARRY=carry,
        CLIPS=scheme.scale_rule != "rceil",
        LEAST_SQUARES=least_squares,
        # Only scales above E - 2 reach byte 253, and only beyond float16.
        LIMITED=dtype != torch.float16 and (carry > 0 or least_squares),
        LARGEST=torch.finfo(limit or out or dtype).max,
        BF16=dtype == torch.bfloat16,
        TILES=scheme.block_rows != 1,
        INTERPRETED=INTERPRETED,
        NATIVE=native,
        CONVERTS=converts,
    )


def alpha(scheme: Scheme) -> float:
    """What the residual is multiplied by."""
    return 1.0 if scheme.outlier_fallback is None else float(scheme.outlier_fallback)


def options(tile_rows: int, tile_cols: int, constants: SchemeConstants) -> dict[str, int | bool]:
    """How to compile for a tile. Contracting a multiply and an add would change bits; see `common/blocks.py`."""
    num_warps = min(tile_rows * tile_cols // 512, _MOST_WARPS)
    if constants.SEARCH in (_SEARCH["dynamic"], _SEARCH["blockwise"]) and constants.LEAST_SQUARES:
        # A search in a search needs more registers per element.
        num_warps = min(2 * num_warps, _MOST_WARPS)
    return {"num_warps": num_warps, "enable_fp_fusion": False}


def plan(n_rows: int, n_cols: int, row_stride: int, unit: int, block_rows: int = 1, flat: bool = True) -> Plan:
    """The matrix cut into tiles.

    A gapless matrix whose rows are whole (macro) blocks is one long row: no part of a tile is wasted then. Not with
    ``flat=False``, for what belongs to columns.
    """
    if block_rows != 1:
        return Plan(n_rows, n_cols, row_stride, block_rows, max(unit, 128))
    if flat and n_cols % unit == 0 and unit <= _FLAT_TILE[1] and (row_stride == n_cols or n_rows == 1):
        return Plan(1, n_rows * n_cols, n_rows * n_cols, *_FLAT_TILE)
    if unit > _ROW_TILE[1]:
        return Plan(n_rows, n_cols, row_stride, max(2 * LONGEST_FLAT_TILE.value // unit, 1), unit)
    return Plan(n_rows, n_cols, row_stride, *_ROW_TILE)


def both_tile(scheme: Scheme) -> tuple[int, int]:
    """``TILE`` and ``STRIP`` of the kernel of `quantization/both.py`: the longer is a multiple of what belongs
    together."""
    if (scheme.macro_block or 0) > 128:
        return 256, 32
    # A residual needs more registers per element than half of the threads of a multiprocessor have.
    whole = scheme.block_rows == 1 and scheme.outlier_fallback is None
    return 128, 64 if whole else 32


def unit_of(scheme: Scheme, side: Side) -> int:
    """Elements of a row that belong together."""
    return max(scheme.macro_block or BLOCK, side.rotation or 1)


@functools.lru_cache(maxsize=1024)
def takes_pairs(scheme: Scheme, side: Side, dtype: torch.dtype, length: int) -> bool:
    """Whether `quantization/pairs.py` has a scheme for rows of ``length``, of whole blocks and macro blocks."""
    macro = scheme.macro_block
    if dtype != torch.bfloat16 or side != PLAIN or scheme.block_rows != 1:
        return False
    if length % (macro or BLOCK) or (macro or 0) > PAIRS_TILE // 2:
        return False
    if macro is None:
        return scheme.scale_rule != "mse"
    # Factors may bring what rounds to 8 scales under "floor".
    return scheme.macro_search == "static" and scheme.scale_rule in ("rceil", "even")


@functools.lru_cache(maxsize=1024)
def takes_mantissas(
    scheme: Scheme, side: Side, dtype: torch.dtype, length: int, out: torch.dtype | None = None
) -> bool:
    """Whether `quantization/mantissas.py` has a scheme for rows of ``length``, of whole macro blocks: for codes, or for
    values of the dtype ``out``."""
    if dtype != torch.bfloat16 or side != PLAIN or scheme.block_rows != 1 or scheme.macro_block is None:
        return False
    if scheme.macro_search != "blockwise" or scheme.scale_rule != "even" or length % scheme.macro_block:
        return False
    # Of the residual another part than all of it has more digits.
    return out is None or out == torch.bfloat16 and scheme.outlier_fallback in (None, 1.0)


@functools.lru_cache(maxsize=64)
def has_pairs(device: torch.device) -> bool:
    """Whether a device has the instructions of `common/pairs.py`, or the kernels are interpreted."""
    if device.type == "cpu":
        return INTERPRETED
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


@functools.lru_cache(maxsize=64)
def has_e2m1(device: torch.device) -> bool:
    """Whether a device makes E2M1 codes by an instruction, and Triton compiles for that: compute capability 10.x and
    12.x."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (10, 12)


def check_device(x: torch.Tensor) -> None:
    """Raise `ValueError` for a tensor on a CPU where kernels are not interpreted."""
    if x.device.type == "cpu" and not INTERPRETED:
        raise ValueError("the Triton kernel needs a GPU tensor, got one on the CPU")


def bits(matrix: torch.Tensor) -> torch.Tensor:
    """bfloat16 goes in as int16 bits."""
    return matrix.view(torch.int16) if matrix.dtype == torch.bfloat16 else matrix


def as_stored(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Interpreted, bfloat16 passes as int16 bits."""
    return tensor.view(torch.int16) if INTERPRETED and tensor is not None and tensor.dtype == torch.bfloat16 else tensor


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Start a kernel on a device."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*arguments, **constants)
