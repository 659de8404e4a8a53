# SPDX-License-Identifier: Apache-2.0
"""Section ``files``: the bytes of everything that is saved, packed, exported and imported.

And section ``commands``: what the command line prints.
"""

import itertools
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from typer.main import get_command
from typer.testing import CliRunner

import hf_mxfp4
from hf_mxfp4.cli import app

from .inputs import FAMILIES, save_base, token_ids
from .models import DENSE, MOE, PRESETS, load, with_adapters
from .record import Record, visible_text


#: What `hf-mxfp4 pack` is called with.
_PACK = {
    "default": (),
    "plain": ("--scale-rule", "even", "--macro-block", "none"),
    "blockwise": ("--macro-search", "block_mantissas", "--skip", "layers.0"),
    "fallback": ("--outlier-fallback", "0.5", "--preset", "w4a4"),
}
_FORMATS = ("compressed-tensors", "quark", "gpt-oss", "bf16")
_MISMATCH = ("refuse", "requantize", "dequantize")


def command(record: Record, name: str, *arguments: object) -> int:
    """Record what the command prints and its exit code, which is returned."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    record.value(f"{name}/exit code", result.exit_code)
    record.text(f"{name}/printed", result.stdout)
    record.text(f"{name}/messages", result.stderr)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        record.text(f"{name}/error", repr(result.exception))
    return result.exit_code


def record(record: Record, section: str = "files") -> None:
    """Record everything of this section, or of the section ``commands``."""
    if section == "commands":
        return _record_commands(record)
    for family in (DENSE, MOE):
        _record_saved(record, family)
    for family in FAMILIES:
        _record_conversions(record, family)
    for mode in PRESETS:
        name = f"adapters/{mode}"
        with record.errors(name):
            model = with_adapters(load(_base(record, MOE), mode), MOE)
            model.save_pretrained(record.workplace / name)
            record.folder_of_files(name, record.workplace / name)


def _base(record: Record, family: str) -> Path:
    return save_base(family, record.workplace / family, torch.bfloat16)


def _record_saved(record: Record, family: str) -> None:
    for mode, preset in itertools.chain.from_iterable(itertools.product([mode], PRESETS[mode]) for mode in PRESETS):
        name = f"saved/{family}/{mode}-{preset}"
        with record.errors(name):
            folder = record.workplace / name
            load(_base(record, family), mode, preset=preset).save_pretrained(folder, max_shard_size="100KB")
            record.folder_of_files(name, folder)
            again = AutoModelForCausalLM.from_pretrained(folder)
            with torch.no_grad():
                record.tensor(f"{name}/logits", again(token_ids()).logits)
    name = f"saved/{family}/packed later"
    with record.errors(name):
        model = load(_base(record, family))
        hf_mxfp4.pack(model)
        model.save_pretrained(record.workplace / name)
        record.folder_of_files(name, record.workplace / name)


def _record_conversions(record: Record, family: str) -> None:
    base = _base(record, family)
    sources = {"base": base}
    for kind, options in _PACK.items():
        name = f"pack/{family}/{kind}"
        out = record.workplace / name
        out.parent.mkdir(parents=True, exist_ok=True)
        if command(record, name, "pack", base, out, *options) == 0:
            record.folder_of_files(name, out)
            sources[kind] = out
    load(base, preset="w4a4").save_pretrained(record.workplace / f"qat-{family}")
    sources["qat"] = record.workplace / f"qat-{family}"
    for (kind, source), form, mismatch in itertools.product(sources.items(), _FORMATS, _MISMATCH):
        if mismatch != "refuse" and kind not in ("default", "qat"):
            continue
        name = f"export/{family}/{kind}/{form}/{mismatch}"
        out = record.workplace / name
        out.parent.mkdir(parents=True, exist_ok=True)
        if command(record, name, "export", source, out, "--format", form, "--on-mismatch", mismatch) != 0:
            continue
        record.folder_of_files(name, out)
        if mismatch == "refuse":
            back = out.with_name("back-" + out.name)
            if command(record, f"import/{family}/{kind}/{form}", "import", out, back, "--json") == 0:
                record.folder_of_files(f"import/{family}/{kind}/{form}", back)


def _record_commands(record: Record) -> None:
    """What the command line prints and writes, and the help of every command."""
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
