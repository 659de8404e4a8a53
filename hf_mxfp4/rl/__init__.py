# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of quantized policies: a GRPO trainer, quantization noise, callbacks and rewards.

trl is imported when the trainer or its config is first used.
"""

from ..utils import lazy_names


_LAZY = {
    "ActivationErrorCallback": "callbacks.errors",
    "EntropyCallback": "callbacks.entropy",
    "ErrorCallback": "callbacks.errors",
    "ExactResumeMixin": "resume",
    "MXFP4AsyncGRPOTrainer": "asynchronous",
    "MXFP4GRPOConfig": "config",
    "MXFP4GRPOTrainer": "trainer",
    "NoiseSchedule": "noise",
    "NormNoise": "noise",
    "OscillationResetCallback": "callbacks.oscillation",
    "QuantizationStepCallback": "callbacks.entropy",
    "RewardError": "rewards.guard",
    "RunLogCallback": "callbacks.run_log",
    "StepMovementCallback": "callbacks.movement",
    "VLLMServerError": "rollout.vllm_engine",
    "plain_name": "noise",
    "rollout_parameters": "rollout.vllm",
}

__all__ = sorted(_LAZY)


__getattr__ = lazy_names(__name__, _LAZY)


def __dir__():
    return list(__all__)
