# SPDX-License-Identifier: Apache-2.0
"""The options `fprop`, `dgrad` and `wgrad` of `MXFP4RLConfig`: read, checked, applied.

They are written as dictionaries, in YAML and JSON too, and kept as tuples of pairs, which are frozen and hashable.
"""

from collections.abc import Mapping
from typing import Any

from .numerics import (
    FP8,
    FULL,
    GEMM_OPERANDS,
    PLAIN,
    REUSE,
    GemmScheme,
    LinearScheme,
    OperandScheme,
    QuantScheme,
    parse_rotation,
    parse_scheme,
)
from .suggestions import unknown_key_message


#: Options of one product: operand or "rotation", and its text.
GemmOptions = tuple[tuple[str, str], ...]

#: Which operands can take the values of the forward product, and which FP8.
_REUSED = (("dgrad", "weight"), ("wgrad", "x"))


def read_gemm(gemm: str, options: Any, owner: str) -> GemmOptions | None:
    """The options of one product as pairs.

    Args:
        gemm: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        options: a mapping of its operands to ``"full"``, ``"reuse"``, ``"fp8"`` or the text of a scheme
            ([`hf_mxfp4.numerics.parse_scheme`]), and of ``"rotation"`` to ``"none"``, ``"deterministic-<size>"`` or
            ``"random-<size>"``; or `None`.
        owner: what messages call it.

    Raises `ValueError` for what is none of these, with the nearest names.
    """
    if options is None:
        return None
    known = [*GEMM_OPERANDS[gemm], "rotation"]
    if isinstance(options, tuple):  # already read, as by dataclasses.replace
        options = dict(options)
    if not isinstance(options, Mapping) or not options:
        raise ValueError(f"{owner}={options!r} must be a mapping with some of {', '.join(known)}, or none")
    for key, text in options.items():
        if key not in known:
            raise ValueError(unknown_key_message(owner, str(key), known))
        if not isinstance(text, str):
            raise ValueError(f"{owner} has {key}={text!r}, which must be text such as {_EXAMPLES[key]}")
        try:
            parse_rotation(text) if key == "rotation" else parse_operand(gemm, key, text)
        except ValueError as error:
            raise ValueError(f"{owner}, {key}: {error}") from None
    return tuple((key, options[key]) for key in known if key in options)


_EXAMPLES = {
    "x": "'full' or 'rceil+mbs128-static'",
    "weight": "'full' or 'rceil+32x32'",
    "grad": "'full', 'fp8' or 'rceil+stochastic'",
    "rotation": "'none' or 'deterministic-16'",
}


def parse_operand(gemm: str, operand: str, text: str) -> OperandScheme:
    """Read how an operand is treated. Raises `ValueError` for what cannot be read or does not fit the operand."""
    if text == FULL.value:
        return FULL
    if text == REUSE.value:
        if (gemm, operand) not in _REUSED:
            raise ValueError("'reuse' is for the weight of dgrad and the x of wgrad, which fprop has quantized before")
        return REUSE
    if text == FP8.value:
        if operand != "grad":
            raise ValueError("'fp8' is for output gradients (grad); give a scheme of MXFP4, or 'full'")
        return FP8
    try:
        scheme = parse_scheme(text)
    except ValueError as error:
        raise ValueError(f"{error}; or 'full', 'reuse' (of fprop's values), 'fp8' (grad)") from None
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


def check_products(scheme: LinearScheme, backend: str, saved: str = "full") -> None:
    """Raise `ValueError` for a rotation that would do nothing, a backend that does not round stochastically, or inputs
    that cannot be saved in the form ``saved`` (one of [`hf_mxfp4.numerics.SAVED_FORMS`])."""
    for gemm in GEMM_OPERANDS:
        product: GemmScheme = getattr(scheme, gemm)
        if product.rotation is not None and not product.quantizes:
            raise ValueError(
                f"rotation={product.rotation} of {gemm} has no effect, since neither operand is quantized in "
                "it; leave it out"
            )
        if product.rounds_stochastically and backend == "cpu":
            raise ValueError(f"backend={backend!r} does not round stochastically; use backend='auto'")
    _check_saved(scheme, saved)


def _check_saved(scheme: LinearScheme, form: str) -> None:
    if form != "mxfp4":
        return
    if not isinstance(scheme.fprop.left, QuantScheme) or scheme.wgrad.right is not REUSE:
        why = "fprop takes x unquantized" if scheme.wgrad.right is REUSE else "wgrad does not reuse the x of fprop"
        raise ValueError(
            f"saved_activations='mxfp4' keeps the MXFP4 codes of the forward product's input, but {why}; use "
            "saved_activations='fp8' (rounded), or a preset whose wgrad reuses a quantized input: w4a4, w4a4g8, paper_a"
        )


def packing_unsupported_reason(fprop: GemmScheme) -> str | None:
    """Why stored 4-bit weights cannot stand for this forward product; `None` where they can."""
    if not isinstance(fprop.right, QuantScheme):
        return "its fprop leaves weights in full precision"
    if fprop.rotation is not None and fprop.rotation.random:
        return f"its fprop rotates both operands by signs that are drawn anew in every step ({fprop.rotation})"
    return "its fprop rounds stochastically, anew in every step" if fprop.is_random else None


def weights_alone_unsupported_reason(fprop: GemmScheme) -> str | None:
    """Why no plain weights have the values that this forward product computes with, whatever multiplies with them;
    `None` where some have."""
    if fprop.rotation is not None and isinstance(fprop.right, QuantScheme):
        return f"its fprop rotates both operands ({fprop.rotation}), which weights alone cannot express"
    return packing_unsupported_reason(fprop)


def describe(preset: str, scheme: LinearScheme, saved: str = "full") -> str:
    """Return one line that names every operand with a scheme of its own; backward products only where they have one,
    and the form of saved inputs where it is not the usual one."""
    fprop = scheme.fprop
    rotation = f", rotation {fprop.rotation}" if fprop.rotation else ""
    parts = [f"{preset} [weights {fprop.right}, activations {fprop.left}{rotation}]"]
    if not scheme.dgrad == scheme.wgrad == PLAIN:
        parts += [f"{gemm} [{scheme.describe(gemm)}]" for gemm in ("dgrad", "wgrad")]
    if saved != "full":
        parts.append(f"saved activations {saved}")
    return ", ".join(parts)
