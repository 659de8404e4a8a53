# SPDX-License-Identifier: Apache-2.0
"""What `sft.py` and `distill.py` have in common: texts to learn and held-out ones, training, and what it changed."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import Trainer

from hf_mxfp4.files import write_json
from hf_mxfp4.lab import TextOptions
from hf_mxfp4.recipes.common.reporting import INPUT_ERRORS, errors_as_messages, print_table, tell
from hf_mxfp4.recipes.post_training import output as files
from hf_mxfp4.recipes.post_training.arguments import Options, parse_or_exit
from hf_mxfp4.recipes.post_training.policy import find_start, load_policy, load_task, make_trainer, prepare_start
from hf_mxfp4.recipes.tasks import of_task


Measured = dict[str, dict[str, float]]
#: Held-out texts of each source, unless the options say otherwise.
_HELD_OUT = 24
#: Texts that are learned at most, or windows of `max_length` tokens of a running text.
_LEARNED = 100_000


class TextRun:
    """A run of `sft.py` or `distill.py`, made by [`TextRun.begun`] with its model loaded.

    Attributes:
        options, recipe, output: all options, those of the script, and the output folder.
        stored, origin, original: what was loaded, a name for it, and the checkpoint that it was made of.
        policy, tokenizer: as they were loaded.
    """

    def __init__(self, options: Options, output: Path, learn: tuple[str, ...], started: float):
        self.recipe = options.recipe
        self.output = output
        self._started = started
        with errors_as_messages(*INPUT_ERRORS):
            if self.recipe.learn not in learn:
                raise ValueError(f"learn={self.recipe.learn!r} must be one of {', '.join(learn)}")
        stored, options = find_start(options)
        # Nothing of a task is needed where texts are both learned and held out.
        self._task = None
        if not self.recipe.text or not self.recipe.eval_text:
            self._task = load_task(options, stored)
        start = prepare_start(stored, options, self._task, self.output)
        self.stored, self.options, self.origin, self.original = start
        self.policy, self.tokenizer = load_policy(self.stored, self.options)
        self.tokenizer.split_special_tokens = False  # TRL ends texts by the name of a token

    @classmethod
    @contextlib.contextmanager
    def begun(
        cls, argv: list[str], groups: tuple[type, ...], demo: Path, learn: tuple[str, ...]
    ) -> Iterator["TextRun"]:
        """Yield the run of a command line, whose output folder is no other run's within this context; end with a
        message for what cannot be run.

        Args:
            argv, groups, demo: as for [`parse`].
            learn: the ways to learn of a task.
        """
        started = time.monotonic()
        options = parse_or_exit(argv, groups, demo)
        with files.one_run(options) as output:
            yield cls(options, output, learn, started)

    def make_trainer(self, kind: type[Trainer]) -> Trainer:
        """Make a trainer of what is learned and held out; end with a message for texts or options that it refuses."""
        with errors_as_messages(*INPUT_ERRORS):
            learned, held_out = self._load_datasets()
        given = {"train_dataset": learned, "eval_dataset": held_out, "processing_class": self.tokenizer}
        return make_trainer(kind, self.policy, self.stored, self.options, **given)

    def _load_datasets(self) -> tuple[Dataset, dict[str, Dataset]]:
        """Return what is learned, and the held-out texts by name. Raises `ValueError` for two texts of one name, and as
        [`TextOptions.read`] does."""
        recipe = self.recipe
        task = self._task
        n_held_out = recipe.evaluate_n or _HELD_OUT
        if recipe.text:
            learned = self._texts(recipe.text, _LEARNED, recipe.text_field)
        else:
            learned = of_task(task.train, recipe.learn)
        held_out = {Path(source).stem: self._texts(source, n_held_out) for source in recipe.eval_text}
        if len(held_out) < len(recipe.eval_text):
            raise ValueError(f"eval_text names two files alike; rename one of {', '.join(recipe.eval_text)}")
        if not held_out:
            test = task.test.select(range(min(n_held_out, len(task.test))))
            learn = "text" if recipe.learn == "text" else "completion"
            held_out[task.name] = of_task(test, learn)
        return learned, held_out

    def _texts(self, source: str, samples: int, field: str | None = None) -> Dataset:
        """Read texts, in tokens; those with a single one have nothing to predict."""
        read = TextOptions(source, field, samples, self.options.training.max_length)
        ids = [row[0].tolist() for row in read.tokens(self.tokenizer, read.read()) if row.shape[-1] > 1]
        tell("texts", f"{len(ids)} of {source}, {sum(map(len, ids))} tokens")
        return Dataset.from_dict({"input_ids": ids})

    def train(
        self, trainer: Trainer, measures: Mapping[str, str], facts: Callable[[], dict[str, Any]], saved_as: str
    ) -> dict[str, Any]:
        """Train, measure held-out texts before and after it, and save the model, unless the options say not to.

        All processes call it.

        Args:
            measures: what is logged of a text, with its heading in the table.
            facts: returns more entries of the summary, when training has ended.
            saved_as: the folder of the model in the output folder.

        Returns the summary, which is also written to `summary.json`.
        """
        options = self.options
        output = self.output
        report = files.begin(trainer, options, output)
        resumed_from = files.resume_choice(options.training)
        trainer.args.eval_on_start = resumed_from is None  # a checkpoint has the numbers of its start
        if options.training.max_steps:
            with report.on_exit(trainer):
                trainer.train(resume_from_checkpoint=resumed_from)
        before = _measured(trainer, 0, list(measures))
        after = _measured(trainer, trainer.state.global_step, list(measures))
        saved = None
        if self.recipe.study.save_policy:
            saved = str(output / saved_as)
            trainer.save_model(saved)
        trainer.accelerator.wait_for_everyone()
        scheme = "full precision"
        if not self.recipe.full_precision:
            scheme = options.quantization.describe()
        summary = {
            "scheme": scheme,
            "steps": trainer.state.global_step,
            **facts(),
            "before": before,
            "after": after,
            "saved": saved,
            "seconds": round(time.monotonic() - self._started, 1),
        }
        if trainer.is_world_process_zero():
            write_json(output / "log_history.json", trainer.state.log_history)
            write_json(output / "summary.json", summary, indent=2)
            _print_measures(f"{summary['steps']} steps", before, after, measures)
            tell("scheme", summary["scheme"])
            tell("saved model", summary["saved"] or "none")
        return summary


def _measured(trainer: Trainer, step: int, measures: list[str]) -> Measured:
    """Return the measures of each held-out text at a step; evaluate now if it is the last one and was not evaluated."""
    measured = _logged_measures(trainer, step, measures)
    if step == trainer.state.global_step and not measured:
        trainer.evaluate()
        measured = _logged_measures(trainer, step, measures)
    return measured


def _logged_measures(trainer: Trainer, step: int, measures: list[str]) -> Measured:
    logged: dict[str, float] = {}
    for entry in trainer.state.log_history:
        if entry["step"] == step:
            logged.update(entry)
    measured: Measured = {}
    for name in trainer.eval_dataset:
        if f"eval_{name}_{measures[0]}" in logged:
            measured[name] = {measure: logged[f"eval_{name}_{measure}"] for measure in measures}
    return measured


def _print_measures(title: str, before: Measured, after: Measured, measures: Mapping[str, str]) -> None:
    """Print measures of held-out texts before and after training, by their headings. What the teacher has does not
    change."""
    headings = ["held-out text"]
    for measure, heading in measures.items():
        if measure.startswith("teacher_"):
            headings.append(heading)
        else:
            headings += [f"{heading} before", f"{heading} after"]
    rows = []
    for name, now in after.items():
        old = before.get(name, {})
        row = [name]
        for measure in measures:
            if not measure.startswith("teacher_"):
                row.append(f"{old.get(measure, math.nan):.4g}")
            row.append(f"{now[measure]:.4g}")
        rows.append(row)
    print_table(title, rows, headings)
