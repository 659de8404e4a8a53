# SPDX-License-Identifier: Apache-2.0
"""The tables of arXiv 2605.20402: GRPO in full precision, in MXFP4, and with each correction, for several seeds.

    python recipes/ablation.py --config recipes/configs/ablation_cpu.yaml [--out DIR] [--jobs N] [--seeds 0,1,2]

Pretrains the starting point of the grid once (or takes a checkpoint), then runs `grpo.py` for every cell and seed in a
process and a folder of its own, and writes `ablation.json` (one record per run), `table.md` and `plots/`. A grid that
was stopped goes on where it was: finished runs are kept, a killed one is started again. A run that fails is reported,
and the others go on; the exit code is then 1. A grid may be spread over machines of one kind: `--only` and `--seeds`
run parts of it, and `--records` adds the results of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text


# The description of the machine in records is the benchmarks'.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from ablations.base import describe_base, write_json
from ablations.grid import Grid, Run, check_cells, read_grid
from ablations.merging import merge
from ablations.plots import draw_all
from ablations.results import Record, make_records, markdown, models, stored_seeds, table_rows
from ablations.runner import leaving_on_sigterm, locked, prepare_bases, run_grid


console = Console(width=None if sys.stdout.isatty() else 140)
# TRL's own default still has the old name of this option.
warnings.filterwarnings("ignore", category=FutureWarning, message=".*gradient_checkpointing.*")


def main(argv: list[str]) -> int:
    """Run what is missing of a grid and write its results; the exit code."""
    arguments = parser().parse_args(argv)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "30")  # in a log, bars are a line now and then
    try:
        grid = read_grid(
            arguments.config,
            output=arguments.out,
            seeds=arguments.seeds,
            only=arguments.only,
            models=arguments.models,
        )
        check_cells(grid)
        elsewhere = read_records(arguments.records) if arguments.records else []
        if arguments.dry_run:
            describe(grid)
            return 0
        with leaving_on_sigterm(), locked(grid.output) as lock:
            failed = []
            if not arguments.report_only:
                bases = prepare_bases(grid, rerun=arguments.rerun, tell=tell)
                failed = run_grid(grid, bases, lock, jobs=arguments.jobs, rerun=arguments.rerun, tell=tell)
            # Everything that is there, not only the part that was asked for.
            whole = read_grid(arguments.config, output=arguments.out)
            whole = replace(whole, seeds=stored_seeds(whole))
            report(whole, "python recipes/ablation.py " + shlex.join(["--config", arguments.config]), elsewhere)
    except FileNotFoundError as error:
        raise SystemExit(f"error: no file {error.filename}") from error
    except (RuntimeError, ValueError, yaml.YAMLError) as error:
        raise SystemExit(f"error: {error}") from error
    if failed:
        tell("failed", ", ".join(failed))
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""

    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--config", required=True, help="the grid, YAML")
    result.add_argument("--out", help="folder; by default the grid's output_dir")
    result.add_argument("--jobs", type=int, default=1, help="runs at a time; each gets its share of the cores")
    result.add_argument("--only", type=words, help="cells to run, separated by commas")
    result.add_argument("--models", type=words, help="models to run, separated by commas")
    result.add_argument("--seeds", type=numbers, help="seeds instead of the grid's, separated by commas")
    result.add_argument("--rerun", action="store_true", help="run again what was run with other settings")
    result.add_argument("--dry-run", action="store_true", help="print the cells and what differs, and stop")
    result.add_argument("--records", help="an ablation.json with other runs of this grid, to report beside")
    result.add_argument("--report-only", action="store_true", help="write the results of what is finished, run nothing")
    return result


def read_records(path: str) -> list[Record]:
    """The records of an earlier `ablation.json`."""
    try:
        return json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def describe(grid: Grid) -> None:
    """Print every model, what its cells share, and what each cell differs in."""
    for model in grid.models:
        tell("model", f"{model.label}: {describe_base(model)}")
        tell("shared", ", ".join(f"{name}={value}" for name, value in model.shared.items()))
        table = Table(title=f"{len(model.cells)} cells x {len(grid.seeds)} seeds {list(grid.seeds)}")
        for column in ("cell", "label", "differs in"):
            table.add_column(column, overflow="fold")
        for cell in model.cells:
            options = ", ".join(f"{name}={value}" for name, value in cell.options.items())
            table.add_row(Text(cell.name), Text(cell.label), Text(options or "(nothing)"))
        console.print(table)
        tell("folders", f"{Run(grid, model, model.cells[0], grid.seeds[0]).folder} ...")


def report(grid: Grid, command: str, elsewhere: Sequence[Record] = ()) -> None:
    """Write records, tables and plots of the finished runs, here and elsewhere, and print the tables."""
    records, left_out = make_records(grid, command)
    if left_out:
        tell("left out", f"run with other settings: {', '.join(left_out)}")
    if elsewhere:
        both = {record["name"] for record in records} & {record["name"] for record in elsewhere}
        records = merge(grid, records, elsewhere)
        tell("merged", f"{len(elsewhere)} runs from elsewhere, {len(both)} of them made here too, with equal results")
    if not records:
        raise RuntimeError("no run has finished, so there is nothing to report")
    write_json(grid.output / "ablation.json", records)
    texts = []
    plots = grid.output / "plots"
    plots.mkdir(exist_ok=True)
    several = len(models(records)) > 1
    keys = {model.label: model.key for model in grid.models}
    for model in models(records):
        columns, rows = table_rows(records, model)
        table = Table(title=f"{model}, greedy accuracy in %")
        for column in columns:
            table.add_column(column)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
        texts.append(f"{model}\n\n{markdown(records, model)}")
        for name, figure in draw_all(records, model).items():
            figure.savefig(plots / (f"{keys[model]}_{name}.png" if several else f"{name}.png"), dpi=120)
    (grid.output / "table.md").write_text("\n".join(texts))
    tell("results", f"{grid.output}: ablation.json, table.md, plots/")


def tell(subject: str, message: str) -> None:
    """Print a line."""
    console.print(Text.assemble((subject, "bold"), " ", message), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
