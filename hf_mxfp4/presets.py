# SPDX-License-Identifier: Apache-2.0
"""Values of the options of `MXFP4RLConfig`, what its presets stand for, and its options `fprop`, `dgrad` and `wgrad`.

These three are written as dictionaries, in YAML and JSON too, and kept as tuples of pairs, which are frozen and
hashable.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mxfp4_kernels.scale_rules import SCALE_RULES

from .numerics import (
    FP8,
    FULL,
    GEMM_OPERANDS,
    MXFP8,
    NVFP4,
    REUSE,
    GemmScheme,
    LinearScheme,
    OperandScheme,
    QuantScheme,
    Rotation,
    parse_rotation,
    parse_scheme,
)
from .numerics.schemes import MACRO_BLOCKS, MANTISSAS, Treatment
from .utils import unknown_key_message


#: Options of one product: operand or "rotation", and its text.
GemmOptions = tuple[tuple[str, str], ...]

MODES = ("qat", "packed")
#: Values of options that have a fixed set of them. For `matmul_backend` see [`hf_mxfp4.ops.select_matmul`].
CHOICES = {
    "scale_rule": SCALE_RULES,
    "macro_block": (None, *MACRO_BLOCKS),
    "macro_search": ("static", "dynamic", "hybrid", *MANTISSAS),
    "backend": ("auto", "eager", "cpu", "triton"),
    "matmul_backend": ("auto", "dense", "fp8", "fp4"),
}

#: Operand of a [`Preset`] in the MXFP4 scheme that the options of the config describe.
MXFP4 = "mxfp4"


@dataclass(frozen=True)
class Preset:
    """Which operands of a linear layer's products are quantized, and the usual options of those in MXFP4.

    Attributes:
        name: value of the option ``preset``.
        summary: one line for help texts and the docs.
        fprop, dgrad, wgrad: left and right operand of each product, in the order of
            [`hf_mxfp4.numerics.GEMM_OPERANDS`]: `MXFP4`, or how else it is treated.
        scale_rule, macro_block, macro_search, outlier_fallback: defaults of these options of the config.
        tiles: whether 32 x 32 elements of a weight share a block scale, instead of 1 x 32.
        wgrad_rotation: rotation of the operands of Wgrad.
        modes: modes of the config that have this preset.
    """

    name: str
    summary: str
    fprop: tuple[Treatment | str, Treatment | str]
    dgrad: tuple[Treatment | str, Treatment | str] = (FULL, REUSE)
    wgrad: tuple[Treatment | str, Treatment | str] = (FULL, REUSE)
    scale_rule: str = "even"
    macro_block: int | str | None = 128
    macro_search: str = "block_mantissas"
    outlier_fallback: float | None = None
    tiles: bool = False
    wgrad_rotation: Rotation | None = None
    modes: tuple[str, ...] = ("qat",)

    def usual_macro_search(self, macro_block: int | str | None) -> str:
        """Return the default of ``macro_search``. Only macro blocks of 128 hold block mantissas."""
        if macro_block != 128 and self.macro_search in MANTISSAS:
            return "hybrid"
        return self.macro_search

    def products(self, weights: QuantScheme, activations: QuantScheme) -> LinearScheme:
        """Return the products with these schemes of the operands in MXFP4; gradients have that of activations."""
        if self.tiles:
            weights = replace(weights, block_rows=32)
        in_mxfp4 = {"x": activations, "grad": activations, "weight": weights}
        products = {}
        for gemm, names in GEMM_OPERANDS.items():
            left, right = getattr(self, gemm)
            if left == MXFP4:
                left = in_mxfp4[names[0]]
            if right == MXFP4:
                right = in_mxfp4[names[1]]
            rotation = self.wgrad_rotation if gemm == "wgrad" else None
            products[gemm] = GemmScheme(left, right, rotation)
        return LinearScheme(**products)


#: Weights whose values are E4M3 numbers times a power of two lose little more, and FP8 tensor cores multiply them.
#: Paper A is arXiv 2605.20402. Paper B is arXiv 2605.09825; it states no scale rule, so the rule is that of OCP.
_ROWS = (
    Preset(
        name="w4a16",
        summary="weights in MXFP4",
        fprop=(FULL, MXFP4),
        macro_search="block_mantissas_fp8",
        modes=("qat", "packed"),
    ),
    Preset(
        name="w4a8",
        summary="weights in MXFP4, activations in E4M3",
        fprop=(FP8, MXFP4),
        macro_search="block_mantissas_fp8",
        modes=("qat", "packed"),
    ),
    Preset(
        name="w4a8g8",
        summary="as w4a8, output gradients in E4M3",
        fprop=(FP8, MXFP4),
        dgrad=(FP8, REUSE),
        wgrad=(FP8, REUSE),
        macro_search="block_mantissas_fp8",
    ),
    Preset(
        name="w4a4",
        summary="weights and activations in MXFP4",
        fprop=(MXFP4, MXFP4),
        modes=("qat", "packed"),
    ),
    Preset(
        name="w4a4g4",
        summary="all six operands in MXFP4",
        fprop=(MXFP4, MXFP4),
        dgrad=(MXFP4, MXFP4),
        wgrad=(MXFP4, MXFP4),
    ),
    Preset(
        name="w8a8",
        summary="weights and activations in E4M3, a baseline",
        fprop=(FP8, FP8),
        macro_block=None,
    ),
    Preset(
        name="paper_a",
        summary="w4a4 of arXiv 2605.20402: rceil, static macro factors, half of the residual",
        fprop=(MXFP4, MXFP4),
        scale_rule="rceil",
        macro_search="static",
        outlier_fallback=0.5,
    ),
    Preset(
        name="paper_b",
        summary="w4a4g4 of arXiv 2605.09825: floor, weights in tiles of 32 x 32, Wgrad rotated by H16",
        fprop=(MXFP4, MXFP4),
        dgrad=(MXFP4, MXFP4),
        wgrad=(MXFP4, MXFP4),
        scale_rule="floor",
        macro_block=None,
        tiles=True,
        wgrad_rotation=Rotation(16),
    ),
)
#: Presets by name.
PRESETS = {preset.name: preset for preset in _ROWS}
#: Preset of each mode that names none.
DEFAULT_PRESETS = {"qat": "w4a8", "packed": "w4a16"}


def presets_with(macro_search: str) -> str:
    """Return the presets that find macro factors so, for help texts: ``"'w4a4' and 'w4a4g4'"``."""
    names = []
    for preset in PRESETS.values():
        if preset.macro_block is not None and preset.macro_search == macro_search:
            names.append(repr(preset.name))
    return f"{', '.join(names[:-1])} and {names[-1]}"


#: Operands that can take the values of the forward product.
_REUSED = (("dgrad", "weight"), ("wgrad", "x"))
_EXAMPLES = {
    "x": "'full', 'fp8' or 'mxfp8' (of fprop) or 'rceil+mbs128-static'",
    "weight": "'full', 'fp8' (of fprop) or 'rceil+32x32'",
    "grad": "'full', 'fp8', 'mxfp8' or 'rceil+stochastic'",
    "rotation": "'none' or 'deterministic-16'",
}


class Default(enum.Enum):
    """Stand for "what is usual there" until mode and preset are known; a finished config holds the value itself."""

    BY_MODE = "by mode"
    BY_PRESET = "by preset"

    def __str__(self) -> str:
        return self.value

    __repr__ = __str__


def read_gemm(gemm: str, options: Any) -> GemmOptions | None:
    """Return the options of the product ``gemm`` as pairs, from a mapping of its operands to ``"full"``, ``"reuse"``,
    ``"fp8"``, ``"mxfp8"`` or the text of a scheme ([`hf_mxfp4.numerics.parse_scheme`]), and of ``"rotation"`` to
    ``"none"``, ``"deterministic-<size>"`` or ``"random-<size>"``; or from `None`.

    Raises `ValueError` for what is none of these, with the nearest names.
    """
    if options is None:
        return None
    known = [*GEMM_OPERANDS[gemm], "rotation"]
    if isinstance(options, tuple):  # already read, as by dataclasses.replace
        options = dict(options)
    if not isinstance(options, Mapping) or not options:
        raise ValueError(f"{gemm}={options!r} must be a mapping with some of {', '.join(known)}, or none")
    for key, text in options.items():
        if key not in known:
            raise ValueError(unknown_key_message(gemm, str(key), known))
        if not isinstance(text, str):
            raise ValueError(f"{gemm} has {key}={text!r}, which must be text such as {_EXAMPLES[key]}")
        try:
            if key == "rotation":
                parse_rotation(text)
            else:
                parse_operand(gemm, key, text)
        except ValueError as error:
            raise ValueError(f"{gemm}, {key}: {error}") from None
    return tuple((key, options[key]) for key in known if key in options)


def parse_operand(gemm: str, operand: str, text: str) -> OperandScheme:
    """Read how an operand is treated. Raises `ValueError` for what cannot be read or does not fit the operand."""
    if text == FULL.value:
        return FULL
    if text == REUSE.value:
        if (gemm, operand) not in _REUSED:
            raise ValueError("'reuse' is for the weight of dgrad and the x of wgrad, which fprop has quantized before")
        return REUSE
    if text == FP8.value:
        if operand != "grad" and gemm != "fprop":
            raise ValueError("'fp8' is for output gradients (grad) and for fprop; give a scheme of MXFP4, or 'full'")
        return FP8
    if text == MXFP8.value:
        if operand != "grad" and (gemm, operand) != ("fprop", "x"):
            raise ValueError("'mxfp8' is for the x of fprop and output gradients (grad); give a scheme of MXFP4")
        return MXFP8
    try:
        scheme = parse_scheme(text)
    except ValueError as error:
        raise ValueError(
            f"{error}; or 'full', 'reuse' (of fprop's values), 'fp8' (grad, and fprop), 'mxfp8' (grad, and x of fprop)"
        ) from None
    if scheme is NVFP4 and gemm != "fprop":
        raise ValueError("'nvfp4' is for fprop, to compare with; give a scheme of MXFP4, 'fp8' (grad) or 'full'")
    if scheme.block_rows != 1 and operand != "weight":
        raise ValueError("tiles of 32x32 are for weights: rows of other operands are tokens")
    return scheme


def apply_options(gemm: str, scheme: GemmScheme, options: GemmOptions | None) -> GemmScheme:
    """Return ``scheme`` with the options of one product in place. Its rotation goes where they leave nothing to
    quantize, and do not ask for one themselves."""
    if options is None:
        return scheme
    given = dict(options)
    left_name, right_name = GEMM_OPERANDS[gemm]
    left = scheme.left
    if left_name in given:
        left = parse_operand(gemm, left_name, given[left_name])
    right = scheme.right
    if right_name in given:
        right = parse_operand(gemm, right_name, given[right_name])
    changed = GemmScheme(left, right)
    if "rotation" in given:
        return replace(changed, rotation=parse_rotation(given["rotation"]))
    if changed.quantizes:
        return replace(changed, rotation=scheme.rotation)
    return changed


def check_products(scheme: LinearScheme, backend: str) -> None:
    """Raise `ValueError` for a rotation that would do nothing, or a backend that does not round stochastically."""
    for gemm in GEMM_OPERANDS:
        product: GemmScheme = getattr(scheme, gemm)
        if product.rotation is not None and not product.quantizes:
            raise ValueError(
                f"rotation={product.rotation} of {gemm} has no effect, since neither operand is quantized in "
                "it; leave it out"
            )
        if product.rounds_stochastically and backend == "cpu":
            raise ValueError(f"backend={backend!r} does not round stochastically; use backend='auto'")


def check_matmul_backend(matmul_backend: str, scheme: LinearScheme) -> None:
    """Raise `ValueError` where none of the products could run on the tensor cores that are asked for."""
    if matmul_backend == "fp8" and all(scheme.e4m3_problem(gemm) for gemm in GEMM_OPERANDS):
        raise ValueError(
            f"matmul_backend='fp8' has no effect, since no product is one of E4M3 numbers (in fprop "
            f"{scheme.e4m3_problem('fprop')}); leave it out, or use preset='w4a8'"
        )
    if matmul_backend == "fp4" and scheme.fp4_problem is not None:
        raise ValueError(f"matmul_backend='fp4' has no effect: {scheme.fp4_problem}; leave it out")
