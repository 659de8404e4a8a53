# SPDX-License-Identifier: Apache-2.0
"""The scheme that most tests of layers compute with."""

from typing import Any

from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig


def load_factors(folder, **options: Any) -> Any:
    """The causal language model of a folder under [`factors_config`] of the options."""
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=factors_config(**options))


def factors_config(**options: Any) -> MXFP4RLConfig:
    """A config of `w4a4` (packed: of `w4a16`) with the rule `rceil` and macro factors, searched for weights alone, and
    in mode ``qat`` half residuals; `options` win. Presets with E4M3 or of papers, and an `fprop` that leaves none of
    these options an operand, keep what is usual. Weights are not smoothed.
    """
    is_packed = options.get("mode") == "packed"
    preset = options.get("preset", "w4a16" if is_packed else "w4a4")
    operands = {"weight"} if preset == "w4a16" else {"x", "weight"}
    usual: dict[str, Any] = {"preset": preset, "smooth": False}
    if preset in ("w4a16", "w4a4", "w4a4g4") and not operands <= set(options.get("fprop") or ()):
        usual |= {"scale_rule": "rceil", "macro_search": "hybrid"}
        if not is_packed:
            usual["outlier_fallback"] = 0.5
    return MXFP4RLConfig(**usual | options)
