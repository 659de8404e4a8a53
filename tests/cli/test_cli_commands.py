# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 compare`, `simulate`, `env`, and the command itself."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig, decompose, utils
from hf_mxfp4 import gemm as ops
from hf_mxfp4.backends import self_check
from hf_mxfp4.cli import app, common, main
from hf_mxfp4.lab import sample


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_version_and_help():
    assert run("--version").stdout == f"hf-mxfp4 {hf_mxfp4.__version__}\n"
    text = run("--help").stdout
    assert all(name in text for name in ("analyze", "compare", "simulate", "report", "env"))
    for name in ("analyze", "compare", "simulate", "report", "env"):
        assert run(name, "--help").exit_code == 0
    assert run("analyse").exit_code == 2


def test_the_entry_point(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hf-mxfp4", "simulate", "--elements", "1024", "--scheme", "nonsense"])
    with pytest.raises(SystemExit) as exit:
        main()
    printed = capsys.readouterr()
    assert exit.value.code == 2 and printed.out == ""
    assert "error: scheme 'nonsense': no scale rule 'nonsense'; known are rceil" in printed.err


def test_two_checkpoints(checkpoint):
    a, b = checkpoint(seed=0), checkpoint(seed=1)
    done = run("compare", a, b, "--scheme", "even", "--json")
    assert done.exit_code == 0, done.stderr
    data = json.loads(done.stdout)
    assert (data["scheme"], len(data["tensors"]), len(data["by_layer_type"])) == ("mxfp4+even", 14, 7)
    name = "model.layers.0.mlp.up_proj.weight"
    x, y = (load_file(Path(folder, "model.safetensors"))[name] for folder in (a, b))
    pair = data["tensors"][name]
    assert pair["first_relative_mse"] == pytest.approx(decompose(x, scale_rule="even").relative_mse, rel=1e-9)
    assert pair["second_relative_mse"] == pytest.approx(decompose(y, scale_rule="even").relative_mse, rel=1e-9)
    assert pair["relative_difference"] == pytest.approx(float((x - y).norm() / x.norm()), rel=1e-5)
    table = run("compare", a, b)
    assert table.exit_code == 0 and "under mxfp4+rceil, by layer" in table.stdout and "|A-B| / |A|" in table.stdout


def test_the_scheme_of_the_first_checkpoint(checkpoint):
    a, b = Path(checkpoint(seed=0)), checkpoint(seed=1)
    written = json.loads((a / "config.json").read_text())
    config = MXFP4RLConfig(scale_rule="floor", macro_block=None, outlier_fallback=None)
    (a / "config.json").write_text(json.dumps({**written, "quantization_config": config.to_dict()}))
    assert json.loads(run("compare", a, b, "--json").stdout)["scheme"] == "mxfp4+floor"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a second checkpoint; hf-mxfp4 analyze A --scheme X --scheme Y compares schemes"),
        (["{model}", "--scheme", "rceil", "--scheme", "even"], "--scheme once at most"),
        (["gone/gone/gone"], "does not exist"),
    ],
)
def test_wrong_comparisons(checkpoint, arguments, message):
    folder = checkpoint()
    done = run("compare", folder, *[argument.format(model=folder) for argument in arguments])
    assert done.exit_code == 2 and message in done.stderr


def test_simulation_is_the_decomposition():
    done = run("simulate", "--distribution", "student-t", "--df", 5, "--elements", 30000, "--seed", 7, "--json")
    data = json.loads(done.stdout)
    assert (data["distribution"], data["elements"], data["seed"], data["df"]) == ("student-t", 30720, 7, 5.0)
    expected = decompose(sample("student-t", 30000, 7, 5.0), macro_block=128)
    found = data["schemes"]["mxfp4+rceil+mbs128-static"]
    assert found["relative_mse"] == pytest.approx(expected.relative_mse, rel=1e-9)
    assert found["cosine_scale_grid"] == pytest.approx(expected.cosine_scale_grid, rel=1e-9)
    assert found["zero_fraction"] == pytest.approx(expected.zero_fraction)


def test_simulation_on_screen():
    table = run("simulate", "--elements", 4096, "--scheme", "even").stdout
    assert "gaussian, 4,096 elements, seed 0" in table and "mxfp4+even" in table and "SQNR dB" in table
    done = run("simulate", "--distribution", "student-t", "--df", 2)
    assert done.exit_code == 2 and "more than 2 degrees of freedom" in done.stderr
    assert run("simulate", "--distribution", "cauchy").exit_code == 2


def test_environment():
    data = json.loads(run("env", "--json").stdout)
    assert data["versions"]["hf-mxfp4"] == hf_mxfp4.__version__ and data["versions"]["torch"] == torch.__version__
    assert set(utils.PACKAGES) < set(data["versions"])
    assert data["cpu"]["cores"] == os.cpu_count()
    cpu = [row for row in data["quantization"] if row["device"] == "cpu"]
    assert len(cpu) == 6 and {row["backend"] for row in cpu} <= {"cpu", "eager"}
    found = {(row["preset"], row["hardware"], row["product"]): row for row in data["products"]}
    assert "full precision" in found["w4a16", "sm_90", "fprop"]["reason"]
    assert {row["linear"] for row in data["products"] if row["hardware"] == "sm_80"} == {"dense"}
    lines = run("env").stdout.splitlines()
    assert len(lines) <= 16 and f"hf-mxfp4      {hf_mxfp4.__version__}" in lines and "GPUs          none" in lines
    assert lines[-1].endswith("hf-mxfp4 env --verbose")


def test_environment_on_screen(monkeypatch):
    gpu = {"type": "cuda", "name": "A GPU", "capability": "compute capability 9.0"}
    monkeypatch.setattr(utils, "present_gpus", lambda: [gpu])
    monkeypatch.setattr(ops, "hardware_of", lambda device: "sm_90")
    states = {"decode": "not checked yet"}, {"decode": "failed: off by 1"}
    monkeypatch.setattr(self_check, "states", lambda device, check: states[check])
    assert json.loads(run("env", "--json").stdout)["self_checks"] == {"cuda:0": states[0]}
    assert json.loads(run("env", "--json", "--check").stdout)["self_checks"] == {"cuda:0": states[1]}
    short = run("env").stdout
    assert "GPU 0         A GPU, compute capability 9.0" in short and "kernels on cuda:0: 1 not checked yet" in short
    assert len(short.splitlines()) <= 18 and "quantization on cuda: " in short
    text = run("env", "--verbose").stdout
    assert "what quantizes" in text and "what multiplies" in text and "x is in full precision" in text


def test_lines_where_there_is_no_terminal(monkeypatch, capsys):
    with common.work_progress(4_000_000) as progress:
        progress(1_000_000, "layers.0")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(common, "LINE_SECONDS", 1e-9)
    with common.work_progress(4_000_000) as progress:
        progress(1_000_000, "layers.0")
        progress(1_000_000, "layers.1")
    printed = capsys.readouterr().err
    assert "layers.0" in printed and "layers.1:  50%" in printed and "2.00M/4.00M" in printed
