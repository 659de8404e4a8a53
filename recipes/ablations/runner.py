# SPDX-License-Identifier: Apache-2.0
"""Runs a grid: starting points first, then every cell and seed in a process of its own, several at a time."""

from __future__ import annotations

import datetime
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

import yaml

from hf_mxfp4.checkpoint import last_complete_checkpoint
from hf_mxfp4.stats import share_text
from recipes.common.hardware import hardware, versions

from .base import make_base, stored_base, write_json
from .grid import Grid, Run, changed, fingerprint


GRPO = Path(__file__).resolve().parents[1] / "grpo.py"
_STATE, _SUMMARY = "cell.json", "summary.json"
_POLL_SECONDS = 0.5
PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets")
Tell = Callable[[str, str], None]


@contextmanager
def locked(folder: Path) -> Iterator[TextIO]:
    """Keeps a second process away from a folder for as long as this one or a run that it started is alive.

    Raises `ValueError` when one is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is at work in {folder}, or a run that it had started still is") from None
        yield file


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """SIGTERM ends this process as an exception does, so that it can end those that it started."""

    def leave(number, frame):
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def finished(run: Run, base: str, *, rerun: bool = False) -> bool:
    """Whether a run is complete. Raises `ValueError` when it was run with other settings, unless `rerun`."""
    state = stored_state(run.folder)
    if state is None:
        return False
    differences = changed(state["settings"], run.settings(base))
    if not differences:
        return state["status"] != "failed" and summary(run) is not None
    if rerun or state["status"] == "failed":
        return False
    raise ValueError(
        f"{run.folder} was run with other {', '.join(differences)}; choose another --out, or run it again with --rerun"
    )


def summary(run: Run) -> dict[str, Any] | None:
    """What a complete run wrote; `None` for one that is not."""
    try:
        found = json.loads((run.folder / _SUMMARY).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return found


def stored_state(folder: Path) -> dict[str, Any] | None:
    """How a run stands: settings, where and when it was made, status, exit code, seconds; `None` for none."""
    try:
        return json.loads((folder / _STATE).read_text())
    except FileNotFoundError:
        return None


# ---- starting points ------------------------------------------------------------------------------------------------


def prepare_bases(grid: Grid, *, rerun: bool, tell: Tell) -> dict[tuple[str, int], dict[str, Any]]:
    """The record of the starting point of each model and seed; those that are missing are made first.

    Raises `ValueError` as [`stored_base`] does, and `RuntimeError` when one could not be made.
    """
    records = {}
    for model in grid.models:
        for seed in grid.seeds:
            record = stored_base(grid, model, seed, rerun=rerun)
            if record is None:
                tell("base", f"pretraining {model.label}")
                # Its memory goes back when it ends, to the runs that follow.
                process = multiprocessing.get_context("spawn").Process(target=make_base, args=(grid, model, seed))
                process.start()
                try:
                    process.join()
                finally:
                    process.terminate()
                record = stored_base(grid, model, seed)
                if record is None:
                    raise RuntimeError(f"{model.label} could not be pretrained, see above")
                tell(
                    "base",
                    f"{model.label}: {record['parameters'] / 1e6:.2f} M parameters, {record['steps']} steps"
                    # Not logged in fewer steps than `logging_steps`.
                    + ("" if record["loss"] is None else f", loss {record['loss']:.4f}")
                    + f", {record['seconds']:.0f} s",
                )
            records[model.key, seed] = record
    return records


# ---- runs -----------------------------------------------------------------------------------------------------------


@dataclass
class _Process:
    run: Run
    state: dict[str, Any]
    popen: subprocess.Popen
    log: TextIO
    started: float
    earlier: float


def run_grid(
    grid: Grid,
    bases: dict[tuple[str, int], dict[str, Any]],
    lock: TextIO,
    *,
    jobs: int = 1,
    rerun: bool = False,
    tell: Tell,
) -> list[str]:
    """Run what is missing, `jobs` at a time with an equal share of the processor cores each.

    A run that was killed goes on from its newest checkpoint, or starts again where it has none. One that fails is
    recorded, and the others go on.

    Returns:
        The names of failed runs.

    Raises:
        ValueError: a run is there with other settings, and not `rerun`; or `jobs` is below 1.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    fingerprints = {key: record["fingerprint"] for key, record in bases.items()}
    runs = list(grid.runs)
    waiting = [run for run in runs if not finished(run, fingerprints[run.model.key, run.seed], rerun=rerun)]
    tell("runs", f"{len(waiting)} of {len(runs)}, {jobs} at a time" + _already(len(runs) - len(waiting)))
    active: list[_Process] = []
    failed: list[str] = []
    durations: list[float] = []
    total = len(waiting)
    with _ended_with_us(active):
        while waiting or active:
            while waiting and len(active) < jobs:
                run = waiting.pop(0)
                settings = run.settings(fingerprints[run.model.key, run.seed])
                active.append(_start(run, settings, threads, lock))
            time.sleep(_POLL_SECONDS)
            for process in [process for process in active if process.popen.poll() is not None]:
                active.remove(process)
                seconds, reason = _finish(process)
                durations.append(seconds)
                if reason is not None:
                    failed.append(process.run.name)
                done = total - len(waiting) - len(active)
                left = fmean(durations) * (len(waiting) + 0.5 * len(active)) / jobs
                tell(
                    f"{done}/{total}",
                    f"{process.run.name}: {reason or _outcome(process.run)}, {seconds:.0f} s"
                    + (f"; about {_duration(left)} left" if done < total else ""),
                )
    return failed


