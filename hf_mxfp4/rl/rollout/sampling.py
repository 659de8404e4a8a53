# SPDX-License-Identifier: Apache-2.0
"""Groups of other prompts in the place of those whose completions all earn the same (DAPO, arXiv 2503.14476, section
3.2).

Such a group has zero advantages and moves nothing. DAPO samples until a batch is full of others, which starves where
rewards are constant; here the rounds are limited, and what could not be replaced is kept.
"""

import contextlib
import copy
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from trl import GRPOTrainer

from ..._logging import get_logger
from ..config import MXFP4GRPOConfig
from .rows import Batch, movable, put_rows, take_rows


class DynamicSampling:
    """Replaces groups with equal rewards (`dynamic_sampling`).

    Metrics: `dynamic_sampling/rounds` and `dynamic_sampling/replaced_share`.

    Args:
        args: of the trainer.
        dataset: that other prompts are drawn from.
        accelerator: moves rows between processes.
        pad_token: id of the padding token.
        record: called with a metric's name and value.

    Raises `ValueError` for a dataset that other prompts cannot be drawn from.
    """

    def __init__(
        self,
        args: MXFP4GRPOConfig,
        dataset: Dataset,
        accelerator: Accelerator,
        pad_token: int,
        record: Callable[[str, float], None],
    ):
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise ValueError(
                "dynamic_sampling=True draws prompts from anywhere in the dataset, which one that is streamed does not "
                "allow: load it without streaming, or set dynamic_sampling=False"
            )
        self._args, self._dataset, self._accelerator = args, dataset, accelerator
        self._pad_token, self._record = pad_token, record
        self._warned = False

    def replacement(
        self, batch: Batch, inputs: list[dict[str, Any]], equal: torch.Tensor, micro_step: int
    ) -> "GroupReplacement":
        """Begin to replace the groups of a rollout that are ``equal``, bool ``[groups of all processes]``.

        Args:
            batch: the scored rollout, of this process.
            inputs: the rows of the dataset that it is of.
            micro_step: which rollout this is; others draw other prompts.
        """
        movable(batch)
        targets = equal.nonzero().flatten().tolist()
        prompts = iter(())
        if targets:
            # Gathered, so that all processes leave out the same.
            drawn = set(gather_object([prompt_digest(row) for row in inputs]))
            prompts = self.other_prompts(drawn, micro_step)
        return GroupReplacement(self._args, self._accelerator, batch, targets, len(equal), prompts)

    def finish(self, replacement: "GroupReplacement", step: int) -> Batch:
        """The batch with what was found, and a log of how much that is."""
        left, targets, n_groups = len(replacement.left), len(replacement.targets), replacement.n_groups
        self._record("dynamic_sampling/rounds", replacement.rounds)
        self._record("dynamic_sampling/replaced_share", (targets - left) / n_groups)
        if left == n_groups and not self._warned:
            self._warned = True
            get_logger().warning(
                "step %d: every group has equal rewards, also after %d rounds of dynamic sampling; they are kept and "
                "train nothing. Said once; see dynamic_sampling/replaced_share",
                step,
                replacement.rounds,
            )
        if left == targets:
            return replacement.batch
        by_sequence = {"advantages"}
        if self._args.vllm_importance_sampling_mode.startswith("sequence"):
            by_sequence.add("importance_sampling_ratio")
        batch = put_rows(replacement.batch, replacement.rows, self._pad_token, by_sequence)
        tokens = (batch["completion_mask"] * batch.get("tool_mask", 1)).sum()
        batch["num_items_in_batch"] = self._accelerator.gather(tokens).sum()
        return batch

    def other_prompts(self, drawn: set[str], micro_step: int) -> Iterator[dict[str, Any]]:
        """Rows of the dataset in an order of this rollout's own, the same on all processes and after resuming. Without
        those of the prompts ``drawn``, given as [`prompt_digest`], unless the dataset has no others."""
        order = np.random.default_rng([self._args.seed, micro_step]).permutation(len(self._dataset))
        while True:
            found = False
            for index in order:
                row = self._dataset[int(index)]
                if prompt_digest(row) not in drawn:
                    found = True
                    yield row
            if not found:
                drawn = set()


