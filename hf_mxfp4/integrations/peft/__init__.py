# SPDX-License-Identifier: Apache-2.0
"""PEFT adapters on quantized models: LoRA on quantized layers, merging, and the base's scheme in the adapter's files.

Importing this package imports PEFT, makes its LoRA know quantized layers, and has its other methods checked before
they are attached to such layers. Loading a quantized model does so.
"""

from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING, PeftType

from .layers import MXFP4LoraExpertParameter, MXFP4LoraExperts, MXFP4LoraLinear, MXFP4LoraMasterLinear
from .lora_model import SUPPORTED, TRAINABLE_ONLY, MXFP4LoraConfig, MXFP4LoraModel, base_scheme, watch_tuners
from .merging import MergeReport, merge_adapters
from .rollout import (
    adapted_parameters,
    adapter_factors,
    adapter_rank,
    adapter_sums,
    has_inseparable_adapters,
    is_packed_with_adapters,
    is_trainable_with_adapters,
    policy_parameters,
)


# PEFT's own tables of what stands for "LORA": both classes behave as PEFT's wherever no quantized layer is concerned.
PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.LORA] = MXFP4LoraConfig
PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = MXFP4LoraModel
watch_tuners()

__all__ = [
    "MXFP4LoraConfig",
    "MXFP4LoraExpertParameter",
    "MXFP4LoraExperts",
    "MXFP4LoraLinear",
    "MXFP4LoraMasterLinear",
    "MXFP4LoraModel",
    "MergeReport",
    "SUPPORTED",
    "TRAINABLE_ONLY",
    "adapted_parameters",
    "adapter_factors",
    "adapter_rank",
    "adapter_sums",
    "base_scheme",
    "has_inseparable_adapters",
    "is_packed_with_adapters",
    "is_trainable_with_adapters",
    "merge_adapters",
    "policy_parameters",
]
