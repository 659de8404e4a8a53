# SPDX-License-Identifier: Apache-2.0
"""How blocks are quantized, what each axis has of its own, and the constants that kernels are compiled with for it."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import torch

from ..scale_rules import SCALE_RULES, ScaleRule
from . import blocks
from .arguments import SchemeConstants, SideConstants
from .tensors import INTERPRETED


#: Elements that share a scale byte.
BLOCK = 32
#: Macro search -> its compile-time constant. FP8's mantissas are the same search, with one candidate fewer.
_SEARCH = {name: getattr(blocks, name.upper()).value for name in ("static", "dynamic", "block_mantissas")}
_SEARCH["block_mantissas_fp8"] = _SEARCH["block_mantissas"]
_ROTATIONS = (16, 32, 64, 128)


def unsupported_scheme(
    scale_rule: Any, macro_block: Any, macro_search: Any, outlier_fallback: Any, block_rows: Any = 1
) -> str | None:
    """Return why the kernels do not have a scheme, given the fields of [`Scheme`]; `None` when they do."""
    choices = [
        ("scale_rule", scale_rule, SCALE_RULES),
        ("macro_block", macro_block, (None, 32, 64, 128, 256)),
    ]
    # Without macro blocks a search has no effect, whatever its name.
    if macro_block:
        choices.append(("macro_search", macro_search, tuple(_SEARCH)))
    choices.append(("block_rows", block_rows, (1, 32)))
    for name, value, known in choices:
        if isinstance(value, bool) or value not in known:
            return f"{name}={value!r} is not supported by the Triton kernels; use {', '.join(map(str, known))}"
    if macro_block not in (None, 128) and _SEARCH[macro_search] == blocks.BLOCK_MANTISSAS.value:
        return f"macro_search={macro_search!r} needs macro_block=128, got macro_block={macro_block!r}"
    if outlier_fallback is None:
        return None
    is_number = isinstance(outlier_fallback, (int, float)) and not isinstance(outlier_fallback, bool)
    if not is_number or not math.isfinite(outlier_fallback) or not 0 < outlier_fallback <= 1:
        return f"outlier_fallback={outlier_fallback!r} must be None or a number in (0, 1]"
    return None


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How blocks of 32 elements are quantized. Raises `ValueError` for what the kernels do not have.

    Attributes:
        scale_rule: the name of a [`ScaleRule`].
        macro_block: 32, 64, 128 or 256 elements that share a macro byte, or `None`.
        macro_search: ``"static"`` factors, ``"dynamic"`` ones (the best of 16 by squared error), or
            ``"block_mantissas"``: two mantissa bits for each block's scale (``macro_block`` 128), or
            ``"block_mantissas_fp8"``: the same without 1.75, so that values are E4M3 numbers times powers of two.
            Without macro blocks it has no effect.
        outlier_fallback: weight in (0, 1] of the quantized residual, or `None` for one pass only.
        block_rows: rows that share blocks: 1, or 32 for tiles of 32 x 32 over the last two axes.
    """

    scale_rule: str = "rceil"
    macro_block: int | None = None
    macro_search: str = "static"
    outlier_fallback: float | None = None
    block_rows: int = 1

    def __post_init__(self):
        if (reason := unsupported_scheme(*dataclasses.astuple(self))) is not None:
            raise ValueError(reason)

    @functools.cached_property
    def alpha(self) -> float:
        """The factor of the residual; 1 without one."""
        if self.outlier_fallback is None:
            return 1.0
        return float(self.outlier_fallback)

    @functools.cached_property
    def search(self) -> int:
        """The compile-time constant of the macro search."""
        if self.macro_block is None:
            return blocks.NO_MACRO.value
        return _SEARCH[self.macro_search]


