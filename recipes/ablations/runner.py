# SPDX-License-Identifier: Apache-2.0
"""Runs a grid: starting points first, then every cell and seed in a process of its own, several at a time."""

import datetime
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TextIO

import yaml
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from hf_mxfp4.checkpoint import last_complete_checkpoint
from hf_mxfp4.files import write_json
from hf_mxfp4.rl import ExactResumeMixin
from hf_mxfp4.utils import share_text
from recipes.common.records import hardware, versions
from recipes.common.terminal import TrainingBar, tell
from recipes.evaluation.policy import folder_digest
from recipes.tasks import TaskArguments, build_tokenizer
from recipes.tasks.tiny_model import TINY_MODELS, check_lengths, encode_example

from .grid import Grid, Run


GRPO = Path(__file__).resolve().parents[1] / "grpo.py"
PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets")


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON file; `None` where there is none, or only a part of one."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def changed(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Name the settings that differ."""
    stored, wanted = (json.loads(json.dumps(settings)) for settings in (stored, wanted))
    return [name for name in sorted({*stored, *wanted}) if stored.get(name) != wanted.get(name)]


# ---- starting points ------------------------------------------------------------------------------------------------


class _Pretrainer(ExactResumeMixin, Trainer):
    """A Trainer that a killed run continues from exactly."""


def base_settings(grid: Grid) -> dict[str, Any]:
    """Return everything that the weights of the starting point depend on."""
    if name := grid.base.get("model_name_or_path"):
        return {"model_name_or_path": name, "weights": folder_digest(Path(name)) if Path(name).is_dir() else None}
    # The test split is held out whatever part of it is evaluated.
    of_task = TaskArguments.__dataclass_fields__
    task = {name: value for name, value in grid.shared.items() if name in of_task and name != "n_test"}
    made = {name: grid.base.get(name) for name in ("architecture", "sizes", "pretraining")}
    return {**made, "seed": grid.base.get("seed", 0), "task": task}


def stored_base(grid: Grid) -> dict[str, Any] | None:
    """Return the record of the starting point, `None` where it is still to be made. Raises `ValueError` when there is
    one of other settings."""
    settings = base_settings(grid)
    if "model_name_or_path" in grid.base:
        return {"settings": settings, "parameters": None}
    record = read_json(Path(grid.start) / "base.json")
    if record is not None and (differences := changed(record["settings"], settings)):
        raise ValueError(
            f"{grid.start} was made with other {', '.join(differences)}; choose another --out, or remove that folder"
        )
    return record


def make_base(grid: Grid) -> None:
    """Pretrain and save the starting point, from the newest checkpoint if there is one: a small model in full
    precision, on the task's reference completions.

    The folder holds the model, its tokenizer and `base.json`, which is written last. Raises `ValueError` when a
    sequence is longer than the model's positions, `RuntimeError` when the saved tokenizer splits texts in another way.
    """
    started = time.monotonic()
    folder, settings = Path(grid.start), base_settings(grid)
    task = TaskArguments(**settings["task"]).load_task()
    tokenizer = build_tokenizer(task.name)
    policy = TINY_MODELS[settings["architecture"]](tokenizer, **settings["sizes"] or {}, seed=settings["seed"])
    if grid.base.get("attn_implementation"):
        policy.set_attn_implementation(grid.base["attn_implementation"])
    examples = [encode_example(tokenizer, row["prompt"], row["completion"]) for row in task.train]
    check_lengths(examples, policy)
    fixed = {"output_dir": str(folder / "checkpoints"), "seed": settings["seed"]}
    defaults = {"report_to": "none", "save_strategy": "no", "logging_steps": 20}
    trainer = _Pretrainer(
        policy,
        TrainingArguments(**{**defaults, **settings["pretraining"], **fixed}),
        train_dataset=[{"input_ids": ids, "labels": labels} for ids, labels in examples],
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
    )
    TrainingBar.install(trainer, f"pretraining {grid.label}", loss="loss")
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder / "checkpoints"))
    policy.to("cpu").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = task.train[0]["completion"]
    # `AutoTokenizer` goes by the model's family more than by the files, and runs load what it makes of them.
    if AutoTokenizer.from_pretrained(folder)(text)["input_ids"] != tokenizer(text)["input_ids"]:
        raise RuntimeError(f"the tokenizer in {folder} splits {text!r} in another way than the one it was saved from")
    seconds = round(time.monotonic() - started, 1)
    record = {"settings": settings, "parameters": policy.num_parameters(), "seconds": seconds}
    write_json(folder / "base.json", record, indent=1)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def prepare_base(grid: Grid) -> dict[str, Any]:
    """Make the starting point where it is missing; return its settings. Raises `ValueError` as [`stored_base`] does,
    and `RuntimeError` when it could not be made."""
    if stored_base(grid) is None:
        tell("base", f"pretraining {grid.label}")
        # Its memory goes back when it ends, to the runs that follow.
        process = multiprocessing.get_context("spawn").Process(target=make_base, args=(grid,))
        process.start()
        try:
            process.join()
        finally:
            process.terminate()
    record = stored_base(grid)
    if record is None:
        raise RuntimeError(f"{grid.label} could not be pretrained, see above")
    return record["settings"]