def _already(count: int) -> str:
    return f"; {count} are finished" if count else ""


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min"


def _outcome(run: Run) -> str:
    found = summary(run)
    score, after = next(iter(found["accuracy_after"].items()))
    return f"{score} accuracy {share_text(after, found['n_test'])}"


def _start(run: Run, settings: dict[str, Any], threads: int, lock: TextIO) -> _Process:
    folder = run.folder
    folder.mkdir(parents=True, exist_ok=True)
    stored = stored_state(folder)
    same = stored is not None and not changed(stored["settings"], settings)
    resumed = last_complete_checkpoint(folder) if same else None
    if not same:
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)  # a later start would go on from it
    (folder / _SUMMARY).unlink(missing_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(run.config, sort_keys=False))
    earlier = stored.get("seconds", 0.0) if resumed else 0.0
    # With the run and not with the report, which may be made on another machine.
    made = {
        "hardware": hardware(threads),
        "versions": versions(PACKAGES),
        "date": datetime.date.today().isoformat(),
    }
    state = {"fingerprint": fingerprint(settings), "settings": settings, "threads": threads, "earlier": earlier, **made}
    write_json(folder / _STATE, {"status": "running", **state})
    command = [*(run.model.launcher or (sys.executable,)), str(GRPO), "--config", str(folder / "config.yaml")]
    command += ["--resume_from_checkpoint", "true"] if resumed else []
    log = (folder / "log.txt").open("a" if resumed else "w")
    # Bars are for terminals; in a log, a line now and then.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TQDM_MININTERVAL": "30"}
    # It inherits the lock: while it lives on after us, its folder stays locked.
    popen = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=(lock.fileno(),),
    )
    return _Process(run, state, popen, log, time.monotonic(), earlier)


def _finish(process: _Process) -> tuple[float, str | None]:
    """Record how a run ended: its seconds, and why it failed."""
    process.log.close()
    folder, code = process.run.folder, process.popen.returncode
    seconds = round(process.earlier + time.monotonic() - process.started, 1)
    reason = None
    if code != 0 or summary(process.run) is None:
        lines = (folder / "log.txt").read_text(errors="replace").strip().splitlines()
        reason = f"FAILED with exit code {code}: {lines[-1].strip()[-300:] if lines else 'no output'}"
    state = {
        "status": "failed" if reason else "finished",
        **process.state,
        "exit_code": code,
        "reason": reason,
        "seconds": seconds,
    }
    write_json(folder / _STATE, state)
    return seconds, reason


@contextmanager
def _ended_with_us(active: Sequence[_Process]) -> Iterator[None]:
    """Ends the runs that are under way when this process leaves."""
    try:
        yield
    finally:
        for process in active:
            process.popen.terminate()
        for process in active:
            process.popen.wait()
            process.log.close()
