# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 analyze` and `compare` as a user meets them: files, messages, exit codes, interruption and resumption."""

import csv
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from commands import change_in_place, finish, run
from safetensors.torch import load_file, save_file
from same_bits import edit_config

from hf_mxfp4 import MXFP4RLConfig, fake_quantize
from hf_mxfp4.checkpoint import export, pack_checkpoint
from hf_mxfp4.lab import PAPER_SCHEMES, open_source
from hf_mxfp4.lab.errors import weights as weights_module


NAME = "model.layers.0.mlp.up_proj"
REPORTS = ("report.json", "tensors.csv", "report.html")


pytestmark = pytest.mark.usefixtures("blank_pictures")


def test_names_from_a_file_are_text_and_nothing_else(tmp_path):
    """A stranger's file names its tensors: no markup, no escape codes for the terminal, no formulas in the plots."""
    name = "model.layers.0.\x1b[2J[red]a[/blue]$\\frac$"
    save_file(
        {f"{name}.weight": torch.ones(8, 64), "model.layers.1.up_proj.weight": torch.ones(8, 64)},
        tmp_path / "x.safetensors",
    )
    done = finish("analyze", tmp_path / "x.safetensors", "--out", tmp_path / "out")
    assert "\x1b" not in done.output
    assert "\\x1b[2J[red]a[/blue]$\\frac$" in done.output


def contents(folder):
    return {name: Path(folder, name).read_bytes() for name in REPORTS}


