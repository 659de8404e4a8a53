# SPDX-License-Identifier: Apache-2.0
from . import (
    checkpoint as checkpoint,
    config as config,
    layers as layers,
    model as model,
    numerics as numerics,
    ops as ops,
    prepare as prepare,
    report as report,
)
from .config import MXFP4RLConfig as MXFP4RLConfig
from .ops import fake_quantize as fake_quantize, quantize as quantize
from .integrations.peft import merge_adapters as merge_adapters
from .integrations.transformers import MXFP4RLQuantizer as MXFP4RLQuantizer, pack as pack
from .layers import (
    MXFP4Experts as MXFP4Experts,
    MXFP4Linear as MXFP4Linear,
    MXFP4PackedExperts as MXFP4PackedExperts,
    MXFP4PackedLinear as MXFP4PackedLinear,
    cached_weights as cached_weights,
    set_quantization_step as set_quantization_step,
    uncached_weights as uncached_weights,
)
from .numerics import (
    ErrorDecomposition as ErrorDecomposition,
    MXFP4Tensor as MXFP4Tensor,
    QuantScheme as QuantScheme,
    ScaleRule as ScaleRule,
    decompose as decompose,
)
from .prepare import dither_masters as dither_masters
from .rl import (
    MXFP4DistillationConfig as MXFP4DistillationConfig,
    MXFP4DistillationTrainer as MXFP4DistillationTrainer,
    MXFP4GRPOConfig as MXFP4GRPOConfig,
    MXFP4GRPOTrainer as MXFP4GRPOTrainer,
)

__version__: str