class Side(NamedTuple):
    """What blocks along one axis have of their own.

    Attributes:
        seed: an integer in 0..2**64 - 1 for stochastic rounding; `None` rounds to nearest, ties to even. Random numbers
            depend on the seed and an element's place alone. A captured CUDA graph repeats those of its seed.
        rotation: 16, 32, 64 or 128 to multiply that many neighbours each by Sylvester's matrix over its root before;
            the axis is then padded with zeros to a multiple. `None` rotates nothing.
        signs: ``[K']`` of 1 and -1 (K' is the padded length) to multiply the columns by before the rotation, or `None`.
    """

    seed: int | None = None
    rotation: int | None = None
    signs: torch.Tensor | None = None

    def checked(self, x: torch.Tensor, length: int) -> Side:
        """Return this side with signs as the kernels read them, for an axis of ``length`` of ``x``. Raises `TypeError`
        or `ValueError` for values that are not supported."""
        seed, rotation, signs = self
        if seed is not None:
            if isinstance(seed, bool) or not isinstance(seed, int):
                raise TypeError(f"stochastic rounding needs an integer as its seed, got {seed!r}")
            if not 0 <= seed < 2**64:
                raise ValueError(f"seed={seed} must be in 0..2**64 - 1")
        if rotation is not None and (isinstance(rotation, bool) or rotation not in _ROTATIONS):
            raise ValueError(f"rotation={rotation!r} must be None or one of {', '.join(map(str, _ROTATIONS))}")
        if signs is None:
            return self
        padded = self.padded(length)
        if rotation is None:
            raise ValueError("signs have no effect without a rotation")
        if tuple(signs.shape) != (padded,):
            raise ValueError(f"signs has the shape {list(signs.shape)}; the rotated axis has {padded} elements")
        if signs.device != x.device:
            raise ValueError(f"signs are on {signs.device}, the tensor is on {x.device}; move them there")
        return self._replace(signs=signs.detach().float().contiguous())

    def padded(self, length: int) -> int:
        """Return the elements of an axis of ``length`` after the rotation."""
        return length + -length % (self.rotation or 1)

    def constants(self, bf16x2: bool) -> SideConstants:
        """Return compile-time arguments; ``bf16x2`` tells whether `common/bf16x2_blocks.py` has what is asked for when
        it is rounded to nearest, and not rotated."""
        rounds_stochastically = self.seed is not None
        rotation = self.rotation or 0
        rotation_scale = (rotation or 1) ** -0.5
        return SideConstants(
            rounds_stochastically,
            rotation,
            rotation_scale,
            self.signs is not None,
            bf16x2 and not rounds_stochastically and not rotation,
        )

    @property
    def halves(self) -> tuple[int, int]:
        """The seed as the bits of two int32 numbers."""
        seed = self.seed or 0
        low = seed & 0xFFFFFFFF
        high = seed >> 32
        # Triton passes integers from 2**31 on as int64; with the sign bit as a sign they are int32.
        return low - (low >> 31 << 32), high - (high >> 31 << 32)


#: Blocks of 32 without macro bytes and residual.
PLAIN = Scheme()
#: An axis that is rounded to nearest and not rotated.
NEAREST = Side()


@functools.lru_cache(maxsize=1024)
def scheme_constants(dtype: torch.dtype, scheme: Scheme, out: torch.dtype) -> SchemeConstants:
    """Return the compile-time arguments of a scheme, for the dtypes of input and output."""
    rule = ScaleRule(scheme.scale_rule)
    n_mantissas = 3 if scheme.macro_search == "block_mantissas_fp8" else 4
    return SchemeConstants(
        MACRO=scheme.macro_block or BLOCK,
        SEARCH=scheme.search,
        MANTISSAS=n_mantissas,
        HAS_FALLBACK=scheme.outlier_fallback is not None,
        CARRY=rule.carry,
        CLIPS=rule.clips,
        LEAST_SQUARES=rule.least_squares,
        # Only scales above E - 2 reach byte 253, and only beyond float16.
        LIMITED=dtype != torch.float16 and (rule.carry > 0 or rule.least_squares),
        LARGEST=torch.finfo(out).max,
        BF16=dtype == torch.bfloat16,
        TILES=scheme.block_rows != 1,
        INTERPRETED=INTERPRETED,
    )


def has_bf16x2(dtype: torch.dtype, scheme: Scheme, packs: bool) -> bool:
    """Return whether `common/bf16x2_blocks.py` has a scheme, for input and output of a dtype: codes, or values, whose
    residual it adds whole."""
    if dtype != torch.bfloat16 or scheme.block_rows != 1:
        return False
    if not packs and scheme.alpha != 1:
        return False
    rule = ScaleRule(scheme.scale_rule)
    if scheme.search == blocks.BLOCK_MANTISSAS.value:
        return rule is ScaleRule.EVEN
    # Without a carry magnitudes are cut to the grid. With one they are not, so they must stay below 7 scales; and the
    # smallest blocks are computed as one of 1.5 * 2**-125, which must not be rounded up.
    has_rule = rule.carry == 0 or ScaleRule.EVEN.carry <= rule.carry <= ScaleRule.RCEIL.carry
    return has_rule and not rule.least_squares and scheme.search == blocks.NO_MACRO.value
