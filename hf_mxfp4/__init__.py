# SPDX-License-Identifier: Apache-2.0
"""hf-mxfp4: reinforcement-learning post-training of language models in MXFP4.

Importing the package registers the quantization method `mxfp4_rl` with transformers. Everything else is imported when
it is first used, so that trl, triton and matplotlib cost nothing until then.
"""

from ._lazy import lazy_names
from .config import MXFP4RLConfig
from .quantizer import MXFP4RLQuantizer


__version__ = "0.1.0"

_LAZY = {
    "ErrorDecomposition": "numerics",
    "MXFP4Experts": "layers",
    "MXFP4GRPOConfig": "rl",
    "MXFP4GRPOTrainer": "rl",
    "MXFP4Linear": "layers",
    "MXFP4PackedExperts": "layers",
    "MXFP4PackedLinear": "layers",
    "MXFP4Tensor": "numerics",
    "QuantScheme": "numerics",
    "ScaleRule": "numerics",
    "cached_weights": "layers",
    "decompose": "numerics",
    "fake_quantize": "ops.functional",
    "merge_adapters": "adapters",
    "pack": "packing",
    "quantize": "ops.functional",
    "set_quantization_step": "layers",
    "uncached_weights": "layers",
}

__all__ = ["MXFP4RLConfig", "MXFP4RLQuantizer", "__version__", *_LAZY]


__getattr__ = lazy_names(__name__, _LAZY)


def __dir__():
    return sorted(__all__)