# ---- runs -----------------------------------------------------------------------------------------------------------


def finished(run: Run, base: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the summary and the state (where and when it was made) of a complete run, `None` of one that is not.
    Raises `ValueError` when it was run with other settings."""
    state, summary = read_json(run.folder / "cell.json"), read_json(run.folder / "summary.json")
    if state is None or state.get("exit_code"):
        return None
    if differences := changed(state["settings"], run.settings(base)):
        raise ValueError(
            f"{run.folder} was run with other {', '.join(differences)}; choose another --out, or remove that folder"
        )
    return None if summary is None else {**summary, "state": state}


def run_grid(grid: Grid, base: Mapping[str, Any], lock: TextIO, *, jobs: int = 1) -> list[str]:
    """Run what is missing from the starting point ``base``, `jobs` at a time with an equal share of the processor cores
    each.

    A run that was killed goes on from its newest checkpoint, or starts again where it has none. One that fails is
    recorded, and the others go on. Processes inherit the lock of the folder.

    Returns:
        The names of failed runs.

    Raises:
        ValueError: a run is there with other settings; or `jobs` is below 1.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    runs = list(grid.runs)
    waiting = [run for run in runs if finished(run, base) is None]
    tell("runs", f"{len(waiting)} of {len(runs)}, {jobs} at a time")
    active: list[subprocess.Popen] = []
    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        try:
            futures = {pool.submit(_run, run, base, threads, lock, active): run for run in waiting}
            for done, future in enumerate(as_completed(futures), start=1):
                seconds, reason = future.result()
                failed += [futures[future].name] if reason else []
                outcome = reason or _outcome(futures[future])
                tell(f"{done}/{len(waiting)}", f"{futures[future].name}: {outcome}, {seconds:.0f} s")
        except BaseException:
            # The runs end with this process.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active:
                process.terminate()
            raise
    return failed


def _outcome(run: Run) -> str:
    found = read_json(run.folder / "summary.json")
    score, after = next(iter(found["accuracy_after"].items()))
    return f"{score} accuracy {share_text(after, found['n_test'])}"


def _run(
    run: Run, base: Mapping[str, Any], threads: int, lock: TextIO, active: list[subprocess.Popen]
) -> tuple[float, str | None]:
    """Run `grpo.py` to its end: its seconds, and why it failed."""
    folder, settings, started = run.folder, run.settings(base), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    stored = read_json(folder / "cell.json")
    same = stored is not None and not changed(stored["settings"], settings)
    resumed = last_complete_checkpoint(folder) if same else None
    (folder / "summary.json").unlink(missing_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(run.config, sort_keys=False))
    # With the run and not with the report, which may be made on another machine.
    state = {
        "settings": settings,
        "earlier": stored.get("seconds", 0.0) if resumed else 0.0,
        "hardware": hardware(threads),
        "versions": versions(PACKAGES),
        "date": datetime.date.today().isoformat(),
    }
    write_json(folder / "cell.json", state, indent=1)
    command = [*(run.grid.launcher or (sys.executable,)), str(GRPO), "--config", str(folder / "config.yaml")]
    command += ["--resume_from_checkpoint", "true"] if resumed else []
    # Bars are for terminals; in a log, a line now and then.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TQDM_MININTERVAL": "30"}
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "env": environment}
    with (folder / "log.txt").open("a" if resumed else "w") as log:
        process = subprocess.Popen(command, stdout=log, pass_fds=(lock.fileno(),), **options)
        active.append(process)
        code = process.wait()
    active.remove(process)
    reason = None
    if code != 0 or read_json(folder / "summary.json") is None:
        lines = (folder / "log.txt").read_text(errors="replace").strip().splitlines()
        reason = f"FAILED with exit code {code}: {lines[-1].strip()[-300:] if lines else 'no output'}"
    seconds = round(state["earlier"] + time.monotonic() - started, 1)
    write_json(folder / "cell.json", {**state, "exit_code": code, "seconds": seconds}, indent=1)
    return seconds, reason
