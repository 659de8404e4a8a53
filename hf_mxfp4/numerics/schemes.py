# SPDX-License-Identifier: Apache-2.0
"""Validated descriptions of how one tensor is quantized, how schemes are written as text, and how the three matrix
products of a linear layer treat their six operands.

Fprop ``y = Q_K(x) Q_K(W)^T``, Dgrad ``dx = Q_N(dy) Q_N(W)``, Wgrad ``dW = Q_M(dy)^T Q_M(x)``. The subscript is the axis
that blocks run along, always the product's contraction axis: K inputs, N outputs, M tokens (arXiv 2605.09825).
"""

import difflib
import enum
import re
from dataclasses import dataclass
from numbers import Real

from mxfp4_kernels.scale_rules import SCALE_RULES, ScaleRule


#: Elements per macro block that have a definition; ``"row"`` is the whole axis.
MACRO_BLOCKS = (32, 64, 128, 256, "row")
#: Searches for a mantissa ``1 + m / 4`` of each block's scale, and how many m, from 0 on, they try.
MANTISSAS = {"block_mantissas": 4, "block_mantissas_fp8": 3}
MACRO_SEARCHES = ("static", "dynamic", *MANTISSAS)
#: Search -> its text in a scheme, where that is not its name.
_TEXTS = {"block_mantissas": "blockwise", "block_mantissas_fp8": "blockwise_fp8"}
ROUNDINGS = ("nearest", "stochastic")
#: Rows of elements that share a block scale: a row of 32, or a tile of 32 x 32.
BLOCK_ROWS = (1, 32)


def one_of(name: str, value: object, allowed: tuple) -> None:
    """Raise `ValueError` naming the argument and the allowed values unless ``value`` is one of them."""
    # `True == 1` and `1.0 == 1`: a value must be of the type of the choice, too.
    is_allowed = any(value == choice and isinstance(value, type(choice)) for choice in allowed)
    if not is_allowed or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not supported; choose one of {', '.join(map(repr, allowed))}")


def check_mantissas(macro_search: str, macro_block: int | str | None) -> None:
    """Raise `ValueError` for block mantissas with macro blocks of another size than 128."""
    if macro_search in MANTISSAS and macro_block not in (None, 128):
        raise ValueError(
            f"macro_search={macro_search!r} needs macro_block=128, whose byte holds the mantissas of four blocks; "
            f"got macro_block={macro_block!r}"
        )


