# SPDX-License-Identifier: Apache-2.0
"""Runs a grid: every cell and seed in a process of its own, several at a time."""

import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TextIO

import yaml

from hf_mxfp4.checkpoint import last_complete_checkpoint
from hf_mxfp4.files import break_links, replace_file, write_json
from hf_mxfp4.recipes.common.reporting import hardware, tell
from hf_mxfp4.recipes.post_training.output import REPLACED
from hf_mxfp4.utils import package_versions, share_text

from .grid import WITHOUT_EFFECT, Grid, Run


GRPO = Path(__file__).resolve().parents[1] / "grpo.py"


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON file; `None` where there is none, or only a part of one."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def changed(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Name the settings that differ."""
    stored, wanted = (json.loads(json.dumps(settings)) for settings in (stored, wanted))
    names = sorted({*stored, *wanted} - {*WITHOUT_EFFECT})
    return [name for name in names if stored.get(name) != wanted.get(name)]


def finished(run: Run) -> dict[str, Any] | None:
    """Return the summary and the state (where and when it was made) of a complete run, `None` of one that is not.
    Raises `ValueError` when it was run with other settings."""
    state, summary = read_json(run.folder / "cell.json"), read_json(run.folder / "summary.json")
    if state is None or state.get("exit_code"):
        return None
    if differences := changed(state["settings"], run.settings):
        raise ValueError(
            f"{run.folder} was run with other {', '.join(differences)}; choose another --out, or remove that folder"
        )
    # The seconds are written last.
    return None if summary is None or "seconds" not in summary else {**summary, "state": state}


def run_grid(grid: Grid, lock: TextIO, *, jobs: int = 1) -> list[str]:
    """Run what is missing, `jobs` at a time with an equal share of the processor cores each; return the names of failed
    runs. A run that was killed goes on from its newest checkpoint, if any. Processes inherit the lock of the folder.
    Raises `ValueError` when a run is there with other settings."""
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    runs = list(grid.runs)
    waiting = [
        run
        for run in runs
        # A policy may be asked for of a run that did not save it.
        if finished(run) is None or (run.config["study"]["save_policy"] and not (run.folder / "policy").is_dir())
    ]
    tell("runs", f"{len(waiting)} of {len(runs)}, {jobs} at a time")
    active: list[subprocess.Popen] = []
    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        try:
            futures = {pool.submit(_run, run, threads, lock, active): run for run in waiting}
            for done, future in enumerate(as_completed(futures), start=1):
                seconds, outcome, succeeded = future.result()
                failed += [] if succeeded else [futures[future].name]
                tell(f"{done}/{len(waiting)}", f"{futures[future].name}: {outcome}, {seconds:.0f} s")
        except BaseException:
            # The runs end with this process.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active:
                process.terminate()
            raise
    return failed


def _run(run: Run, threads: int, lock: TextIO, active: list[subprocess.Popen]) -> tuple[float, str, bool]:
    """Run `grpo.py` to its end; return its seconds, its accuracy or why it failed, and whether it succeeded."""
    folder, settings, started = run.folder, run.settings, time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    stored = read_json(folder / "cell.json")
    same = stored is not None and not changed(stored["settings"], settings)
    checkpoint = last_complete_checkpoint(folder)
    if checkpoint and not same:  # noted before the new settings are written
        (folder / REPLACED).touch()
    resumed = None if (folder / REPLACED).exists() else checkpoint
    (folder / "summary.json").unlink(missing_ok=True)
    replace_file(folder / "config.yaml", yaml.safe_dump(run.config, sort_keys=False))
    # With the run and not with the report, which may be made on another machine.
    state = {
        "settings": settings,
        "earlier": stored.get("seconds", 0.0) if resumed else 0.0,
        "hardware": hardware(threads),
        "versions": package_versions(),
        "date": datetime.date.today().isoformat(),
    }
    write_json(folder / "cell.json", state, indent=1)
    command = [*(run.grid.launcher or (sys.executable,)), str(GRPO), "--config", str(folder / "config.yaml")]
    command += ["--resume_from_checkpoint", "true"] if resumed else []
    # Bars are for terminals; in a log, a line now and then.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TQDM_MININTERVAL": "30"}
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "env": environment}
    break_links(folder / "log.txt")
    with (folder / "log.txt").open("a" if resumed else "w") as log:
        process = subprocess.Popen(command, stdout=log, pass_fds=(lock.fileno(),), **options)
        active.append(process)
        code = process.wait()
    active.remove(process)
    summary = read_json(folder / "summary.json")
    succeeded = code == 0 and summary is not None
    if succeeded:
        score, after = next(iter(summary["accuracy_after"].items()))
        outcome = f"{score} accuracy {share_text(after, summary['n_test'])}"
    else:
        lines = (folder / "log.txt").read_text(errors="replace").strip().splitlines()
        outcome = f"FAILED with exit code {code}: {lines[-1].strip()[-300:] if lines else 'no output'}"
    seconds = round(state["earlier"] + time.monotonic() - started, 1)
    write_json(folder / "cell.json", {**state, "exit_code": code, "seconds": seconds}, indent=1)
    return seconds, outcome, succeeded
