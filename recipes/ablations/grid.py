# SPDX-License-Identifier: Apache-2.0
"""The grid that a YAML file describes: models, cells and seeds, and the configuration of every run."""

from __future__ import annotations

import hashlib
import inspect
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import TrainingArguments

from hf_mxfp4.suggestions import unknown_key_message
from recipes.common.schemes import put_over
from recipes.common.terminal import tell
from recipes.post_training.arguments import GROUPS, Options, parse
from recipes.tasks.tiny_model import TINY_MODELS


OPTIONS = [option.name for group in GROUPS for option in fields(group) if option.init]
#: Options of `grpo.py` that the grid sets itself.
MANAGED = (
    "config evaluate_before model_name_or_path output_dir overwrite reload_check resume_from_checkpoint save_policy "
    "seed"
).split()
#: Of those, the ones that a run's result does not depend on.
_WITHOUT_EFFECT = ("evaluate_before", "output_dir", "overwrite", "model_name_or_path")
_GRID_KEYS = (
    "name output_dir seeds launcher reference naive task evaluation train base models cells extra_cells label"
).split()
_MODEL_KEYS = ("label", "base", "task", "train", "evaluation", "launcher")
_CELL_KEYS = ("label", "options", "paper", "naive", "models")
#: Files of earlier versions name the architecture and sizes of a checkpoint too; they are not needed.
_CHECKPOINT_KEYS = ("model_name_or_path", "architecture", "sizes")
_BASE_KEYS = ("architecture", "sizes", "pretraining", "seed", "per_seed", "attn_implementation")


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
    models: tuple[str, ...] | None


