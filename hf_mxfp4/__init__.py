# SPDX-License-Identifier: Apache-2.0
"""hf-mxfp4: reinforcement-learning post-training of language models in MXFP4.

Importing the package registers the quantization method `mxfp4_rl` with transformers, before or after transformers is
imported. Everything else is imported when it is first used, torch and transformers too.
"""

from typing import TYPE_CHECKING

from .registration import register_with_tables
from .utils import lazy_names


__version__ = "0.1.0"


register_with_tables()

if TYPE_CHECKING:
    from .config import MXFP4RLConfig
    from .integrations.transformers import MXFP4RLQuantizer

_LAZY = {
    "ErrorDecomposition": "numerics",
    "MXFP4DistillationConfig": "rl",
    "MXFP4DistillationTrainer": "rl",
    "MXFP4Experts": "layers",
    "MXFP4GRPOConfig": "rl",
    "MXFP4GRPOTrainer": "rl",
    "MXFP4Linear": "layers",
    "MXFP4PackedExperts": "layers",
    "MXFP4PackedLinear": "layers",
    "MXFP4RLConfig": "config",
    "MXFP4RLQuantizer": "integrations.transformers",
    "MXFP4Tensor": "numerics",
    "QuantScheme": "numerics",
    "ScaleRule": "numerics",
    "cached_weights": "layers",
    "decompose": "numerics",
    "dither_masters": "dither",
    "fake_quantize": "gemm",
    "merge_adapters": "integrations.peft",
    "pack": "integrations.transformers",
    "quantize": "gemm",
    "set_quantization_step": "layers",
    "uncached_weights": "layers",
}

__all__ = ["MXFP4RLConfig", "MXFP4RLQuantizer", "__version__"]
__all__ += [name for name in _LAZY if name not in __all__]

#: Parts that code may name after `import hf_mxfp4` alone.
_PARTS = ("backends", "checkpoint", "config", "dither", "gemm", "layers", "moe", "numerics", "report")

__getattr__ = lazy_names(__name__, _LAZY, parts=_PARTS)


def __dir__():
    return sorted(__all__)
