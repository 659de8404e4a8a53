# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of quantized policies: a GRPO trainer, quantization noise, callbacks and rewards.

trl is imported when the trainer or its config is first used.
"""

from ..utils import lazy_names


_LAZY = {
    "ActivationErrorCallback": "errors",
    "EntropyCallback": "callbacks",
    "ErrorCallback": "errors",
    "ExactResumeMixin": "resume",
    "MXFP4AsyncGRPOTrainer": "asynchronous",
    "MXFP4DistillationConfig": "distillation",
    "MXFP4DistillationTrainer": "distillation",
    "MXFP4GRPOConfig": "config",
    "MXFP4GRPOTrainer": "trainer",
    "NoiseSchedule": "noise",
    "NormNoise": "noise",
    "QuantizationStepCallback": "callbacks",
    "RewardError": "rewards",
    "RunLogCallback": "callbacks",
    "StepMovementCallback": "errors",
    "VLLMServerError": "vllm_engine",
    "plain_name": "noise",
    "rollout_parameters": "vllm",
}

__all__ = sorted(_LAZY)


__getattr__ = lazy_names(__name__, _LAZY)


def __dir__():
    return list(__all__)
