# SPDX-License-Identifier: Apache-2.0
"""The file `run_log.jsonl`, to which a training run appends a line for each log, and advice that the trainer and the
report of a run both give. `hf_mxfp4.lab` reads the file and makes the report; importing this module is cheap."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import append_lines, json_clean


RUN_LOG = "run_log.jsonl"
#: The log of the run before, when a new one begins in the same folder.
PREVIOUS_LOG = "run_log.previous.jsonl"
#: Step movement (see [`hf_mxfp4.rl.StepMovementCallback`]) above which, beyond two standard errors, weights jump.
MOVEMENT_ALARM = 3.0


class RunLog:
    """Appends lines to the `run_log.jsonl` of a folder; a killed run keeps all of them."""

    def __init__(self, folder: str | Path):
        self.path = Path(folder) / RUN_LOG

    def start(self, step: int, max_steps: int, facts: dict[str, Any], history: Sequence[dict[str, Any]]) -> None:
        """Begin a run at step 0, and set the log of an earlier one aside; at a later step continue the log, or begin
        one with ``history``, the log history of the checkpoint, where the folder has none."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if step == 0 and self.path.is_file():
            os.replace(self.path, self.path.with_name(PREVIOUS_LOG))
        if not self.path.is_file():
            for entry in history:
                self.write("log", **entry)
        self.write("start", step=step, max_steps=max_steps, facts=facts)

    def write(self, kind: str, **entry: Any) -> None:
        """Append one line; NaN and infinity become null."""
        line = json_clean({"kind": kind, "time": round(time.time(), 3), **entry})
        append_lines(self.path, [line], allow_nan=False, default=str)


def movement_advice(is_first: bool) -> str:
    """Return why quantized weights move much further than master weights, in the first or a later step, and what
    helps."""
    if is_first:
        return (
            "Many master weights lie exactly between two quantized values (ties of a 16-bit checkpoint), and any step "
            "moves them all: load the model with dtype=torch.float32, and leave dither_ties of MXFP4RLConfig on."
        )
    return (
        "Master weights have gathered at the boundaries between quantized values, or were rounded to 16 bits: keep "
        "them in float32, or lower learning_rate."
    )
