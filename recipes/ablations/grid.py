# SPDX-License-Identifier: Apache-2.0
"""The grid that a YAML file describes: a starting point, cells and seeds, and the configuration of every run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hf_mxfp4.recipes.common.checkpoints import put_over
from hf_mxfp4.recipes.common.options import (
    check_mapping,
    load_yaml,
    names,
    read_env,
    read_yaml,
    refuse_unknown,
    removed_options,
)
from hf_mxfp4.recipes.common.reporting import tell
from hf_mxfp4.recipes.common.study import put_together
from hf_mxfp4.recipes.evaluation.policy import folder_digest
from hf_mxfp4.recipes.post_training.arguments import GROUPS, Options, RunStudy, make_options


#: Options of `grpo.py` that a run's result does not depend on, and those that the grid sets itself.
WITHOUT_EFFECT = ("evaluate_before", "output_dir", "overwrite", "model_name_or_path", "save_policy", "pack")
MANAGED = (*WITHOUT_EFFECT[:-2], "reload_check", "resume_from_checkpoint", "seed")
_GRID_KEYS = (
    "name output_dir seeds launcher reference naive task evaluation train base cells extra_cells label mean_of_last"
).split()
_NEEDED = ("seeds", "task", "train", "cells", "base", "output_dir")
_CELL_KEYS = ("label", "options", "paper", "naive", "base")


@dataclass(frozen=True)
class Cell:
    """A row of the table: what differs from the options that all cells share, the accuracies that the ``paper`` states
    in percent by its model, the ``naive`` cell whose distance from the reference this one may recover, and the
    checkpoint that it starts from, where that is not the grid's, with "{seed}" for the seed of a run."""

    name: str
    label: str
    options: Mapping[str, Any]
    paper: Mapping[str, float]
    naive: str
    base: str | None = None


@dataclass(frozen=True)
class Grid:
    """A parsed grid: ``label`` names the model in tables, all cells are compared with ``reference``, every run begins
    from the checkpoint ``start``, the cells have the options ``shared`` in common, ``launcher`` is the words before
    `grpo.py`, and a run's accuracy is the mean of its last ``mean_of_last`` greedy evaluations while it trained; for 1,
    that of the evaluation after it."""

    name: str
    label: str
    output: Path
    seeds: Sequence[int]
    reference: str
    start: str
    shared: Mapping[str, Any]
    launcher: Sequence[str]
    cells: Sequence[Cell]
    mean_of_last: int = 1

    @property
    def runs(self) -> Iterator[Run]:
        """Every run, all cells of a seed before the next seed, so that a table is whole as early as can be."""
        for seed in self.seeds:
            for cell in self.cells:
                yield Run(self, cell, seed)

    def with_stored_seeds(self) -> Grid:
        """Return the grid with all seeds that there are runs of, in addition to its own."""
        seeds = (folder.name.removeprefix("seed") for folder in (self.output / "cells").glob("*/seed*"))
        found = sorted(int(seed) for seed in seeds if seed.isdecimal())  # not a copy such as "seed0.old"
        return replace(self, seeds=list(dict.fromkeys([*self.seeds, *found])))


