# SPDX-License-Identifier: Apache-2.0
"""hf-mxfp4: reinforcement-learning post-training of language models in MXFP4.

Importing the package registers the quantization method `mxfp4_rl` with transformers, before or after transformers is
imported. Everything else is imported when it is first used, torch and transformers too.
"""

from .registration import register_with_tables
from .utils import lazy_names


__version__ = "0.1.0"


register_with_tables()

__getattr__, _names = lazy_names(__name__)
__all__ = ["__version__", *_names]


def __dir__():
    return list(__all__)
