# SPDX-License-Identifier: Apache-2.0
"""PEFT adapters on quantized models: LoRA on quantized layers, merging, and the base's scheme in the adapter's files.

Importing this package imports PEFT, makes its LoRA know quantized layers, and has its other methods checked before
they are attached to such layers. Loading a quantized model does so.
"""

from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING, PeftType

from ...utils import lazy_names
from ..patches import patch_counts, patch_tuners
from .lora_model import MXFP4LoraConfig, MXFP4LoraModel, check_merge, check_method


# PEFT's own tables of what stands for "LORA": both classes behave as PEFT's wherever no quantized layer is concerned.
PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.LORA] = MXFP4LoraConfig
PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = MXFP4LoraModel
patch_tuners(check_method, check_merge)
patch_counts()

__getattr__, __all__ = lazy_names(__name__)
