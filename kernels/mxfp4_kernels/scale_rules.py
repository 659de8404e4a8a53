# SPDX-License-Identifier: Apache-2.0
"""The scale rules: one table that the eager reference, Triton, C++, the parser of schemes and `--help` read.

It needs neither torch nor Triton. A rule that is a carry works everywhere once it has a row here.
"""

from enum import Enum
from typing import Any


class ScaleRule(str, Enum):
    """How the exponent of a block scale follows from the block's largest magnitude ``a = m * 2**E``, m in [1, 2).

    Attributes:
        carry: added to the float32 bits of ``a``; the exponent ``E`` that is then read, less 2, is that of the scale.
            It carries into the exponent, which makes the scale twice as large, where m is large enough: for m >= t it
            is ``(2 - t) * 2**23``, for m > t one less.
        clips: whether ``a`` can exceed 6 scales, the top of the grid, and saturate.
        least_squares: whether the scales next to that one are tried too.
        summary: a few words for ``--help``.
    """

    _value_: str
    carry: int
    clips: bool
    least_squares: bool
    summary: str

    #: ``E - 2 + [m > 1.5]`` = ceil(log2(a / 6)). The ceiling rule of arXiv 2605.20402; torchao's RCEIL.
    RCEIL = "rceil", 0x3FFFFF, False, False, "never clips"
    #: ``E - 2``. OCP MX v1.0, section 6.3; torchao's FLOOR.
    FLOOR = "floor", 0, True, False, "OCP"
    #: ``E - 2 + [m >= 1.75]``. Clips a little. Quark's, compressed-tensors' and torchao's EVEN; the "OAS" rule of
    #: arXiv 2603.08713 but for one tie.
    EVEN = "even", 0x200000, True, False, "clips a little"
    #: The one of ``{E - 2, E - 1, E - 3}`` with the least squared error over the block; the earlier one wins a tie.
    MSE = "mse", 0, True, True, "least squared error"

    def __new__(cls, name: str, *columns: Any) -> "ScaleRule":
        rule = str.__new__(cls, name)
        rule._value_ = name
        rule.carry, rule.clips, rule.least_squares, rule.summary = columns
        return rule


#: The names, in the order of the table.
SCALE_RULES = tuple(rule.value for rule in ScaleRule)
