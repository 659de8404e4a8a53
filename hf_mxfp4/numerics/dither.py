# SPDX-License-Identifier: Apache-2.0
"""Float32 weights that are 16-bit numbers, moved inside the cells that round to those numbers.

A power-of-two block scale leaves a bfloat16 number its 8 significant bits, and every midpoint between two E2M1 values
is such a number: of the weights of a 16-bit checkpoint many lie exactly on a rounding boundary, where a training step
of any size flips them all along the gradient. Where in its cell a weight of full precision was is lost; a uniform draw
stands for it. What is rounded to the 16-bit dtype again is the checkpoint's number.
"""

import torch


#: Dtypes that checkpoints have, and how many float32 numbers lie between one of their normal numbers and the midpoint
#: to the next. (Below a power of two both spacings are half as wide. The few subnormal numbers of float16 have wider
#: cells than these.)
HALF_CELL = {torch.bfloat16: 1 << 15, torch.float16: 1 << 12}
#: Half the width of the window around a number in which the density of weights is looked at, in its spacings.
_WINDOW = 16
#: Standard errors by which the count of a number exceeds what it should be for the number to be crowded.
_SIGNIFICANT = 3
#: How many elements are looked at at a time.
_PORTION = 1 << 20


def sixteen_bit_dtype(weight: torch.Tensor) -> torch.dtype | None:
    """The dtype, `torch.bfloat16` or `torch.float16`, that every element of a float32 tensor is a number of; bfloat16
    where both are. `None` for weights that were trained or stored in more bits, and for tensors of other dtypes."""
    if weight.dtype != torch.float32:
        return None
    for dtype in HALF_CELL:
        if all(_holds(dtype, some) for some in weight.split(_rows_at_a_time(weight))):
            return dtype
    return None


def _rows_at_a_time(weight: torch.Tensor) -> int:
    return max(1, _PORTION * weight.shape[0] // max(1, weight.numel()))


def _holds(dtype: torch.dtype, weight: torch.Tensor) -> bool:
    """Whether all float32 elements are numbers of ``dtype``; NaN is."""
    return bool(((weight.to(dtype).to(torch.float32) == weight) | weight.isnan()).all())


def crowding(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return, by the bits of a magnitude in ``dtype``, which share of the elements of ``weight`` that have it are more
    than there should be (float32 ``[32768]`` on the CPU); `None` where there are no more of any than there should be.

    There should be as many as the density of weights in a window around the number makes for the width of its cell.
    Numbers at the ends of the window count by half, so that weights on a lattice of 2, 4, 8 or 16 times the spacing of
    ``dtype``, as another quantization leaves them, have the density that they had before. More are as many as exceed
    it by three standard errors.
    """
    portions = weight.split(_rows_at_a_time(weight))
    counts = sum(torch.bincount(_magnitude_bits(some, dtype).flatten(), minlength=1 << 15) for some in portions)
    counts = counts.cpu().double()
    numbers = torch.arange(1 << 15, dtype=torch.int16).view(dtype).double()
    numbers = numbers[numbers.isfinite()]
    counts = counts[: len(numbers)]
    spacing = numbers.diff(append=2 * numbers[-1:] - numbers[-2:-1])
    widths = (spacing + spacing.roll(1)) / 2
    below = counts.cumsum(0) - counts / 2
    ends = [
        (numbers + side * _WINDOW * spacing).clamp(0, float(numbers[-1])).to(dtype).view(torch.int16).long()
        for side in (-1, 1)
    ]
    density = (below[ends[1]] - below[ends[0]]) / (numbers[ends[1]] - numbers[ends[0]])
    fair = density * widths
    crowded = counts - fair > _SIGNIFICANT * counts.sqrt()
    crowded[0] = False  # zeros stay where they are
    if not crowded.any():
        return None
    share = torch.zeros(1 << 15)
    share[: len(numbers)] = torch.where(crowded, 1 - fair / counts, 0.0).float()
    return share


def _magnitude_bits(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of numbers of ``dtype`` without their signs (int64)."""
    return weight.to(dtype).view(torch.int16).long() & 0x7FFF


class Cells:
    """The cells of float32 weights that are numbers of a 16-bit dtype: all that rounds to the same number.

    A place in a cell is how many float32 numbers farther from zero than the 16-bit number it is (int16).

    Args:
        weight: float32, contiguous, all elements numbers of ``dtype``.
        dtype: `torch.bfloat16` or `torch.float16`.
        crowds: what [`crowding`] found of the weight that these are elements of.

    Attributes:
        outermost: the largest place, and minus the smallest one.
    """

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, crowds: torch.Tensor | None = None):
        self.weight, self._bits = weight, weight.view(torch.int32)
        self.outermost = HALF_CELL[dtype] - 1
        self._dtype, self._crowds = dtype, None if crowds is None else crowds.to(weight.device)

    def draw(self, generator: torch.Generator, some: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """Places drawn uniformly over the widths of all cells, or of ``some`` along the first axis, by a generator of
        the CPU, so that they are the same on every device. Zeros, infinities and NaN stay where they are.

        What a crowded number has too many of comes from beyond its cell, and is drawn in the outer halves of it.
        """
        weight, bits = self.weight[some], self._bits[some]
        limit = self.outermost
        places = torch.randint(-limit, limit + 1, weight.shape, generator=generator, dtype=torch.int16)
        places = places.to(weight.device).masked_fill_((weight == 0) | ~weight.isfinite(), 0)
        # The cell of a power of two has a third of its width below it, and half of its float32 numbers.
        too_low = (bits & 0x7FFFFF == 0) & (places < 0) & (places % 3 == 0)
        places = torch.where(too_low, -places, places)
        if self._crowds is None:
            return places
        surplus = torch.rand(weight.shape, generator=generator).to(weight.device)
        surplus = surplus < self._crowds[_magnitude_bits(weight, self._dtype)]
        outer = places.sign() * (limit - places.abs() // 2)
        return torch.where(surplus, outer, places)

    def values(self, places: torch.Tensor, some: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """The float32 numbers at places of all cells or of ``some``."""
        return (self._bits[some] + places).view(torch.float32)

    def places(self, values: torch.Tensor, some: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """The places (int32) of float32 numbers of the cells' signs, beyond ``outermost`` where they lie outside."""
        return values.view(torch.int32) - self._bits[some]
