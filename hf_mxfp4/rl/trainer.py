# SPDX-License-Identifier: Apache-2.0
"""`MXFP4GRPOTrainer`: TRL's GRPO for policies whose linear layers compute in MXFP4."""

import contextlib
import math
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import TrainerState

from .._logging import get_logger
from ..adapters import strict_targets
from ..layers import TRAINABLE
from .callbacks.policy import thresholds_kept
from .callbacks.run_card import mend_card
from .config import MXFP4GRPOConfig
from .noise.rollouts import RolloutNoise
from .resume.boundary import StepBoundary
from .resume.interruption import InterruptibleTraining
from .resume.state import random_states, restore_random_states
from .rewards.guard import guard_reward
from .rewards.overlong import OverlongPenalty
from .rollout.correction import RolloutCorrection
from .rollout.generation import RolloutGeneration
from .rollout.reference_policy import check_reference, check_scheme, count_quantized, reference_config
from .rollout.router_replay import RouterTraining
from .rollout.sampling import DynamicSampling
from .rollout.weights import describe_rollout_weights, rollout_context


class MXFP4GRPOTrainer(
    InterruptibleTraining,
    RouterTraining,
    DynamicSampling,
    OverlongPenalty,
    RolloutCorrection,
    RolloutNoise,
    RolloutGeneration,
):
    """[`trl.GRPOTrainer`] with adaptive quantization noise in rollouts, correction of the mismatch it makes, and
    callbacks for policy entropy and quantization error.

    Takes the arguments of [`trl.GRPOTrainer`]; `args` is an [`MXFP4GRPOConfig`], and `quantization_config` an
    `MXFP4RLConfig` when `model` is a name. A failing reward function raises `RewardError`, and whatever ends training
    early, what was trained so far is saved as a checkpoint first, see [`InterruptibleTraining`]. A resumed run repeats
    the one that was never stopped, see [`ExactResumeMixin`].

    Raises:
        ValueError: the model has no MXFP4 layer (unless `allow_full_precision`), a dataset is empty, the model has no
            norm for the noise, an option would damage the master weights, or `peft_config` names a target that the
            model has not.
        TypeError: `args` is another config, or `quantization_config` is the name of a scheme.
    """

    _tag_names = ["trl", "grpo", "mxfp4", "hf-mxfp4"]

    @strict_targets()
    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: MXFP4GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        quantization_config: Any = None,
        **kwargs: Any,
    ):
        args = MXFP4GRPOConfig() if args is None else args
        if not isinstance(args, MXFP4GRPOConfig):
            raise TypeError(f"args must be an MXFP4GRPOConfig, got {type(args).__name__}")
        check_scheme("quantization_config", quantization_config)
        check_scheme(
            "quantization_config in model_init_kwargs", (args.model_init_kwargs or {}).get("quantization_config")
        )
        args.check_overlong_buffer()
        needs_prompt = kwargs.get("environment_factory") is None
        _check_dataset("train_dataset", train_dataset, needs_prompt)
        for name, dataset in (eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}).items():
            _check_dataset(f"eval_dataset {name}".strip(), dataset, needs_prompt)
        functions = reward_funcs if isinstance(reward_funcs, list) or reward_funcs is None else [reward_funcs]
        if functions is not None:
            functions = [guard_reward(function) for function in functions]
        super().__init__(
            model,
            functions,
            args,
            train_dataset,
            eval_dataset,
            quantization_config=reference_config(model, quantization_config, args),
            **kwargs,
        )
        self.n_quantized = count_quantized(self.model)
        self._check_model()
        check_reference(self.model, self.ref_model, args)
        self._set_up_generation()
        self._set_up_noise()
        self._set_up_correction()
        self._set_up_dynamic_sampling()
        self._set_up_overlong_penalty()
        self._watch_policy()
        self._watch_routers()
        if self.use_vllm:
            self._push_rollout_policy_to_vllm()
        self._boundary = StepBoundary(self._process_state)
        self.add_callback(self._boundary)
        self._epochs_begun = 0
        get_logger().info(
            "MXFP4GRPOTrainer: n_quantized=%d, noise on %s, rollout correction %s, rollout weights: %s",
            self.n_quantized,
            self._describe_noise(),
            args.rollout_correction_mode if args.rollout_correction else "off",
            describe_rollout_weights(self.model, args.cache_rollout_weights, args.rollout_weights),
        )

    # ---- rollouts -------------------------------------------------------------------------------------------------

    def _generate(self, prompts: list):
        with self._rollout_weights(), self._rollout_noise():
            with self.routing.recording() if self._replays else contextlib.nullcontext():
                output = super()._generate(prompts)
            if self._replays:
                self.routing.keep(output[0], output[1])
        return output

    def _rollout_weights(self) -> contextlib.AbstractContextManager[None]:
        return rollout_context(self.args.cache_rollout_weights, self.args.rollout_weights)

    # ---- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """[`transformers.Trainer.evaluate`], which leaves training as it was, also where it is cut short: its rollouts
        draw from the random generators of training, and its forward passes count for selective outlier fallback.
        """
        states = random_states()
        try:
            with thresholds_kept(self.model):
                return super().evaluate(*args, **kwargs)
        finally:
            restore_random_states(states)

    # ---- checks ---------------------------------------------------------------------------------------------------

    def _check_model(self) -> None:
        if self.n_quantized == 0 and not self.args.allow_full_precision:
            raise ValueError(
                f"{type(self.model).__name__} has no MXFP4 layer: this run would train in full precision. Load the "
                "model with quantization_config=MXFP4RLConfig() (the trainer takes it too, beside a model's name), or "
                "set allow_full_precision=True for a baseline"
            )
        layers = [module for module in self.model.modules() if isinstance(module, TRAINABLE)]
        trained = [p for layer in layers for p in layer.parameters(recurse=False) if p.requires_grad and p.dim() > 1]
        if trained and trained[0].dtype in (torch.bfloat16, torch.float16):
            get_logger().warning(
                "the master weights are trained in %s: updates smaller than a 256th (bfloat16) of a weight are rounded "
                "away, which at the learning rates of RL is most of them; load the model with dtype=torch.float32",
                trained[0].dtype,
            )
        casts = self.args.use_transformers_continuous_batching and (self.args.bf16 or self.args.fp16)
        if casts and any(p.dtype == torch.float32 for p in self.model.parameters() if p.requires_grad):
            # PEFT makes adapters in float32 whatever the model is loaded in.
            adapters = isinstance(self.accelerator.unwrap_model(self.model), PeftModel)
            what, remedy = ("adapters", ", with the model loaded in bfloat16") if adapters else ("master weights", "")
            half = "bf16" if self.args.bf16 else "fp16"
            raise ValueError(
                "use_transformers_continuous_batching casts the model for good before generating, which would round "
                f"float32 {what}; set use_transformers_continuous_batching=False, or {half}=False{remedy}"
            )

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """[`trl.GRPOTrainer.create_model_card`], without its links to `None` where the model comes from a folder."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            source = Path(getattr(self.model.config, "_name_or_path", "")).name or type(self.model).__name__
            mend_card(Path(self.args.output_dir) / "README.md", source, self.n_quantized > 0)

    def _process_state(self) -> dict[str, Any]:
        # Completions are sampled for several optimizer steps at once, and a checkpoint may fall between two of them.
        rollouts = {
            "micro_step": self._step,
            "batches": self._buffered_inputs,
            "tokens_seen": self.state.num_input_tokens_seen,
            "split": self._batch_split(),
        }
        metrics = {name: [float(value) for value in values] for name, values in self._metrics["train"].items()}
        # TRL writes these two as well, but after the checkpoint is complete.
        entropy = {"coefficient": self.entropy_coef, "last": self._last_world_entropy}
        return {**super()._process_state(), "rollouts": rollouts, "metrics": metrics, "entropy": entropy}

    def _batch_split(self) -> dict[str, int]:
        """What decides which micro-batch of which rollout an optimizer step trains on."""
        return {
            "steps_per_generation": self.args.steps_per_generation,
            "num_iterations": self.num_iterations,
            "per_device_train_batch_size": self.args.per_device_train_batch_size,
        }

    def _load_process_state(self, state: dict[str, Any], exact: bool) -> None:
        super()._load_process_state(state, exact)
        if exact:
            rollouts = state["rollouts"]
            split = self._batch_split()
            before = rollouts.get("split", split)  # unknown in older checkpoints
            if before == split:
                self._step, self._buffered_inputs = rollouts["micro_step"], rollouts["batches"]
            else:
                get_logger().warning(
                    "the checkpoint was written with %s and is resumed with %s: rollouts start anew, so that this run "
                    "does not repeat one that was never stopped",
                    _in_words(before),
                    _in_words(split),
                )
            self.state.num_input_tokens_seen = rollouts["tokens_seen"]
            self._metrics["train"].clear()  # of what the step that failed had added to them
            self._metrics["train"].update(state["metrics"])
        if self.use_adaptive_entropy:
            self.entropy_coef, self._last_world_entropy = state["entropy"]["coefficient"], state["entropy"]["last"]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        # The epoch has begun before a Trainer loads them, and the states of then belong to no step.
        self._boundary.remember(self.state.global_step)

    def _restore_process(self, checkpoint: str) -> None:
        super()._restore_process(checkpoint)
        # The order of prompts is drawn once an epoch from a generator that belongs to the sampler of this trainer.
        self._epochs_begun = math.floor(TrainerState.load_from_json(f"{checkpoint}/trainer_state.json").epoch or 0)
        if self.args.sync_ref_model:
            get_logger().warning(
                "the synchronized reference policy is not in checkpoints: it starts from the model again"
            )

    def _get_train_sampler(self, dataset: Any = None):
        sampler = super()._get_train_sampler(dataset)
        for _ in range(self._epochs_begun):
            next(iter(sampler), None)
        self._epochs_begun = 0
        return sampler


def _in_words(options: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _check_dataset(name: str, dataset: Any, needs_prompt: bool) -> None:
    if dataset is None:
        return
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise ValueError(f"{name} is empty")
    columns = getattr(dataset, "column_names", None)
    if needs_prompt and columns is not None and "prompt" not in columns:
        raise ValueError(f"{name} has no column 'prompt'; it has {', '.join(columns)}")
