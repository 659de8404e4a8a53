# SPDX-License-Identifier: Apache-2.0
"""Random places in the cells of 16-bit weights at which every code and scale of the forward product stays as it is.

An element that crosses a boundary of its code is reflected at it; one that changes the scale of its block is mirrored
in its cell.
"""

from dataclasses import replace

import torch
from torch import nn

from .backends.select import dequantize
from .gemm import packed_tensor, quantize_weight
from .numerics import BLOCK_SIZE, QuantScheme
from .numerics.dither import Cells


#: How often places are tried at all: in the last attempts what still differs goes back to the middle alone, in the very
#: last one its whole group does.
_ATTEMPTS, _RETURNS = 24, 4
#: How often places anywhere in the cells are tried; later ones are nearer and nearer to the middle.
_ANYWHERE = 12
#: Every how many attempts blocks whose scale differs are drawn again.
_DRAWS = 2
#: A weight lies on a boundary when moving it by this share of itself, up or down, makes a difference.
_NUDGE = 2.0**-21


# ---- the weight as the forward product takes it ----------------------------------------------------------------------


class ForwardWeight:
    """Codes and scales of a weight in the forward product, and where those of two weights differ."""

    def __init__(self, scheme: QuantScheme, backend: str):
        self.scheme, self.backend = scheme, backend

    def quantized(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of [`quantize_weight`] for rows ``[..., N, K]``, in that shape but for the last axis."""
        tensors = quantize_weight(rows.reshape(-1, rows.shape[-1]), self.scheme, self.backend)
        return {name: tensor.view(*rows.shape[:-1], -1) for name, tensor in tensors.items()}

    def differences(
        self, wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor], columns: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Masks ``[..., columns]`` of the elements whose code differs in either pass; of those in blocks of which a
        scale or a macro byte does; and of those in blocks of which the scale of the residual pass does."""
        none = torch.zeros_like(wanted["weight"][..., :1], dtype=torch.bool)
        codes = blocks = residual_blocks = none.expand(*none.shape[:-1], columns)
        for name, tensor in wanted.items():
            bits = tensor ^ found[name]
            if name in ("weight", "weight_residual"):
                pairs = torch.stack([bits & 0xF, bits >> 4], dim=-1) != 0
                codes = codes | pairs.flatten(-2)[..., :columns]
            elif name == "weight_residual_scale":
                residual_blocks = _per_element(bits != 0, BLOCK_SIZE, columns)
            else:
                size = self.scheme.macro_block if name == "weight_macro" else BLOCK_SIZE
                size = columns if size == "row" else max(size, BLOCK_SIZE)
                blocks = blocks | _per_element(bits != 0, size, columns)
        return codes, blocks, residual_blocks

    def passes(self, tensors: dict[str, torch.Tensor], columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what the codes of the first pass stand for, and those of the residual pass, without their weight
        alpha."""

        def values(suffix: str) -> torch.Tensor:
            names = {
                "weight": f"weight{suffix}",
                "weight_scale": f"weight{suffix}_scale",
                "weight_macro": "weight_macro",
            }
            held = {name: tensors[own].flatten(0, -2) for name, own in names.items() if own in tensors}
            one_pass = replace(self.scheme, outlier_fallback=None, fallback_rate=None)
            tensor = packed_tensor(held, columns, one_pass, torch.float32)
            return dequantize(tensor, torch.float32, self.backend).view(*tensors["weight"].shape[:-1], columns)

        return values(""), values("_residual") if "weight_residual" in tensors else None

    def grouped(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows ``[N, K]`` as groups ``[groups, rows of a group, columns of a group]`` that are quantized independently
        of each other: macro blocks where these divide the weight evenly, whole rows elsewhere."""
        n, k = rows.shape
        height, width = self.scheme.block_rows, k
        if self.scheme.macro_block != "row" and self.scheme.fallback_rate is None:
            width = max(BLOCK_SIZE, self.scheme.macro_block or 0)
        if k % width:
            width = k
        if n % height:
            height, width = n, k
        return rows.reshape(n // height, height, k // width, width).transpose(1, 2).reshape(-1, height, width)

    def ungrouped(self, groups: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return what [`grouped`] made groups of, in its shape ``[N, K]``."""
        n, k = shape
        _, height, width = groups.shape
        return groups.reshape(n // height, k // width, height, width).transpose(1, 2).reshape(n, k)

    def count_on_boundaries(self, rows: torch.Tensor) -> int:
        """Count how many codes of rows lie on a boundary; a block on one of its scale counts as one."""
        nudge = rows.abs() * _NUDGE
        sides = self.quantized(rows + nudge), self.quantized(rows - nudge)
        codes, blocks, residual_blocks = self.differences(*sides, rows.shape[-1])
        blocks = blocks | residual_blocks
        return int((codes & ~blocks).sum()) + int(blocks.sum()) // BLOCK_SIZE


def _per_element(of_blocks: torch.Tensor, size: int, width: int) -> torch.Tensor:
    return of_blocks.unsqueeze(-1).expand(*of_blocks.shape, size).flatten(-2)[..., :width]


# ---- places that leave every code and scale as it is -----------------------------------------------------------------


def dithered(cells: Cells, forward: ForwardWeight, generator: torch.Generator) -> torch.Tensor:
    """The numbers of ``cells``, groups of [`ForwardWeight.grouped`], at random places at which they have the codes and
    scales that they have in the middle.

    Groups that differ are tried again. Elements go to the other side of a boundary that they crossed, where as many
    steps then lead over it as over a boundary between weights in general position. Blocks whose scale differs are tried
    with the elements that decide on it mirrored, and are drawn anew where that does not help, since some rules look at
    all elements. In the end both come nearer and nearer to the middle, where they stay when nothing else is left.
    """
    middle = cells.weight
    wanted = forward.quantized(middle)
    places = cells.draw(generator)
    tried, active = places, torch.arange(len(places), device=places.device)
    for attempt in range(_ATTEMPTS):
        values = cells.values(tried, active)
        found = forward.quantized(values)
        differs = _any_difference(wanted, found)
        if not differs.any():
            break
        active, tried, middle, values = active[differs], tried[differs], middle[differs], values[differs]
        wanted, found = ({name: tensor[differs] for name, tensor in tensors.items()} for tensors in (wanted, found))
        crossing, blocks = _crossings(forward, middle, values, wanted, found)
        if attempt == _ATTEMPTS - 1:
            tried = torch.zeros_like(tried)
        elif attempt >= _ATTEMPTS - _RETURNS:
            tried = tried.masked_fill(blocks | (crossing != 0), 0)
        else:
            tried = _other_side(cells, tried, active, values, crossing)
            nearer = max(0, attempt - _ANYWHERE)
            if nearer:
                tried = torch.where(crossing != 0, tried >> 1, tried)
            if attempt % _DRAWS == _DRAWS - 1 and blocks.any():
                tried = torch.where(blocks, cells.draw(generator, active) >> nearer, tried)
        places[active] = tried
    return cells.values(places)


def _any_difference(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mask of the groups along the first axis in which any byte differs."""
    differs = [(tensor != found[name]).flatten(1).any(dim=1) for name, tensor in wanted.items()]
    return torch.stack(differs).any(dim=0)


def _crossings(
    forward: ForwardWeight,
    middle: torch.Tensor,
    moved: torch.Tensor,
    wanted: dict[str, torch.Tensor],
    found: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far elements that went from ``middle`` to ``moved`` are beyond the boundaries that they crossed, 0 for the
    others, and the mask of the blocks whose scale differs.

    A boundary of a code lies in the middle between the grid values on its sides. That of a scale is not known: the
    elements that decide on it (larger than all were, or else the largest) count from the middles of their cells, as do
    elements that lie exactly on a boundary.
    """
    columns = moved.shape[-1]
    codes, blocks, residual_blocks = forward.differences(wanted, found, columns)
    (first, residual), (other, other_residual) = (forward.passes(tensors, columns) for tensors in (wanted, found))
    twice = first + other
    if residual is not None:
        twice = torch.where(first == other, twice + residual + other_residual, twice)
    step, beyond = moved - middle, moved - twice / 2
    crossing = torch.where(codes, torch.where(beyond == 0, step, beyond), 0.0)
    decide = _deciding(middle, moved)
    if residual is not None:
        decide = torch.where(residual_blocks & ~blocks, _deciding(middle - first, moved - other), decide)
    blocks = blocks | residual_blocks
    return torch.where(blocks, torch.where(decide, step, 0.0), crossing), blocks


def _deciding(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Of each block of 32 columns the elements that have become larger than the largest one was; that one if none."""
    before, after = before.abs(), after.abs()
    padding = (0, -before.shape[-1] % BLOCK_SIZE)
    largest = nn.functional.pad(before, padding).unflatten(-1, (-1, BLOCK_SIZE)).amax(dim=-1)
    larger = after > _per_element(largest, BLOCK_SIZE, before.shape[-1])
    any_larger = nn.functional.pad(larger, padding).unflatten(-1, (-1, BLOCK_SIZE)).any(dim=-1)
    is_largest = before == _per_element(largest, BLOCK_SIZE, before.shape[-1])
    return torch.where(_per_element(any_larger, BLOCK_SIZE, before.shape[-1]), larger, is_largest)


def _other_side(
    cells: Cells, tried: torch.Tensor, active: torch.Tensor, values: torch.Tensor, crossing: torch.Tensor
) -> torch.Tensor:
    """Places (int16) on the other sides of the boundaries that were crossed."""
    places = cells.places(values - 2 * crossing, active)
    places = torch.where(places.abs() <= cells.outermost, places, -tried.int())
    return torch.where(crossing != 0, places, tried).to(torch.int16)
