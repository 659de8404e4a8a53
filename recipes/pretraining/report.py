# SPDX-License-Identifier: Apache-2.0
"""What a study says: before it runs, in its files, and in its closing table."""

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from recipes.common.schemes import preset_of
from recipes.common.terminal import console, errors_as_messages, tell
from recipes.common.text import with_interval

from .arguments import Study
from .arms import BASELINE
from .corpus import Corpus
from .plots import draw_curves, draw_overheads
from .records import StudyFile
from .summary import summarize


def announce(study: Study, corpus: Corpus | None, missing: int) -> None:
    """Say what will be done."""
    options, training = study.options, study.training
    tell("arms", ", ".join(arm.name for arm in study.arms))
    for arm in study.arms:
        if arm.config is not None:
            tell(f"arm {arm.name}", f"{study.scheme_text(arm)}: {preset_of(arm.config)}")
    tell(
        "budget",
        f"{training.max_steps} steps of {study.tokens_per_step} tokens, every arm goes on to step {study.total_steps}",
    )
    tell("baseline", study.precision)
    total = len(study.arms) * len(options.seeds)
    tell("runs", f"{missing} of {total}" + (f"; {total - missing} are in {training.output_dir}" * (missing < total)))
    if corpus is not None and corpus.entropy is not None:
        tell("corpus", f"generated, entropy {corpus.entropy:.4f} nats per token")


def finish(study: Study, stored: StudyFile, output: Path) -> dict[str, Any]:
    """The summary of the arms and seeds that were asked for, with its figures; written to the output folder."""
    wanted = {(arm.name, seed) for arm in study.arms for seed in study.options.seeds}
    runs = [run for run in stored.runs if (run["arm"], run["seed"]) in wanted]
    runs.sort(key=lambda run: ([arm.name for arm in study.arms].index(run["arm"]), run["seed"]))
    with errors_as_messages(ValueError):
        summary = summarize(runs, budget=study.budget_tokens, target_fraction=study.options.target_fraction)
    orders = {(run["seed"], run["data_order"]) for run in runs}
    if len(orders) != len(summary["targets"]):
        raise SystemExit(f"error: arms of one seed saw different text, see data_order in {stored.path}; start afresh")
    first = runs[0]
    summary = {
        "baseline": study.precision,
        "parameters": first["parameters"],
        "steps": first["steps"],
        "tokens_per_step": study.tokens_per_step,
        "entropy": first["entropy"],
        **summary,
    }
    for name, result in summary["arms"].items():
        of_arm = [run for run in runs if run["arm"] == name]
        for key in ("scheme", "n_quantized", "n_skipped", "quantized_operands"):
            result[key] = of_arm[0][key]
        for key in ("curve", "oscillation_resets", "seconds", "cpu_seconds"):
            result[key] = [run[key] for run in of_arm]
    curves = {name: result["curve"] for name, result in summary["arms"].items()}
    (output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw_curves(curves, entropy=summary["entropy"]).savefig(output / "curves.png", dpi=120)
    if len(summary["arms"]) > 1:
        draw_overheads(summary["arms"]).savefig(output / "overheads.png", dpi=120)
    return summary


def print_summary(summary: dict[str, Any]) -> None:
    """The closing table."""
    table = Table(
        title=f"tokens to the loss of {BASELINE} ({summary['baseline']}) after {summary['target_fraction']:.0%} of "
        f"{summary['budget_tokens'] / 1e6:.2f} M tokens"
    )
    for column in ("arm", "quantized", "token overhead", "loss above baseline", "s per run"):
        table.add_column(column, overflow="fold")
    for name, result in summary["arms"].items():
        operands = sum(count > 0 for count in result["quantized_operands"].values())
        seconds = sum(result["seconds"]) / len(result["seconds"])
        table.add_row(
            name,
            f"{operands} of 6 operands, {result['n_quantized']} layers" if operands else "nothing",
            "" if name == BASELINE else overhead_text(result["overhead"]),
            "" if name == BASELINE else with_interval(result["gap"], 1.0, 4),
            f"{seconds:.0f}",
        )
    console.print(table)


def overhead_text(overhead: dict[str, Any]) -> str:
    """An overhead in percent; how often the target was not reached, where that happened."""
    if overhead["mean"] is not None:
        return with_interval(overhead, 100.0, 1, unit=" %")
    missed = f"not reached by {overhead['n'] - overhead['n_finite']} of {overhead['n']} seeds"
    return missed if overhead["at_least"] is None else f"{missed}: over {100 * overhead['at_least']:.1f} %"


def tell_run(run: dict[str, Any]) -> None:
    """Say how a run went."""
    operands = " ".join(f"{name}:{count}" for name, count in run["quantized_operands"].items() if count)
    last = run["curve"][-1][1]
    tell(
        f"{run['arm']}, seed {run['seed']}",
        f"validation loss {'not finite' if last is None else f'{last:.4f}'} after {run['steps']} steps, "
        f"{run['seconds']:.0f} s; n_quantized={run['n_quantized']} {operands or '(nothing quantized)'}",
    )
