# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware distillation: a quantized student learns the predictions of the checkpoint it was made of.

    accelerate launch recipes/distill.py --config recipes/configs/<name>.yaml [--option value ...]

Without `--config` it runs `distill_tiny_cpu.yaml`, unless another model or task is named. Every option of the recipe,
of `MXFP4RLConfig`, of `MXFP4DistillationConfig` and of `ModelConfig` can stand in the YAML file or on the command
line, which wins. The teacher is the checkpoint in full precision, as it was before `smooth_strength` and `gptq` prepare
it for the student; name the original with `teacher_model_name_or_path` when the model is a prepared or packed one.
Held-out texts are evaluated before, while and after it trains; `max_steps: 0` evaluates alone.
"""

if __name__ == "__main__" and not __package__:
    import from_root  # noqa: F401  the root in place of this folder

import math
import sys
import time
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from rich.table import Table
from trl import get_peft_config

from hf_mxfp4 import MXFP4DistillationConfig, MXFP4DistillationTrainer
from hf_mxfp4.files import write_json
from hf_mxfp4.lab import RunReportCallback, TextOptions
from hf_mxfp4.recipes.common.options import CONFIGS
from hf_mxfp4.recipes.common.reporting import INPUT_ERRORS, TrainingBar, console, errors_as_messages, shutdown, tell
from hf_mxfp4.recipes.post_training import output as files
from hf_mxfp4.recipes.post_training.arguments import DistillArguments, Options, parse_or_exit
from hf_mxfp4.recipes.post_training.policy import find_start, load_policy, prepare_start
from hf_mxfp4.recipes.tasks import Task, of_task


DEMO = CONFIGS / "distill_tiny_cpu.yaml"
LEARN = ("text", "completion", "generated")
#: What is reported of each held-out text.
MEASURES = ("kl", "perplexity", "teacher_perplexity")


def main(argv: list[str]) -> dict[str, Any]:
    """Run the recipe; return the summary that it also writes to `summary.json` in the output folder."""
    started = time.monotonic()
    options = parse_or_exit(argv, MXFP4DistillationConfig, DistillArguments, DEMO)
    recipe, _, training, model_args = options
    output = Path(training.output_dir)
    files.refuse_used_folder(output, recipe, training)
    with errors_as_messages(*INPUT_ERRORS):
        if recipe.learn not in LEARN:
            raise ValueError(f"learn={recipe.learn!r} must be one of {', '.join(LEARN)}")
        task = None if recipe.text and recipe.eval_text else recipe.load_task()
    start = find_start(options)
    options = options._replace(quantization=start.scheme)
    whole = start.name or str(output / "base")
    start, origin = prepare_start(start, options, task, output)
    if start.name != whole:
        training.teacher_model_name_or_path = training.teacher_model_name_or_path or whole
    student, tokenizer = load_policy(start, options)
    training.allow_full_precision = training.allow_full_precision or recipe.full_precision
    with errors_as_messages(*INPUT_ERRORS):
        learned, held_out = datasets_of(options, task, tokenizer)
        trainer = MXFP4DistillationTrainer(
            student,
            None,
            training,
            learned,
            held_out,
            processing_class=tokenizer,
            peft_config=None if start.is_adapter else get_peft_config(model_args),
        )
    shared, megabytes = trainer.shared[0], trainer.shared[1] / 1e6
    tell("student", f"{origin}: {trainer.n_quantized} quantized layers; {shared} tensors ({megabytes:.1f} MB) shared")
    TrainingBar.install(trainer)
    files.remove_old_checkpoints(output, recipe, training)
    if PartialState().is_main_process:
        files.write_resolved_config(output, *options)
    report = RunReportCallback(training.report_every)
    if training.report_every:
        trainer.add_callback(report)

    resumed_from = files.resume_choice(training)
    training.eval_on_start = resumed_from is None  # a checkpoint has the numbers of its start
    if training.max_steps:
        with report.on_exit(trainer):
            trainer.train(resume_from_checkpoint=resumed_from)
    before, after = measured(trainer, 0), measured(trainer, trainer.state.global_step)
    saved = output / "student" if recipe.save_student else None
    if saved is not None:
        trainer.save_model(str(saved))
    trainer.accelerator.wait_for_everyone()
    summary = {
        "model": origin,
        "teacher": training.teacher_model_name_or_path or origin,
        "scheme": "full precision" if recipe.full_precision else start.scheme.describe(),
        "steps": trainer.state.global_step,
        "n_quantized": trainer.n_quantized,
        "shared_tensors": trainer.shared[0],
        "shared_bytes": trainer.shared[1],
        "tokens_distilled": trainer.tokens_distilled,
        "before": before,
        "after": after,
        "saved": saved and str(saved),
        "seconds": round(time.monotonic() - started, 1),
    }
    if trainer.is_world_process_zero():
        write_json(output / "log_history.json", trainer.state.log_history)
        write_json(output / "summary.json", summary, indent=2)
        print_summary(summary)
    return summary


def datasets_of(options: Options, task: Task | None, tokenizer: Any) -> tuple[Dataset, dict[str, Dataset]]:
    """Return what is learned, and the held-out texts by name."""
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


def measured(trainer: MXFP4DistillationTrainer, step: int) -> dict[str, dict[str, float]]:
    """Return divergence and perplexities by the name of the held-out text at a step; evaluate now if it is the last
    one and was not evaluated."""
    history = trainer.state.log_history
    kinds = {f"eval_{name}_kl" for name in trainer.eval_dataset}
    if step == trainer.state.global_step and not any(line["step"] == step and line.keys() & kinds for line in history):
        trainer.evaluate()
    lines = [line for line in history if line["step"] == step]
    return {
        name: {measure: line[f"eval_{name}_{measure}"] for measure in MEASURES}
        for name in trainer.eval_dataset
        for line in lines
        if f"eval_{name}_kl" in line
    }


def print_summary(summary: dict[str, Any]) -> None:
    """Print the closing table."""
    table = Table(title=f"{summary['steps']} steps of distillation · {summary['tokens_distilled']:,} tokens")
    for column in ("held-out text", "KL before", "KL after", "perplexity before", "after", "of the teacher"):
        table.add_column(column)
    for name, after in summary["after"].items():
        before = summary["before"].get(name, dict.fromkeys(MEASURES, math.nan))
        values = before["kl"], after["kl"], before["perplexity"], after["perplexity"], after["teacher_perplexity"]
        table.add_row(name, *(f"{value:.4g}" for value in values))
    console.print(table)
    tell("scheme", summary["scheme"])
    if summary["saved"]:
        tell("saved student", summary["saved"])


if __name__ == "__main__":
    main(sys.argv[1:])
    shutdown()
