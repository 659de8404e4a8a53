# SPDX-License-Identifier: Apache-2.0
"""What must be so in every run of a rehearsal, and of the launcher that was not used in it."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from recipes.ablations.grid import Model, Run
from recipes.ablations.runner import summary


def log_of(run: Run) -> list[dict[str, Any]]:
    """What the trainer of a finished run logged."""
    return json.loads((run.folder / "log_history.json").read_text())


def largest(run: Run, key: str) -> float | None:
    """The largest logged value of a name; `None` where it was never logged."""
    values = [entry[key] for entry in log_of(run) if isinstance(entry.get(key), int | float)]
    return max(values, default=None)


def check_run(run: Run) -> list[str]:
    """What is wrong with a finished run, in words: options that touched nothing, and numbers that are none."""
    result, log, options = summary(run), log_of(run), run.config
    problems = []
    if options.get("full_precision"):
        if result["n_quantized"]:
            problems.append(f"{result['n_quantized']} layers are quantized in full precision")
    elif not result["n_quantized"]:
        problems.append("no layer is quantized")
    if result["steps"] != options["max_steps"]:
        problems.append(f"{result['steps']} steps, not {options['max_steps']}")
    if options.get("evaluate_every") and largest(run, f"greedy/{next(iter(result['accuracy_after']))}") is None:
        problems.append("not evaluated while it trained")
    if options["evaluate_before"] and result["accuracy_before"] is None:
        problems.append("not evaluated before RL")
    if options.get("aqn") and not largest(run, "aqn/sigma"):
        problems.append("no noise")
    if options.get("router_replay") and not any(key.startswith("router_replay/") for entry in log for key in entry):
        problems.append("no routes were replayed")
    for key in ("loss", "grad_norm", "entropy"):
        values = [entry[key] for entry in log if key in entry]
        if not values:
            problems.append(f"{key} was not logged")
        if not all(map(math.isfinite, values)):
            problems.append(f"{key} is not finite: {values}")
    return [f"{run.name}: {problem}" for problem in problems]


def check_gradients(runs: Sequence[Run]) -> list[str]:
    """Models of which no finished run had a gradient: all of a group were rewarded alike, so nothing was trained."""
    gradients: dict[str, float] = {}
    for run in runs:
        found = largest(run, "grad_norm") or 0.0
        gradients[run.model.label] = max(gradients.get(run.model.label, 0.0), found)
    return [
        f"{label}: rewards never differed, so there was no gradient" for label, most in gradients.items() if most == 0
    ]


def check_launcher(model: Model) -> None:
    """Read the words of a launcher as it will read them; one that is not accelerate's must be a program.

    Raises `ValueError` when it would refuse them, or its configuration is missing or wrong.
    """
    words = list(model.launcher)
    if not words:
        return
    what = f"{model.label}: the launcher `{' '.join(words)}`"
    if shutil.which(words[0]) is None and words[0] != "accelerate":
        raise ValueError(f"{what}: there is no program {words[0]}")
    if words[:2] != ["accelerate", "launch"]:
        return
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = launch_command_parser().parse_args([*words[2:], "recipes/grpo.py"])
    except SystemExit:
        raise ValueError(f"{what}: {said.getvalue().strip().splitlines()[-1]}") from None
    if parsed.config_file is not None:
        if not Path(parsed.config_file).is_file():
            raise ValueError(f"{what}: there is no file {parsed.config_file} in {Path.cwd()}")
        try:
            load_config_from_file(parsed.config_file)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{what}: {parsed.config_file}: {error}") from error
