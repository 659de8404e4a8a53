# SPDX-License-Identifier: Apache-2.0
"""Section ``files``: the bytes of everything that is saved, packed, exported and imported."""

import itertools
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_mxfp4
from hf_mxfp4.cli import app

from .inputs import FAMILIES, save_base, token_ids
from .models import DENSE, MOE, PRESETS, load, with_adapters
from .record import Record


#: What `hf-mxfp4 pack` is called with.
_PACK = {
    "default": (),
    "plain": ("--scale-rule", "even", "--macro-block", "none"),
    "blockwise": ("--macro-search", "blockwise", "--skip", "layers.0"),
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


def record(record: Record) -> None:
    """Record everything of this section."""
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
