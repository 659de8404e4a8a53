# SPDX-License-Identifier: Apache-2.0
"""`run_report.html`: one file about one training run, for someone who has never seen the project."""

import datetime
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...files import is_number, replace_file
from ..html import image, page, table
from .charts import Panel, draw_panels, panels_figure
from .health import STATE_WORDS, Check, overall, summary, verdict
from .log import RunRecord, read_run


RUN_REPORT = "run_report.html"


def write_run_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of the run in ``folder`` (see [`read_run`]) to ``out``, by default `run_report.html` in it.

    Raises [`RunLogError`] when there is no run to report on.
    """
    record = read_run(folder)
    path = Path(out) if out is not None else Path(folder) / RUN_REPORT
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, render_run(record))
    return path


def write_run_picture(folder: str | Path, out: str | Path) -> Path:
    """Draw the plots of the run in ``folder`` as one picture; the format follows the suffix of ``out``, which gets
    `.png` where it has none. The file that was written.

    Raises [`RunLogError`] when there is no run, and `ValueError` for a format that cannot be written.
    """
    record, out = read_run(folder), Path(out)
    if not out.suffix:  # matplotlib would add one by itself, and the file be elsewhere than is told
        out = out.with_name(f"{out.name}.png")
    figure = panels_figure(record, summary(record, verdict(record)))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=80)
    return out


def render_run(record: RunRecord) -> str:
    """The report as one HTML page, images included."""
    checks = verdict(record)
    drawn, absent = draw_panels(record)
    facts = record.facts
    title = f"MXFP4 training run: {_name(record)}"
    line = [facts.get("architecture"), facts.get("scheme"), _when(record)]
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="small">{escape(" · ".join(str(part) for part in line if part))}</p>',
        f"<p><b>{escape(summary(record, checks))}</b></p>",
        _checks(checks),
        '<p class="small">OK, LOOK and BAD follow rules of thumb: see docs/run-report.md. One run is one seed: what '
        "differs between two runs needs several of each.</p>",
        *_damage(record),
        "<h2>Plots</h2>",
        '<div class="panels">',
        *(f"<section>{image(figure, panel.title)}<p>{escape(panel.reading)}</p></section>" for panel, figure in drawn),
        "</div>",
        *_absent(absent),
        *_facts(record),
    ]
    return page(f"{title} ({STATE_WORDS[overall(checks)]})", body)


def _checks(checks: Sequence[Check]) -> str:
    items = []
    for check in checks:
        advice = f" <i>{escape(check.advice)}</i>" if check.advice else ""
        items.append(
            f'<li class="{check.state}"><b>{STATE_WORDS[check.state]} · {escape(check.title)}.</b> '
            f"{escape(check.finding)}{advice}</li>"
        )
    return f'<ul class="checks">{"".join(items)}</ul>'


def _damage(record: RunRecord) -> list[str]:
    if not record.damaged:
        return []
    lines = "1 line" if record.damaged == 1 else f"{record.damaged} lines"
    return [f'<p class="problem">{lines} of {escape(record.source)} could not be read and were passed over.</p>']


def _absent(panels: Sequence[Panel]) -> list[str]:
    if not panels:
        return []
    rows = [[panel.title, panel.option] for panel in panels]
    return ["<h2>Not measured</h2>", table(["plot", "what turns it on"], rows, numbers=False)]


def _facts(record: RunRecord) -> list[str]:
    facts = record.facts
    if not facts:
        return [
            "<h2>Run</h2>",
            f"<p>Read from {escape(record.source)}, which holds the logged values alone: options, versions and machine "
            "are not known.</p>",
        ]
    options = facts.get("options", {})
    changed = {name: options.get(name) for name in facts.get("changed_options", [])}
    quantization = facts.get("quantization") or {}
    parts = ["<h2>Run</h2>", table([], _overview(record), numbers=False)]
    parts.append(
        "<h3>Options that differ from their defaults</h3>"
        f'<p class="small">Some of these transformers and TRL fill in by themselves.</p>{_options(changed)}'
    )
    if quantization:
        parts.append(f"<details><summary>Quantization config</summary>{_options(quantization)}</details>")
    parts.append(f"<details><summary>All {len(options)} options</summary>{_options(options)}</details>")
    return parts


def _overview(record: RunRecord) -> list[list[str]]:
    facts = record.facts
    machine = facts.get("machine", {})
    cpu = machine.get("cpu", {})
    gpus = ", ".join(gpu["name"] for gpu in machine.get("gpus", [])) or "none"
    times = record.values("step_time")
    # accelerate's word for a single process is NO, which reads as an answer to another question.
    engine = "" if facts.get("distributed") in (None, "NO") else f" ({facts['distributed']})"
    began, ended = record.starts[0].get("time"), (record.end or record.logs[-1]).get("time")
    rows = [
        ["model", f"{facts.get('model')} ({facts.get('architecture')})"],
        [
            "parameters",
            f"{_count(facts.get('parameters'))}, of which {_count(facts.get('trained_parameters'))} trained",
        ],
        ["scheme", str(facts.get("scheme"))],
        ["training prompts", str(facts.get("train_rows"))],
        ["processes", f"{facts.get('processes')}{engine}, on {facts.get('device')}"],
        ["mixed precision", str(facts.get("precision"))],
        ["GPUs", gpus],
        ["CPU", f"{cpu.get('name')}, {cpu.get('cores')} cores"],
        ["system", str(machine.get("system"))],
        ["versions", ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items() if version)],
        ["time per step", f"{sum(times) / len(times):.2f} s on average" if times else "not logged"],
        ["read from", f"{record.source} in {record.folder}"],
    ]
    if is_number(began) and is_number(ended) and ended > began:
        rows.insert(-1, ["from first to last entry", f"{_duration(ended - began)}, {len(record.starts)} start(s)"])
    return rows


def _options(options: dict[str, Any]) -> str:
    rows = [[name, value if isinstance(value, str) else json.dumps(value)] for name, value in sorted(options.items())]
    return table(["option", "value"], rows, numbers=False)


def _name(record: RunRecord) -> str:
    return record.folder.resolve().name


def _when(record: RunRecord) -> str:
    times = [entry["time"] for entry in [*record.starts, *record.logs] if is_number(entry.get("time"))]
    if not times:
        return ""
    day = datetime.datetime.fromtimestamp(max(times), tz=datetime.timezone.utc)
    return f"last entry {day:%Y-%m-%d %H:%M} UTC"


def _count(number: Any) -> str:
    return f"{number / 1e6:,.2f} M" if is_number(number) else "unknown"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
