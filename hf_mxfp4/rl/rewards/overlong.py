# SPDX-License-Identifier: Apache-2.0
"""Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), as one more reward function."""

import torch
from trl import GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

from ..._logging import get_logger
from ..config import MXFP4GRPOConfig
from .guard import guard_reward


class OverlongPenalty:
    """TRL's punishment among the rewards (`overlong_buffer`, `overlong_penalty`): 0 up to `max_completion_length` less
    the buffer's tokens, from there falling to minus the weight at `max_completion_length`. Logged as
    `rewards/soft_overlong_punishment_reward/*`.

    A completion that no other reward function scores is not punished either: its advantage is 0, as without.

    Args:
        args: of the trainer.
        column: its place among the reward functions.

    Attributes:
        function: the reward function.
        weight: its weight among them.

    Raises `ValueError` when completions have no greatest length.
    """

    def __init__(self, args: MXFP4GRPOConfig, column: int):
        buffer, self.weight, longest = args.overlong_buffer, args.overlong_penalty, args.max_completion_length
        if longest is None:
            raise ValueError(
                f"overlong_buffer={buffer} is part of a completion's length: set max_completion_length too"
            )
        self.function = guard_reward(get_soft_overlong_punishment(longest, buffer))
        self._column = column
        self._warned = False
        get_logger().info(
            "overlong punishment: from %d to %d tokens, weight %g", longest - buffer, longest, self.weight
        )

    def add_to(self, trainer: GRPOTrainer) -> None:
        """Make it the last of a trainer's reward functions, as TRL adds the rewards of environments."""
        trainer.reward_funcs.append(self.function)
        trainer.reward_func_names.append(self.function.__name__)
        trainer.reward_processing_classes.append(None)
        trainer.reward_weights = torch.cat([trainer.reward_weights, torch.tensor([self.weight])])

    def spare_unscored(self, rewards: torch.Tensor, step: int) -> torch.Tensor:
        """Rewards ``[completions, functions]`` with NaN for the punishment too where all others are NaN."""
        others = torch.cat([rewards[:, : self._column], rewards[:, self._column + 1 :]], dim=1)
        unscored = others.isnan().all(dim=1)
        rewards = rewards.clone()
        rewards[unscored, self._column] = torch.nan
        if unscored.any() and not self._warned:
            # TRL says so where no function returned anything, which the punishment always does.
            self._warned = True
            get_logger().warning(
                "step %d: no reward function scores %d of %d completions; they train nothing, and are not punished for "
                "their length. Said once",
                step,
                int(unscored.sum()),
                len(rewards),
            )
        return rewards
