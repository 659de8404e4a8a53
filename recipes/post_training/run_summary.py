# SPDX-License-Identifier: Apache-2.0
"""What a run of `grpo.py` leaves in its output folder, and the table that it closes with."""

import json
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from hf_mxfp4 import MXFP4GRPOTrainer
from hf_mxfp4.checkpoint import add_evaluation
from hf_mxfp4.files import replace_file
from hf_mxfp4.lab import plot_training
from hf_mxfp4.stats import share_text
from recipes.common.terminal import console, tell
from recipes.evaluation.generate import Evaluation, write_completions
from recipes.tasks import Task


def write_results(
    output: Path,
    trainer: MXFP4GRPOTrainer,
    task: Task,
    before: Evaluation | None,
    after: Evaluation,
    saved: Path | None,
    model: str,
    base_checksum: dict[str, str] | None,
    seconds: float,
) -> dict[str, Any]:
    """Write all that is known once the policy is trained and saved: completions, plot, logged values, the evaluation in
    the card of the saved policy, and `summary.json`. For one process; the summary."""
    write_completions(after, task.test, output / "completions_after.jsonl")
    replace_file(output / "log_history.json", json.dumps(trainer.state.log_history) + "\n")
    plot = plot_training(trainer.state.log_history, output / "training.png")
    summary = summarize(trainer, task, before, after, saved, plot, model)
    summary |= {"base_checksum": base_checksum, "seconds": seconds}
    write_summary(output, summary)
    if saved is not None:
        if not summary["adapter"] and trainer.n_quantized and before is not None:
            add_evaluation(saved, summary)
        summary["bytes_on_disk"] = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
        write_summary(output, summary)
    return summary


def write_summary(output: Path, summary: dict[str, Any]) -> None:
    """Write `summary.json`, or put it in the place of an earlier one."""
    replace_file(output / "summary.json", json.dumps(summary, indent=2) + "\n")


def summarize(
    trainer: MXFP4GRPOTrainer,
    task: Task,
    before: Evaluation | None,
    after: Evaluation,
    saved: Path | None,
    plot: Path,
    model: str,
) -> dict[str, Any]:
    """Everything the closing table shows, as JSON, but for what is found by reloading."""
    history = [entry for entry in trainer.state.log_history if "entropy" in entry]
    sigmas = [entry["aqn/sigma"] for entry in history if "aqn/sigma" in entry]
    written = trainer.report_callback and trainer.report_callback.path
    report = getattr(trainer.accelerator.unwrap_model(trainer.model), "quantization_report", None)
    return {
        "task": task.name,
        "model": model,
        "scheme": report.scheme if report else "full precision",
        "seed": trainer.args.seed,
        "steps": trainer.state.global_step,
        "n_test": len(task.test),
        "accuracy_before": before and {name: before.accuracy(name) for name in task.scores},
        "accuracy_after": {name: after.accuracy(name) for name in task.scores},
        "standard_error_before": before and {name: before.standard_error(name) for name in task.scores},
        "standard_error_after": {name: after.standard_error(name) for name in task.scores},
        "entropy_first": history[0]["entropy"] if history else None,
        "entropy_last": history[-1]["entropy"] if history else None,
        "entropy_alarms": trainer.entropy_callback.alarms,
        "aqn_sigma_logged": sigmas and {"largest": max(sigmas), "last": sigmas[-1]},
        "n_quantized": trainer.n_quantized,
        "n_skipped": report.n_skipped if report else None,
        "weight_sqnr_db": report.sqnr_db if report else None,
        "saved": saved and str(saved),
        "adapter": saved is not None and (saved / "adapter_config.json").is_file(),
        "plot": str(plot),
        "run_report": str(written) if written else None,
        "reloaded": None,
        "reload_error": None,
    }


def print_summary(summary: dict[str, Any]) -> None:
    """The closing table."""
    table = Table(
        title=f"{summary['task']} · {summary['steps']} GRPO steps · seed {summary['seed']}", show_header=False
    )
    table.add_column(style="bold")
    table.add_column(overflow="fold")

    def accuracy(when: str, name: str) -> str:
        return share_text(summary[f"accuracy_{when}"][name], summary["n_test"])

    table.add_row("model", Text(summary["model"]))
    table.add_row("scheme", Text(summary["scheme"]))
    for name, after in summary["accuracy_after"].items():
        remark = f"95 %, n = {summary['n_test']}"
        if summary["accuracy_before"]:
            table.add_row(f"{name}, greedy, before RL", f"{accuracy('before', name)}  ({remark})")
            remark = f"{after - summary['accuracy_before'][name]:+.3f}"
        table.add_row(f"{name}, greedy, after RL", f"{accuracy('after', name)}  ({remark})")
    if summary["entropy_first"] is not None:
        alarms = f", {len(summary['entropy_alarms'])} alarms"
        table.add_row("entropy", f"{summary['entropy_first']:.3f} -> {summary['entropy_last']:.3f} nats{alarms}")
    if summary["aqn_sigma_logged"]:
        table.add_row("AQN sigma", "largest {largest:.2g}, last {last:.2g}".format(**summary["aqn_sigma_logged"]))
    sqnr = f", weight SQNR {summary['weight_sqnr_db']:.1f} dB" if summary["weight_sqnr_db"] is not None else ""
    left = f" ({summary['n_skipped']} left in full precision)" if summary["n_quantized"] else ""
    table.add_row("quantized layers", f"{summary['n_quantized']}{left}{sqnr}")
    kind = "adapter alone" if summary["adapter"] else "master weights"
    if summary["base_checksum"]:
        before, after = summary["base_checksum"]["before"], summary["base_checksum"]["after"]
        verdict = "bit-identical after training" if before == after else f"CHANGED to {after[:12]}"
        table.add_row("frozen base", f"sha256 {before[:12]}, {verdict}")
    if summary["saved"]:
        table.add_row("size on disk", f"{summary['bytes_on_disk'] / 1e6:.2f} MB ({kind})")
    if summary["reload_error"]:
        table.add_row("after reloading", Text("FAILED, see below", style="bold red"))
    elif summary["reloaded"]:
        same, compared = summary["reloaded"]["identical"], summary["reloaded"]["compared"]
        table.add_row("after reloading", f"{same} of {compared} completions identical")
    elif summary["adapter"]:
        table.add_row("after reloading", "not compared (reload_check is 0)")
    table.add_row("time", f"{summary['seconds']:.0f} s")
    console.print(table)
    # Paths are for copying: a table would break them on a narrow terminal.
    if summary["saved"]:
        tell("saved model", summary["saved"])
    tell("plot", summary["plot"])
    tell("run report", summary["run_report"] or "none (see report_every)")
    if summary["reload_error"]:
        tell(
            "reloading failed",
            f"{summary['reload_error']}\nThe saved model and all results are written; --reload_check 0 leaves the "
            "comparison out.",
        )
