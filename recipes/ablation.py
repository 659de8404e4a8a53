# SPDX-License-Identifier: Apache-2.0
"""The tables of arXiv 2605.20402: GRPO in full precision, in MXFP4, and with each correction, for several seeds.

    python recipes/ablation.py --config recipes/configs/ablation_cpu.yaml [--out DIR] [--jobs N] [--seeds 0,1,2]

Runs `grpo.py` for every cell and seed in a process and a folder of its own, and writes `ablation.json` (one record per
run) and `table.md`. A grid that was stopped goes on where it was: finished runs are kept, a killed one
is started again. A run that fails is reported, and the others go on; the exit code is then 1. A grid may be spread over
machines of one kind: `--only` and `--seeds` run parts of it, and `--report_only` reports all of them from a folder that
the others have been copied into.

Options of `grpo.py` take the place of those that all cells share. To try a grid before it is started, give it a few
steps of a small model and a folder: `--max_steps 3 --study '{n_train: 64}' --evaluate_n 8 --evaluate_every 1
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
from hf_mxfp4.recipes.ablations.grid import Grid, check_cells, read_grid
from hf_mxfp4.recipes.ablations.results import RECORDS, make_records, refuse_other_results, table_rows
from hf_mxfp4.recipes.ablations.runner import run_grid
from hf_mxfp4.recipes.common.folders import locked
from hf_mxfp4.recipes.common.options import read_command, read_words
from hf_mxfp4.recipes.common.reporting import console, errors_as_messages, markdown_table, print_table, tell
from hf_mxfp4.recipes.common.study import one_study
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
    report_only: bool = option(False, "Write the results of what is finished, run nothing.")


def parse(argv: Sequence[str]) -> tuple[str, GridArguments, dict[str, Any]]:
    """Parse the command line: the file of the grid, its options, and those of `grpo.py`."""
    own, words = read_words(argv, (GridArguments,), description=__doc__)
    path = own.pop("config", None)
    if not path:
        raise ValueError("name a grid with --config, such as recipes/configs/ablation_cpu.yaml")
    return path, GridArguments(**own), read_command(one_study(words), GROUPS)


def main(argv: list[str]) -> int:
    """Run what is missing of a grid and write its results; return the exit code."""
    if not sys.stdout.isatty():
        console.width = 140  # of the tables in a log
    failed = []
    with errors_as_messages(OSError, RuntimeError, ValueError):
        path, arguments, options = parse(argv)
        changes = {"output": arguments.out, "launcher": arguments.launcher, "options": options}
        only, seeds = (text and text.split(",") for text in (arguments.only, arguments.seeds))
        grid = read_grid(path, only=only, seeds=seeds and list(map(int, seeds)), **changes)
        check_cells(grid, options)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # runs end with this process
        with locked(grid.output) as file:
            refuse_other_results(grid)
            if not arguments.report_only:
                failed = run_grid(grid, file, jobs=arguments.jobs)
            # Everything that is there, not only the part that was asked for.
            words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
            command = "python recipes/ablation.py " + shlex.join(["--config", path, *words])
            report(read_grid(path, **changes).with_stored_seeds(), command)
    if failed:
        tell("failed", ", ".join(failed))
    return 1 if failed else 0


def report(grid: Grid, command: str) -> None:
    """Write records and the table of the finished runs, and print it."""
    records, left_out = make_records(grid, command)
    if left_out:
        tell("left out", f"run with other settings: {', '.join(left_out)}")
    if not records:
        raise RuntimeError("no run has finished, so there is nothing to report")
    replace_file(grid.output / RECORDS, "[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
    columns, rows = table_rows(records)
    print_table(f"{grid.label}, greedy accuracy in %", rows, columns)
    replace_file(grid.output / "table.md", f"{grid.label}\n\n{markdown_table(columns, rows)}")
    tell("results", f"{grid.output}: {RECORDS}, table.md")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
