# SPDX-License-Identifier: Apache-2.0
"""Values of the options of `MXFP4RLConfig`, what its presets stand for, and its options `fprop`, `dgrad` and `wgrad`.

These three are written as dictionaries, in YAML and JSON too, and kept as tuples of pairs, which are frozen and
hashable.
"""

import enum
from collections.abc import Mapping
from typing import Any

from .numerics import (
    FP8,
    FULL,
    GEMM_OPERANDS,
    NVFP4,
    PLAIN,
    REUSE,
    GemmScheme,
    LinearScheme,
    OperandScheme,
    QuantScheme,
    Rotation,
    ScaleRule,
    parse_rotation,
    parse_scheme,
)
from .numerics.schemes import MACRO_BLOCKS, MANTISSAS
from .utils import unknown_key_message


#: Options of one product: operand or "rotation", and its text.
GemmOptions = tuple[tuple[str, str], ...]

MODES = ("qat", "packed")
#: Rows x columns of a weight that share a block scale, and the rows of it.
WEIGHT_BLOCKS = {"1x32": 1, "32x32": 32}
#: Values of options that have a fixed set of them. For `matmul_backend` see [`hf_mxfp4.gemm.select_matmul`].
CHOICES = {
    "scale_rule": tuple(rule.value for rule in ScaleRule),
    "macro_block": (None, *MACRO_BLOCKS),
    "macro_search": ("static", "dynamic", "hybrid", *MANTISSAS),
    "outlier_fallback_operands": ("both", "weights", "activations"),
    "weight_block": tuple(WEIGHT_BLOCKS),
    "backend": ("auto", "eager", "cpu", "triton"),
    "matmul_backend": ("auto", "dense", "fp8", "fp4"),
}

#: Presets of both modes, which say no more than which forward operands are quantized.
FORWARD_PRESETS = ("w4a16", "w4a8", "w4a4")
PRESETS = (
    *FORWARD_PRESETS,
    *("w4a8g8", "w4a4g8", "w4a4g4", "paper_a", "paper_b", "w4a4g4_tuned", "w8a8"),
)
#: Presets whose activations are not MXFP4.
WITHOUT_BLOCKS = ("w4a16", "w4a8", "w4a8g8", "w8a8")

#: Presets whose weights are to be E4M3 numbers times a power of two, for FP8 tensor cores.
FP8_PRESETS = ("w4a8", "w4a8g8")

#: Presets that quantize all six operands, and how they rotate those of Wgrad.
ALL_OPERANDS = {"w4a4g4": None, "paper_b": Rotation(16), "w4a4g4_tuned": Rotation(16)}

#: Defaults of the options of a scheme, which lost least for their size on real models (docs/evidence.md), and where a
#: preset has others. Paper A is arXiv 2605.20402. Paper B is arXiv 2605.09825: tiles for weights and a rotation by H16;
#: its scale rule is not stated, so it is that of OCP here. w4a4g4_tuned is what the study of docs/backward.md led to.
#: w4a8 and w4a8g8 store weights of 4.31
#: bits without residuals: with E4M3 activations these are nearly the whole of what is lost, and one product suffices.
#: w8a8 has no blocks at all, so that the options of their scheme are refused.
OPTION_DEFAULTS = {
    "scale_rule": "even",
    "macro_block": 128,
    "outlier_fallback_operands": "both",
    "weight_block": "1x32",
}
PRESET_DEFAULTS: dict[str, dict[str, Any]] = {
    "w4a8": {"outlier_fallback": None},
    "w4a8g8": {"outlier_fallback": None},
    "w8a8": {"outlier_fallback": None, "macro_block": None},
    "paper_a": {"scale_rule": "rceil", "macro_search": "static", "outlier_fallback": 0.5},
    "paper_b": {"scale_rule": "floor", "macro_block": None, "outlier_fallback": None, "weight_block": "32x32"},
    "w4a4g4_tuned": {"outlier_fallback": None, "weight_block": "32x32"},
}
#: Weight of the residual, where neither the preset nor the user says it.
_FALLBACK = {"qat": 1.0, "packed": None}
#: Operands that can take the values of the forward product.
_REUSED = (("dgrad", "weight"), ("wgrad", "x"))
_EXAMPLES = {
    "x": "'full', 'fp8' (of fprop) or 'rceil+mbs128-static'",
    "weight": "'full', 'fp8' (of fprop) or 'rceil+32x32'",
    "grad": "'full', 'fp8' or 'rceil+stochastic'",
    "rotation": "'none' or 'deterministic-16'",
}


