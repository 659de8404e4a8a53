# SPDX-License-Identifier: Apache-2.0
"""Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), as one more reward function."""

import torch
from trl import GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

from .._logging import get_logger
from .reward_guard import guard_reward


def add_overlong_penalty(trainer: GRPOTrainer, buffer: int, weight: float) -> None:
    """Add TRL's punishment to a trainer's rewards: 0 up to `max_completion_length` less ``buffer`` tokens, from there
    falling to -``weight`` at `max_completion_length`. Logged as `rewards/soft_overlong_punishment_reward/*`.

    Raises `ValueError` when the buffer is longer than a completion may be.
    """
    longest = trainer.max_completion_length
    if buffer > longest:
        raise ValueError(f"overlong_buffer={buffer} is more than max_completion_length={longest}")
    punishment = guard_reward(get_soft_overlong_punishment(longest, buffer))
    # As TRL adds the rewards of environments.
    trainer.reward_funcs.append(punishment)
    trainer.reward_func_names.append(punishment.__name__)
    trainer.reward_processing_classes.append(None)
    trainer.reward_weights = torch.cat([trainer.reward_weights, torch.tensor([weight], dtype=torch.float32)])
    get_logger().info("overlong punishment: from %d to %d tokens, weight %g", longest - buffer, longest, weight)
