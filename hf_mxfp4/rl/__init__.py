# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of quantized policies: a GRPO trainer, quantization noise, callbacks and rewards.

trl is imported when the trainer or its config is first used.
"""

from ..utils import lazy_names


__getattr__, __all__ = lazy_names(
    __name__,
    {
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
    },
)