@dataclass(frozen=True)
class Model:
    """A starting point and its own table. `shared` holds the options that its cells have in common, `launcher` what is
    put before `grpo.py`, and `key` names its folder (the empty word: the grid's own folder)."""

    key: str
    label: str
    base: Mapping[str, Any]
    shared: Mapping[str, Any]
    launcher: tuple[str, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Grid:
    """A parsed grid. `reference` is the cell that all are compared with."""

    name: str
    output: Path
    seeds: tuple[int, ...]
    reference: str
    models: tuple[Model, ...]

    @property
    def runs(self) -> Iterator[Run]:
        """Every run, all cells of a seed before the next seed, so that a table is whole as early as can be."""
        for model in self.models:
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
    def name(self) -> str:
        return "/".join(part for part in (self.model.key, self.cell.name, f"seed{self.seed}") if part)

    @property
    def folder(self) -> Path:
        return self.grid.output / self.model.key / "cells" / self.cell.name / f"seed{self.seed}"

    @property
    def base_folder(self) -> Path:
        return base_folder(self.grid, self.model, self.seed)

    @property
    def config(self) -> dict[str, Any]:
        """The options for `grpo.py`."""
        own = "model_name_or_path" in self.model.base
        # The starting point of all seeds is the same model on the same problems.
        evaluate_before = self.seed == self.grid.seeds[0] or bool(self.model.base.get("per_seed"))
        return {
            "report_to": "none",
            "save_strategy": "no",
            **put_over(self.model.shared, self.cell.options)[0],
            **self.cell.options,
            "model_name_or_path": self.model.base["model_name_or_path"] if own else str(self.base_folder),
            "output_dir": str(self.folder),
            "seed": self.seed,
            "evaluate_before": evaluate_before,
            "save_policy": False,
            "reload_check": 0,
            "overwrite": True,
        }

    def settings(self, base: str) -> dict[str, Any]:
        """Everything that the result depends on; `base` is the fingerprint of the starting point."""
        config = {name: value for name, value in self.config.items() if name not in _WITHOUT_EFFECT}
        return {**config, "base": base}


def base_folder(grid: Grid, model: Model, seed: int) -> Path:
    """Where the starting point of a model is kept: one for all seeds, or with `per_seed` one for each."""
    folder = grid.output / model.key / "base"
    return folder / f"seed{seed}" if model.base.get("per_seed") else folder


def fingerprint(settings: Mapping[str, Any]) -> str:
    """SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def changed(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The names of settings that differ."""
    stored, wanted = (json.loads(json.dumps(settings)) for settings in (stored, wanted))
    return [name for name in sorted({*stored, *wanted}) if stored.get(name) != wanted.get(name)]


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
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    _mapping(content, f"{path}", _GRID_KEYS)
    for key in ("seeds", "task", "train", "cells", "output_dir"):
        if key not in content:
            raise ValueError(f"{path} lacks {key}")
    if ("base" in content) == ("models" in content):
        raise ValueError(f"{path} needs either base, or models with a base each")
    reference, naive = content.get("reference", "bf16"), content.get("naive", "mxfp4")
    described = content["cells"]
    if isinstance(described, str):
        described = yaml.safe_load((path.parent / described).read_text(encoding="utf-8"))
    described = {**_mapping(described, "cells"), **_mapping(content.get("extra_cells", {}), "extra_cells")}
    cells = [_cell(name, cell, naive) for name, cell in described.items()]
    known = [cell.name for cell in cells]
    for name in (reference, *(cell.naive for cell in cells), *(only or ())):
        if name not in known:
            raise ValueError(unknown_key_message("cells", name, known))
    described = content.get("models") or {"": {"base": content["base"], "label": content.get("label", "")}}
    for name in (*(models or ()), *(name for cell in cells for name in cell.models or ())):
        if name not in described:
            raise ValueError(unknown_key_message("models", name, list(described)))
    options = dict(options or {})
    base = {"model_name_or_path": options.pop("model_name_or_path")} if options.get("model_name_or_path") else None
    _options(options, "the command line")
    built = [
        _model(name, _changed_model(model, base, launcher), content, cells, only, options)
        for name, model in described.items()
        if models is None or name in models
    ]
    if not any(model.cells for model in built):
        raise ValueError(f"none of the cells {', '.join(only or known)} is run on {', '.join(models or described)}")
    chosen = tuple(content["seeds"] if seeds is None else seeds)
    if not chosen or len(set(chosen)) != len(chosen) or not all(isinstance(seed, int) for seed in chosen):
        raise ValueError(f"seeds={list(chosen)} must be distinct whole numbers, at least one")
    return Grid(
        name=content.get("name", path.stem),
        output=Path(output or content["output_dir"]),
        seeds=chosen,
        reference=reference,
        models=tuple(model for model in built if model.cells),
    )


def _mapping(value: Any, where: str, known: Sequence[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must hold one `option: value` per line")
    for name in value:
        if known is not None and name not in known:
            raise ValueError(unknown_key_message(where, str(name), list(known)))
    return value


def _options(value: Any, where: str) -> dict[str, Any]:
    """Options of `grpo.py`."""
    for name in _mapping({} if value is None else value, where, OPTIONS):
        if name in MANAGED:
            raise ValueError(f"{where}: {name} is set for each run and cannot be given")
    return value or {}


def _cell(name: str, cell: Any, naive: str) -> Cell:
    _mapping(cell, f"cells.{name}", _CELL_KEYS)
    models = cell.get("models")
    return Cell(
        name=name,
        label=cell.get("label", name),
        options=_options(cell.get("options"), f"cells.{name}.options"),
        paper=cell.get("paper") or {},
        naive=cell.get("naive", naive),
        models=None if models is None else tuple(models),
    )


def _model(
    key: str,
    model: Any,
    content: Mapping[str, Any],
    cells: Sequence[Cell],
    only: Sequence[str] | None,
    options: Mapping[str, Any],
) -> Model:
    where = f"models.{key}" if key else "the grid"
    _mapping(model, where, _MODEL_KEYS)
    shared: dict[str, Any] = {}
    for sections, of in ((content, ""), (model, f"{where}.")):
        own: dict[str, Any] = {}
        for section in ("task", "evaluation", "train"):
            own |= _options(sections.get(section), f"{of}{section}")
        shared = put_over(shared, own)[0] | own
    shared = put_over(shared, options)[0] | options
    launcher = model.get("launcher", content.get("launcher")) or ""
    return Model(
        key=key,
        label=model.get("label") or key or content.get("name", "model"),
        base=_base(model.get("base"), f"{where}.base" if key else "base"),
        shared=shared,
        launcher=tuple(launcher.split()),
        cells=tuple(
            cell
            for cell in cells
            if (cell.models is None or key in cell.models) and (only is None or cell.name in only)
        ),
    )


def _changed_model(model: Any, base: dict[str, Any] | None, launcher: str | None) -> Any:
    """A model of the file with another base and launcher, where they are given."""
    changes = {"base": base, "launcher": launcher}
    changes = {name: value for name, value in changes.items() if value is not None}
    return {**model, **changes} if isinstance(model, dict) else model


def _base(base: Any, where: str) -> dict[str, Any]:
    checkpoint = isinstance(base, dict) and "model_name_or_path" in base
    _mapping(base, where, _CHECKPOINT_KEYS if checkpoint else _BASE_KEYS)
    if checkpoint:
        return {"model_name_or_path": base["model_name_or_path"]}
    builder = TINY_MODELS.get(base.get("architecture"))
    if builder is None:
        raise ValueError(f"{where}.architecture={base.get('architecture')!r} must be one of {', '.join(TINY_MODELS)}")
    parameters = inspect.signature(builder).parameters.values()
    sizes = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "seed"]
    _mapping(base.get("sizes") or {}, f"{where}.sizes", sizes)
    known = [option.name for option in fields(TrainingArguments) if option.name not in ("output_dir", "seed")]
    _mapping(base.get("pretraining"), f"{where}.pretraining", known)
    return base


# ---- cells differ in nothing but what they say -----------------------------------------------------------------------


def check_cells(grid: Grid, options: Mapping[str, Any] | None = None) -> None:
    """Parse the configuration of every cell as `grpo.py` will, and compare them two by two with the first.

    On a machine without a GPU, configurations for one are parsed as for the CPU. Cells whose preset or mode resets
    shared options are named in a line each.

    Raises `ValueError` for an option that `grpo.py` refuses, for two cells of a model that differ in an option that
    neither names, and for a cell with an option of its own that is among those given for all (`options`).
    """
    for cell in (cell for model in grid.models for cell in model.cells):
        if same := sorted({*(options or {})} & {*cell.options}):
            raise ValueError(f"the cell {cell.name} has {', '.join(same)} of its own; change that in the file")
    for model in grid.models:
        first: tuple[Cell, dict[str, Any]] | None = None
        for cell in model.cells:
            run = Run(grid, model, cell, grid.seeds[0])
            try:
                parsed = _plain(run.config)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{run.name}: {error}") from error
            if first is None:
                first = cell, parsed
            dropped = put_over(model.shared, cell.options)[1]
            if dropped:
                told = ", ".join(f"{name}={value}" for name, value in dropped.items())
                tell(f"cell {cell.name}", f"its own preset or mode resets {told}, which the other cells share")
            declared = {*first[0].options, *cell.options, *dropped}
            declared |= {*put_over(model.shared, first[0].options)[1]}
            undeclared = [name for name, value in parsed.items() if value != first[1][name] and name not in declared]
            if undeclared:
                raise ValueError(
                    f"{cell.name} and {first[0].name} differ in {', '.join(undeclared)}, which neither names"
                )


def parse_run(config: Mapping[str, Any]) -> Options:
    """Parse the configuration of a run as `grpo.py` will, on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(dict(config)))
        no_gpu = [] if torch.cuda.is_available() else ["--use_cpu=true", "--bf16=false", "--tf32=false"]
        return parse(["--config", str(path), *no_gpu])


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Option by name as it arrives, but for the folder of the run."""
    recipe, _, training, model = parse_run(config)
    groups = (recipe, training, model)
    options = {f.name: getattr(group, f.name) for group in groups for f in fields(group) if f.name in OPTIONS}
    # The options of the scheme become one object, so these are compared as written.
    scheme = {f.name: config.get(f.name) for f in fields(GROUPS[1])}
    return {name: repr(value) for name, value in {**options, **scheme}.items() if name != "output_dir"}
