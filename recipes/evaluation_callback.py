# SPDX-License-Identifier: Apache-2.0
"""Greedy accuracy while training, at a fixed cadence."""

from collections.abc import Callable

from evaluation import Evaluation
from transformers import TrainerCallback


class GreedyEvaluation(TrainerCallback):
    """Adds `greedy/<score>` to the log history every so many steps: without noise, under the policy's own scheme.

    Args:
        every: steps between evaluations.
        evaluate: evaluates the policy as it is; all processes call it together.
    """

    def __init__(self, every: int, evaluate: Callable[[], Evaluation]):
        self.every = every
        self.evaluate = evaluate

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            evaluation = self.evaluate()
            values = {f"greedy/{score}": evaluation.accuracy(score) for score in evaluation.correct}
            state.log_history.append({"step": state.global_step, **values})
