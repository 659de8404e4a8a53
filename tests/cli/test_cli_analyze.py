# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 analyze` as a user meets it: files, messages, exit codes, interruption and resumption."""

import csv
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import hf_mxfp4
from hf_mxfp4.cli import app
from hf_mxfp4.lab import PAPER_SCHEMES, open_source
from hf_mxfp4.lab import weights as weights_module


REPORTS = ("report.json", "tensors.csv", "report.html")


pytestmark = pytest.mark.usefixtures("blank_pictures")


def run(*arguments):
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)])


def test_names_from_a_file_are_text_and_nothing_else(tmp_path):
    """A stranger's file names its tensors: no markup, no escape codes for the terminal, no formulas in the plots."""
    name = "model.layers.0.\x1b[2J[red]a[/blue]$\\frac$"
    save_file(
        {f"{name}.weight": torch.ones(8, 64), "model.layers.1.up_proj.weight": torch.ones(8, 64)},
        tmp_path / "x.safetensors",
    )
    done = run(tmp_path / "x.safetensors", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output and "\\x1b[2J[red]a[/blue]$\\frac$" in done.output


def contents(folder):
    return {name: Path(folder, name).read_bytes() for name in REPORTS}


def test_a_checkpoint_from_start_to_end(checkpoint, tmp_path):
    folder = Path(checkpoint(shard_size="60KB"))
    done = run(folder, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["schemes"] == [f"mxfp4+{text}" for text in PAPER_SCHEMES]
    assert report["source"]["architecture"] == "Qwen2ForCausalLM" and len(report["tensors"]) == 14
    assert len(list(csv.reader((tmp_path / "out" / "tensors.csv").open()))) == 1 + 14 * 3
    assert f"{folder.name}: 14 tensors" in done.stdout
    for text in (
        "self_attn.q_proj",
        "energy of that part of the error over that of the whole error",
        "Verdict, least error: at 4.25 bits an element mxfp4+rceil (SQNR ",
        "; at 8.56 bits an element mxfp4+rceil+mbs128-static+of0.5 (SQNR ",
        "does not rank schemes by the perplexity",
        "largest relative errors under mxfp4+rceil+mbs128-static+of0.5",
        "left out: 1 embedding (such as model.embed_tokens.weight)",
    ):
        assert text in done.stdout
    assert len(done.stdout.splitlines()) < 45 and len(done.stdout.encode()) < 6000
    assert "report.html" in done.stderr


def test_a_policy_under_its_own_scheme(checkpoint, tmp_path):
    folder = Path(checkpoint())
    config = hf_mxfp4.MXFP4RLConfig(scale_rule="even", outlier_fallback=None)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "quantization_config": config.to_dict()}))
    summary = json.loads(run(folder, "--json", "--out", tmp_path / "a").stdout)
    assert summary["schemes"] == ["mxfp4+even+mbs128-blockwise"]
    summary = json.loads(run(folder, "--json", "--out", tmp_path / "b", "--scheme", "rceil").stdout)
    assert summary["schemes"] == ["mxfp4+rceil"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "rciel"], "no scale rule 'rciel'; did you mean 'rceil'?"),
        (["--include", "layers.9"], "matches the pattern 'layers.9'"),
        (["--include", "norm"], "would be quantized; skipped"),
        (["--activations", "--text", "t.jsonl"], "--activations was removed: hf-mxfp4 eval MODEL --text TEXT"),
        (["--perplexity", "t.jsonl"], "--perplexity was removed: run hf-mxfp4 eval MODEL --text TEXT"),
    ],
)
def test_wrong_usage(checkpoint, tmp_path, arguments, message):
    done = run(checkpoint(), "--out", tmp_path / "out", *arguments)
    assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.output
    assert not (tmp_path / "out" / "report.json").exists()


def test_no_such_model(tmp_path):
    done = run(tmp_path / "gone", "--out", tmp_path)
    assert done.exit_code == 2 and "does not exist" in done.stderr
    assert run(tmp_path).exit_code == 2


def test_a_folder_that_cannot_be_made(checkpoint, tmp_path):
    (tmp_path / "file").touch()
    done = run(checkpoint(), "--scheme", "rceil", "--out", tmp_path / "file")
    assert done.exit_code == 2 and done.stderr == f"error: File exists: {tmp_path / 'file'}\n"


