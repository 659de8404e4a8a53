# SPDX-License-Identifier: Apache-2.0
"""`run_report.html`: one file about one training run, for someone who has never seen the project."""

import contextlib
import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from ..._logging import get_logger
from ...files import replace_file
from ..page import render_page
from .charts import charts_figure, draw_charts, save_figure
from .health import STATE_WORDS, health_checks, overall, summary
from .log import RunRecord, is_number, read_run


RUN_REPORT = "run_report.html"


def write_run_report(folder: str | Path) -> Path:
    """Write the report of the run in ``folder`` (see [`read_run`]) to `run_report.html` in it, and return its path.

    Raises [`RunLogError`] when there is no run to report on.
    """
    path = Path(folder) / RUN_REPORT
    replace_file(path, render_run(read_run(folder)))
    return path


def write_run_picture(folder: str | Path, out: str | Path) -> Path:
    """Draw the plots of the run in ``folder`` as one picture; the format follows the suffix of ``out``, which gets
    `.png` where it has none. The file that was written.

    Raises [`RunLogError`] when there is no run, and `ValueError` for a format that cannot be written.
    """
    record = read_run(folder)
    out = Path(out)
    if not out.suffix:  # matplotlib would add one by itself, and the file be elsewhere than is told
        out = out.with_name(f"{out.name}.png")
    return save_figure(charts_figure(record, summary(record, health_checks(record))), out)


def render_run(record: RunRecord) -> str:
    """Return the report as one HTML page, images included."""
    checks = health_checks(record)
    drawn, absent = draw_charts(record)
    facts = record.facts
    options = facts.get("options", {})
    parts = [facts.get("architecture"), facts.get("scheme"), _when(record)]
    overview = []
    if facts:
        overview = _overview(record)
    return render_page(
        "run_report",
        title=f"MXFP4 training run: {record.folder.resolve().name}",
        subtitle=" · ".join(str(part) for part in parts if part),
        state=STATE_WORDS[overall(checks)],
        summary=summary(record, checks),
        checks=checks,
        state_words=STATE_WORDS,
        record=record,
        charts=drawn,
        absent=[[chart.title, chart.option] for chart in absent],
        overview=overview,
        changed_options=_option_rows({name: options.get(name) for name in facts.get("changed_options", [])}),
        quantization=_option_rows(facts.get("quantization") or {}),
        options=_option_rows(options),
    )


def _overview(record: RunRecord) -> list[list[str]]:
    """Return names and values of what ran, where, and how long it took."""
    facts = record.facts
    machine = facts.get("machine", {})
    cpu = machine.get("cpu", {})
    gpus = ", ".join(gpu["name"] for gpu in machine.get("gpus", [])) or "none"
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items() if version)
    step_time = "not logged"
    times = record.values("step_time")
    if times:
        step_time = f"{sum(times) / len(times):.2f} s on average"
    processes = str(facts.get("processes"))
    # accelerate's word for a single process is NO, which reads as an answer to another question.
    if facts.get("distributed") not in (None, "NO"):
        processes += f" ({facts['distributed']})"
    parameters = _millions(facts.get("parameters"))
    trained = _millions(facts.get("trained_parameters"))
    rows = [
        ["model", f"{facts.get('model')} ({facts.get('architecture')})"],
        ["parameters", f"{parameters}, of which {trained} trained"],
        ["scheme", str(facts.get("scheme"))],
        ["training prompts", str(facts.get("train_rows"))],
        ["processes", f"{processes}, on {facts.get('device')}"],
        ["mixed precision", str(facts.get("precision"))],
        ["GPUs", gpus],
        ["CPU", f"{cpu.get('name')}, {cpu.get('cores')} cores"],
        ["system", str(machine.get("system"))],
        ["versions", versions],
        ["time per step", step_time],
        ["read from", f"{record.source} in {record.folder}"],
    ]
    began = record.starts[0].get("time")
    ended = (record.end or record.logs[-1]).get("time")
    if is_number(began) and is_number(ended) and ended > began:
        rows.insert(-1, ["from first to last entry", f"{_duration(ended - began)}, {len(record.starts)} start(s)"])
    return rows


def _option_rows(options: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, value in sorted(options.items()):
        if not isinstance(value, str):
            value = json.dumps(value)
        rows.append([name, value])
    return rows


def _when(record: RunRecord) -> str:
    entries = [*record.starts, *record.logs]
    times = [entry["time"] for entry in entries if is_number(entry.get("time"))]
    if not times:
        return ""
    day = datetime.datetime.fromtimestamp(max(times), tz=datetime.timezone.utc)
    return f"last entry {day:%Y-%m-%d %H:%M} UTC"


def _millions(number: Any) -> str:
    if not is_number(number):
        return "unknown"
    return f"{number / 1e6:,.2f} M"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s"


class RunReportCallback(TrainerCallback):
    """Writes `run_report.html` into the output folder every few steps and when training ends, of the `run_log.jsonl`
    that [`hf_mxfp4.MXFP4GRPOTrainer`] writes there. Done by the main process. Whatever fails in it is a warning, and
    training goes on.

    Args:
        every: steps between reports; each takes about a second of one core.

    Attributes:
        path: of the report last written, `None` before.
    """

    def __init__(self, every: int = 100):
        self.every = every
        self.path: Path | None = None
        self._warned = False

    def on_step_end(self, args, state, control, **kwargs):
        # The last step's report comes with the end of training.
        if state.global_step % self.every == 0 and state.global_step < state.max_steps:
            self._write(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        self._write(args, state)

    @contextlib.contextmanager
    def on_exit(self, trainer: Trainer) -> Iterator[None]:
        """Write the report of a training within this context that ends by an exception, too."""
        try:
            yield
        except BaseException:
            if self in trainer.callback_handler.callbacks:
                self._write(trainer.args, trainer.state)
            raise

    def _write(self, args, state) -> None:
        if state.is_world_process_zero and state.log_history:
            self.write(args.output_dir)

    def write(self, folder: str | Path) -> None:
        """Write the report of the run in ``folder``."""
        try:
            self.path = write_run_report(folder)
        except Exception as error:
            if not self._warned:
                get_logger().warning("no run report in %s: %s: %s", folder, type(error).__name__, error)
            self._warned = True
