# SPDX-License-Identifier: Apache-2.0
"""The part of [`MXFP4GRPOTrainer`] that weights sampled tokens by how likely the policy that trains is to sample them.

TRL does so for vLLM alone. Without vLLM the policy that samples is another one, too: noise in its norms, tokens
computed one by one from a key-value cache, compiled code, packed copies of weights, each with its own rounding, which
4-bit activations turn into steps of their grid. See docs/rollouts.md.
"""

from typing import Any

import torch
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from ..._logging import get_logger
from .generation import generating_module
from .logprobs import recorded_batches, recorded_generate
from .mismatch import MismatchSums, importance_ratios, limit_ratios, log_ratios
from .routing import BATCH_KEY


_SAMPLED = "sampling_per_token_logps"
#: What TRL records under vLLM itself.
_RECORDED_BY_TRL = ("sampling/importance_sampling_ratio/m", "sampling/sampling_logp_difference/")


class RolloutCorrection(GRPOTrainer):
    """Importance weights (`rollout_correction*`) and the `sampling/*` metrics.

    Both need the log-probabilities of the sampled tokens under the policy as it is when training on them begins. Where
    TRL does not compute those (rollouts and updates are aligned), they are what the training step itself computes, at
    no cost. TRL's loss takes one advantage per token as well as one per completion: the door for the weights, since
    they are not negative and every loss but VESPO's is, for a token, proportional to its advantage as long as the sign
    stays. VESPO takes them as they are.
    """

    _unweighted: tuple[dict[str, Any], torch.Tensor] | None = None

    def _set_up_correction(self) -> None:
        self._mismatch, self._mismatch_step = MismatchSums(), -1
        if self.use_transformers_continuous_batching:
            self.continuous_batching_config.return_logprobs = True

    # ---- the policy that samples ----------------------------------------------------------------------------------

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any):
        if self.use_vllm or not self.model.training:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        generator = generating_module(self.model)
        if self.use_transformers_continuous_batching:
            with recorded_batches(generator) as rows:
                completions, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        else:
            with recorded_generate(generator) as recorder:
                completions, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            rows = recorder.rows(completions)
        return completions, rows

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training and _SAMPLED not in output:
            if self.args.rollout_correction and self.state.global_step == 0:
                get_logger().warning("rollout_func returns no log-probabilities: its rollouts are not corrected")
        if self._replays:
            output[BATCH_KEY] = self.routing.padded(output["prompt_mask"], output["completion_ids"])
            if "old_per_token_logps" in output:
                # What TRL computed is under free routing.
                output["old_per_token_logps"] = self._replayed_log_probs(output)
        return output

    @torch.no_grad()
    def _replayed_log_probs(self, output: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities ``[B, T]`` of the last rollout's completions, routed as it was."""
        masks = output["prompt_mask"], output["completion_mask"]
        with (
            self._rollout_weights(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
            self.routing.scoring(*masks),
        ):
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                torch.cat(masks, dim=1),
                output["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        return logps

    # ---- the policy that trains -----------------------------------------------------------------------------------

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any):
        if not self.model.training or _SAMPLED not in inputs:
            return super().compute_loss(model, inputs, *args, **kwargs)
        inputs = dict(inputs)  # weighted anew when the batch is trained on again
        old = inputs.get("old_per_token_logps")
        if old is not None:
            self._weigh(inputs, old)
            return super().compute_loss(model, inputs, *args, **kwargs)
        # Not there until they are weighted: a loss that reads them earlier fails.
        self._unweighted = inputs, inputs.pop("advantages")
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._unweighted = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any):
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._unweighted is not None:
            (inputs, advantages), self._unweighted = self._unweighted, None
            inputs["advantages"] = advantages
            self._weigh(inputs, output[0].detach())
        return output

    def _weigh(self, inputs: dict[str, Any], trained: torch.Tensor) -> None:
        """Weight a batch in place by the ratio of ``trained`` to the probabilities it was sampled with; measure it."""
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        log_ratio = log_ratios(trained, inputs[_SAMPLED], mask)
        args = self.args
        if self.use_vllm:
            mode, cap = args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_max
            limits = mode, cap, args.vllm_importance_sampling_clip_min
        else:
            limits = args.rollout_correction_mode, args.rollout_correction_cap, args.rollout_correction_min
        self._measure(log_ratio, mask, limits)
        if self.use_vllm or not args.rollout_correction:
            return
        weights = limit_ratios(importance_ratios(log_ratio, limits[0]), *limits)
        if self.loss_type == "vespo":
            inputs["importance_sampling_ratio"] = weights.masked_fill(~mask.bool(), 1.0)
        else:
            inputs["advantages"] = inputs["advantages"].unsqueeze(1) * weights

    def _measure(self, log_ratio: torch.Tensor, mask: torch.Tensor, limits: tuple) -> None:
        """Add to what is logged once per optimizer step, over its batches and all processes."""
        if self._mismatch_step != self.state.global_step:
            self._mismatch, self._mismatch_step = MismatchSums(), self.state.global_step
        self._mismatch.add(log_ratio, mask, *limits)
        if self.accelerator.sync_gradients:
            by_trl = _RECORDED_BY_TRL if self.use_vllm and self.vllm_importance_sampling_correction else ()
            for name, value in self._mismatch.measures(self.accelerator.gather).items():
                if not name.startswith(by_trl):
                    self._record(name, value)
            self._mismatch_step = -1
