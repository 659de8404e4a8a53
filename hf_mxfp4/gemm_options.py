# SPDX-License-Identifier: Apache-2.0
"""The options `fprop`, `dgrad`, `wgrad` and `layer_overrides` of `MXFP4RLConfig`: read, checked, applied.

They are written as dictionaries, in YAML and JSON too, and kept as tuples of pairs, which are frozen and hashable.
"""

import re
from collections.abc import Mapping
from typing import Any

from .module_names import name_matches
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
#: The pattern of one entry of `layer_overrides`, and the options of its products.
LayerOverride = tuple[str, tuple[tuple[str, GemmOptions], ...]]

#: Which operands can take the values of the forward product, and which FP8.
_REUSED = (("dgrad", "weight"), ("wgrad", "x"))
#: The products whose options single layers can have.
_BACKWARD = ("dgrad", "wgrad")


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


def read_overrides(entries: Any) -> tuple[LayerOverride, ...] | None:
    """`layer_overrides` as tuples. Raises `ValueError` for what cannot be read, with the nearest names."""
    if entries is None:
        return None
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ValueError(f"layer_overrides={entries!r} must be a list of mappings with 'modules', 'dgrad', 'wgrad'")
    return tuple(_read_override(f"layer_overrides[{i}]", entry) for i, entry in enumerate(entries))


def _read_override(owner: str, entry: Any) -> LayerOverride:
    if isinstance(entry, tuple) and len(entry) == 2:
        entry = {"modules": entry[0], **dict(entry[1])}
    if not isinstance(entry, Mapping):
        raise ValueError(f"{owner}={entry!r} must be a mapping with 'modules' and 'dgrad' or 'wgrad'")
    for key in entry:
        if key == "fprop":
            raise ValueError(
                f"{owner} has 'fprop', but all quantized layers share one forward scheme; to leave layers in full "
                "precision, name them in modules_to_not_convert"
            )
        if key not in ("modules", *_BACKWARD):
            raise ValueError(unknown_key_message(owner, str(key), ["modules", *_BACKWARD]))
    pattern = entry.get("modules")
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"{owner} needs 'modules', a name such as 'layers.0' or 're:<regex on the full name>'")
    try:
        re.compile(pattern[3:] if pattern.startswith("re:") else "")
    except re.error as error:
        raise ValueError(f"{owner} has {pattern!r}, which is no regular expression: {error}") from error
    options = tuple(
        (gemm, read_gemm(gemm, entry[gemm], f"{owner} {gemm}")) for gemm in _BACKWARD if entry.get(gemm) is not None
    )
    if not options:
        raise ValueError(f"{owner} changes nothing of {pattern!r}; give it 'dgrad' or 'wgrad'")
    return pattern, options


def apply_overrides(
    scheme: LinearScheme, overrides: tuple[LayerOverride, ...] | None, names: tuple[str, ...]
) -> LinearScheme:
    """``scheme`` with the options of every entry that matches one of a layer's ``names``, the last one first."""
    backward = {gemm: getattr(scheme, gemm) for gemm in _BACKWARD}
    for pattern, options in overrides or ():
        if any(name_matches(name, pattern) for name in names):
            for gemm, given in options:
                backward[gemm] = apply_options(gemm, backward[gemm], given)
    return LinearScheme(scheme.fprop, **backward)


def overrides_as_dicts(overrides: tuple[LayerOverride, ...]) -> list[dict]:
    """Undo [`read_overrides`]."""
    return [{"modules": p, **{gemm: dict(given) for gemm, given in options}} for p, options in overrides]


def each_overridden(scheme: LinearScheme, overrides: tuple[LayerOverride, ...] | None) -> dict[str, LinearScheme]:
    """Yield for each entry the products of a layer that no other matches, by what messages call it."""
    return {
        f"layer_overrides for {pattern!r}": apply_overrides(scheme, (("re:.*", options),), ("",))
        for pattern, options in overrides or ()
    }


def check_products(owner: str, scheme: LinearScheme, backend: str, saved: str = "full") -> None:
    """Raise `ValueError` for a rotation that would do nothing, a backend that does not round stochastically, or inputs
    that cannot be saved in the form ``saved`` (one of [`hf_mxfp4.numerics.SAVED_FORMS`])."""
    for gemm in GEMM_OPERANDS:
        product: GemmScheme = getattr(scheme, gemm)
        if product.rotation is not None and not product.quantizes:
            raise ValueError(
                f"{owner}: rotation={product.rotation} of {gemm} has no effect, since neither operand is quantized in "
                "it; leave it out"
            )
        if product.rounds_stochastically and backend == "cpu":
            raise ValueError(f"{owner}: backend={backend!r} does not round stochastically; use backend='auto'")
    _check_saved(owner, scheme, saved)


def _check_saved(owner: str, scheme: LinearScheme, form: str) -> None:
    if form != "mxfp4":
        return
    if not isinstance(scheme.fprop.left, QuantScheme) or scheme.wgrad.right is not REUSE:
        why = "fprop takes x unquantized" if scheme.wgrad.right is REUSE else "wgrad does not reuse the x of fprop"
        raise ValueError(
            f"{owner}: saved_activations='mxfp4' keeps the MXFP4 codes of the forward product's input, but {why}; use "
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


def describe(
    preset: str, scheme: LinearScheme, overrides: tuple[LayerOverride, ...] | None, saved: str = "full"
) -> str:
    """One line that names every operand with a scheme of its own; backward products only where they have one, and the
    form of saved inputs where it is not the usual one."""
    fprop = scheme.fprop
    rotation = f", rotation {fprop.rotation}" if fprop.rotation else ""
    parts = [f"{preset} [weights {fprop.right}, activations {fprop.left}{rotation}]"]
    if not scheme.dgrad == scheme.wgrad == PLAIN:
        parts += [f"{gemm} [{scheme.describe(gemm)}]" for gemm in _BACKWARD]
    for pattern, options in overrides or ():
        parts.append(f"{pattern}: " + " ".join(f"{gemm} {dict(given)}" for gemm, given in options))
    if saved != "full":
        parts.append(f"saved activations {saved}")
    return ", ".join(parts)
