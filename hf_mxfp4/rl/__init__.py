# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of quantized policies: a GRPO trainer, quantization noise, callbacks and rewards.

trl is imported when the trainer or its config is first used.
"""

from ..utils import lazy_names, stub_names


_LAZY = stub_names(__name__)

__all__ = sorted(_LAZY)

__getattr__ = lazy_names(__name__, _LAZY)


def __dir__():
    return list(__all__)
