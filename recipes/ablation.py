# SPDX-License-Identifier: Apache-2.0
"""The tables of arXiv 2605.20402: GRPO in full precision, in MXFP4, and with each correction, for several seeds.

    python recipes/ablation.py --config recipes/configs/recovery_two_points.yaml [--out DIR] [--jobs N] [--seeds 0,1,2]

Runs `grpo.py` for every cell and seed in a process and a folder of its own, and writes `ablation.json` (one record per
run) and `table.md`. A grid that was stopped continues: finished runs are kept, a killed one is started again. A run
that fails is reported, and the others continue; the exit code is then 1. `--only` and `--seeds` run parts of a grid.

Options of `grpo.py` take the place of those in the file, of all cells. To try a grid before it is started, give it a
few steps of a small model and a folder: `--max_steps 3 --study '{n_train: 64}' --evaluate_n 8 --evaluate_every 1
--model_name_or_path SMALL --out DIR`.
"""

if __name__ == "__main__" and not __package__:
    import from_root  # noqa: F401  the root in place of this folder

import json
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_mxfp4.files import replace_file
from hf_mxfp4.recipes.ablations.grid import Grid, read_grid
from hf_mxfp4.recipes.ablations.results import make_records, table_rows
from hf_mxfp4.recipes.ablations.runner import finished, run_grid
from hf_mxfp4.recipes.common.folders import locked
from hf_mxfp4.recipes.common.options import read_command, read_words
from hf_mxfp4.recipes.common.reporting import console, errors_as_messages, markdown_table, print_table, tell
from hf_mxfp4.recipes.post_training.arguments import GROUPS
from hf_mxfp4.utils import option


@dataclass
class GridArguments:
    """Options of a grid; lists are separated by commas."""

    out: str | None = option(None, "Folder; by default the grid's output_dir.")
    jobs: int = option(1, "Runs at a time; each gets its share of the cores.")
    only: str | None = option(None, "Cells to run.")
    seeds: str | None = option(None, "Seeds instead of the grid's.")
    launcher: str | None = option(None, "Instead of the grid's; '' for none.")


def parse(argv: Sequence[str]) -> tuple[str, GridArguments, dict[str, Any]]:
    """Parse the command line: the file of the grid, its options, and those of `grpo.py`."""
    named, words = read_words(argv, (GridArguments,), description=__doc__)
    path = named.pop("config", None)
    if not path:
        raise ValueError("name a grid with --config, such as recipes/configs/recovery_two_points.yaml")
    return path, GridArguments(**named), read_command(words, GROUPS)


def main(argv: list[str]) -> int:
    """Run what is missing of a grid and write its results; return the exit code."""
    if not sys.stdout.isatty():
        console.width = 140  # of the tables in a log
    with errors_as_messages(OSError, RuntimeError, ValueError):
        path, arguments, options = parse(argv)
        only = arguments.only.split(",") if arguments.only else None
        seeds = [int(seed) for seed in arguments.seeds.split(",")] if arguments.seeds else None
        changes = {"output": arguments.out, "launcher": arguments.launcher, "options": options}
        whole = read_grid(path, seeds=seeds, **changes)
        for run in whole.runs:  # what is wrong is found before hours of runs
            run.parse()
            finished(run)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # runs end with this process
        with locked(whole.output):
            failed = run_grid(read_grid(path, seeds=seeds, only=only, **changes), jobs=arguments.jobs)
            report(whole, _command(path, options))
    if failed:
        tell("failed", ", ".join(failed))
    return 1 if failed else 0


def _command(path: str, options: dict[str, Any]) -> str:
    """Return the command for the records of a grid."""
    words = ["python", "recipes/ablation.py", "--config", path]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    return shlex.join(words)


def report(grid: Grid, command: str) -> None:
    """Write records and the table of the finished runs, and print it."""
    records = make_records(grid, command)
    if not records:
        raise RuntimeError("no run has finished, so there is nothing to report")
    lines = ",\n".join(json.dumps(record) for record in records)
    replace_file(grid.output / "ablation.json", f"[\n{lines}\n]\n")
    columns, rows = table_rows(records)
    print_table(f"{grid.label}, greedy accuracy in %", rows, columns)
    replace_file(grid.output / "table.md", f"{grid.label}\n\n{markdown_table(columns, rows)}")
    tell("results", f"{grid.output}: ablation.json, table.md")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
