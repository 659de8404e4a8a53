# SPDX-License-Identifier: Apache-2.0
from .asynchronous import MXFP4AsyncGRPOTrainer as MXFP4AsyncGRPOTrainer
from .callbacks.entropy import EntropyCallback as EntropyCallback
from .callbacks.errors import ActivationErrorCallback as ActivationErrorCallback, ErrorCallback as ErrorCallback
from .callbacks.movement import StepMovementCallback as StepMovementCallback
from .callbacks.quantization_step import QuantizationStepCallback as QuantizationStepCallback
from .callbacks.run_log import RunLogCallback as RunLogCallback
from .config import MXFP4GRPOConfig as MXFP4GRPOConfig
from .distillation import (
    MXFP4DistillationConfig as MXFP4DistillationConfig,
    MXFP4DistillationTrainer as MXFP4DistillationTrainer,
)
from .exact_resume import ExactResumeMixin as ExactResumeMixin
from .noise import NoiseSchedule as NoiseSchedule, NormNoise as NormNoise, plain_name as plain_name
from .rewards import RewardError as RewardError
from .trainer import MXFP4GRPOTrainer as MXFP4GRPOTrainer
from .vllm import rollout_parameters as rollout_parameters
from .vllm_engine import VLLMServerError as VLLMServerError
