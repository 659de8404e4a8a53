# SPDX-License-Identifier: Apache-2.0
"""Values of the options of `MXFP4RLConfig`, and what its presets stand for."""

import enum
from typing import Any

from .numerics import FP8, FULL, PLAIN, REUSE, SAVED_FORMS, GemmScheme, LinearScheme, QuantScheme, Rotation, ScaleRule
from .numerics.schemes import MACRO_BLOCKS


MODES = ("qat", "packed")
#: Rows x columns of a weight that share a block scale, and the rows of it.
WEIGHT_BLOCKS = {"1x32": 1, "32x32": 32}
#: Values of options that have a fixed set of them. For `engine` see [`hf_mxfp4.gemm.select_matmul`].
CHOICES = {
    "scale_rule": tuple(rule.value for rule in ScaleRule),
    "macro_block": (None, *MACRO_BLOCKS),
    "macro_search": ("static", "dynamic", "hybrid", "block_mantissas"),
    "outlier_fallback_operands": ("both", "weights", "activations"),
    "weight_block": tuple(WEIGHT_BLOCKS),
    "saved_activations": SAVED_FORMS,
    "backend": ("auto", "eager", "cpu", "triton"),
    "engine": ("auto", "dense", "fp8"),
}

#: Presets of both modes, which say no more than which forward operands are quantized.
FORWARD_PRESETS = ("w4a16", "w4a4")
PRESETS = (*FORWARD_PRESETS, "w4a4_tuned", "w4a4_h64", "w4a4g8", "w4a4g4", "paper_a", "paper_b", "w4a4g4_tuned")

#: Presets that quantize all six operands, and how they rotate those of Wgrad.
ALL_OPERANDS = {"w4a4g4": None, "paper_b": Rotation(16), "w4a4g4_tuned": Rotation(16)}

#: Defaults of the options of a scheme, which lost least for their size on real models (docs/evidence.md), and where a
#: preset has others. Paper A is arXiv 2605.20402. Paper B is arXiv 2605.09825: tiles for weights and a rotation by H16;
#: its scale rule is not stated, so it is that of OCP here. w4a4g4_tuned is what the study of docs/backward.md led to.
#: w4a4_h64 is for checkpoints whose weights were rounded for it (docs/gptq.md).
OPTION_DEFAULTS = {
    "scale_rule": "even",
    "macro_block": 128,
    "outlier_fallback_operands": "both",
    "outlier_fallback_rate": None,
    "weight_block": "1x32",
}
PRESET_DEFAULTS = {
    "w4a4_tuned": {"outlier_fallback_rate": 0.05},
    "w4a4_h64": {
        "outlier_fallback_rate": 0.05,
        "outlier_fallback_operands": "activations",
        "fprop": {"rotation": "deterministic-64"},
    },
    "paper_a": {"scale_rule": "rceil", "macro_search": "static", "outlier_fallback": 0.5},
    "paper_b": {"scale_rule": "floor", "macro_block": None, "outlier_fallback": None, "weight_block": "32x32"},
    "w4a4g4_tuned": {"outlier_fallback": None, "weight_block": "32x32"},
}
#: Weight of the residual, where neither the preset nor the user says it.
_FALLBACK = {"qat": 1.0, "packed": None}


class Default(enum.Enum):
    """Stand for "what is usual there" until mode and preset are known; a finished config holds the value itself."""

    BY_MODE = "by mode"
    BY_PRESET = "by preset"

    def __str__(self) -> str:
        return self.value

    __repr__ = __str__


def usual_options(mode: str, preset: str, outlier_fallback: Any) -> dict[str, Any]:
    """Return the defaults under a mode and a preset; without outlier fallback, its other options are those of no
    preset."""
    usual = {**OPTION_DEFAULTS, "outlier_fallback": _FALLBACK[mode], **PRESET_DEFAULTS.get(preset, {})}
    if outlier_fallback is None:
        usual |= {name: OPTION_DEFAULTS[name] for name in ("outlier_fallback_rate", "outlier_fallback_operands")}
    return usual


def preset_gemms(preset: str, weights: QuantScheme, activations: QuantScheme) -> LinearScheme:
    """The three products under a preset: ``weights`` and ``activations`` (output gradients too) wherever it quantizes
    such an operand."""
    fprop = GemmScheme(FULL if preset == "w4a16" else activations, weights)
    if preset == "w4a4g8":
        return LinearScheme(fprop, GemmScheme(FP8, REUSE), GemmScheme(FP8, REUSE))
    if preset in ALL_OPERANDS:
        wgrad = GemmScheme(activations, activations, ALL_OPERANDS[preset])
        return LinearScheme(fprop, GemmScheme(activations, weights), wgrad)
    return LinearScheme(fprop, PLAIN, PLAIN)
