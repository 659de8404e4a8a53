# SPDX-License-Identifier: Apache-2.0
"""Section ``commands``: what the command line prints and writes, and the help of every command."""

import torch
from typer.main import get_command

from hf_mxfp4.cli import app

from .files import command
from .inputs import save_base
from .record import Record
from .texts import visible_text


def record(record: Record) -> None:
    """Record everything of this section."""
    record.text("help", get_command(app).get_short_help_str(10_000))
    command(record, "help of all", "--help")
    for name in sorted(get_command(app).commands):
        command(record, f"help of {name}", name, "--help")
    base = save_base("qwen2", record.workplace / "base", torch.bfloat16)
    moe = save_base("qwen3_moe", record.workplace / "moe")
    other = save_base("qwen2", record.workplace / "other", num_hidden_layers=1)
    for number, options in enumerate(
        (
            (base, "--gpus", 4, "--gpu-memory", 80),
            (base, "--gpus", 1, "--gpu-memory", 24, "--mode", "packed", "--lora-rank", 16, "--json"),
            (moe, "--gpus", 2, "--gpu-memory", 0.001, "--saved-activations", "mxfp4"),
        )
    ):
        command(record, f"plan/{number}", "plan", *options)
    for name, folder in (("base", base), ("moe", moe)):
        out = record.workplace / f"analysis-{name}"
        command(record, f"analyze/{name}", "analyze", folder, "--out", out)
        for path in sorted(out.iterdir()) if out.is_dir() else ():
            if path.suffix == ".html":
                record.text(f"analyze/{name}/{path.name}", visible_text(path.read_text()))
            elif path.name != "progress.jsonl":
                record.file(f"analyze/{name}/{path.name}", path)
    command(record, "analyze/json", "analyze", base, "--json", "--scheme", "even", "--out", record.workplace / "even")
    command(record, "analyze/wrong", "analyze", base, "--scheme", "rciel")
    command(record, "compare/checkpoints", "compare", base, other)
    command(record, "compare/json", "compare", base, other, "--scheme", "even", "--json")
    command(record, "compare/schemes", "compare", base, "--scheme", "rceil", "--scheme", "rceil+of0.5")
    for distribution in ("gaussian", "laplace", "student-t"):
        options = ("--distribution", distribution, "--elements", 8192, "--seed", 3)
        command(record, f"simulate/{distribution}", "simulate", *options)
    command(record, "mistake", "analyse")
    command(record, "report/nothing", "report", record.workplace / "base")
