# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of quantized policies: a GRPO trainer, quantization noise, callbacks and rewards.

trl is imported when the trainer or its config is first used.
"""

from ..utils import lazy_names


__getattr__, __all__ = lazy_names(__name__)
