# SPDX-License-Identifier: Apache-2.0
"""How the three matrix products of a linear layer treat their six operands.

Fprop ``y = Q_K(x) Q_K(W)^T``, Dgrad ``dx = Q_N(dy) Q_N(W)``, Wgrad ``dW = Q_M(dy)^T Q_M(x)``. The subscript is the axis
that blocks run along, always the product's contraction axis: K inputs, N outputs, M tokens (arXiv 2605.09825).
"""

import enum
import re
from dataclasses import dataclass

from .hadamard import ROTATION_SIZES
from .scheme import QuantScheme, one_of


#: The products, and the names of their left and right operands.
GEMM_OPERANDS = {"fprop": ("x", "weight"), "dgrad": ("grad", "weight"), "wgrad": ("grad", "x")}


#: Forms of a layer's input that is saved for the gradient of its weight. ``full``: as Wgrad takes it. ``mxfp4``: the
#: codes and scale bytes of the forward product's operand, which give its very bits back. ``fp8``: rounded to E4M3 with
#: one power-of-two scale per row (token).
SAVED_FORMS = ("full", "mxfp4", "fp8")


class Treatment(enum.Enum):
    """What else than MXFP4 an operand can be.

    FULL: full precision. REUSE: the values that the forward product used, blocks along K (arXiv 2605.20402). FP8: E4M3
    with one power-of-two scale per row of the contraction.
    """

    FULL = "full"
    REUSE = "reuse"
    FP8 = "fp8"

    def __str__(self) -> str:
        return {"full": "full precision", "reuse": "as in fprop"}.get(self.value, self.value)


FULL, REUSE, FP8 = Treatment
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
        return f"{'random' if self.random else 'deterministic'}-{self.size}"


def parse_rotation(text: str) -> Rotation | None:
    """``"none"``, ``"deterministic-<size>"`` or ``"random-<size>"``. Raises `ValueError` for anything else."""
    match = re.fullmatch(r"(deterministic|random)-(\d+)", text) if isinstance(text, str) else None
    if match and int(match[2]) in ROTATION_SIZES:
        return Rotation(int(match[2]), match[1] == "random")
    if text != "none":
        sizes = ", ".join(map(str, ROTATION_SIZES))
        raise ValueError(
            f"rotation={text!r} is not supported; choose 'none', 'deterministic-<size>' or 'random-<size>' with a size "
            f"of {sizes}"
        )
    return None


@dataclass(frozen=True)
class GemmScheme:
    """One product: its left and right operand, and the rotation of both."""

    left: OperandScheme
    right: OperandScheme
    rotation: Rotation | None = None

    @property
    def quantizes(self) -> bool:
        """Whether an operand is quantized here, along this product's contraction axis."""
        return any(isinstance(operand, QuantScheme) or operand is FP8 for operand in (self.left, self.right))

    @property
    def is_random(self) -> bool:
        """Whether random numbers are drawn."""
        return self.rounds_stochastically or self.rotation is not None and self.rotation.random

    @property
    def rounds_stochastically(self) -> bool:
        """Whether an operand is rounded so."""
        operands = (self.left, self.right)
        return any(isinstance(operand, QuantScheme) and operand.rounding != "nearest" for operand in operands)


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

    def describe(self, gemm: str) -> str:
        """The operands of one product, and its rotation."""
        scheme: GemmScheme = getattr(self, gemm)
        parts = [f"{n} {o}" for n, o in zip(GEMM_OPERANDS[gemm], (scheme.left, scheme.right), strict=True)]
        return ", ".join([*parts, *([f"rotation {scheme.rotation}"] if scheme.rotation else [])])
