# SPDX-License-Identifier: Apache-2.0
"""GRPO that computes the prompt of a group once, for studies in which prompts are most of the tokens."""

from typing import Any

import torch
from transformers import DynamicCache

from hf_mxfp4 import MXFP4GRPOTrainer


class SharedPromptTrainer(MXFP4GRPOTrainer):
    """[`hf_mxfp4.MXFP4GRPOTrainer`] that computes each distinct prompt once, and what all prompts of a batch start with
    (solved examples) once for all. Completions read copies of the keys and values; when the trainer samples, when it
    trains, and whenever else its model generates.

    Log-probabilities and gradients are the same up to rounding. With 8 completions of 3 tokens to a prompt of 19, a
    step of SmolLM2-135M takes a third of the time on a CPU core. Logged are `prompts/shared`, completions to a prompt,
    and `prompts/common`, tokens that all prompts of a batch start with.

    Raises `ValueError` for several processes, other samplers than `generate`, gradient checkpointing (which has no
    cache), and replay or auxiliary losses of routers.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        given = {
            "use_vllm": self.use_vllm,
            "use_transformers_continuous_batching": self.batched_rollouts is not None,
            "gradient_checkpointing": self.args.gradient_checkpointing,
            "router_replay": self.routing is not None,
            "an auxiliary loss of routers": self.aux_loss_enabled,
            "several processes": self.accelerator.num_processes > 1,
        }
        refused = [name for name, is_given in given.items() if is_given]
        if refused:
            raise ValueError(f"share_prompts does not work with {', '.join(refused)}")
        generate = self.model.generate

        def generate_after_prompts(input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any):
            cache = self._prompt_cache(self.model, input_ids[:, :-1], attention_mask[:, :-1])
            return generate(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, **options)

        self.model.generate = generate_after_prompts

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: torch.Tensor, mask: torch.Tensor, width: int, *args: Any, **kwargs: Any
    ):
        start = ids.size(1) - width - 1  # the last token of the prompt predicts the first of the completion
        labels = ids.masked_fill(mask == 0, -100)[:, start:]
        labels[:, 0] = -100
        with self.accelerator.autocast():
            cache = self._prompt_cache(model, ids[:, :start], mask[:, :start])
            output = model(
                input_ids=ids[:, start:],
                attention_mask=mask,
                position_ids=_positions(mask)[:, start:],
                past_key_values=cache,
                labels=labels,
                fused_lm_head=True,
            )
        log_probs = output.log_probs[:, -width:]
        self.correction.take_log_probs(log_probs)
        return log_probs, output.entropy[:, -width:], None

    def _prompt_cache(self, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> DynamicCache:
        """Return the keys and values of prompts ``ids`` ``[B, P]``, padded on the left."""
        if ids.size(1) == 0:
            raise ValueError("share_prompts needs prompts of more than one token")
        prompts, index = torch.unique(torch.stack([ids, mask]), dim=1, return_inverse=True)
        distinct, distinct_mask = prompts
        positions = _positions(distinct_mask)
        differs = (prompts != prompts[:, :1]).any(dim=0).any(dim=0)
        common = int((differs.cumsum(0) == 0).sum())
        cache = DynamicCache(config=model.config)
        for start, end, n_rows in ((0, common, 1), (common, ids.size(1), len(distinct))):
            if start < end:
                model(
                    input_ids=distinct[:n_rows, start:end],
                    attention_mask=distinct_mask[:n_rows, :end],
                    position_ids=positions[:n_rows, start:end],
                    past_key_values=cache,
                    logits_to_keep=1,
                )
                cache.batch_repeat_interleave(len(distinct) // n_rows)
        cache.batch_select_indices(index)
        if self.model.training:
            self._record("prompts/shared", len(ids) / len(distinct))
            self._record("prompts/common", common)
        return cache


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """Return the position of each token in its sequence, as `generate` counts them; 0 for padding."""
    return (mask.cumsum(1) - 1).clamp(min=0)
