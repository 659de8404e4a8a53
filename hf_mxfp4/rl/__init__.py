# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of quantized policies: a GRPO trainer, quantization noise, callbacks and rewards.

trl is imported when the trainer or its config is first used.
"""

from .._lazy import lazy_names


_LAZY = {
    "ActivationErrorCallback": "callbacks.activation_errors",
    "EntropyCallback": "callbacks.base",
    "ErrorCallback": "callbacks.base",
    "ExactResumeMixin": "resume.state",
    "MXFP4AsyncGRPOTrainer": "asynchronous",
    "MXFP4GRPOConfig": "config",
    "MXFP4GRPOTrainer": "trainer",
    "NoiseSchedule": "noise.schedule",
    "NormNoise": "noise.norms",
    "OscillationResetCallback": "callbacks.oscillation",
    "QuantizationStepCallback": "callbacks.base",
    "RewardError": "rewards.guard",
    "RouterCallback": "callbacks.routers",
    "RunReportCallback": "callbacks.report",
    "StepMovementCallback": "callbacks.movement",
    "VLLMServerError": "rollout.vllm_server",
}

__all__ = sorted(_LAZY)


__getattr__ = lazy_names(__name__, _LAZY)


def __dir__():
    return list(__all__)
