# SPDX-License-Identifier: Apache-2.0
"""PEFT adapters on quantized models: LoRA on quantized layers, merging, and the base's scheme in the adapter's files.

Importing this package imports PEFT, makes its LoRA know quantized layers, and has its other methods checked before
they are attached to such layers. Loading a quantized model does so.
"""

from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING, PeftType

from .adapter_card import keep_weights_without_a_card
from .base_scheme import MXFP4LoraConfig
from .expert_lora import MXFP4LoraExperts
from .expert_parameters import MXFP4LoraExpertParameter
from .lora_layer import MXFP4LoraLinear
from .lora_model import MXFP4LoraModel, merge_adapters
from .master_lora import MXFP4LoraMasterLinear
from .merge.merge_report import MergeReport
from .methods import watch_tuners
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
from .target_names import strict_targets


# PEFT's own tables of what stands for "LORA": both classes behave as PEFT's wherever no quantized layer is concerned.
PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.LORA] = MXFP4LoraConfig
PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = MXFP4LoraModel
watch_tuners()
keep_weights_without_a_card()

__all__ = [
    "MXFP4LoraConfig",
    "MXFP4LoraExpertParameter",
    "MXFP4LoraExperts",
    "MXFP4LoraLinear",
    "MXFP4LoraMasterLinear",
    "MXFP4LoraModel",
    "MergeReport",
    "adapted_parameters",
    "adapter_factors",
    "adapter_rank",
    "adapter_sums",
    "has_inseparable_adapters",
    "is_packed_with_adapters",
    "is_trainable_with_adapters",
    "merge_adapters",
    "policy_parameters",
    "strict_targets",
]
