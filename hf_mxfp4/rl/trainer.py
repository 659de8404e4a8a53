# SPDX-License-Identifier: Apache-2.0
"""`MXFP4GRPOTrainer`: TRL's GRPO for policies whose linear layers compute in MXFP4."""

import contextlib
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad

from .._logging import get_logger
from ..adapters import is_packed_with_adapters, policy_parameters
from ..checkpoint import why_incomplete
from ..layers import (
    QUANTIZED,
    TRAINABLE,
    cached_weights,
    fallback_thresholds,
    matrix_names,
    random_layers,
    uncached_weights,
)
from .aqn import NoiseReport, NormNoise
from .callbacks import EntropyCallback, ErrorCallback, FallbackCallback, QuantizationStepCallback
from .config import MXFP4GRPOConfig
from .resume import ExactResumeMixin
from .reward_guard import guard_reward
from .rollout_routing import BATCH_KEY
from .router_training import RouterTraining
from .step_boundary import StepBoundary
from .vllm_sync import rollout_parameters


class MXFP4GRPOTrainer(ExactResumeMixin, RouterTraining):
    """[`trl.GRPOTrainer`] with adaptive quantization noise in rollouts, correction of the mismatch it makes, and
    callbacks for policy entropy and quantization error.

    Takes the arguments of [`trl.GRPOTrainer`]; `args` is an [`MXFP4GRPOConfig`], and `quantization_config` an
    `MXFP4RLConfig` when `model` is a name. A failing reward function raises `RewardError`, and whatever ends training
    early, what was trained so far is saved as a checkpoint first. A resumed run repeats the one that was never stopped,
    see [`ExactResumeMixin`].

    Raises:
        ValueError: the model has no MXFP4 layer (unless `allow_full_precision`), a dataset is empty, the model has no
            norm for the noise, or an option would damage the master weights.
    """

    _tag_names = ["trl", "grpo", "mxfp4", "hf-mxfp4"]

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
        needs_prompt = kwargs.get("environment_factory") is None
        _check_dataset("train_dataset", train_dataset, needs_prompt)
        for name, dataset in (eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}).items():
            _check_dataset(f"eval_dataset {name}".strip(), dataset, needs_prompt)
        functions = reward_funcs if isinstance(reward_funcs, list) or reward_funcs is None else [reward_funcs]
        if functions is not None:
            functions = [guard_reward(function) for function in functions]
        if quantization_config is None and args.beta != 0 and not isinstance(model, str):
            # Otherwise TRL loads the reference policy in full precision beside a quantized policy.
            quantization_config = getattr(model.config, "quantization_config", None)
        super().__init__(
            model,
            functions,
            args,
            train_dataset,
            eval_dataset,
            quantization_config=quantization_config,
            **kwargs,
        )
        quantized = [module for module in self.model.modules() if isinstance(module, QUANTIZED)]
        self.n_quantized = sum(len(matrix_names("", module)) for module in quantized)
        self._check_model()
        seed = args.seed if args.aqn_seed is None else args.aqn_seed
        self.noise = NormNoise(self.model, seed) if args.aqn else None
        self.entropy_callback = EntropyCallback(args.entropy_collapse, args.entropy_explosion)
        self.add_callback(self.entropy_callback)
        # First in line, so that what it adds to the logs reaches the trackers, which are callbacks too.
        self.callback_handler.callbacks.insert(0, self.callback_handler.callbacks.pop())
        self.error_callback: ErrorCallback | None = None
        # Packed weights are frozen, and the weights that their error would be measured against are gone.
        trainable = next((module for module in self.model.modules() if isinstance(module, TRAINABLE)), None)
        if args.error_every and args.error_layers and trainable is not None:
            if trainable.config.packing_obstacle:
                get_logger().warning("no error components are measured: %s", trainable.config.packing_obstacle)
            else:
                self.error_callback = ErrorCallback(args.error_every, args.error_layers, record=self._record)
                self.add_callback(self.error_callback)
        if fallback_thresholds(self.model):
            self.add_callback(FallbackCallback(record=self._record))
        if random_layers(self.model):
            self.add_callback(QuantizationStepCallback())
        self._watch_routers()
        if self.use_vllm:
            self._push_rollout_policy_to_vllm()
        self._boundary = StepBoundary(self._process_state)
        self.add_callback(self._boundary)
        self._epochs_begun = 0
        get_logger().info(
            "MXFP4GRPOTrainer: n_quantized=%d, noise on %s norms, rollout correction %s",
            self.n_quantized,
            len(self.noise.norms) if self.noise else "no",
            "on" if args.rollout_correction else "off",
        )

    # ---- rollouts -------------------------------------------------------------------------------------------------

    def _generate(self, prompts: list):
        with self._rollout_weights(), self._rollout_noise() as sigma:
            with self.routing.recording() if self._replays else contextlib.nullcontext():
                output = list(super()._generate(prompts))
            if self._replays:
                self.routing.keep(output[0], output[1])
            if sigma > 0 and self._corrects_rollouts(output):
                output[4] = self._score(output[0], output[1])
        return tuple(output)

    def _rollout_weights(self) -> contextlib.AbstractContextManager[None]:
        return cached_weights() if self.args.cache_rollout_weights else uncached_weights()

    def _sigma(self) -> float:
        """Standard deviation of the noise at this step; 0 outside of training."""
        if self.noise is None or not self.model.training:
            return 0.0
        return self.args.noise_schedule.sigma(self.state.global_step, self.state.max_steps)

    @contextlib.contextmanager
    def _rollout_noise(self) -> Iterator[float]:
        """Noise for one rollout; gives its standard deviation, 0 outside of training."""
        if self.noise is None or not self.model.training:
            yield 0.0
            return
        sigma = self._sigma()
        if self.use_vllm:
            # The noise travels with the weights; a new push is due even if they have not changed.
            self._last_loaded_step = -1
            self.noise.last_report = NoiseReport(0.0, 0.0, 0) if sigma == 0 else None
            yield sigma
            if self.noise.last_report is None:
                raise RuntimeError("adaptive quantization noise did not reach vLLM: no weights were pushed")
            self._record_noise(self.noise.last_report)
            return
        with self.noise.active(self.state.global_step, sigma):
            yield sigma
        self._record_noise(self.noise.last_report)

    def _record_noise(self, report: NoiseReport) -> None:
        self._record("aqn/sigma", report.sigma)
        self._record("aqn/measured_std", report.measured_std)
        self._record("aqn/n_modules", report.modules)

    def _push_rollout_policy_to_vllm(self) -> None:
        generation = self.vllm_generation
        named_parameters = generation._iter_named_params

        @functools.wraps(named_parameters)
        def rollout_policy():
            # TRL would merge the adapters, which for packed layers means to quantize their sum with the weight; the
            # policy that trains adds them to the quantized weight.
            packed = is_packed_with_adapters(self.model)
            named = policy_parameters(self.model) if packed else named_parameters()
            return rollout_parameters(named, self.model, self.noise, self.state.global_step, self._sigma())

        generation._iter_named_params = rollout_policy
        layers = [module for module in self.model.modules() if isinstance(module, QUANTIZED)]
        if any(layer.config.activation_scheme is not None for layer in layers):
            get_logger().warning(
                "vLLM samples from the quantized weights with full-precision activations (W4A16); "
                "vllm_importance_sampling_correction accounts for the difference"
            )

    # ---- truncated importance sampling without vLLM ---------------------------------------------------------------

    def _corrects_rollouts(self, output: list) -> bool:
        has_images = output[6] is not None
        return self.args.rollout_correction and output[4] is None and not has_images

    @torch.no_grad()
    def _score(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[list[float]]:
        """Log-probabilities of the sampled tokens under the policy as it is now, one list per completion."""
        device = self.accelerator.device

        def batch(sequences: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
            ids = [torch.tensor(sequence) for sequence in sequences]
            masks = [torch.ones_like(sequence) for sequence in ids]
            padding = {"padding_side": side, "pad_to_multiple_of": self.pad_to_multiple_of}
            return (
                pad(ids, padding_value=self._tokenizer.pad_token_id, **padding).to(device),
                pad(masks, padding_value=0, **padding).to(device),
            )

        prompts, prompt_mask = batch(prompt_ids, "left")
        completions, completion_mask = batch(completion_ids, "right")
        logps = self._log_probs(prompts, prompt_mask, completions, completion_mask)
        return [row[: len(ids)].tolist() for row, ids in zip(logps, completion_ids, strict=True)]

    @torch.no_grad()
    def _log_probs(self, prompts, prompt_mask, completions, completion_mask) -> torch.Tensor:
        """Log-probabilities of the last rollout, routed as it was under router replay."""
        with (
            self._rollout_weights(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
            self.routing.scoring(prompt_mask, completion_mask) if self._replays else contextlib.nullcontext(),
        ):
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([prompts, completions], dim=1),
                torch.cat([prompt_mask, completion_mask], dim=1),
                completions.size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        return logps

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self._replays:
            output[BATCH_KEY] = self.routing.padded(output["prompt_mask"], output["completion_ids"])
        sampled = output.get("sampling_per_token_logps")
        corrects = sampled is not None and not self.use_vllm and self.args.rollout_correction and self.model.training
        # What TRL itself computed, if anything, is under free routing.
        scored = "old_per_token_logps" in output
        if scored and self._replays or not scored and corrects:
            output["old_per_token_logps"] = self._log_probs(
                output["prompt_ids"], output["prompt_mask"], output["completion_ids"], output["completion_mask"]
            )
        if not corrects:
            return output
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        difference = torch.nan_to_num(output["old_per_token_logps"] - sampled) * mask
        ratio = difference.exp()
        self._record_ratio(ratio, mask)
        # GRPOTrainer multiplies the loss of a token by its advantage, and takes one per token as well as one per
        # completion: the door for a per-token weight.
        cap = self.args.rollout_correction_cap
        output["advantages"] = output["advantages"].unsqueeze(1) * ratio.clamp(max=cap)
        return output

    def _record_ratio(self, ratio: torch.Tensor, mask: torch.Tensor) -> None:
        tokens = ratio[mask.bool()]
        tokens = tokens if tokens.numel() else torch.ones(1, device=ratio.device)
        clipped = (tokens > self.args.rollout_correction_cap).float().mean()
        stats = torch.stack([tokens.min(), tokens.mean(), tokens.max(), clipped])
        stats = self.accelerator.gather(stats.unsqueeze(0))
        self._record("sampling/importance_sampling_ratio/min", stats[:, 0].min().item())
        self._record("sampling/importance_sampling_ratio/mean", stats[:, 1].mean().item())
        self._record("sampling/importance_sampling_ratio/max", stats[:, 2].max().item())
        self._record("sampling/importance_sampling_ratio/clipped", stats[:, 3].mean().item())

    # ---- checks and logs -------------------------------------------------------------------------------------------

    def _record(self, name: str, value: float) -> None:
        """Add to the next training log, where values of one name are averaged."""
        self._metrics["train"][name].append(value)

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
            raise ValueError(
                "use_transformers_continuous_batching casts the model for good before generating, which would "
                "round float32 master weights; load the model in bfloat16, or set bf16=False"
            )

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def _process_state(self) -> dict[str, Any]:
        # Completions are sampled for several optimizer steps at once, and a checkpoint may fall between two of them.
        rollouts = {
            "micro_step": self._step,
            "batches": self._buffered_inputs,
            "tokens_seen": self.state.num_input_tokens_seen,
        }
        metrics = {name: [float(value) for value in values] for name, values in self._metrics["train"].items()}
        # TRL writes these two as well, but after the checkpoint is complete.
        entropy = {"coefficient": self.entropy_coef, "last": self._last_world_entropy}
        return {**super()._process_state(), "rollouts": rollouts, "metrics": metrics, "entropy": entropy}

    def _load_process_state(self, state: dict[str, Any], exact: bool) -> None:
        super()._load_process_state(state, exact)
        if exact:
            rollouts = state["rollouts"]
            self._step, self._buffered_inputs = rollouts["micro_step"], rollouts["batches"]
            self.state.num_input_tokens_seen = rollouts["tokens_seen"]
            self._metrics["train"].update(state["metrics"])
        if self.use_adaptive_entropy:
            self.entropy_coef, self._last_world_entropy = state["entropy"]["coefficient"], state["entropy"]["last"]

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

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """[`transformers.Trainer.train`]; an exception leaves a checkpoint of the last finished step behind.

        Raises `ValueError` when the checkpoint to resume from is not whole, or there is none that is.
        """
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            self._save_before_leaving(error)
            raise

    def _save_before_leaving(self, error: BaseException) -> None:
        step = self.state.global_step
        what = f"training stopped at step {step} by {type(error).__name__}: {error}"
        if step == 0 or self.optimizer is None:
            get_logger().error("%s; nothing was trained yet, so nothing was saved", what)
        elif self.accelerator.num_processes > 1:
            # Sharded weights are gathered by all ranks together, and the others may not be here.
            get_logger().error("%s; not saved, since other processes may still be training", what)
        elif self._boundary.inside_update:
            get_logger().error("%s, in the middle of an update; not saved, since the weights are half-updated", what)
        else:
            folder = Path(self._get_output_dir(trial=None)) / f"checkpoint-{step}"
            try:
                if why_incomplete(folder) is not None:
                    state = self._boundary.rewind(step)
                    if state is not None:
                        self._load_process_state(state, exact=True)
                    self._save_checkpoint(self.model, trial=None)
            except Exception as failure:
                get_logger().error("%s; saving failed too: %s: %s", what, type(failure).__name__, failure)
            else:
                get_logger().error("%s; saved as %s, resume with resume_from_checkpoint", what, folder)


def _check_dataset(name: str, dataset: Any, needs_prompt: bool) -> None:
    if dataset is None:
        return
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise ValueError(f"{name} is empty")
    columns = getattr(dataset, "column_names", None)
    if needs_prompt and columns is not None and "prompt" not in columns:
        raise ValueError(f"{name} has no column 'prompt'; it has {', '.join(columns)}")
