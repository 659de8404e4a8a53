# SPDX-License-Identifier: Apache-2.0
"""vLLM loads checkpoints of this package: the entry point `vllm.general_plugins` names [`register`]. This module and
`weight_loading.py` import no vLLM."""

from ...registration import QUANT_METHOD
from .settings import SETTINGS_KEY, EngineSettings
from .weight_loading import ExpectedLayers, WeightConverter


__all__ = ["SETTINGS_KEY", "EngineSettings", "ExpectedLayers", "WeightConverter", "register"]


def register() -> None:
    """Teach vLLM the quantization method `mxfp4_rl`. vLLM calls this in each of its processes, maybe more than once."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from .quantization import MXFP4RLVLLMConfig

    register_quantization_config(QUANT_METHOD)(MXFP4RLVLLMConfig)