@pytest.mark.parametrize("damage", ["truncated", "missing", "header", "nan"])
def test_what_cannot_be_read_is_named_everywhere(checkpoint, tmp_path, damage):
    folder, out = Path(checkpoint(shard_size="60KB")), tmp_path / "out"
    shard = list(open_source(str(folder)).expected)[1]
    file, where = folder / shard, shard
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "missing":
        file.unlink()
    elif damage == "header":
        contents = bytearray(file.read_bytes())
        contents[9] ^= 4
        file.write_bytes(contents)
    else:
        tensors = load_file(file)
        where = next(name for name, x in tensors.items() if x.dim() == 2 and "embed" not in name)
        tensors[where][0, 0] = float("nan")
        save_file(tensors, file)
    done = run(folder, "--scheme", "rceil", "--out", out)
    assert done.exit_code == 1
    assert f"problem: {where}: " in done.stderr
    report = json.loads((out / "report.json").read_text())
    assert [problem["where"] for problem in report["problems"]] == [where]
    assert 0 < len(report["tensors"]) < 14
    assert where in (out / "report.html").read_text()


def test_a_rerun_and_a_copy_of_the_model_give_the_same_bytes(checkpoint, tmp_path):
    folder = Path(checkpoint(shard_size="60KB"))
    run(folder, "--scheme", "rceil", "--out", tmp_path / "a")
    first = contents(tmp_path / "a")
    again = run(folder, "--scheme", "rceil", "--out", tmp_path / "a")
    assert again.exit_code == 0 and "holds 14 tensors that are done" in again.stderr
    assert contents(tmp_path / "a") == first
    shutil.copytree(folder, tmp_path / "elsewhere" / folder.name)
    run(tmp_path / "elsewhere" / folder.name, "--scheme", "rceil", "--out", tmp_path / "b")
    assert contents(tmp_path / "b") == first


def test_other_settings_do_not_mix(checkpoint, tmp_path):
    folder = Path(checkpoint())
    run(folder, "--scheme", "rceil", "--out", tmp_path)
    before = contents(tmp_path)
    done = run(folder, "--scheme", "floor", "--out", tmp_path)
    assert done.exit_code == 2 and "start over with --overwrite" in done.stderr
    assert contents(tmp_path) == before
    os.utime(folder / "model.safetensors", ns=(1, 1))
    done = run(folder, "--scheme", "rceil", "--out", tmp_path)
    assert done.exit_code == 2 and "as it was before it changed" in done.stderr
    assert run(folder, "--scheme", "floor", "--out", tmp_path, "--overwrite").exit_code == 0
    assert json.loads((tmp_path / "report.json").read_text())["schemes"] == ["mxfp4+floor"]


def test_ctrl_c_and_on(checkpoint, tmp_path, monkeypatch):
    folder = checkpoint(shard_size="60KB")
    run(folder, "--scheme", "rceil", "--out", tmp_path / "whole")
    count = 0

    def interrupted(*arguments):
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        return original(*arguments)

    original = weights_module.analyze_tensor
    monkeypatch.setattr(weights_module, "analyze_tensor", interrupted)
    done = run(folder, "--scheme", "rceil", "--out", tmp_path / "halves")
    assert done.exit_code == 130 and "interrupted; the same command resumes where it stopped" in done.stderr
    assert not (tmp_path / "halves" / "report.json").exists()
    done = run(folder, "--scheme", "rceil", "--out", tmp_path / "halves")
    assert done.exit_code == 0 and count == 6 + 9
    assert contents(tmp_path / "halves") == contents(tmp_path / "whole")


def test_a_model_on_the_hub(checkpoint, tmp_path, monkeypatch):
    folder = Path(checkpoint(shard_size="60KB"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **options: folder)
    monkeypatch.chdir(tmp_path)
    done = run("someone/model", "--scheme", "rceil")
    assert done.exit_code == 0, done.stderr
    report = json.loads((tmp_path / "analysis" / "someone--model" / "report.json").read_text())
    assert (report["model"], report["source"]["kind"], len(report["tensors"])) == ("someone/model", "hub", 14)
