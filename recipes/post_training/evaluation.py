# SPDX-License-Identifier: Apache-2.0
"""Greedy evaluations of the policy that a trainer holds: before, while and after it trains, and once it is reloaded."""

from collections.abc import Callable
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback

from hf_mxfp4 import MXFP4GRPOTrainer
from recipes.common.terminal import console, tell
from recipes.evaluation.generate import Evaluation, evaluate_greedy
from recipes.post_training.arguments import RecipeArguments
from recipes.post_training.placement import placed, why_not_on
from recipes.tasks import Task


class PolicyEvaluation:
    """Evaluates the policy of a trainer on the test split of a task; all processes call it together.

    Args:
        trainer: whose policy, in the precision of its training.
        task, recipe: what is evaluated, and in which batches.
    """

    def __init__(self, trainer: MXFP4GRPOTrainer, task: Task, recipe: RecipeArguments):
        self.trainer, self.task, self.recipe = trainer, task, recipe

    @property
    def model(self) -> PreTrainedModel:
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    def __call__(self, title: str, most: int | None = None) -> Evaluation:
        """Evaluate the policy as it is, on the first ``most`` problems, leaving training alone."""
        problems = self.task.test.select(range(min(most or len(self.task.test), len(self.task.test))))
        return self._evaluate(self.model, self.trainer.processing_class, problems, title)

    def before_training(self) -> Evaluation | None:
        """The policy before its first step; None, and a line that says why, where it does not fit on the device."""
        training = self.trainer.args
        copies = training.cache_rollout_weights and self.trainer.n_quantized > 0
        reason = why_not_on(training.device, self.model, copies=copies)
        if reason is not None:
            tell("not evaluated before RL:", reason)
            return None
        with placed(self.model, training.device):
            return self("evaluating before RL")

    def report(self, when: str, evaluation: Evaluation | None) -> None:
        """Put the accuracy by each score into the run report, where there are both."""
        if self.trainer.run_log is not None and evaluation is not None:
            scores = {
                name: {
                    "accuracy": evaluation.accuracy(name),
                    "standard_error": evaluation.standard_error(name),
                    "n": len(evaluation.completions),
                }
                for name in evaluation.correct
            }
            self.trainer.run_log.add_evaluation(when, self.trainer.state.global_step, scores)

    def compare_reloaded(
        self, saved: Path, load_saved: Callable[[], PreTrainedModel], after: Evaluation
    ) -> dict[str, int] | None:
        """Load the saved policy afresh, compare its completions with the trained one's, and print some: how many were
        ``compared`` and are ``identical``; None where nothing is to be compared."""
        recipe, training, test = self.recipe, self.trainer.args, self.task.test
        if recipe.reload_check == 0:
            return None
        count = min(recipe.reload_check, len(test))
        # Whole batches of the evaluation, so that padding is the same and completions can be compared to the letter.
        count = min(-(-count // recipe.greedy_batch_size) * recipe.greedy_batch_size, len(test))
        trust = training.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(saved, padding_side="left", trust_remote_code=trust)
        subset = test.select(range(count))
        evaluation = self._evaluate(load_saved().to(training.device), tokenizer, subset, "reloaded policy")
        same = sum(a == b for a, b in zip(evaluation.completions, after.completions, strict=False))
        for i in range(min(recipe.samples_shown, count) if PartialState().is_main_process else 0):
            row = subset[i]
            prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
            console.print(f"  {prompt!r} -> {evaluation.completions[i]!r}  (answer {row['answer']})", markup=False)
        return {"compared": count, "identical": same}

    def _evaluate(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Dataset, title: str
    ) -> Evaluation:
        # In the precision of training, which a model has in itself only once it is trained.
        with self.trainer.accelerator.autocast():
            return evaluate_greedy(
                model,
                tokenizer,
                problems,
                self.task.scores,
                max_new_tokens=self.trainer.args.max_completion_length,
                batch_size=self.recipe.greedy_batch_size,
                title=title,
                cache_weights=self.trainer.args.cache_rollout_weights,
            )


class EvaluationCallback(TrainerCallback):
    """Logs `greedy/<score>` every so many steps: without noise, under the policy's own scheme.

    Values go to the log history and to the trackers at once and alone, by [`transformers.Trainer.log`] and not TRL's,
    which would end the step's averages before the step does.

    Args:
        evaluation: of the policy as it is.
        every: steps between evaluations.
        most: problems of each.
    """

    def __init__(self, evaluation: PolicyEvaluation, every: int, most: int):
        self.evaluation = evaluation
        self.every = every
        self.most = most

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            evaluation = self.evaluation("evaluating", self.most)
            due = control.should_log
            values = {f"greedy/{score}": evaluation.accuracy(score) for score in evaluation.correct}
            Trainer.log(self.evaluation.trainer, values)
            control.should_log = due  # what the step itself logs comes still
