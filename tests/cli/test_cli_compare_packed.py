# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 compare` of a checkpoint and what was packed from it."""

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_mxfp4 import MXFP4RLConfig, fake_quantize
from hf_mxfp4.checkpoint import export, pack_checkpoint
from hf_mxfp4.cli import app


NAME = "model.layers.0.mlp.up_proj"


def run(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def packed_of(original, folder, **options):
    pack_checkpoint(original, folder, MXFP4RLConfig(mode="packed", **options))
    return folder


@pytest.mark.parametrize("options", [{}, {"scale_rule": "even", "macro_block": None}, {"outlier_fallback": 0.5}])
def test_the_error_of_the_stored_weights(checkpoint, tmp_path, options):
    original = Path(checkpoint(dtype=torch.bfloat16))
    packed = packed_of(original, tmp_path / "packed", **options)
    done = run(original, packed, "--json")
    assert done.exit_code == 0, done.stderr
    data = json.loads(done.stdout)
    weight = load_file(original / "model.safetensors")[f"{NAME}.weight"]
    scheme = MXFP4RLConfig(mode="packed", **options).weight_scheme
    noise = (fake_quantize(weight.float(), **vars(scheme)) - weight.float()).double().square().sum()
    sqnr = 10 * math.log10(float(weight.double().square().sum() / noise))
    assert data["tensors"][NAME]["sqnr_db"] == pytest.approx(sqnr, rel=1e-6)
    assert len(data["tensors"]) == 14 and data["scheme"] == str(scheme)
    assert data["total"]["elements_packed_otherwise"] == 0
    assert data["not_quantized"]["changed"] == [] and "lm_head.weight" in data["not_quantized"]["same"]
    assert data["only_first"] == data["only_second"] == data["problems"] == []


def test_the_order_does_not_matter_and_the_screen_says_what_is_compared(checkpoint, tmp_path):
    original = Path(checkpoint())
    packed = packed_of(original, tmp_path / "packed")
    done = run(packed, original)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == run(original, packed).stdout
    for text in (
        f"A: {original.name}, the original",
        "B: packed, whose packed weights are compared as they are stored, dequantized",
        "SQNR of 14 weights: ",
        "B holds exactly what packing A now gives",
        "tensors that are not quantized: 13 the same, 0 with other values",
        "error of the stored weights (mxfp4+even+mbs128-blockwise), by layer",
        "largest relative errors",
    ):
        assert text in done.stdout


def test_fused_experts_meet_experts_of_their_own(checkpoint, tmp_path):
    original = Path(checkpoint("qwen3_moe"))
    packed = packed_of(original, tmp_path / "packed")
    assert any(".experts.0." in name for name in load_file(original / "model.safetensors"))
    data = json.loads(run(original, packed, "--json", "--include", "mlp.experts").stdout)
    assert sorted(data["tensors"]) == [
        f"model.layers.{i}.mlp.experts.{name}" for i in range(2) for name in ("down_proj", "gate_up_proj")
    ]
    assert data["total"]["elements_packed_otherwise"] == 0 and 15 < data["total"]["sqnr_db"] < 25


def test_an_exported_checkpoint(checkpoint, tmp_path):
    original = checkpoint()
    packed = packed_of(original, tmp_path / "packed", macro_block=None)
    export(packed, tmp_path / "out", "compressed-tensors")
    exported, own = (run(original, folder, "--json") for folder in (tmp_path / "out", packed))
    assert exported.exit_code == 0, exported.stderr
    mine, theirs = json.loads(own.stdout), json.loads(exported.stdout)
    assert {name: pair["sqnr_db"] for name, pair in theirs["tensors"].items()} == {
        name: pair["sqnr_db"] for name, pair in mine["tensors"].items()
    }
    assert "elements_packed_otherwise" not in theirs["total"] and theirs["scheme"] == "compressed-tensors"
    assert "packing A now" not in run(original, tmp_path / "out").stdout


def test_files_of_a_comparison(checkpoint, tmp_path):
    original = checkpoint()
    packed = packed_of(original, tmp_path / "packed")
    done = run(original, packed, "--out", tmp_path / "out", "--json")
    assert done.exit_code == 0 and "comparison.html" in done.stderr
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert {key: written[key] for key in json.loads(done.stdout)} == json.loads(done.stdout)
    rows = list(csv.DictReader((tmp_path / "out" / "comparison.csv").open()))
    assert [row["name"] for row in rows] == list(written["tensors"])
    assert float(rows[0]["sqnr_db"]) == written["tensors"][rows[0]["name"]]["sqnr_db"]
    html = (tmp_path / "out" / "comparison.html").read_text()
    assert "B holds exactly what packing A now gives" in html and NAME in html and html.endswith("</html>\n")


def test_what_cannot_be_compared(checkpoint, tmp_path):
    original = Path(checkpoint())
    packed = packed_of(original, tmp_path / "packed")
    for arguments, message in (
        ([packed, packed], "both checkpoints store quantized weights; give the original of one of them as A"),
        ([original, packed, "--scheme", "rceil"], "packed stores weights under a scheme of its own; give no --scheme"),
        ([original, packed, "--include", "layers.9"], "no quantized layer of packed matches the pattern 'layers.9'"),
        ([checkpoint("llama", layers=1), packed, "--include", "layers.1"], "have no quantized weight in common"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2 and message in done.stderr, done.output


def test_other_shapes_and_nan_are_problems(checkpoint, tmp_path):
    original = Path(checkpoint())
    packed = packed_of(original, tmp_path / "packed")
    tensors = load_file(original / "model.safetensors")
    tensors[f"{NAME}.weight"][0, 0] = math.nan
    save_file(tensors, original / "model.safetensors")
    done = run(original, packed)
    assert done.exit_code == 1 and f"problem: {NAME}: 1 elements are NaN or infinite" in done.stderr
    other = checkpoint(intermediate=128)
    done = run(other, packed)
    assert done.exit_code == 1 and f"problem: {NAME}: shapes differ: [1, 128, 64] and [1, 96, 64]" in done.stderr