@dataclass(frozen=True)
class QuantScheme:
    """How one tensor is quantized.

    Attributes:
        scale_rule: how block scales are chosen; see [`ScaleRule`].
        macro_block: elements per macro block (32, 64, 128, 256 or ``"row"``), or `None` for no macro-block scaling.
        macro_search: ``"static"`` (factor from the macro maximum), ``"dynamic"`` (the best of 16 by squared error),
            ``"block_mantissas"`` (no common factor: two mantissa bits for each block's scale, by squared error) or
            ``"block_mantissas_fp8"`` (the same storage, but only the mantissas 1, 1.25 and 1.5, with which every value
            is an E4M3 number times a power of two). In texts these are ``"blockwise"`` and ``"blockwise_fp8"``.
        outlier_fallback: weight ``alpha`` in (0, 1] of the quantized residual, or `None` for one pass only.
        rounding: ``"nearest"`` (ties to even) or ``"stochastic"`` (both passes).
        block_rows: 1 for blocks of 32 elements along the quantized axis; 32 for tiles of 32 x 32, over that axis and
            the one before it. One set of tiles serves a matrix and its transpose: the values are the same bit for bit,
            but for macro factors that several tiles share and stochastic rounding.

    Raises `ValueError` for values outside the supported sets.
    """

    scale_rule: ScaleRule = ScaleRule.RCEIL
    macro_block: int | str | None = None
    macro_search: str = "static"
    outlier_fallback: float | None = None
    rounding: str = "nearest"
    block_rows: int = 1

    def __post_init__(self):
        one_of("scale_rule", self.scale_rule, SCALE_RULES)
        # Dynamo of torch 2.11 does not trace a rule that is made of a rule.
        if not isinstance(self.scale_rule, ScaleRule):
            object.__setattr__(self, "scale_rule", ScaleRule(self.scale_rule))
        one_of("macro_block", self.macro_block, (None, *MACRO_BLOCKS))
        if self.macro_search == "hybrid":
            raise ValueError(
                "macro_search='hybrid' means dynamic for weights and static for activations; "
                "one tensor is either: pass 'dynamic' or 'static'"
            )
        one_of("macro_search", self.macro_search, MACRO_SEARCHES)
        check_mantissas(self.macro_search, self.macro_block)
        one_of("rounding", self.rounding, ROUNDINGS)
        check_alpha(self.outlier_fallback)
        one_of("block_rows", self.block_rows, BLOCK_ROWS)

    @property
    def mantissas(self) -> int:
        """How many mantissas ``1 + m / 4`` of a block's scale are tried, from m = 0 on; 0 for scales without one."""
        if self.macro_block is None:
            return 0
        return MANTISSAS.get(self.macro_search, 0)

    @property
    def has_block_scales_alone(self) -> bool:
        """Whether values are codes times block scales, with mantissas or without: no residuals and macro factors."""
        has_macro_factors = self.macro_block is not None and self.mantissas == 0
        return not self.outlier_fallback and not has_macro_factors

    @property
    def e4m3_problem(self) -> str | None:
        """What gives values more digits than E4M3 has; `None` where each is an E4M3 number times a power of two."""
        if self.macro_block is not None and not self.mantissas:
            return "macro factors"
        if self.mantissas == MANTISSAS["block_mantissas"]:
            return "block mantissas up to 1.75"
        if self.outlier_fallback is not None:
            return "residuals"
        return None

    def __str__(self) -> str:
        parts = ["mxfp4", self.scale_rule.value]
        if self.macro_block is not None:
            parts.append(f"mbs{self.macro_block}-{_TEXTS.get(self.macro_search, self.macro_search)}")
        if self.outlier_fallback is not None:
            parts.append(f"of{_number_text(self.outlier_fallback)}")
        if self.rounding != "nearest":
            parts.append(self.rounding)
        if self.block_rows != 1:
            parts.append(f"{self.block_rows}x32")
        return "+".join(parts)


def _number_text(number: float) -> str:
    """Return a number as text: short where that is exact, because a scheme is read back from its text."""
    short = f"{number:g}"
    if float(short) == number:
        return short
    return repr(float(number))


def check_alpha(alpha: float | None) -> None:
    """Raise `ValueError` unless the outlier-fallback weight is `None` or a finite number in (0, 1]."""
    if alpha is None:
        return
    if isinstance(alpha, bool) or not isinstance(alpha, Real) or not 0 < alpha <= 1:
        raise ValueError(f"outlier_fallback={alpha!r} must be None or a number in (0, 1]")


# ---- schemes as text ------------------------------------------------------------------------------------------------


_MACRO = re.compile(r"mbs(?P<size>\d+|row)(?:-(?P<search>\w+))?")
_FALLBACK = re.compile(r"of(?P<alpha>[\d.e-]+)")
_EXAMPLE = "rceil+mbs128-static+of0.5"


def parse_scheme(text: str) -> "QuantScheme | Treatment":
    """Return the scheme that ``str(scheme)`` describes: ``"mxfp4+rceil+mbs128-static+of0.5"``, with or without
    ``"mxfp4+"``; of ``"nvfp4"`` it is [`Treatment.NVFP4`].

    The parts after the rule come in any order: ``mbs<size>[-<search>]`` (static when no search is named),
    ``of<alpha>``, ``stochastic``, ``32x32``.

    Raises `ValueError` for what cannot be read, with the nearest known spelling.
    """
    parts = [part.strip() for part in text.strip().split("+")]
    if parts[0] == NVFP4.value:
        if parts[1:]:
            raise ValueError(f"scheme {text!r}: 'nvfp4' has no options; its scales are the only ones it has")
        return NVFP4
    if parts[0] == "mxfp4":
        parts = parts[1:]
    if not parts or not parts[0]:
        raise ValueError(f"scheme {text!r} names no scale rule; give one first, as in {_EXAMPLE!r}")
    if parts[0] not in SCALE_RULES:
        known = [*SCALE_RULES, NVFP4.value]
        raise ValueError(f"scheme {text!r}: no scale rule {parts[0]!r}; {_nearest(parts[0], known)}")
    options: dict = {"scale_rule": ScaleRule(parts[0])}
    try:
        for part in parts[1:]:
            for key, value in _part_options(part).items():
                if key in options:
                    raise ValueError(f"{key} is given twice")
                options[key] = value
        return QuantScheme(**options)
    except ValueError as error:
        raise ValueError(f"scheme {text!r}: {error}") from None


