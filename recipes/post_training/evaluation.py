# SPDX-License-Identifier: Apache-2.0
"""Greedy evaluations of the policy that a trainer holds: before, while and after it trains, and once it is reloaded."""

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from datasets import Dataset
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, Trainer, TrainerCallback

from hf_mxfp4 import MXFP4GRPOTrainer
from hf_mxfp4.lab import read_schemes, swapped
from hf_mxfp4.recipes.evaluation.generate import Evaluation, evaluate_greedy
from hf_mxfp4.recipes.post_training.arguments import RecipeArguments
from hf_mxfp4.recipes.tasks import Task


class PolicyEvaluation:
    """Evaluates the policy of a trainer on the test split of a task, in the precision of its training; under the
    ``rollout_scheme`` where there is one, which the trainer samples under too. All processes call it together."""

    def __init__(self, trainer: MXFP4GRPOTrainer, task: Task, recipe: RecipeArguments):
        self.trainer = trainer
        self.task = task
        self.recipe = recipe
        self.study = recipe.study
        self.tokenizer = trainer.processing_class
        self._scheme = None
        if self.study.rollout_scheme:
            self._scheme = read_schemes([self.study.rollout_scheme])[0].config
            generate = trainer._generate

            def generate_quantized(prompts: list):
                with swapped(self.model, self._scheme):
                    return generate(prompts)

            trainer._generate = generate_quantized

    @property
    def model(self) -> PreTrainedModel:
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    def __call__(self, title: str, most: int | None = None) -> Evaluation:
        """Evaluate the policy as it is, on the first ``most`` problems, leaving training alone."""
        return self._evaluate(self.model, self.tokenizer, self._problems(most), title)

    def _problems(self, most: int | None = None) -> Dataset:
        test = self.task.test
        return test.select(range(min(most or len(test), len(test))))

    def before_training(self) -> Evaluation | None:
        """Evaluate the policy before its first step; return None for one whose weights are read when training
        begins."""
        if any(parameter.is_meta for parameter in self.model.parameters()):
            return None
        with placed(self.model, self.trainer.args.device):
            return self("evaluating before RL")

    def report(self, when: str, evaluation: Evaluation | None) -> None:
        """Put an evaluation into the run report, where there are both."""
        if self.trainer.run_log is not None and evaluation is not None:
            self.trainer.run_log.add_evaluation(when, self.trainer.state.global_step, evaluation.correct)

    def compare_reloaded(
        self, saved: Path, load_saved: Callable[[], PreTrainedModel], after: Evaluation
    ) -> dict[str, int]:
        """Load the saved policy and compare its completions with the trained one's; return how many were ``compared``
        and are ``identical``."""
        study = self.study
        training = self.trainer.args
        # Whole batches of the evaluation, one in each process, so that padding is the same and completions can be
        # compared to the letter.
        together = study.greedy_batch_size * self.trainer.accelerator.num_processes
        problems = self._problems(math.ceil(study.reload_check / together) * together)
        trust = training.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(saved, padding_side="left", trust_remote_code=trust)
        reloaded = self._evaluate(load_saved().to(training.device), tokenizer, problems, "reloaded policy")
        pairs = zip(reloaded.completions, after.completions, strict=False)
        return {"compared": len(problems), "identical": sum(a == b for a, b in pairs)}

    def _evaluate(self, model: PreTrainedModel, tokenizer, problems: Dataset, title: str) -> Evaluation:
        scheme: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self._scheme is not None:
            scheme = swapped(model, self._scheme)
        # In the precision of training, which a model has in itself only once it is trained.
        with scheme, self.trainer.accelerator.autocast():
            return evaluate_greedy(
                model,
                tokenizer,
                problems,
                self.task.scores,
                max_new_tokens=self.trainer.args.max_completion_length,
                chat_template_kwargs=self.trainer.args.chat_template_kwargs,
                batch_size=self.study.greedy_batch_size,
                title=title,
                cache_weights=self.trainer.args.step_weights != "uncached",
            )


class EvaluationCallback(TrainerCallback):
    """Logs `greedy/<score>` every so many steps: without noise, under the policy's own scheme.

    Values go to the log history and to the trackers at once and alone, by [`transformers.Trainer.log`] and not TRL's,
    which would end the step's averages before the step does. A run that was stopped while it was evaluated is evaluated
    when it goes on.
    """

    def __init__(self, evaluation: PolicyEvaluation):
        self.evaluation = evaluation

    def on_train_begin(self, args, state, control, **kwargs):
        logged = {entry["step"] for entry in state.log_history if any(name.startswith("greedy/") for name in entry)}
        if state.global_step and state.global_step not in logged:
            self.on_step_end(args, state, control)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.evaluation.recipe.evaluate_every == 0:
            accuracies = self.evaluation("evaluating", self.evaluation.study.evaluate_every_n).accuracies
            should_log = control.should_log
            Trainer.log(self.evaluation.trainer, {f"greedy/{score}": value for score, value in accuracies.items()})
            control.should_log = should_log  # what the step itself logs is still to come


@contextlib.contextmanager
def placed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Keep a whole model that waits on the CPU on ``device`` within this context: FSDP and DeepSpeed expect it on the
    CPU until training begins. End with a message where it does not fit."""
    parameters = list(model.parameters())
    sharded = any(hasattr(p, "ds_id") or hasattr(p, "full_tensor") for p in parameters)
    if device.type == "cpu" or sharded or any(p.device.type != "cpu" for p in parameters):
        yield
        return
    try:
        model.to(device)
        yield
    except torch.OutOfMemoryError as error:
        raise SystemExit(
            f"error: the whole model does not fit on {device}, and it is sharded only when training begins; leave the "
            "evaluation before RL out with --study '{evaluate_before: false}'"
        ) from error
    finally:
        model.to("cpu")
        torch.accelerator.empty_cache()
