# SPDX-License-Identifier: Apache-2.0
"""One validated description of how one tensor is quantized."""

from dataclasses import dataclass
from numbers import Real

from .e8m0 import ScaleRule


#: Elements per macro block that have a definition; ``"row"`` is the whole axis.
MACRO_BLOCKS = (32, 64, 128, 256, "row")
MACRO_SEARCHES = ("static", "dynamic", "blockwise")
ROUNDINGS = ("nearest", "stochastic")
#: Rows of elements that share a block scale: a row of 32, or a tile of 32 x 32.
BLOCK_ROWS = (1, 32)


def one_of(name: str, value: object, allowed: tuple) -> None:
    """Raise `ValueError` naming the argument and the allowed values unless ``value`` is one of them."""
    if not any(value == choice and isinstance(value, type(choice)) for choice in allowed) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not supported; choose one of {', '.join(map(repr, allowed))}")


@dataclass(frozen=True)
class QuantScheme:
    """How one tensor is quantized. See [`fake_quantize`] for the meaning of the fields.

    Raises `ValueError` for values outside the supported sets.
    """

    scale_rule: ScaleRule = ScaleRule.RCEIL
    macro_block: int | str | None = None
    macro_search: str = "static"
    outlier_fallback: float | None = None
    rounding: str = "nearest"
    block_rows: int = 1
    fallback_rate: float | None = None

    def __post_init__(self):
        one_of("scale_rule", self.scale_rule, tuple(rule.value for rule in ScaleRule))
        object.__setattr__(self, "scale_rule", ScaleRule(self.scale_rule))
        one_of("macro_block", self.macro_block, (None, *MACRO_BLOCKS))
        if self.macro_search == "hybrid":
            raise ValueError(
                "macro_search='hybrid' means dynamic for weights and static for activations; "
                "one tensor is either: pass 'dynamic' or 'static'"
            )
        one_of("macro_search", self.macro_search, MACRO_SEARCHES)
        if self.macro_search == "blockwise" and self.macro_block not in (None, 128):
            raise ValueError(
                f"macro_search='blockwise' needs macro_block=128, whose byte holds the mantissas of four blocks; "
                f"got macro_block={self.macro_block!r}"
            )
        one_of("rounding", self.rounding, ROUNDINGS)
        check_alpha(self.outlier_fallback)
        one_of("block_rows", self.block_rows, BLOCK_ROWS)
        check_fallback_rate("fallback_rate", self.fallback_rate, self.outlier_fallback)

    @property
    def searches(self) -> bool:
        """Whether something is chosen by its squared error: the scale (`mse`) or the macro factor."""
        return self.scale_rule is ScaleRule.MSE or self.macro_block is not None and self.macro_search != "static"

    def __str__(self) -> str:
        parts = ["mxfp4", self.scale_rule.value]
        if self.macro_block is not None:
            parts.append(f"mbs{self.macro_block}-{self.macro_search}")
        if self.outlier_fallback is not None:
            rate = "" if self.fallback_rate is None else f"@{_number_text(self.fallback_rate)}"
            parts.append(f"of{_number_text(self.outlier_fallback)}{rate}")
        if self.rounding != "nearest":
            parts.append(self.rounding)
        if self.block_rows != 1:
            parts.append(f"{self.block_rows}x32")
        return "+".join(parts)


def _number_text(number: float) -> str:
    """Short where that is exact: a scheme is read back from its text."""
    short = f"{number:g}"
    return short if float(short) == number else repr(float(number))


def check_alpha(alpha: float | None) -> None:
    """Raise `ValueError` unless the outlier-fallback weight is `None` or a finite number in (0, 1]."""
    if alpha is None:
        return
    if isinstance(alpha, bool) or not isinstance(alpha, Real) or not 0 < alpha <= 1:
        raise ValueError(f"outlier_fallback={alpha!r} must be None or a number in (0, 1]")


def check_fallback_rate(name: str, rate: float | None, alpha: float | None) -> None:
    """Raise `ValueError` unless the share of blocks with outlier fallback is `None` or a number in (0, 1), and there is
    a fallback (weight ``alpha``) to be selective about."""
    if rate is None:
        return
    if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 < rate < 1:
        raise ValueError(f"{name}={rate!r} must be None (every block) or a number between 0 and 1")
    if alpha is None:
        raise ValueError(
            f"{name}={rate!r} selects blocks for outlier fallback, which outlier_fallback=None switches off"
        )