def _part_options(part: str) -> dict:
    """Return the fields of a [`QuantScheme`] that one part of a text sets. Raises `ValueError` for an unknown part."""
    if match := _MACRO.fullmatch(part):
        size = match["size"]
        if size != "row":
            size = int(size)
        search = match["search"] or "static"
        for name, text in _TEXTS.items():
            if search == text:
                search = name
        return {"macro_block": size, "macro_search": search}
    if match := _FALLBACK.fullmatch(part):
        return {"outlier_fallback": float(match["alpha"])}
    if part in ROUNDINGS:
        return {"rounding": part}
    if part in ("1x32", "32x32"):
        return {"block_rows": int(part.split("x")[0])}
    known = [*(f"mbs128-{_TEXTS.get(name, name)}" for name in MACRO_SEARCHES), "of0.5", "stochastic", "32x32"]
    raise ValueError(f"{part!r} is no part of a scheme; {_nearest(part, known)}")


def _nearest(word: str, known: list[str]) -> str:
    """Return the end of an error message for an unknown word: the known one that it resembles, or all of them."""
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known are {', '.join(known)}, as in {_EXAMPLE!r}"


# ---- the three products of a linear layer ---------------------------------------------------------------------------


#: Sizes of the blocks that a rotation mixes.
ROTATION_SIZES = (16, 32, 64, 128)

#: The products, and the names of their left and right operands.
GEMM_OPERANDS = {"fprop": ("x", "weight"), "dgrad": ("grad", "weight"), "wgrad": ("grad", "x")}


class Treatment(enum.Enum):
    """What else than MXFP4 an operand can be.

    FULL: full precision. REUSE: the values that the forward product used, blocks along K (arXiv 2605.20402). FP8: E4M3
    with one power-of-two scale per row of the contraction. MXFP8: E4M3 with one per 32 elements of a row. NVFP4: see
    [`hf_mxfp4.numerics.quantize_nvfp4`]; of a weight with one float32 scale for the matrix, of activations with one per
    token.
    """

    FULL = "full"
    REUSE = "reuse"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"

    @property
    def rounding(self) -> str:
        """Return how elements are rounded, as of a [`QuantScheme`]."""
        return "nearest"

    @property
    def block_rows(self) -> int:
        """Return the rows that share a block scale, as of a [`QuantScheme`]."""
        return 1

    def __str__(self) -> str:
        if self is Treatment.FULL:
            return "full precision"
        if self is Treatment.REUSE:
            return "as in fprop"
        return self.value


FULL, REUSE, FP8, MXFP8, NVFP4 = Treatment
OperandScheme = QuantScheme | Treatment


@dataclass(frozen=True)
class Rotation:
    """Block-diagonal Hadamard rotation of both operands along the contraction axis, before they are quantized.

    The axis is padded with zeros to a multiple of ``size``. With ``random`` each element has a random sign before, the
    same for both operands. Raises `ValueError` for a size that is not supported.
    """

    size: int
    random: bool = False

    def __post_init__(self):
        one_of("size", self.size, ROTATION_SIZES)

    def __str__(self) -> str:
        kind = "random" if self.random else "deterministic"
        return f"{kind}-{self.size}"


def parse_rotation(text: str) -> Rotation | None:
    """Read ``"none"``, ``"deterministic-<size>"`` or ``"random-<size>"``. Raises `ValueError` for anything else."""
    if text == "none":
        return None
    # A config that is read from JSON may have a value of any type.
    if isinstance(text, str):
        match = re.fullmatch(r"(deterministic|random)-(\d+)", text)
        if match and int(match[2]) in ROTATION_SIZES:
            return Rotation(int(match[2]), random=match[1] == "random")
    sizes = ", ".join(map(str, ROTATION_SIZES))
    raise ValueError(
        f"rotation={text!r} is not supported; choose 'none', 'deterministic-<size>' or 'random-<size>' with a size of "
        f"{sizes}"
    )


