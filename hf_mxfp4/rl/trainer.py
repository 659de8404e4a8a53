# SPDX-License-Identifier: Apache-2.0
"""`MXFP4GRPOTrainer`: TRL's GRPO for policies whose linear layers compute in MXFP4 (arXiv 2605.20402).

One training step, in order, and what of this package has a part in it:

1. A step begins: `exit_checkpoint` remembers random states; layers that draw random numbers are told the step
   ([`QuantizationStepCallback`]). From here to its last backward pass `quantization` keeps quantized weights.
2. Completions are sampled (`_generate`), with `noise` on norms (or on what `vllm_policy` pushes), while `routing`
   records the experts. Around a single `generate` (`_generate_single_turn`) the log-probability of every token is
   recorded ([`recorded_log_probs`]); `batched_rollouts` does both under continuous batching.
3. Completions are scored: reward functions are guarded.
4. The batch is made (`_generate_and_score_completions`): `routing` adds the experts to it.
5. The loss is computed (`compute_loss`): `routing` has the routers choose as they did, `activation_callback` measures
   the inputs of layers, and `correction` weights the advantages once TRL has computed log-probabilities.
6. Gradients are computed and the optimizer steps, in [`transformers.Trainer`]. Replay ends before the optimizer does.
7. A step ends: callbacks measure errors and movement.
8. What was measured is logged, checkpoints are written (`_process_state` is what they have in addition to TRL's), and
   evaluations run on the policy without noise (`evaluate`).

Components that are switched off are `None`. Methods of TRL are overridden here, except for those that
[`QuantizedTrainerMixin`] and [`ExactResumeMixin`] override for any Trainer. What is measured every few steps is listed
in [`hf_mxfp4.rl.callbacks.MEASUREMENTS`].
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from .._logging import get_logger
from ..checkpoint import decoration
from ..files import replace_file
from ..layers import cached_weights
from ..utils import evaluation_mode
from .batched_rollouts import BatchedRollouts
from .callbacks import MEASUREMENTS, ActivationErrorCallback, ErrorCallback, StepMovementCallback
from .callbacks.entropy import EntropyCallback
from .callbacks.logs import shorten_printed_logs
from .config import (
    MXFP4GRPOConfig,
    check_adapter,
    check_arguments,
    check_policy,
    check_reference,
    check_tokens,
    count_quantized,
    first_prompts,
)
from .noise import NormNoise
from .rewards import guard_reward
from .rollout import RolloutCorrection, recorded_log_probs
from .router_replay import BATCH_KEY, RouterReplay
from .step_quantization import QuantizedTrainerMixin, StepQuantization
from .vllm import VLLMPolicy
from .vllm_engine import vllm_in_scheme


class MXFP4GRPOTrainer(QuantizedTrainerMixin, GRPOTrainer):
    """[`trl.GRPOTrainer`] with adaptive quantization noise in rollouts, correction of the mismatch it makes, and
    callbacks for policy entropy and quantization error.

    Takes the arguments of [`trl.GRPOTrainer`]; `args` is an [`MXFP4GRPOConfig`], and `quantization_config` an
    `MXFP4RLConfig` when `model` is a name. A failing reward function raises `RewardError`, and whatever ends training
    early, what was trained so far is saved as a checkpoint first, see [`train`]. A resumed run repeats the one that was
    never stopped, see [`ExactResumeMixin`].

    Attributes:
        n_quantized: weight matrices of the policy that are in MXFP4.
        noise, routing, vllm_policy, batched_rollouts: noise on norms, replay of experts, weights for vLLM, and
            continuous batching; `None` where switched off.
        entropy_callback: alarms.
        error_callback, activation_callback, movement_callback: measurements; `None` where switched off.

    Raises:
        ValueError: the model has no MXFP4 layer (unless `allow_full_precision`), a dataset is empty, the model has no
            norm for the noise, `peft_config` names a target that the model has not, or a trained adapter would be
            replaced or stay frozen.
        TypeError: `args` is another config, or `quantization_config` is the name of a scheme.
    """

    error_callback: ErrorCallback | None
    activation_callback: ActivationErrorCallback | None
    movement_callback: StepMovementCallback | None

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
        if args is None:
            args = MXFP4GRPOConfig()
        needs_prompt = kwargs.get("environment_factory") is None
        check_arguments(args, quantization_config)
        prompts = first_prompts(train_dataset, eval_dataset, needs_prompt)  # before a seed is set: transforms may draw
        check_adapter(model, kwargs.get("peft_config"))
        kwargs["quantization_config"] = quantization_config
        if isinstance(reward_funcs, list):
            reward_funcs = list(reward_funcs)  # TRL adds to the list
        with vllm_in_scheme(args):
            super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, **kwargs)
        # TRL has added the rewards of environments to both lists.
        self.reward_funcs: list[Any] = list(map(guard_reward, self.reward_funcs, self.reward_func_names))
        self.n_quantized = count_quantized(self.model)
        check_tokens(self._tokenizer, prompts)
        advice = "set allow_full_precision=True for a baseline"
        if args.allow_full_precision:
            advice = ""
        check_policy(self.model, self.n_quantized, otherwise=advice)
        check_reference(self.model, self.ref_model)
        self._make_components(args)
        self._add_callbacks(args)
        n_norms = 0
        if self.noise is not None:
            n_norms = len(self.noise.norms)
        get_logger().info(
            "MXFP4GRPOTrainer: n_quantized=%d, noise on %d norms, rollout correction %s",
            self.n_quantized, n_norms, args.rollout_correction,
        )  # fmt: skip

    def _make_components(self, args: MXFP4GRPOConfig) -> None:
        """Make the components of a training step, which the docstring of this module lists."""
        self.quantization = StepQuantization(self.model, self.ref_model, args, self.accelerator, self._record)
        self.noise: NormNoise | None = None
        if args.aqn:
            self.noise = NormNoise(self.model, args.seed)
        self._warned_of_noise = False
        self.correction = RolloutCorrection(args, self.accelerator, self._record)
        self.routing: RouterReplay | None = None
        self._check_turns()
        if args.router_replay:
            llm = self.vllm_generation.llm if self.use_vllm else None
            is_scored_by_trl = self.use_vllm and self.vllm_importance_sampling_correction
            self.routing = RouterReplay(self.model, self.accelerator, self._record, llm, is_scored_by_trl)
        self._in_step = contextlib.ExitStack()
        self.batched_rollouts: BatchedRollouts | None = None
        if self.use_transformers_continuous_batching:
            self._check_batched_rollouts()
            self.batched_rollouts = BatchedRollouts(
                self.model, self.generation_config, self.continuous_batching_config, self.quantization.refresh_graphs
            )
        self.vllm_policy: VLLMPolicy | None = None
        if self.use_vllm:
            self._push_rollout_policy_to_vllm()

    def _check_turns(self) -> None:
        """Raise `ValueError` for rollouts of several turns with what needs a single one."""
        is_custom = self.rollout_func is not None or self.environment_factories is not None
        if self.args.router_replay and (self.tools or is_custom):
            raise ValueError(
                "router_replay=True records rollouts of one generation each; it does not work with tools, "
                "environment_factory or rollout_func"
            )
        is_shared = self.quantization.is_sharded and self.accelerator.num_processes > 1
        if self.tools and is_shared and not self.use_vllm:
            raise ValueError(
                "with tools each process generates as often as its rollouts call them, and processes that shard "
                "weights (FSDP, ZeRO-3) can only generate together: use DDP, ZeRO-2 or use_vllm=True"
            )

    def _check_batched_rollouts(self) -> None:
        """Raise `ValueError` where processes must generate in step, which continuous batching does not."""
        if self.quantization.is_sharded:
            raise ValueError(
                "with use_transformers_continuous_batching=True each process takes as many passes as its own "
                "completions need, and processes that shard weights (FSDP, ZeRO-3) can only generate together: use "
                "DDP, ZeRO-2 or use_vllm=True"
            )

    def _add_callbacks(self, args: MXFP4GRPOConfig) -> None:
        """Add what measures, and what watches a run."""
        for attribute, measurement in MEASUREMENTS.items():
            every = getattr(args, measurement.option)
            callback = None
            if every:
                callback = measurement.for_trainer(self, every)
            setattr(self, attribute, callback)
            if callback is not None:
                self.add_callback(callback)
        self.entropy_callback = EntropyCallback()
        self._add_run_callbacks(self.entropy_callback)
        shorten_printed_logs(self.callback_handler.callbacks)

    # ---- training -------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any):
        try:
            return super().train(*args, **kwargs)
        finally:
            self._close_batched_rollouts()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            if not self.quantization.is_training:
                self._close_batched_rollouts()

    def _close_batched_rollouts(self) -> None:
        """Give back the memory of continuous batching, whose graphs read quantized weights that are given back too."""
        if self.batched_rollouts is not None:
            self.batched_rollouts.close()

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Gradient checkpointing runs forward passes in the backward pass: what they depend on must last until then.
        with contextlib.ExitStack() as self._in_step, self.quantization.micro_batch(self.state.global_step):
            return super().training_step(*args, **kwargs)

    # ---- a rollout ------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return batch
        self.correction.check(batch, self.state.global_step)
        if self.routing is not None:
            batch[BATCH_KEY] = self.routing.padded(batch["prompt_mask"], batch["completion_ids"])
            if "old_per_token_logps" in batch and not self.routing.is_scored_by_trl:
                # What TRL computed is under free routing.
                batch["old_per_token_logps"] = self._replayed_log_probs(batch)
        return batch

    def _generate(self, prompts: list):
        with self._rollout_policy():
            if self.routing is None or not self.model.training:
                return super()._generate(prompts)
            with self.routing.recording():
                output = super()._generate(prompts)
            self.routing.keep(output[0], output[1])
        return output

    @contextlib.contextmanager
    def _rollout_policy(self) -> Iterator[None]:
        """Make the policy sample from kept quantized weights, and in training under noise, within this context."""
        sigma = self._sigma()
        is_noisy = self.noise is not None and self.model.training
        if self.use_vllm and (is_noisy or self.vllm_policy.has_noise):
            # The noise travels with the weights: a push is due even if they have not changed, to bring noise, or in
            # evaluation to take it away.
            self._last_loaded_step = -1
        noise: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if is_noisy and self.use_vllm:
            noise = self.noise.pushed(sigma)
        elif is_noisy:
            noise = self.noise.active(self.state.global_step, sigma)
        with self._weight_copies(), noise:
            yield
        if is_noisy:
            self._log_noise(sigma)

    def _weight_copies(self) -> contextlib.AbstractContextManager[None]:
        """Within this context each weight is quantized once, unless `step_weights` is uncached."""
        forms = {"none": "auto", "uncached": "none"}  # 'none' keeps nothing beyond the rollout
        return cached_weights(self.model, forms.get(self.args.step_weights, self.args.step_weights))

    def _sigma(self) -> float:
        """Return the standard deviation of the noise at this step; 0 outside of training."""
        if self.noise is None or not self.model.training:
            return 0.0
        return self.args.noise_schedule.sigma(self.state.global_step, self.state.max_steps)

    def _log_noise(self, sigma: float) -> None:
        """Record the noise of a rollout; warn once when rounding has taken it away."""
        report = self.noise.last_report
        self._record("aqn/sigma", sigma)
        self._record("aqn/measured_std", report.measured_std)
        self._record("aqn/n_modules", report.modules)
        if report.is_swallowed and not self._warned_of_noise:
            self._warned_of_noise = True
            get_logger().warning(
                "step %d: noise on norms was meant to have a standard deviation of %.2g and has %.2g: the dtype that "
                "they sample in rounds it away; raise aqn_sigma_end, or sample in float32",
                self.state.global_step, report.sigma, report.measured_std,
            )  # fmt: skip

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any):
        if not all(prompt_ids):
            raise ValueError("a prompt has no token, so nothing can be generated from it; leave its row out")
        if self.use_vllm:
            # Weights that are merged for it are to be summed in their own dtype.
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if self.batched_rollouts is not None:
            return self._generate_batched(prompt_ids)
        # accelerate puts autocast on the forward pass of what TRL trains, which for adapters `generate` goes past; and
        # in training mode dropout would draw another policy for each token.
        with recorded_log_probs(self.model) as recorder, evaluation_mode(self.model), self.accelerator.autocast():
            completions, log_probs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if self.model.training:
            log_probs = recorder.rows(completions)
        return completions, log_probs

    def _generate_batched(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]] | None]:
        """Sample completions by continuous batching, without TRL's cast of the policy, as `_generate_single_turn`."""
        is_noisy = self._sigma() > 0
        with evaluation_mode(self.model), self.accelerator.autocast(), self.quantization.serving_graphs():
            completions, log_probs = self.batched_rollouts.generate(prompt_ids, is_noisy)
        if not self.model.training:
            return completions, None
        return completions, log_probs

    def _push_rollout_policy_to_vllm(self) -> None:
        """Have TRL push to vLLM what the policy computes with, noise included, in place of its master weights."""

        def rollout() -> tuple[int, float]:
            return self.state.global_step, self._sigma()

        self.vllm_policy = VLLMPolicy(self.vllm_generation, self.model, self.args, self.noise, rollout, self._record)

    @torch.no_grad()
    def _replayed_log_probs(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return log-probabilities ``[B, T]`` of the last rollout's completions, with the experts of the rollout."""
        with (
            self._weight_copies(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
            self.routing.scoring(batch["prompt_mask"], batch["completion_mask"]),
        ):
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
                torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
                batch["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        return logps

    # ---- the loss -------------------------------------------------------------------------------------------------

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        self.quantization.reference.clear()  # it has scored the rollout
        if self.routing is not None:
            self._in_step.enter_context(self.routing.training(inputs))
        n_logged = len(self._metrics["train"].get("entropy", ()))
        watching: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.activation_callback is not None:
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            watching = self.activation_callback.observing(mask)
        with watching, self.correction.weighting(inputs, self.state.global_step) as weighted:
            loss = super().compute_loss(model, weighted, *args, **kwargs)
        entropies = self._metrics["train"].get("entropy", [])
        if len(entropies) > n_logged:
            n_tokens = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum()
            if self.accelerator.reduce(n_tokens, reduction="sum").item() == 0:
                # TRL logs 0, which is the entropy of a policy that has collapsed. Its log leaves NaN out.
                entropies[n_logged:] = [math.nan] * (len(entropies) - n_logged)
        return loss

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, mask: Any, width: int, *args, **kwargs):
        replay: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.routing is not None:
            replay = self.routing.scoring_next(mask, width)
        with replay:
            output = super()._get_per_token_logps_and_entropies(model, ids, mask, width, *args, **kwargs)
        self.correction.take_log_probs(output[0])
        return output

    # ---- logs -----------------------------------------------------------------------------------------------------

    def _record_mean(self, name: str, value: float) -> None:
        """[`_record`] the mean over all processes, which must all call this; NaN does not count."""
        values = self.accelerator.gather(torch.tensor([value], dtype=torch.float32, device=self.accelerator.device))
        self._record(name, values.nanmean().item())

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """[`trl.GRPOTrainer.create_model_card`], without links to `None`, with the import that MXFP4 layers need."""
        with decoration():
            super().create_model_card(*args, **kwargs)
            if self.is_world_process_zero():
                source = Path(getattr(self.model.config, "_name_or_path", "")).name or type(self.model).__name__
                path = Path(self.args.output_dir) / "README.md"
                text = path.read_text(encoding="utf-8")
                text = text.replace("[None](https://huggingface.co/None)", f"the local model `{source}`")
                text = text.replace('model="None"', 'model="path/to/this/model"')
                if self.n_quantized:
                    pipeline = "from transformers import pipeline\n"
                    text = text.replace(pipeline, f"import hf_mxfp4  # the layers\n{pipeline}")
                replace_file(path, text)

    def _process_state(self) -> dict[str, Any]:
        # With use_adaptive_entropy TRL moves them before the optimizer steps.
        controller = self.entropy_coef, self._last_world_entropy
        return {**super()._process_state(), "entropy_controller": controller}

    def _forget_step(self) -> None:
        super()._forget_step()
        self.correction.forget_step()

    def _load_process_state(self, state: dict[str, Any]) -> None:
        super()._load_process_state(state)
        if self.use_adaptive_entropy:
            self.entropy_coef, self._last_world_entropy = state["entropy_controller"]
