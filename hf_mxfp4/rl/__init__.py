# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of quantized policies: a GRPO trainer, quantization noise, callbacks and rewards.

trl is imported when the trainer or its config is first used.
"""

from ..utils import lazy_names


_NAMES = {
    "asynchronous": "MXFP4AsyncGRPOTrainer",
    "callbacks": "EntropyCallback QuantizationStepCallback RunLogCallback",
    "config": "MXFP4GRPOConfig",
    "distillation": "MXFP4DistillationConfig MXFP4DistillationTrainer",
    "errors": "ActivationErrorCallback ErrorCallback StepMovementCallback",
    "noise": "NoiseSchedule NormNoise plain_name",
    "resume": "ExactResumeMixin",
    "rewards": "RewardError",
    "trainer": "MXFP4GRPOTrainer",
    "vllm": "rollout_parameters",
    "vllm_engine": "VLLMServerError",
}
_LAZY = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_LAZY)


__getattr__ = lazy_names(__name__, _LAZY)


def __dir__():
    return list(__all__)
