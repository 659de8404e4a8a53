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
    import from_root  # noqa: F401  parts are found as recipes.*

import sys
from pathlib import Path
from typing import Any

from recipes.common.process_group import leave_together
from recipes.common.terminal import errors_as_messages
from recipes.pretraining.arguments import parse_or_exit
from recipes.pretraining.corpus import load_corpus
from recipes.pretraining.records import StudyFile
from recipes.pretraining.report import announce, finish, print_summary, tell_run
from recipes.pretraining.runs import train_arm


def main(argv: list[str]) -> dict[str, Any]:
    """Run what is missing of a study; the summary that it also writes to `summary.json` in the output folder."""
    study = parse_or_exit(argv)
    output = Path(study.training.output_dir)
    with errors_as_messages(OSError, RuntimeError, ValueError):
        stored = StudyFile(output / "study.json", study.settings)
        missing = [
            (seed, arm)
            for seed in study.options.seeds
            for arm in study.arms
            if not stored.finished(arm.name, seed, study.scheme_text(arm))
        ]
        corpus = load_corpus(study.options, study.total_steps * study.tokens_per_step) if missing else None
    announce(study, corpus, len(missing))
    for seed, arm in missing:
        with errors_as_messages(ValueError, where=f"arm {arm.name}, seed {seed}: "):
            run = train_arm(study, arm, seed, corpus, output)
        if study.training.process_index == 0:
            stored.add(run)
        tell_run(run)
    if study.training.process_index != 0:
        return {}
    summary = finish(study, stored, output)
    print_summary(summary)
    return summary


if __name__ == "__main__":
    main(sys.argv[1:])
    leave_together()
