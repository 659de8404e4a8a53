# SPDX-License-Identifier: Apache-2.0
"""The output folder of a run: which run it belongs to, every option that was used, results, and the closing table."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainingArguments

from hf_mxfp4 import MXFP4GRPOTrainer
from hf_mxfp4.checkpoint import add_evaluation, checkpoint_step, invalidate, last_complete_checkpoint
from hf_mxfp4.files import replace_file, write_json
from hf_mxfp4.lab import RunReportCallback, plot_training
from hf_mxfp4.lab.evaluation.intervals import Estimate, paired_share_difference
from hf_mxfp4.recipes.common.folders import LOCK, locked
from hf_mxfp4.recipes.common.options import load_yaml
from hf_mxfp4.recipes.common.reporting import TrainingBar, full_disk_as_message, layers_text, print_table, tell
from hf_mxfp4.recipes.evaluation.generate import Evaluation, write_completions
from hf_mxfp4.recipes.post_training.arguments import Options
from hf_mxfp4.recipes.tasks import Task
from hf_mxfp4.utils import package_versions, share_text


# ---- whose folder it is ---------------------------------------------------------------------------------------------


def resume_choice(training: TrainingArguments) -> str | bool | None:
    """Return what `Trainer.train` takes: a folder, True for the newest checkpoint, or None. YAML has booleans, the
    command line their names."""
    choice = training.resume_from_checkpoint
    words = {"": None, "none": None, "false": None, "true": True}
    return words.get(str(choice).lower(), choice)


@contextlib.contextmanager
def one_run(options: Options) -> Iterator[Path]:
    """Yield the output folder, which is locked within this context. Exits rather than mix a new run into the folder of
    another one. To be called by all processes."""
    output = Path(options.training.output_dir)
    refusal = None
    with contextlib.ExitStack() as stack:
        if PartialState().is_main_process:
            try:
                stack.enter_context(locked(output))
                _prepare_folder(output, options)
            except (OSError, ValueError) as error:
                refusal = str(error)
        # No process may write there before the first one has looked.
        (refusal,) = broadcast_object_list([refusal])
        if refusal is not None:
            raise SystemExit(f"error: {refusal}")
        with full_disk_as_message(output, "--resume_from_checkpoint true"):
            yield output


def _prepare_folder(output: Path, options: Options) -> None:
    """Remove the checkpoints of a run that is written over; raise `ValueError` where this run may not write."""
    resumes_from = resume_choice(options.training)
    if resumes_from is True and last_complete_checkpoint(output) is None:
        raise ValueError(f"nothing to resume: {output} holds no complete checkpoint (see save_strategy and save_steps)")
    is_used = any(path.name != LOCK for path in output.iterdir())
    if not is_used or resumes_from is not None:
        return
    if not options.recipe.overwrite:
        raise ValueError(
            f"output_dir {output} is not empty; choose another --output_dir, continue with "
            "--resume_from_checkpoint true, or write over it with --overwrite true"
        )
    # A later `--resume_from_checkpoint true` would take the one with the largest step, be it an old one.
    for folder in list(output.iterdir()):
        if checkpoint_step(folder) is not None and folder.is_dir():
            invalidate(folder)  # should removing it be cut short, nobody resumes from the rest
            shutil.rmtree(folder)


def begin(trainer: Trainer, options: Options, output: Path) -> RunReportCallback:
    """Do what comes before training: show progress, write down all options, and add the run report, which is
    returned."""
    TrainingBar.install(trainer)
    if PartialState().is_main_process:
        write_resolved_config(output, options)
    report = RunReportCallback(getattr(options.training, "report_every", 0))
    if report.every:
        trainer.add_callback(report)
    return report


# ---- options --------------------------------------------------------------------------------------------------------

#: Options of one start of a run.
_OF_A_START = ("output_dir", "overwrite", "resume_from_checkpoint")


def write_resolved_config(folder: Path, options: Options) -> None:
    """Write `resolved_config.yaml`: the options of all groups in order, without tokens, and versions of packages.

    A run that is resumed first prints which options are not those that it was begun with.
    """
    used: dict[str, Any] = {}
    for group in options:
        if isinstance(group, TrainingArguments):
            used.update(group.to_dict())
            continue
        for field in fields(group):
            if field.init:
                used[field.name] = getattr(group, field.name)
    used["study"] = asdict(used["study"])
    used = {name: value for name, value in used.items() if name not in ("hub_token", "push_to_hub_token")}
    # Through JSON, which makes plain values of enumerations, paths and the like.
    content = json.loads(json.dumps({"versions": package_versions(), "options": used}, default=str))
    file = folder / "resolved_config.yaml"
    if resume_choice(options.training) is not None and file.is_file():
        before = load_yaml(file)["options"]
        changes = []
        for name, value in content["options"].items():
            if name not in _OF_A_START and before.get(name) != value:
                changes.append(f"{name}={value} (was {before.get(name)})")
        if changes:
            tell("resumed", f"the run was begun with other options: {', '.join(changes)}")
    replace_file(file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    tell("options", f"all of them in {file}")


# ---- results --------------------------------------------------------------------------------------------------------


def write_results(
    output: Path,
    trainer: MXFP4GRPOTrainer,
    run_report: RunReportCallback,
    task: Task,
    before: Evaluation | None,
    after: Evaluation,
    saved: Path | None,
    model: str,
) -> dict[str, Any]:
    """Write all that is known once the policy is trained and saved: completions, plot, logged values, the evaluation in
    the card of the saved policy, and `summary.json`. For one process; returns the summary."""
    logged = trainer.state.log_history
    write_completions(after, task.test, output / "completions_after.jsonl")
    write_json(output / "log_history.json", logged)
    plot = None
    if logged:
        plot = str(plot_training(logged, output / "training.png"))
        if trainer.run_log is not None:
            run_report.write(output)  # with the evaluation

    report = getattr(trainer.accelerator.unwrap_model(trainer.model), "quantization_report", None)
    is_adapter = saved is not None and (saved / "adapter_config.json").is_file()
    summary = {
        "task": task.name,
        "model": model,
        "scheme": report.scheme if report else "full precision",
        "seed": trainer.args.seed,
        "learning_rate": trainer.args.learning_rate,
        "steps": trainer.state.global_step,
        "n_test": len(task.test),
        "accuracy_before": before.accuracies if before else None,
        "accuracy_after": after.accuracies,
        "accuracy_change": _changes(before, after) if before else None,
        "entropy_alarms": trainer.entropy_callback.alarms,
        "n_quantized": trainer.n_quantized,
        "n_skipped": report.n_skipped if report else None,
        "weight_sqnr_db": report.sqnr_db if report else None,
        "saved": str(saved) if saved else None,
        "adapter": is_adapter,
        "plot": plot,
        "run_report": str(run_report.path) if run_report.path else None,
        "reloaded": None,
    }
    if saved is not None:
        if not is_adapter and trainer.n_quantized and before is not None:
            add_evaluation(saved, summary)
        summary["bytes_on_disk"] = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    write_json(output / "summary.json", summary, indent=2)
    return summary


def _changes(before: Evaluation, after: Evaluation) -> dict[str, dict[str, Any]]:
    """Return by how much the accuracy by each score changed on the same problems, with intervals."""
    changes = {}
    for name, correct in after.correct.items():
        change, _, _ = paired_share_difference(correct, before.correct[name])
        changes[name] = change.to_dict()
    return changes


def print_summary(summary: dict[str, Any]) -> None:
    """Print the closing table, and paths below it, where they can be copied from a narrow terminal."""
    rows = {"model": summary["model"], "scheme": summary["scheme"]}
    n_test = summary["n_test"]
    for name, after in summary["accuracy_after"].items():
        interval = f"(95 %, n = {n_test})"
        if summary["accuracy_before"]:
            rows[f"{name}, greedy, before RL"] = f"{share_text(summary['accuracy_before'][name], n_test)}  {interval}"
        rows[f"{name}, greedy, after RL"] = f"{share_text(after, n_test)}  {interval}"
        if summary["accuracy_change"]:
            change = Estimate(**summary["accuracy_change"][name])
            rows[f"{name}, greedy, change"] = f"{change.signed()}  {interval}"
    rows["alarms of entropy"] = str(len(summary["entropy_alarms"]))
    rows["quantized layers"] = layers_text(summary)
    if summary["saved"]:
        kind = "adapter alone" if summary["adapter"] else "master weights"
        rows["size on disk"] = f"{summary['bytes_on_disk'] / 1e6:.2f} MB ({kind})"
        if summary.get("packed"):
            rows["packed"] = f"{summary['bytes_packed'] / 1e6:.2f} MB (start: {summary['bytes_of_start'] / 1e6:.2f} MB)"
    if summary["reloaded"]:
        rows["after reloading"] = "{identical} of {compared} completions identical".format(**summary["reloaded"])
    rows["time"] = f"{summary['seconds']:.0f} s"
    print_table("{task} · {steps} GRPO steps · seed {seed}".format(**summary), rows.items())
    if summary["saved"]:
        tell("saved model", summary["saved"])
    tell("plot", summary["plot"] or "none, since nothing was trained")
    tell("run report", summary["run_report"] or "none (see report_every)")
