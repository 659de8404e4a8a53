# SPDX-License-Identifier: Apache-2.0
"""The part of [`MXFP4GRPOTrainer`] that replaces groups whose completions all earn the same (DAPO, arXiv 2503.14476,
section 3.2).

Such a group has zero advantages and moves nothing. DAPO samples until a batch is full of others, which starves where
rewards are constant; here the rounds are limited, and what could not be replaced is kept.
"""

import contextlib
import copy
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer

from ..._logging import get_logger
from .rows import Batch, movable, put_rows, take_rows


class DynamicSampling(GRPOTrainer):
    """Groups of other prompts in the place of those with equal rewards (`dynamic_sampling`). Not in evaluation.

    The share of such groups is logged always, as `dynamic_sampling/zero_variance_share`: TRL's `frac_reward_zero_std`
    is that of the batch, zero or one, where rewards are scaled by the batch. All other metrics of TRL's about rewards
    and completions remain those of the prompts that the sampler drew, so that they mean the same with and without.
    """

    _rewards: torch.Tensor | None = None
    _warned_of_constant_rewards = False

    def _set_up_dynamic_sampling(self) -> None:
        """Raises `ValueError` for a dataset that other prompts cannot be drawn from."""
        dataset = self.train_dataset
        indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if self.args.dynamic_sampling and not indexed:
            raise ValueError(
                "dynamic_sampling=True draws prompts from anywhere in the dataset, which one that is streamed does not "
                "allow: load it without streaming, or set dynamic_sampling=False"
            )

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._rewards = super()._calculate_rewards(*args, **kwargs)  # [all processes' completions, functions]
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        output = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        equal = self._equal_groups()
        self._record("dynamic_sampling/zero_variance_share", equal.float().mean().item())
        if self.args.dynamic_sampling:
            output = self._replace_groups(output, inputs, equal.nonzero().flatten().tolist(), len(equal))
        return output

    def _equal_groups(self) -> torch.Tensor:
        return equal_rewards(self._rewards, self.reward_weights.to(self._rewards.device), self.num_generations)

    def _replace_groups(self, output: Batch, inputs: list[dict[str, Any]], equal: list[int], n_groups: int) -> Batch:
        """Every process decides the same, from the rewards of all; rows move between them where they must."""
        movable(output)
        size, world, rank = self.num_generations, self.accelerator.num_processes, self.accelerator.process_index
        # Groups are dealt to processes in rows, as the sampler does it: each gets the same number.
        unit = world // np.gcd(world, size)
        # Gathered, so that all processes leave out the same.
        prompts = self._other_prompts(set(gather_object([prompt_digest(row) for row in inputs]))) if equal else iter(())
        left, rows, rounds = equal, {}, 0
        with self._logs_set_aside():
            while left and rounds < self.args.dynamic_sampling_max_rounds:
                rounds += 1
                count = -(-len(left) // unit) * unit
                dealt = [dict(prompt) for prompt in itertools.islice(prompts, count) for _ in range(size)]
                share = len(dealt) // world
                found = super()._generate_and_score_completions(dealt[rank * share : (rank + 1) * share])
                usable = (~self._equal_groups()).nonzero().flatten().tolist()[: len(left)]
                moved = self._gathered_rows(found, [group * size + i for group in usable for i in range(size)], share)
                for target, group in zip(left, usable, strict=False):
                    for i in range(size):
                        process, row = divmod(target * size + i, len(output["prompt_ids"]))
                        if process == rank:
                            rows[row] = moved[group * size + i]
                left = left[len(usable) :]
        self._record("dynamic_sampling/rounds", rounds)
        self._record("dynamic_sampling/replaced_share", (len(equal) - len(left)) / n_groups)
        if len(left) == n_groups and not self._warned_of_constant_rewards:
            self._warned_of_constant_rewards = True
            get_logger().warning(
                "step %d: every group has equal rewards, also after %d rounds of dynamic sampling; they are kept and "
                "train nothing. Said once; see dynamic_sampling/replaced_share",
                self.state.global_step,
                rounds,
            )
        if len(left) == len(equal):
            return output
        by_sequence = {"advantages"}
        if self.args.vllm_importance_sampling_mode.startswith("sequence"):
            by_sequence.add("importance_sampling_ratio")
        output = put_rows(output, rows, self._tokenizer.pad_token_id, by_sequence)
        tokens = (output["completion_mask"] * output.get("tool_mask", 1)).sum()
        output["num_items_in_batch"] = self.accelerator.gather(tokens).sum()
        return output

    def _other_prompts(self, drawn: set[str]) -> Iterator[dict[str, Any]]:
        """Rows of the dataset in an order of this rollout's own, the same on all processes and after resuming. Without
        those of the prompts ``drawn``, given as [`prompt_digest`], unless the dataset has no others."""
        order = np.random.default_rng([self.args.seed, self._step]).permutation(len(self.train_dataset))
        while True:
            found = False
            for index in order:
                row = self.train_dataset[int(index)]
                if prompt_digest(row) not in drawn:
                    found = True
                    yield row
            if not found:
                drawn = set()

    def _gathered_rows(self, found: Batch, wanted: list[int], share: int) -> dict[int, Batch]:
        """Rows of a rollout by their number over all processes, of which each holds ``share``."""
        rank = self.accelerator.process_index
        mine = [row for row in wanted if row // share == rank]
        rows = dict(zip(mine, take_rows(found, [row % share for row in mine]), strict=True))
        if self.accelerator.num_processes == 1 or not wanted:
            return rows
        on_cpu = [(row, {name: value.cpu() for name, value in entry.items()}) for row, entry in rows.items()]
        return dict(gather_object(on_cpu))

    @contextlib.contextmanager
    def _logs_set_aside(self) -> Iterator[None]:
        """What is logged within the context is lost but for the number of tokens."""
        metrics, logs = self._metrics["train"], self._logs
        self._metrics["train"], self._logs = defaultdict(list), copy.deepcopy(logs)
        try:
            yield
        finally:
            tokens = self._metrics["train"].get("num_tokens")
            self._metrics["train"], self._logs = metrics, logs
            if tokens:
                metrics["num_tokens"] = tokens


def prompt_digest(row: dict[str, Any]) -> str:
    """The same for rows of the same prompt, in all processes; where environments make the prompts, for equal rows."""
    return hashlib.sha256(repr(row.get("prompt", row)).encode()).hexdigest()


def equal_rewards(rewards: torch.Tensor, weights: torch.Tensor, size: int) -> torch.Tensor:
    """Which groups of ``size`` completions earn the same: bool ``[completions / size]``.

    Args:
        rewards: ``[completions, functions]``, NaN where a function does not apply. Completions that none applies to
            do not count.
        weights: ``[functions]``.
    """
    total = (rewards * weights).nansum(dim=1)
    scored = ~rewards.isnan().all(dim=1)
    highest = total.masked_fill(~scored, -torch.inf).view(-1, size).amax(dim=1)
    lowest = total.masked_fill(~scored, torch.inf).view(-1, size).amin(dim=1)
    return ~(highest > lowest)