@dataclass(frozen=True)
class Run:
    """One cell with one seed."""

    grid: Grid
    cell: Cell
    seed: int

    @property
    def name(self) -> str:
        return f"{self.cell.name}/seed{self.seed}"

    @property
    def folder(self) -> Path:
        return self.grid.output / "cells" / self.name

    @property
    def start(self) -> str:
        return (self.cell.base or self.grid.start).replace("{seed}", str(self.seed))

    @property
    def config(self) -> dict[str, Any]:
        """The options for `grpo.py`."""
        usual = {"report_to": "none", "save_strategy": "no", "study": {"save_policy": False, "pack": False}}
        own = put_together(put_over(self.grid.shared, self.cell.options)[0], self.cell.options)
        managed = {
            "model_name_or_path": self.start,
            "output_dir": str(self.folder),
            "seed": self.seed,
            "overwrite": True,
            # The starting point of all seeds is the same model on the same problems, but where it has the seed's name.
            "study": {
                "evaluate_before": self.seed == self.grid.seeds[0] or "{seed}" in (self.cell.base or ""),
                "reload_check": 0,
            },
        }
        return put_together(put_together(usual, own), managed)

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that the result depends on."""
        start = Path(self.start)
        base = {"model_name_or_path": self.start, "weights": folder_digest(start) if start.is_dir() else None}
        options = {**self.config, **self.config["study"]}
        left_out = ("study", *WITHOUT_EFFECT)
        return {**{name: value for name, value in options.items() if name not in left_out}, "base": base}

    def parse(self) -> Options:
        """Parse the configuration as `grpo.py` will, on this machine. Raises `ValueError` for what it refuses."""
        options = {name: value for name, value in self.config.items() if name != "env"}
        if not torch.cuda.is_available():
            options |= {"use_cpu": True, "bf16": False, "tf32": False}
        try:
            return make_options(options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.name}: {error}") from error


def read_grid(
    path: str | Path,
    *,
    output: str | Path | None = None,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    launcher: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Grid:
    """Read a grid. `output`, `seeds`, `only` (cells) and `launcher` take the place of what the file says, `options` of
    `grpo.py` that of those that the cells share, and `model_name_or_path` among them that of the base.

    Raises `ValueError` for an option that does not exist or has the wrong form, or a cell that is not in the file.
    """
    path, options = Path(path), dict(options or {})
    content = load_yaml(path)
    check_mapping(content, f"{path}", _GRID_KEYS)
    if missing := [key for key in _NEEDED if key not in content]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    base = check_mapping(content["base"], "base", ["model_name_or_path"])
    start = options.pop("model_name_or_path", base.get("model_name_or_path"))
    if not start:
        raise ValueError(
            "base needs model_name_or_path: a grid makes no model; `make demo` makes outputs/tiny_cpu/base"
        )
    shared: dict[str, Any] = {}
    for section in ("task", "evaluation", "train"):
        shared = put_together(shared, _options(content.get(section), section))
    options = _options(options, "the command line")
    seeds = content["seeds"] if seeds is None else seeds
    if not seeds or len(set(seeds)) != len(seeds) or not all(isinstance(seed, int) for seed in seeds):
        raise ValueError(f"seeds={list(seeds)} must be distinct whole numbers, at least one")
    name = content.get("name", path.stem)
    grid = Grid(
        name=name,
        label=content.get("label", name),
        output=Path(output or content["output_dir"]),
        seeds=seeds,
        reference=content.get("reference", "bf16"),
        start=start,
        shared=put_together(put_over(shared, options)[0], options),
        launcher=((content.get("launcher") if launcher is None else launcher) or "").split(),
        cells=_cells(content, path, only),
        mean_of_last=content.get("mean_of_last", 1),
    )
    if not isinstance(grid.mean_of_last, int) or grid.mean_of_last < 1:
        raise ValueError(f"mean_of_last={grid.mean_of_last!r} must be a whole number, at least 1")
    return grid


def _cells(content: Mapping[str, Any], path: Path, only: Sequence[str] | None) -> list[Cell]:
    """Return the chosen cells of a grid."""
    described = content["cells"]
    if isinstance(described, str):
        described = load_yaml(path.parent / described)
    described = {**described, **content.get("extra_cells", {})}
    cells = []
    for name, cell in described.items():
        check_mapping(cell, f"cells.{name}", _CELL_KEYS)
        cell = {"label": name, "naive": content.get("naive", "mxfp4"), **cell}
        cell["options"] = _options(cell.get("options"), f"cells.{name}.options")
        cells.append(Cell(name, **{"paper": {}, **cell}))
    named = [content.get("reference", "bf16"), *(cell.naive for cell in cells), *(only or ())]
    refuse_unknown(named, "cells", list(described))
    return [cell for cell in cells if only is None or cell.name in only]


def check_cells(grid: Grid, options: Mapping[str, Any]) -> None:
    """Parse every run, and report which ``options``, those of the command line, do not reach a cell, which has its own,
    and what a preset of a cell resets. Raises `ValueError` for what cannot be parsed."""
    for cell in grid.cells:
        if same := [f"{name}={cell.options[name]}" for name in sorted({*options} & {*cell.options})]:
            tell(f"cell {cell.name}", f"keeps its own {', '.join(same)}")
        if dropped := put_over(grid.shared, cell.options)[1]:
            told = ", ".join(f"{name}={value}" for name, value in dropped.items())
            tell(f"cell {cell.name}", f"its own preset or mode resets {told}, which the other cells share")
    for run in grid.runs:
        run.parse()


def _options(value: Any, where: str) -> dict[str, Any]:
    value = check_mapping(value or {}, where, [*names(GROUPS), "env"], removed_options(GROUPS))
    study = check_mapping(read_yaml("study", value.get("study") or {}), f"{where}: study", names((RunStudy,)))
    for name in (*value, *study):
        if name in MANAGED:
            raise ValueError(f"{where}: {name} is set for each run and cannot be given")
    read_env(value.get("env"))
    return value
