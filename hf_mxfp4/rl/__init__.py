# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of quantized policies: a GRPO trainer, quantization noise, callbacks and rewards.

trl is imported when the trainer or its config is first used.
"""

import importlib


_LAZY = {
    "EntropyCallback": "callbacks",
    "ErrorCallback": "callbacks",
    "MXFP4GRPOConfig": "config",
    "MXFP4GRPOTrainer": "trainer",
    "NoiseSchedule": "aqn",
    "NormNoise": "aqn",
    "RewardError": "reward_guard",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


def __dir__():
    return list(__all__)
