# SPDX-License-Identifier: Apache-2.0
"""A rehearsal from its first file to its last table, and what is wrong in it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.ablations.grid import Grid, Model, Run, check_cells
from recipes.ablations.report import report
from recipes.ablations.runner import Starter, locked, prepare_bases, run_grid, summary
from recipes.common.terminal import tell

from .checks import check_gradients, check_launcher, check_run, log_of
from .forks import start_fork
from .shorten import STEPS, Rehearsal, shorten
from .show import show
from .stand_ins import GENERATED, architecture_of, make_problems, make_stand_in, problem_files, stand_in_folder


def rehearse(
    grid: Grid,
    output: str | None,
    command: str,
    *,
    seeds: Sequence[int] | None = None,
    jobs: int = 1,
    starter: Starter = start_fork,
) -> list[str]:
    """Run every cell of a grid on the CPU with a tiny model and a few steps, and print what ran, what was shortened and
    what could not be tried.

    Every cell runs with one seed, the reference and the naive cell with a second one where the grid has two, and the
    naive one is resumed from its first step. Nothing is downloaded.

    Args:
        grid: the real one.
        output: a folder that is not there or empty; by default a temporary one, which is kept for its logs and plots.
        command: what the records say that they were made by.
        seeds: every cell runs with these, instead of what is said above.
        jobs: runs at a time.

    Returns:
        What went wrong, in words.

    Raises:
        ValueError: the folder is used, a launcher that cannot be, or a checkpoint of unknown architecture.
    """
    started = time.monotonic()
    for model in grid.models:
        check_launcher(model)
    folder = Path(output or tempfile.mkdtemp(prefix=f"rehearsal_{grid.name}_"))
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; a rehearsal needs a folder of its own")
    short = shorten(grid, folder, tuple(seeds or grid.seeds[:2]))
    tell("rehearsal", f"of {grid.name}, in {folder}")
    check_cells(short.grid)
    with _offline(), locked(folder) as lock:
        for model, own in zip(grid.models, short.grid.models, strict=True):
            _stand_in(model, own, folder)
        options = {"jobs": jobs, "tell": tell, "starter": starter, "threads": 1}  # for models so small
        failed: list[str] = []
        bases: dict[tuple[str, int], dict[str, Any]] = {}
        parts = list(_parts(short, whole=seeds is not None))
        for part in parts:
            bases |= prepare_bases(part, rerun=False, tell=tell)
            failed += [name for name in run_grid(part, bases, lock, **options) if name not in failed]
        problems = [f"{name}: failed, see its log.txt" for name in failed]
        for model in short.grid.models:
            problems += _resume(short.grid, model, lambda part: run_grid(part, bases, lock, **options))
        runs = list({run.name: run for part in parts for run in part.runs}.values())
        finished = [run for run in runs if summary(run) is not None]
        problems += [problem for run in finished for problem in check_run(run)] + check_gradients(finished)
        with contextlib.suppress(RuntimeError):  # no run has finished: said already, run by run
            report(short.grid, command)
    for checkpoint in folder.rglob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    show(short, runs, problems, time.monotonic() - started)
    return problems


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Within this context processes that are started do not ask the Hub."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _stand_in(model: Model, short: Model, folder: Path) -> None:
    """The problems and the starting point of a model, where it would read them."""
    files = problem_files(folder, model.key)
    if short.shared["task"] not in GENERATED and short.shared["train_file"] == str(files["train_file"]):
        make_problems(short.shared["task"], files)
    if "model_name_or_path" in model.base:
        architecture = architecture_of(model)
        count = make_stand_in(short, architecture, model.base.get("sizes") or {}, stand_in_folder(folder, model.key))
        tell("stand-in", f"{architecture} of {count / 1e6:.2f} M parameters for {model.base['model_name_or_path']}")


def _parts(short: Rehearsal, whole: bool) -> Iterator[Grid]:
    """Every cell with the first seed, and the reference and the naive cells with all: intervals need two."""
    grid = short.grid
    if whole or len(grid.seeds) == 1:
        yield grid
        return
    yield replace(grid, seeds=grid.seeds[:1])
    few = {grid.reference, *(cell.naive for model in grid.models for cell in model.cells)}
    models = [replace(m, cells=tuple(cell for cell in m.cells if cell.name in few)) for m in grid.models]
    if models := tuple(model for model in models if model.cells):
        yield replace(grid, models=models)


def _resume(grid: Grid, model: Model, again: Callable[[Grid], list[str]]) -> list[str]:
    """Run a naive cell again as if it had been killed after its first step, where the grid keeps checkpoints.

    Args:
        again: runs what is missing of a grid, and returns the names of runs that failed.

    Returns:
        What went wrong, in words.
    """
    cell = next((cell for cell in model.cells if cell.name == cell.naive), model.cells[0])
    part = replace(grid, seeds=grid.seeds[:1], models=(replace(model, cells=(cell,)),))
    (run,) = part.runs
    before = summary(run)
    if model.shared.get("save_strategy") != "steps" or before is None:
        return []
    logged = log_of(run)
    if not (run.folder / "checkpoint-1").is_dir():
        return [f"{run.name}: no checkpoint of its first step to resume from"]
    shutil.rmtree(run.folder / f"checkpoint-{STEPS}")
    (run.folder / "summary.json").unlink()
    tell("resuming", f"{run.name} from its first step")
    if again(part):
        return [f"{run.name}: failed when it was resumed, see its log.txt"]
    if "resume_from_checkpoint: 'true'" not in (run.folder / "resolved_config.yaml").read_text():
        return [f"{run.name}: was started again and not resumed"]
    return _differences(run, logged, before)


def _differences(run: Run, logged: list[dict], before: dict) -> list[str]:
    """Whether a run that was resumed came out as the one that was not interrupted."""
    keys = ("loss", "reward", "entropy", "grad_norm")
    steps = [
        [{key: entry.get(key) for key in keys} for entry in log if entry.get("step") == STEPS and "entropy" in entry]
        for log in (logged, log_of(run))
    ]
    same = steps[0] == steps[1] and summary(run)["accuracy_after"] == before["accuracy_after"]
    return [] if same else [f"{run.name}: came out otherwise when it was resumed: {json.dumps(steps)}"]
