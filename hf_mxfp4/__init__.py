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

_NAMES = {
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
}
#: Parts that code may name after `import hf_mxfp4` alone.
_PARTS = ("backends", "checkpoint", "config", "dither", "gemm", "layers", "moe", "numerics", "report")

__getattr__, _lazy = lazy_names(__name__, _NAMES, parts=_PARTS)
__all__ = ["MXFP4RLConfig", "MXFP4RLQuantizer", "__version__"]
__all__ += [name for name in _lazy if name not in __all__]


def __dir__():
    return sorted(__all__)