@dataclass(frozen=True)
class GemmScheme:
    """One product: its left and right operand, and the rotation of both."""

    left: OperandScheme
    right: OperandScheme
    rotation: Rotation | None = None

    @property
    def operands(self) -> tuple[OperandScheme, OperandScheme]:
        """The left and the right operand."""
        return self.left, self.right

    @property
    def quantizes(self) -> bool:
        """Whether an operand is quantized here, along this product's contraction axis."""
        return any(operand not in (FULL, REUSE) for operand in self.operands)

    @property
    def is_random(self) -> bool:
        """Whether random numbers are drawn."""
        return self.rounds_stochastically or self.rotation is not None and self.rotation.random

    @property
    def rounds_stochastically(self) -> bool:
        """Whether an operand is rounded so."""
        return any(operand.rounding != "nearest" for operand in self.operands)


#: Output gradients in full precision times what the forward product used.
PLAIN = GemmScheme(FULL, REUSE)


@dataclass(frozen=True)
class LinearScheme:
    """The three products of a linear layer; operands in the order of [`GEMM_OPERANDS`]."""

    fprop: GemmScheme
    dgrad: GemmScheme = PLAIN
    wgrad: GemmScheme = PLAIN

    @property
    def is_random(self) -> bool:
        """Whether any product draws random numbers."""
        return self.fprop.is_random or self.dgrad.is_random or self.wgrad.is_random

    @property
    def folds_scales(self) -> bool:
        """Whether Wgrad multiplies E4M3 gradients with the E4M3 input of the forward product. Its powers of two lie on
        the tokens, which are then summed over, so that they go into the gradient before that is rounded."""
        return self.fprop.left is FP8 and self.fprop.rotation is None and self.wgrad == GemmScheme(FP8, REUSE)

    def e4m3_problem(self, gemm: str) -> str | None:
        """Return why the operands of a product are no E4M3 numbers times one power of two per row, which FP8 tensor
        cores multiply; `None` where they are."""
        product: GemmScheme = getattr(self, gemm)
        for name, operand in zip(GEMM_OPERANDS[gemm], product.operands, strict=True):
            if operand is REUSE:
                if self.fprop.rotation or product.rotation:
                    return f"the reused {name} is rotated after it was quantized"
                operand = self.fprop.left
                if name == "weight":
                    operand = self.fprop.right
                if operand is FP8 and (name == "weight" or not self.folds_scales):
                    return f"the scales of the reused {name} lie on the axis that is summed over"
            if operand is FULL:
                return f"{name} is in full precision"
            if operand is MXFP8:
                return f"the scales of {name} change from block to block"
            if operand is NVFP4:
                return f"NVFP4 scales of {name} have more digits than E4M3"
            if isinstance(operand, QuantScheme) and operand.e4m3_problem is not None:
                return f"{operand.e4m3_problem} of {name} have more digits than E4M3"
        return None

    @property
    def fp4_problem(self) -> str | None:
        """Why the forward operands are no codes that FP4 tensor cores multiply; `None` where they are."""
        left, right = self.fprop.operands
        has_fixed_codes = self.fprop.rotation is None and right.rounding == "nearest"
        if not isinstance(left, QuantScheme) or not isinstance(right, QuantScheme) or not has_fixed_codes:
            return "FP4 products are those of forward operands in 4 bits, without rotation and random weights"
        if not left.has_block_scales_alone or not right.has_block_scales_alone:
            return "FP4 products have no residuals and macro factors"
        return None

    @property
    def mxfp8_problem(self) -> str | None:
        """Why the forward operands are no E4M3 elements with a scale for 32 of them, which MXFP8 products take; `None`
        where they are. A weight in MXFP4 becomes such an operand with the same values."""
        left, right = self.fprop.operands
        if left is not MXFP8 or not isinstance(right, QuantScheme) or self.fprop.is_random or self.fprop.rotation:
            return "MXFP8 products are those of MXFP8 inputs and MXFP4 weights, without rotation and random weights"
        return right.e4m3_problem

    def describe(self, gemm: str) -> str:
        """Return the operands of one product, and its rotation."""
        product: GemmScheme = getattr(self, gemm)
        parts = [f"{name} {operand}" for name, operand in zip(GEMM_OPERANDS[gemm], product.operands, strict=True)]
        if product.rotation is not None:
            parts.append(f"rotation {product.rotation}")
        return ", ".join(parts)
