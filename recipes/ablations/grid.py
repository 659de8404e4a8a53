# SPDX-License-Identifier: Apache-2.0
"""The grid that a YAML file describes: models, cells and seeds, and the configuration of every run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from hf_mxfp4.suggestions import unknown_key_message
from recipes.common.options import names
from recipes.common.schemes import put_over
from recipes.common.terminal import tell
from recipes.post_training.arguments import GROUPS, REMOVED, Options, make_options
from recipes.tasks.tiny_model import TINY_MODELS


#: Options of `grpo.py` that the grid sets itself.
MANAGED = (
    "evaluate_before model_name_or_path output_dir overwrite reload_check resume_from_checkpoint save_policy seed"
).split()
#: Of those, the ones that a run's result does not depend on.
_WITHOUT_EFFECT = ("evaluate_before", "output_dir", "overwrite", "model_name_or_path")
_GRID_KEYS = (
    "name output_dir seeds launcher reference naive task evaluation train base models cells extra_cells label"
).split()
_MODEL_KEYS = ("label", "base", "task", "train", "evaluation", "launcher")
_CELL_KEYS = ("label", "options", "paper", "naive", "models")
_BASE_KEYS = ("model_name_or_path", "architecture", "sizes", "pretraining", "seed", "attn_implementation")


@dataclass(frozen=True)
class Cell:
    """A row of the table: what differs from the options that all cells share.

    Attributes:
        paper: accuracies that the paper states, in percent, by its model.
        naive: the cell whose distance from the reference this one may recover.
        models: the models that it is run on; `None`: all.
    """

    name: str
    label: str
    options: Mapping[str, Any]
    paper: Mapping[str, float]
    naive: str
    models: Sequence[str] | None


@dataclass(frozen=True)
class Model:
    """A starting point and its own table.

    Attributes:
        base: a checkpoint (``model_name_or_path``), or how a small model is pretrained.
        shared: the options that its cells have in common.
        launcher: words before `grpo.py`.
        folder: where its starting point and runs are.
    """

    label: str
    base: Mapping[str, Any]
    shared: Mapping[str, Any]
    launcher: Sequence[str]
    cells: Sequence[Cell]
    folder: Path

    @property
    def start(self) -> str:
        """The checkpoint that every run starts from."""
        return self.base.get("model_name_or_path") or str(self.folder / "base")


@dataclass(frozen=True)
class Grid:
    """A parsed grid. `reference` is the cell that all are compared with; `models` go by the names of their folders (the
    empty word: the grid's own folder)."""

    name: str
    output: Path
    seeds: Sequence[int]
    reference: str
    models: Mapping[str, Model]

    @property
    def runs(self) -> Iterator[Run]:
        """Every run, all cells of a seed before the next seed, so that a table is whole as early as can be."""
        for model in self.models.values():
            for seed in self.seeds:
                for cell in model.cells:
                    yield Run(self, model, cell, seed)


@dataclass(frozen=True)
class Run:
    """One cell with one seed."""

    grid: Grid
    model: Model
    cell: Cell
    seed: int

    @property
    def folder(self) -> Path:
        return self.model.folder / "cells" / self.cell.name / f"seed{self.seed}"

    @property
    def name(self) -> str:
        return str(self.folder.relative_to(self.grid.output)).replace("cells/", "", 1)

    @property
    def config(self) -> dict[str, Any]:
        """The options for `grpo.py`."""
        return {
            "report_to": "none",
            "save_strategy": "no",
            **put_over(self.model.shared, self.cell.options)[0],
            **self.cell.options,
            "model_name_or_path": self.model.start,
            "output_dir": str(self.folder),
            "seed": self.seed,
            # The starting point of all seeds is the same model on the same problems.
            "evaluate_before": self.seed == self.grid.seeds[0],
            "save_policy": False,
            "reload_check": 0,
            "overwrite": True,
        }

    def settings(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that the result depends on; `base` are the settings of the starting point."""
        return {**{name: value for name, value in self.config.items() if name not in _WITHOUT_EFFECT}, "base": base}

    def parse(self) -> Options:
        """Parse the configuration as `grpo.py` will, on this machine. Raises `ValueError` for what it refuses."""
        no_gpu = {} if torch.cuda.is_available() else {"use_cpu": True, "bf16": False, "tf32": False}
        try:
            return make_options({**self.config, **no_gpu})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.name}: {error}") from error


# ---- reading --------------------------------------------------------------------------------------------------------


def read_grid(
    path: str | Path,
    *,
    output: str | Path | None = None,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    launcher: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Grid:
    """Read a grid; `output`, `seeds`, `only` (cells), `models` and `launcher` take the place of what the file says.

    `options` of `grpo.py` take the place of those that the cells share, and `model_name_or_path` that of every base.

    Raises:
        FileNotFoundError, yaml.YAMLError: the file cannot be read.
        ValueError: an option that does not exist or has the wrong form, or a cell, model or reference that is not in
            the file.
    """
    path = Path(path)
    content = _mapping(_read_yaml(path), f"{path}", _GRID_KEYS)
    for key in ("seeds", "task", "train", "cells", "output_dir"):
        if key not in content:
            raise ValueError(f"{path} lacks {key}")
    if ("base" in content) == ("models" in content):
        raise ValueError(f"{path} needs either base, or models with a base each")
    cells = _cells(content, path, only)
    described = content.get("models") or {"": {"base": content["base"], "label": content.get("label")}}
    _known("models", [*(models or ()), *(name for cell in cells for name in cell.models or ())], described)
    options = dict(options or {})
    start = options.pop("model_name_or_path", None)
    changes = {
        **({"base": {"model_name_or_path": start}} if start else {}),
        **({} if launcher is None else {"launcher": launcher}),
    }
    built = {}
    for key, model in described.items():
        if models is None or key in models:
            model = {**_mapping(model, f"models.{key}", _MODEL_KEYS), **changes}
            of_model = [cell for cell in cells if cell.models is None or key in cell.models]
            built[key] = _model(key, model, content, of_model, options, Path(output or content["output_dir"]) / key)
    if not any(model.cells for model in built.values()):
        raise ValueError(f"none of the cells {', '.join(cell.name for cell in cells)} is run on {', '.join(built)}")
    chosen = content["seeds"] if seeds is None else seeds
    if not chosen or len(set(chosen)) != len(chosen) or not all(isinstance(seed, int) for seed in chosen):
        raise ValueError(f"seeds={list(chosen)} must be distinct whole numbers, at least one")
    return Grid(
        name=content.get("name", path.stem),
        output=Path(output or content["output_dir"]),
        seeds=chosen,
        reference=content.get("reference", "bf16"),
        models={key: model for key, model in built.items() if model.cells},
    )


def _read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _mapping(value: Any, where: str, known: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must hold one `option: value` per line")
    _known(where, value, known)
    return value


def _known(where: str, found: Any, known: Any) -> None:
    for name in found:
        if name not in known:
            raise ValueError(unknown_key_message(where, str(name), list(known)))


def _options(value: Any, where: str) -> dict[str, Any]:
    """Options of `grpo.py`."""
    value = _mapping(value or {}, where, [*names(GROUPS), *REMOVED])
    for name in value:
        if name in MANAGED:
            raise ValueError(f"{where}: {name} is set for each run and cannot be given")
    return value


def _cells(content: Mapping[str, Any], path: Path, only: Sequence[str] | None) -> list[Cell]:
    """The chosen cells of a grid."""
    described = content["cells"]
    if isinstance(described, str):
        described = _read_yaml(path.parent / described)
    described = {**described, **content.get("extra_cells", {})}
    naive = content.get("naive", "mxfp4")
    cells = []
    for name, cell in described.items():
        cell = {"label": name, "naive": naive, "models": None, **_mapping(cell, f"cells.{name}", _CELL_KEYS)}
        cell["options"] = _options(cell.get("options"), f"cells.{name}.options")
        cells.append(Cell(name, **{"paper": {}, **cell}))
    _known("cells", [content.get("reference", "bf16"), *(cell.naive for cell in cells), *(only or ())], described)
    return [cell for cell in cells if only is None or cell.name in only]


def _model(
    key: str,
    model: Mapping[str, Any],
    content: Mapping[str, Any],
    cells: Sequence[Cell],
    options: Mapping[str, Any],
    folder: Path,
) -> Model:
    shared: dict[str, Any] = {}
    for sections, where in ((content, ""), (model, f"models.{key}.")):
        own: dict[str, Any] = {}
        for section in ("task", "evaluation", "train"):
            own |= _options(sections.get(section), f"{where}{section}")
        shared = put_over(shared, own)[0] | own
    _options(options, "the command line")
    for cell in cells:
        if same := sorted({*options} & {*cell.options}):
            raise ValueError(f"the cell {cell.name} has {', '.join(same)} of its own; change that in the file")
        if dropped := put_over(shared, cell.options)[1]:
            told = ", ".join(f"{name}={value}" for name, value in dropped.items())
            tell(f"cell {cell.name}", f"its own preset or mode resets {told}, which the other cells share")
    base = _mapping(model.get("base"), f"models.{key}.base" if key else "base", _BASE_KEYS)
    if "model_name_or_path" not in base and base.get("architecture") not in TINY_MODELS:
        raise ValueError(f"base: architecture={base.get('architecture')!r} must be one of {', '.join(TINY_MODELS)}")
    return Model(
        label=model.get("label") or key or content.get("name", "model"),
        base=base,
        shared=put_over(shared, options)[0] | options,
        launcher=(model.get("launcher", content.get("launcher")) or "").split(),
        cells=cells,
        folder=folder,
    )


def with_stored_seeds(grid: Grid) -> Grid:
    """Return the grid with all seeds that there are runs of, in addition to its own."""
    found = {
        int(folder.name.removeprefix("seed"))
        for model in grid.models.values()
        for folder in (model.folder / "cells").glob("*/seed*")
    }
    return replace(grid, seeds=tuple(dict.fromkeys([*grid.seeds, *sorted(found)])))