class Default(enum.Enum):
    """Stand for "what is usual there" until mode and preset are known; a finished config holds the value itself."""

    BY_MODE = "by mode"
    BY_PRESET = "by preset"

    def __str__(self) -> str:
        return self.value

    __repr__ = __str__


def usual_options(mode: str, preset: str, outlier_fallback: Any) -> dict[str, Any]:
    """Return the defaults under a mode and a preset; without outlier fallback, its other options are the usual."""
    usual = {**OPTION_DEFAULTS, "outlier_fallback": _FALLBACK[mode], **PRESET_DEFAULTS.get(preset, {})}
    if outlier_fallback is None:
        usual["outlier_fallback_operands"] = OPTION_DEFAULTS["outlier_fallback_operands"]
    return usual


def usual_macro_search(preset: str, macro_block: int | str | None) -> str:
    """Return how macro factors are found by default: four blocks share a byte of mantissas; macro blocks of other sizes
    have one factor."""
    if macro_block != 128:
        return "hybrid"
    return "block_mantissas_fp8" if preset in FP8_PRESETS else "block_mantissas"


def preset_gemms(preset: str, weights: QuantScheme, activations: QuantScheme) -> LinearScheme:
    """Return the products under a preset, with ``weights`` and ``activations`` (gradients too) where it quantizes."""
    left = {"w4a16": FULL, "w4a8": FP8, "w4a8g8": FP8, "w8a8": FP8}.get(preset, activations)
    fprop = GemmScheme(left, FP8 if preset == "w8a8" else weights)
    if preset in ("w4a8g8", "w4a4g8"):
        return LinearScheme(fprop, GemmScheme(FP8, REUSE), GemmScheme(FP8, REUSE))
    if preset in ALL_OPERANDS:
        wgrad = GemmScheme(activations, activations, ALL_OPERANDS[preset])
        return LinearScheme(fprop, GemmScheme(activations, weights), wgrad)
    return LinearScheme(fprop, PLAIN, PLAIN)


def read_gemm(gemm: str, options: Any) -> GemmOptions | None:
    """Return the options of the product ``gemm`` as pairs, from a mapping of its operands to ``"full"``, ``"reuse"``,
    ``"fp8"`` or the text of a scheme ([`hf_mxfp4.numerics.parse_scheme`]), and of ``"rotation"`` to ``"none"``,
    ``"deterministic-<size>"`` or ``"random-<size>"``; or from `None`.

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
            parse_rotation(text) if key == "rotation" else parse_operand(gemm, key, text)
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
    try:
        scheme = parse_scheme(text)
    except ValueError as error:
        raise ValueError(f"{error}; or 'full', 'reuse' (of fprop's values), 'fp8' (grad, and fprop)") from None
    if scheme is NVFP4 and gemm != "fprop":
        raise ValueError("'nvfp4' is for fprop, to compare with; give a scheme of MXFP4, 'fp8' (grad) or 'full'")
    if scheme.block_rows != 1 and operand != "weight":
        raise ValueError("tiles of 32x32 are for weights: rows of other operands are tokens")
    return scheme


def apply_options(gemm: str, scheme: GemmScheme, options: GemmOptions | None) -> GemmScheme:
    """``scheme`` with the options of one product in place. Its rotation goes where they leave nothing to quantize, and
    do not ask for one themselves."""
    if options is None:
        return scheme
    given = dict(options)
    left, right = (
        parse_operand(gemm, name, given[name]) if name in given else default
        for name, default in zip(GEMM_OPERANDS[gemm], (scheme.left, scheme.right), strict=True)
    )
    if "rotation" in given:
        return GemmScheme(left, right, parse_rotation(given["rotation"]))
    return GemmScheme(left, right, scheme.rotation if GemmScheme(left, right).quantizes else None)


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
