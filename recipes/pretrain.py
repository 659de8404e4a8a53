# SPDX-License-Identifier: Apache-2.0
"""Pretraining from scratch with each product of the linear layers quantized: the study of arXiv 2605.09825.

    accelerate launch recipes/pretrain.py --config recipes/configs/<name>.yaml [--option value ...]

Trains every arm (which operands are quantized, and by what) with every seed and says how many more tokens it needs than
the baseline to reach the same validation loss. All runs of a seed start from the same weights and see the same batches
under the same learning rates. A study that was stopped goes on where it was: finished runs are kept in `study.json`.
Without `--config` it runs `pretrain_tiny_cpu.yaml`. Options of the study and of transformers' `TrainingArguments` can
stand in the YAML file or on the command line, which wins.
"""

if __name__ == "__main__" and not __package__:
    import from_root  # noqa: F401  the root in place of this folder

import contextlib
import sys
from pathlib import Path
from typing import Any

from hf_mxfp4.files import break_links, write_json
from hf_mxfp4.recipes.common.folders import locked
from hf_mxfp4.recipes.common.options import exit_on_wrong_options
from hf_mxfp4.recipes.common.reporting import errors_as_messages, full_disk_as_message, shutdown, tell
from hf_mxfp4.recipes.pretraining.arguments import TARGET_FRACTION, Study, parse
from hf_mxfp4.recipes.pretraining.corpus import load_corpus
from hf_mxfp4.recipes.pretraining.runs import StudyFile, train_arm
from hf_mxfp4.recipes.pretraining.summary import draw_overheads, print_summary, summarize


def main(argv: list[str]) -> dict[str, Any]:
    """Run what is missing of a study; return the summary that it also writes to `summary.json` in the output folder."""
    study = exit_on_wrong_options(parse, argv, "On a CPU use pretrain_tiny_cpu.yaml or pretrain_study_cpu.yaml.")
    output = Path(study.training.output_dir)
    with contextlib.ExitStack() as stack:
        if study.training.process_index == 0:
            with errors_as_messages(OSError, ValueError):
                stack.enter_context(locked(output))
        with full_disk_as_message(output, "the same command"):
            return _run(study, output)


def _run(study: Study, output: Path) -> dict[str, Any]:
    with errors_as_messages(OSError, RuntimeError, ValueError):
        stored = StudyFile(output / "study.json", study.settings)
        missing = []
        for seed in study.options.seeds:
            missing += [(seed, arm) for arm in study.arms if not stored.finished(arm, seed)]
        corpus = load_corpus(study.options, study.total_steps * study.tokens_per_step) if missing else None
        if study.training.process_index == 0:
            stored.write()  # before there are weights and checkpoints, which another study would continue
    for arm in study.arms:
        tell(f"arm {arm.name}", study.scheme_text(arm))
    steps = study.training.max_steps
    total = len(study.arms) * len(study.options.seeds)
    tell("budget", f"{steps} steps of {study.tokens_per_step} tokens, every arm goes on to step {study.total_steps}")
    tell("runs", f"{len(missing)} of {total} are missing in {output}")
    for seed, arm in missing:
        with errors_as_messages(ValueError, where=f"arm {arm.name}, seed {seed}: "):
            run = train_arm(study, arm, seed, corpus, output)
        if study.training.process_index == 0:
            stored.add(run)
        operands = " ".join(f"{name}:{count}" for name, count in run["quantized_operands"].items() if count)
        told = f"validation loss {run['curve'][-1][1]} after {run['steps']} steps, {run['seconds']:.0f} s"
        tell(f"{arm.name}, seed {seed}", f"{told}; n_quantized={run['n_quantized']} {operands}")
    if study.training.process_index != 0:
        return {}
    summary = finish(study, stored.runs, output)
    print_summary(summary)
    return summary


def finish(study: Study, runs: list[dict[str, Any]], output: Path) -> dict[str, Any]:
    """Summarize the arms and seeds that were asked for; write `summary.json` and a figure."""
    arms = [arm.name for arm in study.arms]
    runs = [run for run in runs if run["arm"] in arms and run["seed"] in study.options.seeds]
    runs.sort(key=lambda run: (arms.index(run["arm"]), run["seed"]))
    budget = study.training.max_steps * study.tokens_per_step
    with errors_as_messages(ValueError):
        compared = summarize(runs, budget=budget, target_fraction=TARGET_FRACTION)
    summary = {
        "baseline": study.precision,
        "tokens_per_step": study.tokens_per_step,
        **{key: runs[0][key] for key in ("parameters", "steps", "entropy")},
        **compared,
    }
    for name, result in summary["arms"].items():
        of_arm = [run for run in runs if run["arm"] == name]
        for key in ("scheme", "n_quantized", "n_skipped", "quantized_operands"):
            result[key] = of_arm[0][key]
        for key in ("curve", "seconds", "cpu_seconds"):
            result[key] = [run[key] for run in of_arm]
    write_json(output / "summary.json", summary, indent=1)
    break_links(output / "overheads.png")
    draw_overheads(summary["arms"]).savefig(output / "overheads.png", dpi=120)
    return summary


if __name__ == "__main__":
    main(sys.argv[1:])
    shutdown()
