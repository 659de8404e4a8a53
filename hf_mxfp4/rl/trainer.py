# SPDX-License-Identifier: Apache-2.0
"""`MXFP4GRPOTrainer`: TRL's GRPO for policies whose linear layers compute in MXFP4 (arXiv 2605.20402).

One training step, in the order in which it happens, and what of this package has a part in it:

1. A step begins: the boundary of `checkpoints` remembers random states, for a checkpoint of this point; layers that
   draw random numbers are told the step ([`QuantizationStepCallback`]). From here to the last backward pass of the step
   `quantization` keeps what each weight was quantized to.
2. Completions are sampled (`_generate`), within what makes the policy that samples: `generation` keeps the quantized
   copies of weights, `rollout_noise` puts noise on norms (or on what `vllm_policy` pushes), and
   `replay` records the experts. Around a single `generate` (`_generate_single_turn`), `correction` records the
   log-probability of every token, and `generation` sets the dtype, switches dropout off, and compiles.
3. Completions are scored (`_calculate_rewards`): reward functions are guarded.
4. The batch is made (`_generate_and_score_completions`): `replay` adds the experts to it, and `sampler` replaces groups
   that earn the same by groups of other prompts, for each of which 2 and 3 come again.
5. The loss is computed (`compute_loss`): `replay` has the routers choose as they did, `monitor` measures the inputs of
   layers, and `correction` weights the advantages once TRL has computed log-probabilities.
6. Gradients are computed and the optimizer steps, in [`transformers.Trainer`]. `replay` ends before the optimizer does.
7. A step ends: the callbacks of `monitor` measure errors, gradients and movement.
8. What was measured is logged (`log`), `checkpoints` are written (`_process_state` is what they have beside TRL's), and
   evaluations run on the policy without noise (`evaluate`).

`rollout_noise`, `vllm_policy`, `replay` and `sampler` are `None` when they are switched off. Components are
told what they need (the step, the batch, what records a metric), and `checkpoints` alone keeps the trainer. What is
overridden of TRL is overridden here, apart from what [`ExactResumeMixin`] does to any Trainer.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.rewards import get_soft_overlong_punishment

from .._logging import get_logger
from ..checkpoint import decoration
from .callbacks.monitor import PolicyMonitor
from .callbacks.run_facts import mend_card, run_facts
from .checks import (
    check_adapter,
    check_arguments,
    check_policy,
    check_reference,
    check_router_replay,
    check_tokens,
    count_quantized,
    reference_config,
    sharding_of,
)
from .config import MXFP4GRPOConfig
from .noise.rollouts import RolloutNoise
from .resume.run import RunCheckpoints
from .resume.state import ExactResumeMixin, random_states_kept
from .rewards.guard import guard_reward
from .rollout.correction import RolloutCorrection
from .rollout.correction_options import limits_in_force
from .rollout.generation import RolloutGeneration, describe_rollout_weights
from .rollout.replay import BATCH_KEY, RouterReplay
from .rollout.sampling import DynamicSampling, equal_rewards, logs_set_aside
from .rollout.served_experts import experts_returned
from .rollout.vllm import VLLMPolicy
from .rollout.vllm_start import vllm_in_scheme
from .step_quantization import StepQuantization


class MXFP4GRPOTrainer(ExactResumeMixin, GRPOTrainer):
    """[`trl.GRPOTrainer`] with adaptive quantization noise in rollouts, correction of the mismatch it makes, and
    callbacks for policy entropy and quantization error.

    Takes the arguments of [`trl.GRPOTrainer`]; `args` is an [`MXFP4GRPOConfig`], and `quantization_config` an
    `MXFP4RLConfig` when `model` is a name. A failing reward function raises `RewardError`, and whatever ends training
    early, what was trained so far is saved as a checkpoint first, see [`train`]. A resumed run repeats the one that was
    never stopped, see [`ExactResumeMixin`].

    Attributes:
        n_quantized: weight matrices of the policy that are in MXFP4.
        noise: on norms, in rollouts; `None` without.
        routing: what records and replays experts, under `router_replay`; else `None`.
        entropy_callback, error_callback, activation_callback, movement_callback, router_callback, report_callback: what
            watches; `None` where it is off.

    Raises:
        ValueError: the model has no MXFP4 layer (unless `allow_full_precision`), a dataset is empty, the model has no
            norm for the noise, an option would damage the master weights, `peft_config` names a target that the model
            has not, or a trained adapter would be replaced or stay frozen.
        TypeError: `args` is another config, or `quantization_config` is the name of a scheme.
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
        needs_prompt = kwargs.get("environment_factory") is None
        check_arguments(args, quantization_config, train_dataset, eval_dataset, needs_prompt)
        check_adapter(model, kwargs.get("peft_config"))
        functions = reward_funcs if isinstance(reward_funcs, list) or reward_funcs is None else [reward_funcs]
        if functions is not None:
            functions = [guard_reward(function) for function in functions]
        scheme = reference_config(model, quantization_config, args)
        with vllm_in_scheme(args), experts_returned(args):
            super().__init__(model, functions, args, train_dataset, eval_dataset, quantization_config=scheme, **kwargs)
        self.n_quantized = count_quantized(self.model)
        check_tokens(self._tokenizer, train_dataset, eval_dataset)
        check_policy(self.model, self.n_quantized, args, self.accelerator)
        check_reference(self.model, self.ref_model, args)
        self._make_components()
        if self.use_vllm:
            self._push_rollout_policy_to_vllm()
        get_logger().info(
            "MXFP4GRPOTrainer: n_quantized=%d, noise on %s, rollout correction %s, rollout weights: %s",
            self.n_quantized,
            self.rollout_noise.describe() if self.rollout_noise is not None else "nothing",
            (limits_in_force(args) or ("off",))[0],
            describe_rollout_weights(self.model, args.cache_rollout_weights, args.rollout_weights),
        )

    def _make_components(self) -> None:
        """Make what a training step consists of, as the module says."""
        args, model, accelerator, sharding = self.args, self.model, self.accelerator, sharding_of(self.accelerator)
        batching, is_custom = self.continuous_batching_config, self.rollout_func is not None
        config = None if self.use_vllm else self.generation_config
        self.generation = RolloutGeneration(args, accelerator, config, batching, is_custom, sharding)
        self.quantization = StepQuantization(model, self.ref_model, args, accelerator, sharding, self._record)
        self.rollout_noise: RolloutNoise | None = None
        if args.aqn:
            self.rollout_noise = RolloutNoise(model, args, self.generation.is_compiled, self._record)
        self.vllm_policy: VLLMPolicy | None = None
        self.correction = RolloutCorrection(args, accelerator, batching, self._record)
        self.sampler: DynamicSampling | None = None
        if args.dynamic_sampling:
            pad_token = self._tokenizer.pad_token_id
            self.sampler = DynamicSampling(args, self.train_dataset, accelerator, pad_token, self._record)
        if args.overlong_buffer:
            self._punish_long_completions(args)
        facts = functools.partial(run_facts, self)  # gathered when training begins
        self.monitor = PolicyMonitor(model, args, self.n_quantized, self._record, self._record_mean, facts)
        self.replay: RouterReplay | None = None
        if args.router_replay:
            check_router_replay(bool(self.tools) or is_custom or self.environment_factories is not None)
            llm = self.vllm_generation.llm if self.use_vllm else None
            is_scored_by_trl = self.use_vllm and self.vllm_importance_sampling_correction
            self.replay = RouterReplay(model, accelerator, self._record, llm, is_scored_by_trl)
        self._in_step = contextlib.ExitStack()
        self.checkpoints = RunCheckpoints(self)
        self.callback_handler.callbacks[:0] = self.monitor.first
        for callback in (*self.monitor.last, self.checkpoints.boundary):
            self.add_callback(callback)

    def _punish_long_completions(self, args: MXFP4GRPOConfig) -> None:
        """Make TRL's soft overlong punishment the last reward function, as TRL adds the rewards of environments."""
        function = get_soft_overlong_punishment(args.max_completion_length, args.overlong_buffer)
        self.reward_funcs.append(function)
        self.reward_func_names.append(function.__name__)
        self.reward_processing_classes.append(None)
        self.reward_weights = torch.cat([self.reward_weights, torch.tensor([args.overlong_penalty])])

    # ---- training -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """[`transformers.Trainer.train`]; an exception, Ctrl-C or SIGTERM leaves a checkpoint of the last finished step
        behind.

        Raises `ValueError` when the checkpoint to resume from is not whole, or there is none that is.
        """
        with self.checkpoints.left_behind(), self.quantization.training():
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Gradient checkpointing runs forward passes in the backward pass: what they depend on must last until then.
        with contextlib.ExitStack() as self._in_step, self.quantization.micro_batch(self.state.global_step):
            return super().training_step(*args, **kwargs)

    # ---- a rollout ------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self._rollout(inputs)
        if not self.model.training:
            return batch
        # TRL's `frac_reward_zero_std` is that of the batch, zero or one, where rewards are scaled by the batch.
        equal = self._equal_groups()
        self._record("dynamic_sampling/zero_variance_share", equal.float().mean().item())
        if self.sampler is None:
            return batch
        replacement = self.sampler.replacement(batch, inputs, equal, self._step)
        with logs_set_aside(self):
            while replacement.goes_on:
                found = self._rollout(replacement.next_inputs())
                replacement.take(found, self._equal_groups())
        return self.sampler.finish(replacement, self.state.global_step)

    def _rollout(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """One rollout of these rows of the dataset, scored, as a batch."""
        batch = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return batch
        is_same = self.vllm_policy is not None and self.vllm_policy.is_what_trains()
        self.correction.check(batch, self.state.global_step, is_same)
        if self.replay is not None:
            batch[BATCH_KEY] = self.replay.padded(batch["prompt_mask"], batch["completion_ids"])
            if "old_per_token_logps" in batch and not self.replay.is_scored_by_trl:
                # What TRL computed is under free routing.
                batch["old_per_token_logps"] = self._replayed_log_probs(batch)
        return batch

    def _generate(self, prompts: list):
        with self._rollout_policy():
            if self.replay is None or not self.model.training:
                return super()._generate(prompts)
            with self.replay.recording():
                output = super()._generate(prompts)
            self.replay.keep(output[0], output[1])
        return output

    @contextlib.contextmanager
    def _rollout_policy(self) -> Iterator[None]:
        """The policy as it samples: with copies of its weights, and with noise in training."""
        step, sigma = self.state.global_step, self._sigma()
        is_noisy = self.rollout_noise is not None and self.model.training
        if self.use_vllm and (is_noisy or self.vllm_policy.has_noise):
            # The noise travels with the weights: a push is due even if they have not changed, to bring noise, or in
            # evaluation to take it away.
            self._last_loaded_step = -1
        noise = contextlib.nullcontext()
        if is_noisy:
            noise = self.rollout_noise.pushed(step, sigma) if self.use_vllm else self.rollout_noise.active(step, sigma)
        with self.generation.weight_copies(self.model), noise:
            yield

    def _sigma(self) -> float:
        """Standard deviation of the noise at this step; 0 outside of training."""
        if self.rollout_noise is None or not self.model.training:
            return 0.0
        return self.rollout_noise.sigma(self.state.global_step, self.state.max_steps)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any):
        if self.use_vllm:
            # Weights that are merged for it are to be summed in their own dtype.
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if not self.model.training:
            with self.generation.sampling(self.model):
                return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        with self.correction.recording(self.model) as log_probs_of, self.generation.sampling(self.model):
            completions, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        return completions, log_probs_of(completions)

    def _push_rollout_policy_to_vllm(self) -> None:
        def rollout() -> tuple[int, float]:
            return self.state.global_step, self._sigma()

        noise, record = self.rollout_noise, self._record
        self.vllm_policy = VLLMPolicy(self.vllm_generation, self.model, self.args, noise, rollout, record)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._rewards = super()._calculate_rewards(*args, **kwargs)  # [all processes' completions, functions]
        return self._rewards

    def _equal_groups(self) -> torch.Tensor:
        """Which groups of the last rollout earn the same: bool ``[groups of all processes]``."""
        return equal_rewards(self._rewards, self.reward_weights.to(self._rewards.device), self.num_generations)

    @torch.no_grad()
    def _replayed_log_probs(self, batch: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities ``[B, T]`` of the last rollout's completions, routed as it was."""
        masks = batch["prompt_mask"], batch["completion_mask"]
        with (
            self.generation.weight_copies(self.model),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
            self.replay.scoring(*masks),
        ):
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
                torch.cat(masks, dim=1),
                batch["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        return logps

    # ---- the loss -------------------------------------------------------------------------------------------------

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        self.quantization.release_reference()  # it has scored the rollout
        if self.replay is not None:
            self._in_step.enter_context(self.replay.training(inputs))
        logged = len(self._metrics["train"].get("entropy", ()))
        with self.monitor.watching(inputs), self.correction.weighting(inputs, self.state.global_step) as weighted:
            loss = super().compute_loss(model, weighted, *args, **kwargs)
        entropies = self._metrics["train"].get("entropy", [])
        if len(entropies) > logged:
            counted = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum()
            if self.accelerator.reduce(counted, reduction="sum").item() == 0:
                # TRL logs 0, which is the entropy of a policy that has collapsed. What is NaN, its log leaves out.
                entropies[logged:] = [math.nan] * (len(entropies) - logged)
        return loss

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, mask: Any, width: int, *args, **kwargs):
        with contextlib.nullcontext() if self.replay is None else self.replay.scoring_next(mask, width):
            output = super()._get_per_token_logps_and_entropies(model, ids, mask, width, *args, **kwargs)
        self.correction.take_log_probs(output[0])
        return output

    # ---- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """[`transformers.Trainer.evaluate`], which leaves training as it was, also where it is cut short: its rollouts
        draw from the random generators of training.
        """
        with random_states_kept(), self.quantization.evaluation():
            return super().evaluate(*args, **kwargs)

    # ---- logs -----------------------------------------------------------------------------------------------------

    def _record(self, name: str, value: float) -> None:
        """Add to the next training log, where values of one name are averaged."""
        self._metrics["train"][name].append(value)

    def _record_mean(self, name: str, value: float) -> None:
        """[`_record`] the mean over all processes, which must all call this; NaN does not count."""
        values = self.accelerator.gather(torch.tensor([value], dtype=torch.float32, device=self.accelerator.device))
        self._record(name, values.nanmean().item())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """[`transformers.Trainer.log`]. A callback that fails in it leaves nothing of this line for the next."""
        metrics, lines = self._metrics["train" if self.model.training else "eval"], len(self.state.log_history)
        try:
            super().log(logs, start_time)
        finally:
            if len(self.state.log_history) > lines:
                metrics.clear()

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """[`trl.GRPOTrainer.create_model_card`], without its links to `None` where the model comes from a folder."""
        with decoration():
            super().create_model_card(*args, **kwargs)
            if self.is_world_process_zero():
                source = Path(getattr(self.model.config, "_name_or_path", "")).name or type(self.model).__name__
                mend_card(Path(self.args.output_dir) / "README.md", source, self.n_quantized > 0)

    def _process_state(self) -> dict[str, Any]:
        return {**super()._process_state(), **self.checkpoints.process_state()}

    def _load_process_state(self, state: dict[str, Any], exact: bool) -> None:
        super()._load_process_state(state, exact)
        self.checkpoints.load_process_state(state, exact)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        # The epoch has begun before a Trainer loads them, and the states of then belong to no step.
        self.checkpoints.boundary.remember(self.state.global_step)

    def _restore_process(self, checkpoint: str) -> None:
        super()._restore_process(checkpoint)
        self.checkpoints.read_epoch(checkpoint)

    def _get_train_sampler(self, dataset: Any = None):
        return self.checkpoints.skip_epochs(super()._get_train_sampler(dataset))

    # ---- what callbacks and users look at -------------------------------------------------------------------------

    noise = property(lambda self: None if self.rollout_noise is None else self.rollout_noise.norms)
    routing = property(lambda self: self.replay)
    entropy_callback = property(lambda self: self.monitor.entropy)
    error_callback = property(lambda self: self.monitor.errors)
    activation_callback = property(lambda self: self.monitor.activations)
    movement_callback = property(lambda self: self.monitor.movement)
    router_callback = property(lambda self: self.monitor.routers)
    report_callback = property(lambda self: self.monitor.report)