def test_a_checkpoint_from_start_to_end(checkpoint, tmp_path):
    folder = Path(checkpoint(shard_size="60KB"))
    done = finish("analyze", folder, "--out", tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["schemes"] == [f"mxfp4+{text}" for text in PAPER_SCHEMES]
    assert report["source"]["architecture"] == "Qwen2ForCausalLM"
    assert len(report["tensors"]) == 14
    assert len(list(csv.reader((tmp_path / "out" / "tensors.csv").open()))) == 1 + 14 * 3
    assert f"{folder.name}: 14 tensors" in done.stdout
    for text in (
        "Verdict, least error: at 4.25 bits an element mxfp4+rceil (SQNR ",
        "; at 8.56 bits an element mxfp4+rceil+mbs128-static+of0.5 (SQNR ",
        "left out: 1 embedding (such as model.embed_tokens.weight)",
    ):
        assert text in done.stdout
    assert len(done.stdout.splitlines()) < 45
    assert len(done.stdout.encode()) < 6000
    assert "report.html" in done.stderr


def test_a_policy_under_its_own_scheme(checkpoint, tmp_path):
    folder = edit_config(checkpoint(), quantization_config=MXFP4RLConfig(preset="w4a4").to_dict())
    analyzed = json.loads(finish("analyze", folder, "--json", "--out", tmp_path / "out").stdout)
    compared = json.loads(finish("compare", folder, checkpoint(seed=1), "--json").stdout)
    assert analyzed["schemes"] == ["mxfp4+even+mbs128-blockwise"]
    assert compared["scheme"] == "mxfp4+even+mbs128-blockwise"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"preset": "w4a4", "fprop": {"rotation": "deterministic-64"}}, "rotates both operands"),
        ({"preset": "w8a8"}, "takes weights in fp8"),
    ],
)
def test_a_scheme_that_weights_alone_do_not_show(checkpoint, tmp_path, options, reason):
    folder = edit_config(checkpoint(), quantization_config=MXFP4RLConfig(**options).to_dict())
    for command in (("analyze", folder, "--out", tmp_path / "out"), ("compare", folder, folder)):
        refused = finish(*command, code=2)
        assert reason in refused.stderr
        assert "or give --scheme" in refused.stderr
    finish("analyze", folder, "--scheme", "rceil", "--out", tmp_path / "other")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "rciel"], "no scale rule 'rciel'; did you mean 'rceil'?"),
        (["--skip", "layers.9"], "matches the pattern 'layers.9'"),
        (["--skip", "layers"], "all skipped (modules_to_not_convert=['layers'])"),
    ],
)
def test_wrong_usage(checkpoint, tmp_path, arguments, message):
    done = run("analyze", checkpoint(), "--out", tmp_path / "out", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output
    assert not (tmp_path / "out" / "report.json").exists()


def test_a_file_in_the_place_of_the_folder(checkpoint, tmp_path):
    (tmp_path / "file").touch()
    done = run("analyze", checkpoint(), "--scheme", "rceil", "--out", tmp_path / "file")
    assert done.exit_code == 2
    assert done.stderr == f"error: File exists: {tmp_path / 'file'}\n"


@pytest.mark.parametrize("damage", ["truncated", "missing", "nan"])
def test_what_cannot_be_read_is_named_everywhere(checkpoint, tmp_path, damage):
    folder = Path(checkpoint(shard_size="60KB"))
    out = tmp_path / "out"
    where = list(open_source(str(folder)).expected)[1]
    file = folder / where
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "missing":
        file.unlink()
    else:
        tensors = load_file(file)
        where = next(name for name, x in tensors.items() if x.dim() == 2 and "embed" not in name)
        tensors[where][0, 0] = float("nan")
        save_file(tensors, file)
    done = run("analyze", folder, "--scheme", "rceil", "--out", out)
    assert done.exit_code == 1
    assert f"problem: {where}: " in done.stderr
    report = json.loads((out / "report.json").read_text())
    assert [problem["where"] for problem in report["problems"]] == [where]
    assert 0 < len(report["tensors"]) < 14
    assert where in (out / "report.html").read_text()


def test_a_rerun_and_a_copy_of_the_model_give_the_same_bytes(checkpoint, tmp_path):
    folder = Path(checkpoint(shard_size="60KB"))
    run("analyze", folder, "--scheme", "rceil", "--out", tmp_path / "a")
    first = contents(tmp_path / "a")
    again = run("analyze", folder, "--scheme", "rceil", "--out", tmp_path / "a")
    assert again.exit_code == 0
    assert "holds 14 tensors that are done" in again.stderr
    assert contents(tmp_path / "a") == first
    shutil.copytree(folder, tmp_path / "elsewhere" / folder.name)
    run("analyze", tmp_path / "elsewhere" / folder.name, "--scheme", "rceil", "--out", tmp_path / "b")
    assert contents(tmp_path / "b") == first


def test_other_settings_do_not_mix(checkpoint, tmp_path):
    folder = Path(checkpoint())
    run("analyze", folder, "--scheme", "rceil", "--out", tmp_path)
    before = contents(tmp_path)
    done = run("analyze", folder, "--scheme", "floor", "--out", tmp_path)
    assert done.exit_code == 2
    assert "start over with --overwrite" in done.stderr
    assert contents(tmp_path) == before
    change_in_place(folder / "model.safetensors")
    done = run("analyze", folder, "--scheme", "rceil", "--out", tmp_path)
    assert done.exit_code == 2
    assert "as it was before it changed" in done.stderr
    assert run("analyze", folder, "--scheme", "floor", "--out", tmp_path, "--overwrite").exit_code == 0
    assert json.loads((tmp_path / "report.json").read_text())["schemes"] == ["mxfp4+floor"]


def test_ctrl_c_and_on(checkpoint, tmp_path, monkeypatch):
    folder = checkpoint(shard_size="60KB")
    run("analyze", folder, "--scheme", "rceil", "--out", tmp_path / "whole")
    count = 0

    def interrupted(*arguments):
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        return original(*arguments)

    original = weights_module.analyze_tensor
    monkeypatch.setattr(weights_module, "analyze_tensor", interrupted)
    done = run("analyze", folder, "--scheme", "rceil", "--out", tmp_path / "halves")
    assert done.exit_code == 130
    assert "interrupted; the same command resumes where it stopped" in done.stderr
    assert not (tmp_path / "halves" / "report.json").exists()
    done = run("analyze", folder, "--scheme", "rceil", "--out", tmp_path / "halves")
    assert done.exit_code == 0
    assert count == 6 + 9
    assert contents(tmp_path / "halves") == contents(tmp_path / "whole")


def packed_of(original, folder, **options):
    pack_checkpoint(original, folder, MXFP4RLConfig(mode="packed", **options))
    return folder


@pytest.mark.parametrize("options", [{}, {"scale_rule": "even", "macro_block": None}, {"outlier_fallback": 0.5}])
def test_the_error_of_the_stored_weights(checkpoint, tmp_path, options):
    original = Path(checkpoint(dtype=torch.bfloat16))
    packed = packed_of(original, tmp_path / "packed", **options)
    done = finish("compare", original, packed, "--json")
    data = json.loads(done.stdout)
    weight = load_file(original / "model.safetensors")[f"{NAME}.weight"]
    scheme = MXFP4RLConfig(mode="packed", **options).weight_scheme
    noise = (fake_quantize(weight.float(), **vars(scheme)) - weight.float()).double().square().sum()
    sqnr = 10 * math.log10(float(weight.double().square().sum() / noise))
    assert data["tensors"][NAME]["sqnr_db"] == pytest.approx(sqnr, rel=1e-6)
    assert len(data["tensors"]) == 14
    assert data["scheme"] == str(scheme)
    assert data["total"]["elements_packed_otherwise"] == 0
    assert data["not_quantized"]["changed"] == []
    assert "lm_head.weight" in data["not_quantized"]["same"]
    assert data["only_first"] == data["only_second"] == data["problems"] == []


def test_the_order_does_not_matter_and_the_screen_says_what_is_compared(checkpoint, tmp_path):
    original = Path(checkpoint())
    packed = packed_of(original, tmp_path / "packed")
    done = finish("compare", packed, original)
    assert done.stdout == run("compare", original, packed).stdout
    for text in (
        f"A: {original.name}, the original",
        "B holds exactly what packing A now gives",
        "tensors that are not quantized: 13 the same, 0 with other values",
    ):
        assert text in done.stdout


def test_fused_experts_meet_experts_of_their_own(checkpoint, tmp_path):
    original = Path(checkpoint("qwen3_moe"))
    packed = packed_of(original, tmp_path / "packed")
    assert any(".experts.0." in name for name in load_file(original / "model.safetensors"))
    data = json.loads(run("compare", original, packed, "--json", "--skip", "self_attn").stdout)
    names = ("down_proj", "gate_up_proj")
    assert sorted(data["tensors"]) == [f"model.layers.{i}.mlp.experts.{name}" for i in range(2) for name in names]
    assert data["total"]["elements_packed_otherwise"] == 0
    assert 15 < data["total"]["sqnr_db"] < 25


def test_an_exported_checkpoint(checkpoint, tmp_path):
    original = checkpoint()
    packed = packed_of(original, tmp_path / "packed", macro_block=None)
    export(packed, tmp_path / "out", "compressed-tensors")
    exported = json.loads(finish("compare", original, tmp_path / "out", "--json").stdout)
    ours = json.loads(finish("compare", original, packed, "--json").stdout)
    assert exported["scheme"] == "compressed-tensors"
    assert "elements_packed_otherwise" not in exported["total"]
    assert exported["total"]["sqnr_db"] == ours["total"]["sqnr_db"]
    assert "packing A now" not in run("compare", original, tmp_path / "out").stdout


def test_files_of_a_comparison(checkpoint, tmp_path):
    original = checkpoint()
    packed = packed_of(original, tmp_path / "packed")
    done = finish("compare", original, packed, "--out", tmp_path / "out", "--json")
    printed = json.loads(done.stdout)
    assert "comparison.html" in done.stderr
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert {key: written[key] for key in printed} == printed
    rows = list(csv.DictReader((tmp_path / "out" / "comparison.csv").open()))
    assert {row["name"]: float(row["sqnr_db"]) for row in rows} == {
        name: numbers["sqnr_db"] for name, numbers in written["tensors"].items()
    }
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "B holds exactly what packing A now gives" in page
    assert NAME in page


def test_what_cannot_be_compared(checkpoint, tmp_path):
    original = Path(checkpoint())
    packed = packed_of(original, tmp_path / "packed")
    for arguments, message in (
        ([packed, packed], "both checkpoints store quantized weights; give the original of one of them as A"),
        ([original, packed, "--scheme", "rceil"], "packed stores weights under a scheme of its own; give no --scheme"),
        ([original, packed, "--skip", "layers.9"], "no quantized layer of packed matches the pattern 'layers.9'"),
        ([checkpoint("llama", layers=1), packed, "--skip", "layers"], "have no quantized weight in common"),
        ([original], "Missing argument 'B'"),
        ([original, original, "--scheme", "rceil", "--scheme", "even"], "--scheme once at most"),
        ([original, "gone/gone/gone"], "does not exist"),
    ):
        done = run("compare", *arguments)
        assert done.exit_code == 2 and message in done.stderr, done.output


def test_other_shapes_and_nan_are_problems(checkpoint, tmp_path):
    original = Path(checkpoint())
    packed = packed_of(original, tmp_path / "packed")
    tensors = load_file(original / "model.safetensors")
    tensors[f"{NAME}.weight"][0, 0] = math.nan
    save_file(tensors, original / "model.safetensors")
    done = run("compare", original, packed)
    assert done.exit_code == 1
    assert f"problem: {NAME}: 1 elements are NaN or infinite" in done.stderr
    other = checkpoint(intermediate=128)
    done = run("compare", other, packed)
    assert done.exit_code == 1
    assert f"problem: {NAME}: shapes differ: [1, 128, 64] and [1, 96, 64]" in done.stderr
