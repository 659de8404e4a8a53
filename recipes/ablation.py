# SPDX-License-Identifier: Apache-2.0
"""The tables of arXiv 2605.20402: GRPO in full precision, in MXFP4, and with each correction, for several seeds.

    python recipes/ablation.py --config recipes/configs/ablation_cpu.yaml [--out DIR] [--jobs N] [--seeds 0,1,2]

Pretrains the starting point of the grid once (or takes a checkpoint), then runs `grpo.py` for every cell and seed in a
process and a folder of its own, and writes `ablation.json` (one record per run), `table.md` and `plots/`. A grid that
was stopped goes on where it was: finished runs are kept, a killed one is started again. A run that fails is reported,
and the others go on; the exit code is then 1. A grid may be spread over machines of one kind: `--only` and `--seeds`
run parts of it, and `--report_only` reports all of them from a folder that the others have been copied into.

Options of `grpo.py` take the place of those that all cells share. To try a grid before it is started, give it two steps
of a small model and another folder: `--max_steps 2 --n_train 64 --n_test 8 --model_name_or_path SMALL --out DIR`.
"""

if __name__ == "__main__" and not __package__:
    import from_root  # noqa: F401  parts are found as recipes.*

import os
import shlex
import sys
import warnings
from dataclasses import replace

import yaml

from recipes.ablations.arguments import parse
from recipes.ablations.grid import check_cells, read_grid
from recipes.ablations.report import describe, report
from recipes.ablations.results import stored_seeds
from recipes.ablations.runner import leaving_on_sigterm, locked, prepare_bases, run_grid
from recipes.common.terminal import console, tell


# TRL's own default still has the old name of this option.
warnings.filterwarnings("ignore", category=FutureWarning, message=".*gradient_checkpointing.*")


def main(argv: list[str]) -> int:
    """Run what is missing of a grid and write its results; the exit code."""
    if not sys.stdout.isatty():
        console.width = 140  # of the tables in a log
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "30")  # in a log, bars are a line now and then
    try:
        arguments, options = parse(__doc__, argv)
        changes = {"output": arguments.out, "launcher": arguments.launcher, "options": options}
        grid = read_grid(
            arguments.config, seeds=arguments.seeds, only=arguments.only, models=arguments.models, **changes
        )
        check_cells(grid, options)
        if arguments.dry_run:
            describe(grid)
            return 0
        with leaving_on_sigterm(), locked(grid.output) as lock:
            failed = []
            if not arguments.report_only:
                bases = prepare_bases(grid, rerun=arguments.rerun, tell=tell)
                failed = run_grid(grid, bases, lock, jobs=arguments.jobs, rerun=arguments.rerun, tell=tell)
            # Everything that is there, not only the part that was asked for.
            whole = read_grid(arguments.config, **changes)
            whole = replace(whole, seeds=stored_seeds(whole))
            words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
            report(whole, "python recipes/ablation.py " + shlex.join(["--config", arguments.config, *words]))
    except FileNotFoundError as error:
        raise SystemExit(f"error: no file {error.filename}") from error
    except (RuntimeError, ValueError, yaml.YAMLError) as error:
        raise SystemExit(f"error: {error}") from error
    if failed:
        tell("failed", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
