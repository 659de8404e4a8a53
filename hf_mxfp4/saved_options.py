# SPDX-License-Identifier: Apache-2.0
"""Options and presets of earlier versions: what to write instead, and how saved configs that have them are read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .numerics import GEMM_OPERANDS, LinearScheme, QuantScheme


@dataclass(frozen=True)
class RemovedOption:
    """An option that `MXFP4RLConfig` had.

    Attributes:
        instead: what to do instead, for error messages.
        default: value in saved configs that changed nothing.
        saved: what becomes of other values in saved configs: "texts" of operands ([`operand_texts`]), "refused", or
            "dropped", because the forward product does not depend on them.
    """

    instead: str
    default: Any
    saved: str


REMOVED_OPTIONS = {
    "outlier_fallback_operands": RemovedOption(
        instead="give the operand without residual as text, such as fprop={'x': 'even+mbs128-blockwise'}",
        default="both",
        saved="texts",
    ),
    "outlier_fallback_rate": RemovedOption(
        instead="outlier fallback is for all blocks or none. Load a checkpoint that has it with the version that saved "
        "it, or set in its config.json outlier_fallback_rate to null, and outlier_fallback to 1 (more accurate) or "
        "null (smaller)",
        default=None,
        saved="refused",
    ),
    "saved_activations": RemovedOption(
        instead="layers keep their inputs as the backward pass uses them; leave it out",
        default="full",
        saved="dropped",
    ),
    "weight_block": RemovedOption(
        instead="give the weight as text, such as fprop={'weight': 'even+mbs128-blockwise+32x32'}",
        default=None,  # it was that of the preset
        saved="texts",
    ),
}

_TILES = {"weight": "even+mbs128-blockwise+32x32"}
#: Presets of before, as options. Two of them had residuals for 5 % of the blocks, which nothing expresses any more.
REMOVED_PRESETS: dict[str, dict[str, Any]] = {
    "w4a4g8": {
        "preset": "w4a4",
        "outlier_fallback": 1.0,
        "dgrad": {"grad": "fp8"},
        "wgrad": {"grad": "fp8"},
    },
    "w4a4g4_tuned": {
        "preset": "w4a4g4",
        "fprop": _TILES,
        "dgrad": _TILES,
        "wgrad": {"rotation": "deterministic-16"},
    },
    "w4a4_tuned": {"preset": "w4a4"},
    "w4a4_h64": {"preset": "w4a4", "fprop": {"rotation": "deterministic-64"}},
}
_SELECTIVE = ("w4a4_tuned", "w4a4_h64")


def check_preset(preset: Any) -> None:
    """Raise `ValueError` for a preset of before, with the options to use instead."""
    if not isinstance(preset, str) or preset not in REMOVED_PRESETS:
        return
    options = ", ".join(f"{name}={value!r}" for name, value in REMOVED_PRESETS[preset].items())
    what = "the same without its residuals for 5 % of the blocks" if preset in _SELECTIVE else "the same"
    raise ValueError(f"preset={preset!r} was removed; {options} gives {what}")


def split_saved(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a saved config into options that there are and removed ones for [`operand_texts`].

    Presets of before become options. Removed options with their default are dropped. Raises `ValueError` for other
    values that nothing expresses.
    """
    kept = dict(options)
    removed = {}
    for name, option in REMOVED_OPTIONS.items():
        value = kept.pop(name, option.default)
        if value == option.default or option.saved == "dropped":
            continue
        if option.saved == "refused":
            raise ValueError(f"{name}={value!r} is no longer an option: {option.instead}")
        removed[name] = value
    if kept.get("preset") in REMOVED_PRESETS:
        kept |= _instead_of_preset(kept)
    return kept, removed


def _instead_of_preset(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preset and the products that mean the same as a removed preset. Tiles are in ``weight_block``."""
    instead = REMOVED_PRESETS[saved["preset"]]
    options: dict[str, Any] = {"preset": instead["preset"]}
    for gemm in GEMM_OPERANDS:
        texts = {name: text for name, text in instead.get(gemm, {}).items() if name != "weight"}
        own = saved.get(gemm) or {}
        # The rotation of fprop was a default of that option, which options of the user replaced as a whole.
        options[gemm] = own or texts if gemm == "fprop" else {**texts, **own}
    return {name: value or None for name, value in options.items()}


def operand_texts(scheme: LinearScheme, given: Mapping[str, Any], removed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options ``fprop``, ``dgrad`` and ``wgrad`` that have the effect of removed ones.

    Args:
        scheme: products without the removed options.
        given: the three options so far; operands that they name stay as they are.
        removed: values of `outlier_fallback_operands` and `weight_block`.
    """
    with_residual = removed.get("outlier_fallback_operands", "both")
    options = {}
    for gemm, names in GEMM_OPERANDS.items():
        texts = dict(given.get(gemm) or {})
        product = getattr(scheme, gemm)
        for name, operand in zip(names, (product.left, product.right), strict=True):
            if name in texts or not isinstance(operand, QuantScheme):
                continue
            kind = "weights" if name == "weight" else "activations"
            changed = operand
            if with_residual not in ("both", kind):
                changed = replace(changed, outlier_fallback=None)
            if name == "weight" and "weight_block" in removed:
                changed = replace(changed, block_rows=32 if removed["weight_block"] == "32x32" else 1)
            if changed != operand:
                texts[name] = str(changed)
        options[gemm] = texts or None
    return options
