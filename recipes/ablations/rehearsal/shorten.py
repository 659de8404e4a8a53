# SPDX-License-Identifier: Apache-2.0
"""What a rehearsal makes shorter, option by option, and what it cannot run at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hf_mxfp4 import MXFP4GRPOConfig
from recipes.ablations.grid import Cell, Grid, Model

from .stand_ins import GENERATED, architecture_of, problem_files, stand_in_folder, tiny_sizes


STEPS = 2
#: Problems to train on, and as many others to evaluate.
_PROBLEMS = 4
_PROBLEM_STEPS = [1, 2]
#: Of pretraining, where few steps must do.
_LEARNING_RATE = 2.3e-3
#: Options of `grpo.py`: the most that a rehearsal takes of those that are given.
_AT_MOST = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 16,
    "overlong_buffer": 4,
    "warmup_steps": 1,
    "save_steps": 1,
    "greedy_batch_size": 4,
    "evaluate_every": 1,
    "evaluate_every_n": 2,
    "problem_count": 100,
}
#: Options of pretraining (transformers' `TrainingArguments`), likewise. It is long enough to learn a few problems by
#: heart, so that rewards differ and gradients are not zero.
_PRETRAINING_AT_MOST = {
    "max_steps": 120,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "warmup_steps": 10,
    "logging_steps": 50,
    "save_steps": 100,
}
#: Whatever the file says: a run can be resumed from its first step, and each step is looked at.
_ALWAYS = {"max_steps": STEPS, "use_cpu": True, "logging_steps": 1}
#: A report of a run takes twice as long as its steps here, so only one cell of a model writes its own.
_REPORT_EVERY = MXFP4GRPOConfig.report_every
_SHARDED = "deepspeed fsdp fsdp_config".split()


class Change(NamedTuple):
    """An option that a rehearsal does not take as it is written: where it stands, its name, its value and ours."""

    where: str
    option: str
    written: Any
    rehearsed: Any


@dataclass(frozen=True)
class Rehearsal:
    """A grid that can be rehearsed, what was changed for it, and what of the real one it does not show."""

    grid: Grid
    changes: tuple[Change, ...]
    left_out: tuple[str, ...]


def shorten(grid: Grid, output: Path, seeds: Sequence[int]) -> Rehearsal:
    """The same cells with the same options, but for what makes them long or needs a GPU.

    Args:
        grid: the real one.
        output: the folder of the rehearsal.
        seeds: those to run; the file's own are not counted as shortened by `--seeds`.

    Raises:
        ValueError: a checkpoint whose architecture is not known (see `architecture_of`).
    """
    changes: list[Change] = []
    left_out = [
        "kernels, memory and speed of a GPU: everything ran on the CPU",
        "what the numbers are: models, problems and steps are too few to mean anything",
    ]
    if tuple(seeds) != grid.seeds:
        left_out.append(f"seeds beside {', '.join(map(str, seeds))} of {', '.join(map(str, grid.seeds))}")
    models = []
    for model in grid.models:
        short, changed, gone = _model(model, output)
        models.append(short)
        changes += changed
        left_out += gone
    whole = Grid(
        name=f"rehearsal of {grid.name}",
        output=output,
        seeds=tuple(seeds),
        reference=grid.reference,
        models=tuple(models),
        rehearsal=True,
    )
    return Rehearsal(whole, _merged(changes), tuple(dict.fromkeys(left_out)))


def _model(model: Model, output: Path) -> tuple[Model, list[Change], list[str]]:
    where = model.key or "base"
    left_out: list[str] = []
    shared, changes = shortened(model.shared, where)
    shared, gone = on_the_cpu(shared, where)
    left_out += gone
    own = "model_name_or_path" in model.base
    if own:
        name = model.base["model_name_or_path"]
        left_out.append(f"{name}: its weights and tokenizer; a tiny {architecture_of(model)} is in its place")
        base = {"model_name_or_path": str(stand_in_folder(output, model.key))}
        changes.append(Change(where, "model_name_or_path", name, "made on the spot"))
    else:
        base, more, gone = _made_base(model, where)
        changes += more
        left_out += gone
    if shared.get("task") not in GENERATED and None in (shared.get("train_file"), shared.get("test_file")):
        source = shared.get("dataset_name") or shared["task"]
        left_out.append(f"reading {source}: a few problems in its form are in its place")
        for name, path in problem_files(output, model.key).items():
            changes.append(Change(where, name, shared.get(name), "made on the spot"))
            shared[name] = str(path)
    changes.append(Change(where, "n_train", model.shared.get("n_train"), _PROBLEMS))
    changes.append(Change(where, "n_test", model.shared.get("n_test"), _PROBLEMS))
    shared["n_train"] = shared["n_test"] = _PROBLEMS
    if shared.get("save_strategy") == "steps" and shared.get("save_total_limit") is not None:
        # One is resumed from that is not the last.
        changes.append(Change(where, "save_total_limit", shared["save_total_limit"], STEPS))
        shared["save_total_limit"] = STEPS
    changes += [Change(where, name, model.shared.get(name), value) for name, value in _ALWAYS.items()]
    cells = []
    for cell in model.cells:
        short, more, gone = _cell(cell)
        if cell is not model.cells[-1] and model.shared.get("report_every", _REPORT_EVERY):
            more.append(Change(f"cell {cell.name}", "report_every", model.shared.get("report_every"), 0))
            short = replace(short, options={**short.options, "report_every": 0})
        cells.append(short)
        changes += more
        left_out += gone
    if model.launcher:
        left_out.append(f"the launcher `{' '.join(model.launcher)}`: its words were checked, one process ran")
    if model.shared.get("rollout_weights") == "auto":
        left_out.append("rollout_weights=auto chooses packed copies on some GPUs; here it chose what a CPU takes")
    result = replace(
        model,
        label=f"{model.label} (rehearsal)",
        base=base,
        shared={**shared, **_ALWAYS},
        launcher=(),
        cells=tuple(cells),
    )
    return result, changes, left_out


def _cell(cell: Cell) -> tuple[Cell, list[Change], list[str]]:
    options, changes = shortened(cell.options, f"cell {cell.name}")
    options, gone = on_the_cpu(options, f"cell {cell.name}")
    for name in [name for name in options if name in _ALWAYS]:
        changes.append(Change(f"cell {cell.name}", name, options[name], _ALWAYS[name]))
        options[name] = _ALWAYS[name]
    return replace(cell, options=options), changes, gone


def shortened(options: Mapping[str, Any], where: str, most: Mapping[str, int] = _AT_MOST) -> tuple[dict, list[Change]]:
    """Options with everything that takes long cut down, and what was. Measurements come at every step."""
    result, changes = dict(options), []
    for name, value in options.items():
        limit = most.get(name, 1 if name.endswith("_every") else None)
        if limit is not None and isinstance(value, int | float) and value > limit:
            result[name] = limit
            changes.append(Change(where, name, value, limit))
    steps = options.get("problem_steps")
    if steps is not None and list(steps) != _PROBLEM_STEPS:
        result["problem_steps"] = _PROBLEM_STEPS
        changes.append(Change(where, "problem_steps", steps, _PROBLEM_STEPS))
    return result, changes


def on_the_cpu(options: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Options that a CPU can run, and in words which ones it cannot."""
    result, left_out = dict(options), []

    def leave_out(name: str, instead: Any = None) -> None:
        left_out.append(f"{name}={options[name]} ({where})" + (f": {instead} in its place" if instead else ""))
        result.pop(name)
        if instead is not None:
            result[name] = instead

    attention = options.get("attn_implementation")
    if attention not in (None, "eager", "sdpa"):
        leave_out("attn_implementation", "sdpa")
    if options.get("tf32"):
        leave_out("tf32")
    if options.get("fp16"):
        leave_out("fp16")
    for name in [name for name in options if name.startswith("vllm_") or name in _SHARDED or name == "use_vllm"]:
        if options[name]:
            leave_out(name)
        else:
            result.pop(name)
    if "8bit" in str(options.get("optim")) or "fused" in str(options.get("optim")):
        leave_out("optim")
    return result, left_out


