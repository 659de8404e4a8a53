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
#: How many elements are compared at a time.
_PORTION = 1 << 20


def sixteen_bit_dtype(weight: torch.Tensor) -> torch.dtype | None:
    """The dtype, `torch.bfloat16` or `torch.float16`, that every element of a float32 tensor is a number of; bfloat16
    where both are. `None` for weights that were trained or stored in more bits, and for tensors of other dtypes."""
    if weight.dtype != torch.float32:
        return None
    rows = max(1, _PORTION * weight.shape[0] // max(1, weight.numel()))
    for dtype in HALF_CELL:
        if all(_holds(dtype, some) for some in weight.split(rows)):
            return dtype
    return None


def _holds(dtype: torch.dtype, weight: torch.Tensor) -> bool:
    """Whether all float32 elements are numbers of ``dtype``; NaN is."""
    return bool(((weight.to(dtype).to(torch.float32) == weight) | weight.isnan()).all())


class Cells:
    """The cells of float32 weights that are numbers of a 16-bit dtype: all that rounds to the same number.

    A place in a cell is how many float32 numbers farther from zero than the 16-bit number it is (int16).

    Args:
        weight: float32, contiguous, all elements numbers of ``dtype``.
        dtype: `torch.bfloat16` or `torch.float16`.

    Attributes:
        outermost: the largest place, and minus the smallest one.
    """

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype):
        self.weight, self._bits = weight, weight.view(torch.int32)
        self.outermost = HALF_CELL[dtype] - 1

    def draw(self, generator: torch.Generator, some: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """Places drawn uniformly over the widths of all cells, or of ``some`` along the first axis, by a generator of
        the CPU, so that they are the same on every device. Zeros, infinities and NaN stay where they are."""
        weight, bits = self.weight[some], self._bits[some]
        limit = self.outermost
        places = torch.randint(-limit, limit + 1, weight.shape, generator=generator, dtype=torch.int16)
        places = places.to(weight.device).masked_fill_((weight == 0) | ~weight.isfinite(), 0)
        # The cell of a power of two has a third of its width below it, and half of its float32 numbers.
        too_low = (bits & 0x7FFFFF == 0) & (places < 0) & (places % 3 == 0)
        return torch.where(too_low, -places, places)

    def values(self, places: torch.Tensor, some: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """The float32 numbers at places of all cells or of ``some``."""
        return (self._bits[some] + places).view(torch.float32)

    def places(self, values: torch.Tensor, some: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """The places (int32) of float32 numbers of the cells' signs, beyond ``outermost`` where they lie outside."""
        return values.view(torch.int32) - self._bits[some]
