# SPDX-License-Identifier: Apache-2.0
"""Runs a grid: every cell and seed in a process of its own, several at a time."""

import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from hf_mxfp4.checkpoint import last_complete_checkpoint
from hf_mxfp4.files import break_links, replace_file, write_json
from hf_mxfp4.recipes.common.options import load_yaml
from hf_mxfp4.recipes.common.reporting import hardware, source_commit, tell
from hf_mxfp4.utils import package_versions, share_text

from .grid import Grid, Run


GRPO = Path(__file__).resolve().parents[1] / "grpo.py"
#: Seconds between looks at the processes.
_POLL = 0.05


def finished(run: Run) -> dict[str, Any] | None:
    """Return the summary of a run that was finished with these options, `None` of one that is not finished.

    Raises `ValueError` for one that was finished with other options.
    """
    summary = _read_json(run.folder / "summary.json")
    if summary is None or "seconds" not in summary:  # which are written last
        return None
    other = _other_options(run)
    if other:
        raise ValueError(
            f"{run.folder} was run with other {', '.join(other)}; choose another --out, or remove that folder"
        )
    return summary


def state_of(run: Run) -> dict[str, Any]:
    """Return where, by what and when a run was made: ``hardware``, ``versions``, ``commit`` and ``date``."""
    return json.loads((run.folder / "cell.json").read_text())


def run_grid(grid: Grid, *, jobs: int = 1) -> list[str]:
    """Run what is missing, `jobs` at a time with an equal share of the processor cores each; return the names of failed
    runs.

    A run that was killed continues from its newest checkpoint, if any. Runs end with this process. Raises `ValueError`
    when a run is there with other options.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    runs = list(grid.runs)
    waiting = [run for run in runs if finished(run) is None]
    total = len(waiting)
    tell("runs", f"{total} of {len(runs)}, {jobs} at a time")
    active: dict[str, tuple[Run, subprocess.Popen, float]] = {}
    failed: list[str] = []
    done = 0
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                run = waiting.pop(0)
                active[run.name] = run, _start(run, threads), time.monotonic()
            time.sleep(_POLL)
            for name, (run, process, started) in list(active.items()):
                if process.poll() is None:
                    continue
                del active[name]
                done += 1
                if process.returncode:
                    failed.append(name)
                outcome = _outcome(run, process.returncode)
                tell(f"{done}/{total}", f"{name}: {outcome}, {time.monotonic() - started:.0f} s")
    finally:
        for _, process, _ in active.values():
            process.terminate()
    return failed


def _start(run: Run, threads: int) -> subprocess.Popen:
    """Start `grpo.py` for a run, from its newest checkpoint if that has the same options."""
    folder = run.folder
    if folder.is_dir() and _other_options(run):
        shutil.rmtree(folder)  # of a run that did not finish
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").unlink(missing_ok=True)
    replace_file(folder / "config.yaml", yaml.safe_dump(run.config, sort_keys=False))
    state = {
        "hardware": hardware(threads),
        "versions": package_versions(),
        "commit": source_commit(),
        "date": datetime.date.today().isoformat(),
    }
    write_json(folder / "cell.json", state, indent=1)
    command = [*(run.grid.launcher or (sys.executable,)), str(GRPO), "--config", str(folder / "config.yaml")]
    resumes = last_complete_checkpoint(folder) is not None
    if resumes:
        command += ["--resume_from_checkpoint", "true"]
    # Bars are for terminals; in a log, a line now and then.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TQDM_MININTERVAL": "30"}
    break_links(folder / "log.txt")
    with (folder / "log.txt").open("a" if resumes else "w") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )


def _outcome(run: Run, code: int) -> str:
    """Return the accuracy of a run that ended, or why it failed."""
    if code == 0:
        summary = json.loads((run.folder / "summary.json").read_text())
        score, after = next(iter(summary["accuracy_after"].items()))
        return f"{score} accuracy {share_text(after, summary['n_test'])}"
    lines = (run.folder / "log.txt").read_text(errors="replace").strip().splitlines()
    reason = lines[-1].strip()[-300:] if lines else "no output"
    return f"FAILED with exit code {code}: {reason}"


def _other_options(run: Run) -> list[str]:
    """Name the options that differ from those that a run was started with."""
    file = run.folder / "config.yaml"
    if not file.is_file():
        return []
    before = _flat(load_yaml(file))
    now = _flat(run.config)
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return options with those of the study among them, without those that no result depends on."""
    flat = {**config, **config["study"]}
    for name in ("study", "output_dir", "evaluate_before"):
        flat.pop(name, None)
    return yaml.safe_load(yaml.safe_dump(flat))


def _read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON file; `None` where there is none, or only a part of one."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