class GroupReplacement:
    """The rounds of additional rollouts for one batch. Every process decides the same, from the rewards of all; rows
    move between them where they must.

    Attributes:
        batch: as it was.
        targets: the groups to replace, counted over all processes, of ``n_groups``.
        left: those of them that nothing was found for yet.
        rows: what was found for this process, by the row of its batch.
        rounds: how many rollouts were taken.
    """

    def __init__(
        self,
        args: MXFP4GRPOConfig,
        accelerator: Accelerator,
        batch: Batch,
        targets: list[int],
        n_groups: int,
        prompts: Iterator[dict[str, Any]],
    ):
        self.batch, self.targets, self.n_groups = batch, targets, n_groups
        self.left, self.rounds = targets, 0
        self.rows: dict[int, Batch] = {}
        self._size, self._max_rounds, self._prompts = args.num_generations, args.dynamic_sampling_max_rounds, prompts
        self._world, self._rank = accelerator.num_processes, accelerator.process_index

    @property
    def goes_on(self) -> bool:
        """Whether another rollout is to be taken."""
        return bool(self.left) and self.rounds < self._max_rounds

    def next_inputs(self) -> list[dict[str, Any]]:
        """Rows of the dataset for the next rollout of this process, as the sampler deals them: each gets the same
        number."""
        self.rounds += 1
        unit = self._world // np.gcd(self._world, self._size)
        count = -(-len(self.left) // unit) * unit
        dealt = [dict(prompt) for prompt in itertools.islice(self._prompts, count) for _ in range(self._size)]
        share = len(dealt) // self._world
        return dealt[self._rank * share : (self._rank + 1) * share]

    def take(self, found: Batch, equal: torch.Tensor) -> None:
        """Put groups of this scored rollout in the place of those that are left, but for its own ``equal`` ones."""
        size = self._size
        usable = (~equal).nonzero().flatten().tolist()[: len(self.left)]
        moved = self._gathered_rows(found, [group * size + i for group in usable for i in range(size)])
        for target, group in zip(self.left, usable, strict=False):
            for i in range(size):
                process, row = divmod(target * size + i, len(self.batch["prompt_ids"]))
                if process == self._rank:
                    self.rows[row] = moved[group * size + i]
        self.left = self.left[len(usable) :]

    def _gathered_rows(self, found: Batch, wanted: list[int]) -> dict[int, Batch]:
        """Rows of a rollout by their number over all processes, each of which holds as many."""
        share = len(found["prompt_ids"])
        mine = [row for row in wanted if row // share == self._rank]
        rows = dict(zip(mine, take_rows(found, [row % share for row in mine]), strict=True))
        if self._world == 1 or not wanted:
            return rows
        on_cpu = [(row, {name: value.cpu() for name, value in entry.items()}) for row, entry in rows.items()]
        return dict(gather_object(on_cpu))


def prompt_digest(row: dict[str, Any]) -> str:
    """The same for rows of the same prompt, in all processes; where environments make the prompts, for equal rows."""
    return hashlib.sha256(repr(row.get("prompt", row)).encode()).hexdigest()


def equal_rewards(rewards: torch.Tensor, weights: torch.Tensor, size: int) -> torch.Tensor:
    """Return which groups of ``size`` completions earn the same: bool ``[completions / size]``.

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


@contextlib.contextmanager
def logs_set_aside(trainer: GRPOTrainer) -> Iterator[None]:
    """What a trainer logs within the context is lost but for the number of tokens: metrics of TRL's about rewards and
    completions remain those of the prompts that its sampler drew, with `dynamic_sampling` and without."""
    metrics, logs = trainer._metrics["train"], trainer._logs
    trainer._metrics["train"], trainer._logs = defaultdict(list), copy.deepcopy(logs)
    try:
        yield
    finally:
        tokens = trainer._metrics["train"].get("num_tokens")
        trainer._metrics["train"], trainer._logs = metrics, logs
        if tokens:
            metrics["num_tokens"] = tokens
