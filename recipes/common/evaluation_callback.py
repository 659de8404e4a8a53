# SPDX-License-Identifier: Apache-2.0
"""Greedy accuracy while training, at a fixed cadence."""

from collections.abc import Callable

from transformers import TrainerCallback

from evaluation.generate import Evaluation


class GreedyEvaluation(TrainerCallback):
    """Logs `greedy/<score>` every so many steps: without noise, under the policy's own scheme.

    Args:
        every: steps between evaluations.
        evaluate: evaluates the policy as it is; all processes call it together.
        log: hands values to the log history and to the trackers, at once and alone: [`transformers.Trainer.log`], not
            TRL's, which would end the step's averages before the step does.
    """

    def __init__(self, every: int, evaluate: Callable[[], Evaluation], log: Callable[[dict[str, float]], None]):
        self.every = every
        self.evaluate = evaluate
        self.log = log

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            evaluation = self.evaluate()
            values = {f"greedy/{score}": evaluation.accuracy(score) for score in evaluation.correct}
            due = control.should_log
            self.log(values)
            control.should_log = due  # what the step itself logs comes still
