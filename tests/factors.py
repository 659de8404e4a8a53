# SPDX-License-Identifier: Apache-2.0
"""The scheme that most tests of layers compute with."""

from typing import Any

from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.presets import PRESET_DEFAULTS


def load_factors(folder, **options: Any) -> Any:
    """The causal language model of a folder under [`factors_config`] of the options."""
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=factors_config(**options))


def factors_config(**options: Any) -> MXFP4RLConfig:
    """A config of the rule `rceil` with macro factors, searched for weights alone, and in mode ``qat`` half residuals;
    `options`, presets that have options of their own, and an `fprop` that names both operands win."""
    usual: dict[str, Any] = {}
    names_operands = {"x", "weight"} <= set(options.get("fprop", ()))
    if options.get("preset") not in PRESET_DEFAULTS and not names_operands:
        usual = {"scale_rule": "rceil", "macro_search": "hybrid"}
        if options.get("mode", "qat") == "qat":
            usual["outlier_fallback"] = 0.5
    return MXFP4RLConfig(**usual | options)
