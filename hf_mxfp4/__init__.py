# SPDX-License-Identifier: Apache-2.0
"""hf-mxfp4: reinforcement-learning post-training of language models in MXFP4.

Importing the package registers the quantization method `mxfp4_rl` with transformers, before or after transformers is
imported. Everything else is imported when it is first used, torch and transformers too.
"""

from .registration import register_with_tables
from .utils import lazy_names


__version__ = "0.1.0"


register_with_tables()

#: Parts that code may name after `import hf_mxfp4` alone.
_PARTS = ("backends", "checkpoint", "config", "dither", "gemm", "layers", "moe", "numerics", "report")

__getattr__, _names = lazy_names(
    __name__,
    {
        "config": "MXFP4RLConfig",
        "dither": "dither_masters",
        "gemm": "fake_quantize quantize",
        "integrations.peft": "merge_adapters",
        "integrations.transformers": "MXFP4RLQuantizer pack",
        "layers": (
            "MXFP4Experts MXFP4Linear MXFP4PackedExperts MXFP4PackedLinear cached_weights set_quantization_step "
            "uncached_weights"
        ),
        "numerics": "ErrorDecomposition MXFP4Tensor QuantScheme ScaleRule decompose",
        "rl": "MXFP4DistillationConfig MXFP4DistillationTrainer MXFP4GRPOConfig MXFP4GRPOTrainer",
    },
    _PARTS,
)
__all__ = ["__version__", *_names]


def __dir__():
    return list(__all__)
