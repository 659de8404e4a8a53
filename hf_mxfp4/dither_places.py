# SPDX-License-Identifier: Apache-2.0
"""Random places in the cells of 16-bit weights at which every code and scale of the forward product stays as it is.

An element that crosses a boundary of its code is reflected at it, one that changes the scale of its block is mirrored
in its cell. Where the forward product rotates its operands a boundary is a hyperplane through the cells of all elements
that the rotation mixes, and the reflection moves each of them in proportion to the square of its width. Reflections at
one violated plane after another end inside of all of them wherever there is an inside (T. S. Motzkin and
I. J. Schoenberg, The relaxation method for linear inequalities, 1954).
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from .backends.select import dequantize
from .gemm import LayerRng, rotate_operand
from .gemm.operands import rotate_back
from .gemm.storage.packed_weight import packed_tensor, quantize_weight
from .numerics import BLOCK_SIZE, GemmScheme, QuantScheme
from .numerics.dither import Cells


@dataclass(frozen=True)
class _Schedule:
    """Attempts at places that leave codes and scales as they are.

    Attributes:
        attempts: how often it is tried at all. In the last of them what still differs goes back to the middle alone,
            in the very last one its whole group does.
        anywhere: how often places anywhere in the cells are tried; later ones are nearer and nearer to the middle.
        draws: every how many attempts blocks whose scale differs are drawn anew.
    """

    attempts: int
    anywhere: int
    draws: int

    def returns(self, attempt: int) -> bool:
        """Whether it is time for what differs to go back."""
        return attempt >= self.attempts - 4

    def draws_anew(self, attempt: int) -> bool:
        """Whether blocks whose scale differs are drawn anew."""
        return attempt % self.draws == self.draws - 1

    def nearer(self, attempt: int) -> int:
        """How often distances from the middle are halved."""
        return max(0, attempt - self.anywhere) // (self.draws // 2)


_SCHEDULE = _Schedule(attempts=24, anywhere=12, draws=2)
#: Where a rotation mixes elements their boundaries are met one by one.
_ROTATED_SCHEDULE = _Schedule(attempts=64, anywhere=32, draws=8)
#: A weight lies on a boundary when moving it by this share of itself, up or down, makes a difference.
_NUDGE = 2.0**-21


# ---- the weight as the forward product takes it ----------------------------------------------------------------------


class ForwardWeight:
    """Codes and scales of a weight in the forward product, and where those of two weights differ.

    What has columns here has those of the rotated weight, which may end in a padding.
    """

    def __init__(self, fprop: GemmScheme, scheme: QuantScheme, rng: LayerRng, backend: str):
        self.scheme, self.rotation, self.rng, self.backend = scheme, fprop.rotation, rng, backend
        #: How many neighbours a code depends on.
        self.unit = BLOCK_SIZE if self.rotation is None else max(BLOCK_SIZE, self.rotation.size)

    def rotated(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows ``[..., K]`` in the domain in which they are quantized."""
        return rotate_operand(rows, self.rotation, "fprop", self.rng)

    def rotated_back(self, rotated: torch.Tensor, columns: int) -> torch.Tensor:
        """Undo [`rotated`]."""
        return rotate_back(rotated, self.rotation, "fprop", columns, self.rng)

    def quantized(self, rotated: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of [`quantize_weight`] for rotated rows ``[..., N, K]``, in that shape but for the last axis."""
        tensors = quantize_weight(rotated.reshape(-1, rotated.shape[-1]), self.scheme, self.backend)
        return {name: tensor.view(*rotated.shape[:-1], -1) for name, tensor in tensors.items()}

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
            one_pass = {name: tensors[own].flatten(0, -2) for name, own in names.items() if own in tensors}
            tensor = packed_tensor(one_pass, columns, replace(self.scheme, outlier_fallback=None), torch.float32)
            return dequantize(tensor, torch.float32, self.backend).view(*tensors["weight"].shape[:-1], columns)

        return values(""), values("_residual") if "weight_residual" in tensors else None

    def grouped(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows ``[N, K]`` as groups ``[groups, rows of a group, columns of a group]`` that are quantized independently
        of each other: macro blocks or rotated blocks where these divide the weight evenly, whole rows elsewhere."""
        n, k = rows.shape
        height, width = self.scheme.block_rows, k
        if self.scheme.macro_block != "row":
            width = max(self.unit, self.scheme.macro_block or 0)
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

    def differing_elements(self, rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Mask ``[N, K]`` of the elements of two weights that have a part in a code or a scale that differs."""
        rotated, rotated_others = self.rotated(rows), self.rotated(others)
        columns = rotated.shape[-1]
        masks = self.differences(self.quantized(rotated), self.quantized(rotated_others), columns)
        return self.mixed(torch.stack(masks).any(dim=0), rows.shape[-1])

    def mixed(self, mask: torch.Tensor, columns: int) -> torch.Tensor:
        """Mask ``[..., columns]`` of the elements that those of a mask of rotated ones are made of."""
        if self.rotation is None:
            return mask
        return _per_element(mask.unflatten(-1, (-1, self.rotation.size)).any(dim=-1), self.rotation.size, columns)

    def count_on_boundaries(self, rows: torch.Tensor) -> int:
        """Count how many codes of rows lie on a boundary; a block on one of its scale counts as one."""
        rotated = self.rotated(rows)
        nudge = rotated.abs() * _NUDGE
        sides = self.quantized(rotated + nudge), self.quantized(rotated - nudge)
        codes, blocks, residual_blocks = self.differences(*sides, rotated.shape[-1])
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
    middle = forward.rotated(cells.weight)
    wanted = forward.quantized(middle)
    places = cells.draw(generator)
    tried, active = places, torch.arange(len(places), device=places.device)
    schedule = _SCHEDULE if forward.rotation is None else _ROTATED_SCHEDULE
    for attempt in range(schedule.attempts):
        rotated = forward.rotated(cells.values(tried, active))
        found = forward.quantized(rotated)
        differs = _any_difference(wanted, found)
        if not differs.any():
            break
        active, tried, middle, rotated = active[differs], tried[differs], middle[differs], rotated[differs]
        wanted, found = ({name: tensor[differs] for name, tensor in tensors.items()} for tensors in (wanted, found))
        crossing, blocks = _crossings(forward, middle, rotated, wanted, found)
        columns = tried.shape[-1]
        if attempt == schedule.attempts - 1:
            tried = torch.zeros_like(tried)
        elif schedule.returns(attempt):
            tried = tried.masked_fill(forward.mixed(blocks | (crossing != 0), columns), 0)
        else:
            tried = _other_side(cells, forward, tried, active, crossing)
            nearer = schedule.nearer(attempt)
            if nearer > schedule.nearer(attempt - 1):
                tried = torch.where(forward.mixed(crossing != 0, columns), tried >> 1, tried)
            if schedule.draws_anew(attempt) and blocks.any():
                anew = cells.draw(generator, active) >> nearer
                tried = torch.where(forward.mixed(blocks, columns), anew, tried)
        places[active] = tried
    return cells.values(places)


def _any_difference(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mask of the groups along the first axis in which any byte differs."""
    differs = [(tensor != found[name]).flatten(1).any(dim=1) for name, tensor in wanted.items()]
    return torch.stack(differs).any(dim=0)


def _crossings(
    forward: ForwardWeight,
    middle: torch.Tensor,
    rotated: torch.Tensor,
    wanted: dict[str, torch.Tensor],
    found: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far rotated elements are beyond the boundaries that they crossed, 0 for others, and the mask of the blocks
    whose scale differs.

    A boundary of a code lies in the middle between the grid values on its sides. That of a scale is not known: the
    elements that decide on it (larger than all were, or else the largest) count from the middles of their cells, as do
    elements that lie exactly on a boundary.
    """
    columns = rotated.shape[-1]
    codes, blocks, residual_blocks = forward.differences(wanted, found, columns)
    (first, residual), (other, other_residual) = (forward.passes(tensors, columns) for tensors in (wanted, found))
    twice = first + other
    if residual is not None:
        twice = torch.where(first == other, twice + residual + other_residual, twice)
    moved, beyond = rotated - middle, rotated - twice / 2
    crossing = torch.where(codes, torch.where(beyond == 0, moved, beyond), 0.0)
    decide = _deciding(middle, rotated)
    if residual is not None:
        decide = torch.where(residual_blocks & ~blocks, _deciding(middle - first, rotated - other), decide)
    blocks = blocks | residual_blocks
    return torch.where(blocks, torch.where(decide, moved, 0.0), crossing), blocks


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
    cells: Cells, forward: ForwardWeight, tried: torch.Tensor, active: torch.Tensor, crossing: torch.Tensor
) -> torch.Tensor:
    """Places (int16) on the other sides of the boundaries that were crossed; of the planes through the elements that a
    rotation mixes only the one that they are farthest beyond."""
    if forward.rotation is None:
        places = cells.places(cells.values(tried, active) - 2 * crossing, active)
        places = torch.where(places.abs() <= cells.outermost, places, -tried.int())
        return torch.where(crossing != 0, places, tried).to(torch.int16)
    size, columns = forward.rotation.size, tried.shape[-1]
    mixed = crossing.unflatten(-1, (-1, size))
    farthest = mixed.abs().argmax(dim=-1, keepdim=True)
    distance = torch.zeros_like(mixed).scatter_(-1, farthest, mixed.gather(-1, farthest)).flatten(-2)
    normal = forward.rotated_back(distance, columns)
    # Reflected where all cells are equally wide, so that uniform places stay uniform ones.
    ends = cells.values(torch.full_like(tried, cells.outermost), active)
    squares = (ends - cells.weight[active]).square().masked_fill_(cells.weight[active] == 0, 0)
    means = nn.functional.pad(squares, (0, -columns % size)).unflatten(-1, (-1, size)).mean(dim=-1)
    share = squares / _per_element(means, size, columns).clamp_min(torch.finfo(torch.float32).tiny)
    places = cells.places(cells.values(tried, active) - 2 * share * normal, active)
    beyond = (places.abs() - cells.outermost).clamp_min(0)
    places = places.sign() * (places.abs() - 2 * beyond).clamp_min(0)
    return torch.where(normal != 0, places, tried).to(torch.int16)
