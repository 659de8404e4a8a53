# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of quantized policies: a GRPO trainer, quantization noise, callbacks and rewards.

trl is imported when the trainer or its config is first used.
"""

from .._lazy import lazy_names


_LAZY = {
    "ActivationErrorCallback": "activation_errors",
    "EntropyCallback": "callbacks",
    "EntropyNoiseController": "noise_controller",
    "ErrorCallback": "callbacks",
    "ExactResumeMixin": "resume",
    "GradientGainCallback": "policy_callbacks",
    "LinearNoise": "aqn_linears",
    "MXFP4GRPOConfig": "config",
    "MXFP4GRPOTrainer": "trainer",
    "NoiseSchedule": "noise_schedule",
    "NormNoise": "aqn",
    "OscillationResetCallback": "oscillation",
    "QuantizationStepCallback": "callbacks",
    "RewardError": "reward_guard",
    "RouterCallback": "router_callback",
    "RunReportCallback": "report_callback",
    "StepMovementCallback": "movement",
    "TemperatureCallback": "policy_callbacks",
}

__all__ = sorted(_LAZY)


__getattr__ = lazy_names(__name__, _LAZY)


def __dir__():
    return list(__all__)