def _made_base(model: Model, where: str) -> tuple[dict[str, Any], list[Change], list[str]]:
    """The starting point that the grid pretrains itself, with the sizes and steps of a rehearsal."""
    base = dict(model.base)
    written = base.get("sizes") or {}
    base["sizes"] = tiny_sizes(base["architecture"], written)
    changes = [
        Change(f"{where}, sizes", name, written.get(name), value)
        for name, value in base["sizes"].items()
        if written.get(name) != value
    ]
    pretraining, more = shortened(base["pretraining"], f"{where}, pretraining", _PRETRAINING_AT_MOST)
    pretraining, left_out = on_the_cpu(pretraining, f"{where}, pretraining")
    base["pretraining"] = {**pretraining, "use_cpu": True, "learning_rate": _LEARNING_RATE}
    more.append(
        Change(f"{where}, pretraining", "learning_rate", pretraining.get("learning_rate"), _LEARNING_RATE),
    )
    if base.get("attn_implementation") not in (None, "eager", "sdpa"):
        base["attn_implementation"] = "sdpa"
    return base, [*changes, *more], left_out


def _merged(changes: Sequence[Change]) -> tuple[Change, ...]:
    """Changes that are the same in several places as one."""
    places: dict[str, list[str]] = {}
    kept: dict[str, Change] = {}
    for change in changes:
        if change.written == change.rehearsed:
            continue
        key = repr(change[1:])
        kept.setdefault(key, change)
        places.setdefault(key, []).append(change.where)
    return tuple(change._replace(where=_together(places[key])) for key, change in kept.items())


def _together(places: Sequence[str]) -> str:
    """Places in a few words: many cells by their number."""
    names = list(dict.fromkeys(places))
    cells = [name for name in names if name.startswith("cell ")]
    if len(cells) > 2:
        names = [*(name for name in names if name not in cells), f"{len(cells)} cells"]
    return "; ".join(names)
