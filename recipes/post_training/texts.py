# SPDX-License-Identifier: Apache-2.0
"""What `sft.py` and `distill.py` have in common: texts to learn and held-out ones, training, and what it changed."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.table import Table
from transformers import PreTrainedTokenizerBase, Trainer

from hf_mxfp4.files import write_json
from hf_mxfp4.lab import TextOptions
from hf_mxfp4.recipes.common.reporting import INPUT_ERRORS, console, errors_as_messages, tell
from hf_mxfp4.recipes.post_training import output as files
from hf_mxfp4.recipes.post_training.arguments import Options
from hf_mxfp4.recipes.tasks import Task, of_task


Measured = dict[str, dict[str, float]]


def check_output_and_task(options: Options, output: Path, learn: tuple[str, ...]) -> Task | None:
    """Return the task, or None where all texts are the user's. Ends with a message for an output folder that is in use,
    and a task or a way to ``learn`` of it that there is not."""
    recipe = options.recipe
    files.refuse_used_folder(output, recipe, options.training)
    with errors_as_messages(*INPUT_ERRORS):
        if recipe.learn not in learn:
            raise ValueError(f"learn={recipe.learn!r} must be one of {', '.join(learn)}")
        return None if recipe.text and recipe.eval_text else recipe.load_task()


def load_datasets(
    options: Options, task: Task | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[Dataset, dict[str, Dataset]]:
    """Return what is learned, and the held-out texts by name. Raises `ValueError` for two texts of one name, and as
    [`TextOptions.read`] does."""
    recipe, longest = options.recipe, options.training.max_length
    rows = recipe.eval_samples

    def texts(source: str, samples: int, field: str | None = None) -> Dataset:
        read = TextOptions(source, field, samples, longest)
        ids = [row[0].tolist() for row in read.tokens(tokenizer, read.read()) if row.shape[-1] > 1]
        tell("texts", f"{len(ids)} of {source}, {sum(map(len, ids))} tokens")
        return Dataset.from_dict({"input_ids": ids})

    if recipe.text:
        learned = texts(recipe.text, recipe.text_samples, recipe.text_field)
    else:
        learned = of_task(task.train, recipe.learn)
    held_out = {Path(source).stem: texts(source, rows) for source in recipe.eval_text}
    if len(held_out) < len(recipe.eval_text):
        raise ValueError(f"eval_text names two files alike; rename one of {', '.join(recipe.eval_text)}")
    if not held_out:
        test = task.test.select(range(min(rows, len(task.test))))
        held_out[task.name] = of_task(test, "text" if recipe.learn == "text" else "completion")
    return learned, held_out


def train_on_texts(
    trainer: Trainer,
    options: Options,
    output: Path,
    saved: Path | None,
    measures: Mapping[str, str],
    facts: Callable[[], dict[str, Any]],
    started: float,
) -> dict[str, Any]:
    """Train, measure held-out texts before and after it, save the model, and return the summary, which is also written
    to `summary.json`, with the ``facts`` that are asked for at the end. ``measures``: what is logged of a text, with
    its heading in the table; ``started``: when the recipe began. All processes call it."""
    training = options.training
    report = files.begin(trainer, options, output)
    resumed_from = files.resume_choice(training)
    training.eval_on_start = resumed_from is None  # a checkpoint has the numbers of its start
    if training.max_steps:
        with report.on_exit(trainer):
            trainer.train(resume_from_checkpoint=resumed_from)
    before, after = (_measured(trainer, step, list(measures)) for step in (0, trainer.state.global_step))
    if saved is not None:
        trainer.save_model(str(saved))
    trainer.accelerator.wait_for_everyone()
    summary = {
        "scheme": "full precision" if options.recipe.full_precision else options.quantization.describe(),
        "steps": trainer.state.global_step,
        **facts(),
        "before": before,
        "after": after,
        "saved": saved and str(saved),
        "seconds": round(time.monotonic() - started, 1),
    }
    if trainer.is_world_process_zero():
        write_json(output / "log_history.json", trainer.state.log_history)
        write_json(output / "summary.json", summary, indent=2)
        _print_table(f"{summary['steps']} steps", before, after, measures)
        tell("scheme", summary["scheme"])
        tell("saved model", summary["saved"] or "none")
    return summary


def _measured(trainer: Trainer, step: int, measures: list[str]) -> Measured:
    """Return the measures of each held-out text at a step; evaluate now if it is the last one and was not evaluated."""
    history, first = trainer.state.log_history, measures[0]
    kinds = {f"eval_{name}_{first}" for name in trainer.eval_dataset}
    if step == trainer.state.global_step and not any(line["step"] == step and line.keys() & kinds for line in history):
        trainer.evaluate()
    lines = [line for line in history if line["step"] == step]
    return {
        name: {measure: line[f"eval_{name}_{measure}"] for measure in measures}
        for name in trainer.eval_dataset
        for line in lines
        if f"eval_{name}_{first}" in line
    }


def _print_table(title: str, before: Measured, after: Measured, columns: Mapping[str, str]) -> None:
    """Print measures of held-out texts before and after training; ``columns`` has a heading for each. What the teacher
    has does not change."""
    moved = [measure for measure in columns if not measure.startswith("teacher_")]
    table = Table(
        "held-out text", *(f"{columns[m]} {when}" for m in moved for when in ("before", "after")), title=title
    )
    fixed = [measure for measure in columns if measure not in moved]
    for measure in fixed:
        table.add_column(columns[measure])
    for name, now in after.items():
        old = before.get(name, dict.fromkeys(columns, math.nan))
        values = [each[measure] for measure in moved for each in (old, now)] + [now[measure] for measure in fixed]
        table.add_row(name, *(f"{value:.4g}" for value in values))
    console.print(table)
