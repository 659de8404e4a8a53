# SPDX-License-Identifier: Apache-2.0
"""hf-mxfp4: reinforcement-learning post-training of language models in MXFP4.

Importing the package registers the quantization method `mxfp4_rl` with transformers. Everything else is imported when
it is first used, so that trl, triton and matplotlib cost nothing until then. In the process of the `hf-mxfp4` command
the registration waits until a command runs, too: its help needs none of the seconds that transformers takes.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ._lazy import lazy_names


__version__ = "0.1.0"


def _is_own_command() -> bool:
    """Whether this process is `hf-mxfp4`, or `python -m hf_mxfp4.cli` looking for its module."""
    started = sys.argv[0] if sys.argv else ""
    return Path(started).stem == "hf-mxfp4" or started == "-m" and "hf_mxfp4.cli" in sys.orig_argv


if TYPE_CHECKING or not _is_own_command():
    from .config import MXFP4RLConfig
    from .quantizer.quantizer import MXFP4RLQuantizer

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
    "dither_masters": "dither",
    "fake_quantize": "backends.functional",
    "merge_adapters": "adapters",
    "pack": "quantizer.pack",
    "quantize": "backends.functional",
    "set_quantization_step": "layers",
    "uncached_weights": "layers",
}

__all__ = ["MXFP4RLConfig", "MXFP4RLQuantizer", "__version__", *_LAZY]


# The first two only where they were not imported above. The quantizer's module registers both.
__getattr__ = lazy_names(__name__, {"MXFP4RLConfig": "quantizer.quantizer", "MXFP4RLQuantizer": "quantizer", **_LAZY})


def __dir__():
    return sorted(__all__)
