# SPDX-License-Identifier: Apache-2.0
"""The grid that a YAML file describes: a starting point, cells and seeds, and the configuration of every run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_mxfp4.recipes.common.checkpoints import reset_scheme
from hf_mxfp4.recipes.common.options import check_mapping, check_options, load_yaml, merge_options, read_yaml
from hf_mxfp4.recipes.post_training.arguments import GROUPS, Options, RunStudy, make_options


#: Options of `grpo.py` that the grid sets for each run.
MANAGED = (
    "model_name_or_path",
    "output_dir",
    "overwrite",
    "resume_from_checkpoint",
    "seed",
    "evaluate_before",
    "reload_check",
)
_KEYS = ("name output_dir seeds launcher reference task evaluation train base cells label mean_of_last").split()
_NEEDED = ("seeds", "task", "train", "cells", "base", "output_dir")
_CELL_KEYS = ("label", "options", "paper", "base")


@dataclass(frozen=True)
class Cell:
    """A row of the table.

    Attributes:
        options: what differs from the options that all cells share.
        paper: accuracies that the paper states in percent, by its model.
        base: the checkpoint that it starts from, where that is not the grid's; "{seed}" stands for the seed of a run.
    """

    name: str
    label: str
    options: Mapping[str, Any]
    paper: Mapping[str, float]
    base: str | None = None


@dataclass(frozen=True)
class Grid:
    """A parsed grid.

    Attributes:
        label: name of the model in tables.
        reference: the cell that the others are compared with.
        start: the checkpoint that runs begin from.
        shared: options that all cells have in common.
        options: those of the command line, in place of both.
        launcher: words before `grpo.py`.
        mean_of_last: a run's accuracy is the mean of so many of its last greedy evaluations while it trained; for 1,
            that of the evaluation after it.
    """

    name: str
    label: str
    output: Path
    seeds: Sequence[int]
    reference: str
    start: str
    shared: Mapping[str, Any]
    options: Mapping[str, Any]
    launcher: Sequence[str]
    cells: Sequence[Cell]
    mean_of_last: int = 1

    @property
    def runs(self) -> Iterator[Run]:
        """Every run, all cells of a seed before the next seed, so that a table is whole as early as can be."""
        for seed in self.seeds:
            for cell in self.cells:
                yield Run(self, cell, seed)


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
    def config(self) -> dict[str, Any]:
        """The options for `grpo.py`."""
        start = self.cell.base or self.grid.start
        # All seeds start from the same model on the same problems, unless the start has the seed in its name.
        evaluate_before = self.seed == self.grid.seeds[0] or "{seed}" in start
        usual = {"report_to": "none", "save_strategy": "no", "study": {"save_policy": False, "pack": False}}
        shared, _ = reset_scheme(self.grid.shared, self.cell.options)
        managed = {
            "model_name_or_path": start.replace("{seed}", str(self.seed)),
            "output_dir": str(self.folder),
            "seed": self.seed,
            "overwrite": True,
            "study": {"evaluate_before": evaluate_before, "reload_check": 0},
        }
        config = merge_options(merge_options(usual, shared), self.cell.options)
        config, _ = reset_scheme(config, self.grid.options)
        return merge_options(merge_options(config, self.grid.options), managed)

    def parse(self) -> Options:
        """Parse the configuration as `grpo.py` will, on this machine. Raises `ValueError` for what it refuses."""
        options = self.config
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
    """Read a grid.

    Args:
        output, seeds, only, launcher: in place of what the file says; ``only`` names cells.
        options: of `grpo.py`, in place of those of the file and of its cells; `model_name_or_path` replaces the base.

    Raises `ValueError` for an option that does not exist or has the wrong form, or a cell that is not in the file.
    """
    path = Path(path)
    content = check_mapping(load_yaml(path), f"{path}", _KEYS)
    missing = [key for key in _NEEDED if key not in content]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    options = dict(options or {})
    base = check_mapping(content["base"], "base", ["model_name_or_path"])
    start = options.pop("model_name_or_path", base.get("model_name_or_path"))
    if not start:
        raise ValueError(
            "base needs model_name_or_path: a grid makes no model; `make demo` makes outputs/tiny_cpu/base"
        )
    shared: dict[str, Any] = {}
    for section in ("task", "evaluation", "train"):
        shared = merge_options(shared, _check_options(content.get(section), section))
    seeds = content["seeds"] if seeds is None else seeds
    if not seeds or len(set(seeds)) != len(seeds) or not all(isinstance(seed, int) for seed in seeds):
        raise ValueError(f"seeds={list(seeds)} must be distinct whole numbers, at least one")
    if launcher is None:
        launcher = content.get("launcher", "")
    name = content.get("name", path.stem)
    return Grid(
        name=name,
        label=content.get("label", name),
        output=Path(output or content["output_dir"]),
        seeds=seeds,
        reference=content.get("reference", "bf16"),
        start=start,
        shared=shared,
        options=_check_options(options, "the command line"),
        launcher=launcher.split(),
        cells=_cells(content, only),
        mean_of_last=content.get("mean_of_last", 1),
    )


def _cells(content: Mapping[str, Any], only: Sequence[str] | None) -> list[Cell]:
    """Return the chosen cells of a grid."""
    cells = []
    for name, cell in content["cells"].items():
        check_mapping(cell, f"cells.{name}", _CELL_KEYS)
        cells.append(
            Cell(
                name=name,
                label=cell.get("label", name),
                options=_check_options(cell.get("options"), f"cells.{name}.options"),
                paper=cell.get("paper", {}),
                base=cell.get("base"),
            )
        )
    named = [content.get("reference", "bf16"), *(only or ())]
    check_mapping(dict.fromkeys(named), "cells", list(content["cells"]))
    return [cell for cell in cells if only is None or cell.name in only]


def _check_options(value: Any, where: str) -> dict[str, Any]:
    """Return options of `grpo.py`; raise `ValueError` for those that do not exist or that the grid sets."""
    options = check_options(value or {}, where, GROUPS)
    study = check_options(read_yaml("study", options.get("study") or {}), f"{where}: study", (RunStudy,))
    for name in (*options, *study):
        if name in MANAGED:
            raise ValueError(f"{where}: {name} is set for each run and cannot be given")
    return options
