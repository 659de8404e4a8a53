# SPDX-License-Identifier: Apache-2.0
"""What a grid says: before it runs, and its records, tables and plots afterwards."""

from rich.table import Table
from rich.text import Text

from recipes.common.schemes import preset_of
from recipes.common.terminal import console, tell

from .base import describe_base, write_json
from .grid import Grid, Run, parse_run
from .plots import draw_all
from .results import make_records, markdown, models, table_rows


def describe(grid: Grid) -> None:
    """Print every model, what its cells share, and what each cell differs in."""
    for model in grid.models:
        tell("model", f"{model.label}: {describe_base(model)}")
        tell("shared", ", ".join(f"{name}={value}" for name, value in model.shared.items()))
        table = Table(title=f"{len(model.cells)} cells x {len(grid.seeds)} seeds {list(grid.seeds)}")
        for column in ("cell", "label", "differs in", "scheme"):
            table.add_column(column, overflow="fold")
        for cell in model.cells:
            options = ", ".join(f"{name}={value}" for name, value in cell.options.items())
            parsed = parse_run(Run(grid, model, cell, grid.seeds[0]).config)
            scheme = "full precision" if parsed.recipe.full_precision else preset_of(parsed.quantization)
            table.add_row(Text(cell.name), Text(cell.label), Text(options or "(nothing)"), Text(scheme))
        console.print(table)
        tell("folders", f"{Run(grid, model, model.cells[0], grid.seeds[0]).folder} ...")


def report(grid: Grid, command: str) -> None:
    """Write records, tables and plots of the finished runs, and print the tables."""
    records, left_out = make_records(grid, command)
    if left_out:
        tell("left out", f"run with other settings: {', '.join(left_out)}")
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
