# SPDX-License-Identifier: Apache-2.0
from .layers import (
    MXFP4LoraExpertParameter as MXFP4LoraExpertParameter,
    MXFP4LoraLinear as MXFP4LoraLinear,
    MXFP4LoraMasterLinear as MXFP4LoraMasterLinear,
    MXFP4LoraPackedExpertParameter as MXFP4LoraPackedExpertParameter,
)
from .lora_model import (
    MXFP4LoraConfig as MXFP4LoraConfig,
    MXFP4LoraModel as MXFP4LoraModel,
    SUPPORTED as SUPPORTED,
    TRAINABLE_ONLY as TRAINABLE_ONLY,
    base_scheme as base_scheme,
)
from .merging import MergeReport as MergeReport, merge_adapters as merge_adapters
from .rollout import (
    adapted_parameters as adapted_parameters,
    adapter_factors as adapter_factors,
    adapter_rank as adapter_rank,
    adapter_sums as adapter_sums,
    has_inseparable_adapters as has_inseparable_adapters,
    policy_parameters as policy_parameters,
)
