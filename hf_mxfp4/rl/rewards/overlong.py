# SPDX-License-Identifier: Apache-2.0
"""The part of [`MXFP4GRPOTrainer`] that punishes completions for their length: soft overlong punishment (DAPO, arXiv
2503.14476, equation 13), as one more reward function."""

from typing import Any

import torch
from trl import GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

from ..._logging import get_logger
from .guard import guard_reward


class OverlongPenalty(GRPOTrainer):
    """TRL's punishment among the rewards (`overlong_buffer`, `overlong_penalty`): 0 up to `max_completion_length` less
    the buffer's tokens, from there falling to minus the weight at `max_completion_length`. Logged as
    `rewards/soft_overlong_punishment_reward/*`.

    A completion that no other reward function scores is not punished either: its advantage is 0, as without.
    """

    #: Among the reward functions; `None` without a buffer.
    _overlong_column: int | None = None
    _warned_of_unscored = False

    def _set_up_overlong_penalty(self) -> None:
        buffer, weight, longest = self.args.overlong_buffer, self.args.overlong_penalty, self.max_completion_length
        if not buffer:
            return
        if longest is None:
            raise ValueError(
                f"overlong_buffer={buffer} is part of a completion's length: set max_completion_length too"
            )
        punishment = guard_reward(get_soft_overlong_punishment(longest, buffer))
        # As TRL adds the rewards of environments.
        self._overlong_column = len(self.reward_funcs)
        self.reward_funcs.append(punishment)
        self.reward_func_names.append(punishment.__name__)
        self.reward_processing_classes.append(None)
        self.reward_weights = torch.cat([self.reward_weights, torch.tensor([weight], dtype=torch.float32)])
        get_logger().info("overlong punishment: from %d to %d tokens, weight %g", longest - buffer, longest, weight)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)  # [all processes' completions, functions]
        if self._overlong_column is None:
            return rewards
        kept = unscored_kept(rewards, self._overlong_column)
        unscored = int(kept.isnan().all(dim=1).sum())
        if unscored and not self._warned_of_unscored:
            # TRL says so where no function returned anything, which the punishment always does.
            self._warned_of_unscored = True
            get_logger().warning(
                "step %d: no reward function scores %d of %d completions; they train nothing, and are not punished for "
                "their length. Said once",
                self.state.global_step,
                unscored,
                len(kept),
            )
        return kept


def unscored_kept(rewards: torch.Tensor, column: int) -> torch.Tensor:
    """Rewards ``[completions, functions]`` with NaN in ``column`` too where all others are NaN."""
    others = torch.cat([rewards[:, :column], rewards[:, column + 1 :]], dim=1)
    rewards = rewards.clone()
    rewards[others.isnan().all(dim=1), column] = torch.nan
    return rewards
