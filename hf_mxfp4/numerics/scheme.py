# SPDX-License-Identifier: Apache-2.0
"""One validated description of how one tensor is quantized."""

from dataclasses import dataclass
from numbers import Real

from .scales import ScaleRule


#: Elements per macro block that have a definition; ``"row"`` is the whole axis.
MACRO_BLOCKS = (32, 64, 128, 256, "row")
MACRO_SEARCHES = ("static", "dynamic", "blockwise")
ROUNDINGS = ("nearest", "stochastic")


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

    def __str__(self) -> str:
        parts = ["mxfp4", self.scale_rule.value]
        if self.macro_block is not None:
            parts.append(f"mbs{self.macro_block}-{self.macro_search}")
        if self.outlier_fallback is not None:
            parts.append(f"of{self.outlier_fallback:g}")
        if self.rounding != "nearest":
            parts.append(self.rounding)
        return "+".join(parts)


def check_alpha(alpha: float | None) -> None:
    """Raise `ValueError` unless the outlier-fallback weight is `None` or a finite number in (0, 1]."""
    if alpha is None:
        return
    if isinstance(alpha, bool) or not isinstance(alpha, Real) or not 0 < alpha <= 1:
        raise ValueError(f"outlier_fallback={alpha!r} must be None or a number in (0, 1]")
