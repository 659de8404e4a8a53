# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 simulate`, `env`, the command itself, the names of its options, and `run`, which makes programs that do not
import the package compute in MXFP4. That they stop otherwise is in `tests/checkpoint/test_export_engines.py`."""

import json
import os
import sys
from argparse import Namespace
from pathlib import Path

import accelerate.commands.launch
import processes
import pytest
import torch
import torch.distributed.run
import typer
from processes import module
from tiny_models import make_model, make_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig, decompose, utils
from hf_mxfp4.cli import app
from hf_mxfp4.lab import sample
from hf_mxfp4.recipes.common.options import config_path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_version_and_help():
    assert run("--version").stdout == f"hf-mxfp4 {hf_mxfp4.__version__}\n"
    text = run("--help").stdout
    for name in ("analyze", "compare", "simulate", "report", "env"):
        assert name in text and run(name, "--help").exit_code == 0
    assert run("analyse").exit_code == 2
    wrong = run("simulate", "--elements", 1024, "--scheme", "nonsense")
    assert wrong.exit_code == 2 and "error: scheme 'nonsense': no scale rule 'nonsense'; known are" in wrong.stderr


def test_simulation_is_the_decomposition_and_shown_as_a_table():
    done = run("simulate", "--distribution", "student-t", "--elements", 30000, "--seed", 7, "--json")
    data = json.loads(done.stdout)
    assert (data["distribution"], data["elements"], data["seed"]) == ("student-t", 30720, 7)
    expected = decompose(sample("student-t", 30000, 7), macro_block=128)
    found = data["schemes"]["mxfp4+rceil+mbs128-static"]
    assert found["relative_mse"] == pytest.approx(expected.relative_mse, rel=1e-9)
    assert found["cosine_scale_grid"] == pytest.approx(expected.cosine_scale_grid, rel=1e-9)
    assert found["zero_fraction"] == pytest.approx(expected.zero_fraction)
    table = run("simulate", "--elements", 4096, "--scheme", "even").stdout
    assert "gaussian, 4,096 elements, seed 0" in table and "mxfp4+even" in table and "SQNR dB" in table
    assert run("simulate", "--distribution", "cauchy").exit_code == 2


def test_environment(monkeypatch):
    monkeypatch.setattr(utils, "present_gpus", list)
    data = json.loads(run("env", "--json").stdout)
    assert data["versions"]["hf-mxfp4"] == hf_mxfp4.__version__
    assert torch.__version__.startswith(data["versions"]["torch"])  # without "+cu130" of a build on PyPI
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


# ---- names of options -----------------------------------------------------------------------------------------------


def parsed(words):
    """Values that a command is called with."""
    name, *arguments = words.split()
    command = typer.main.get_command(app)
    return command.commands[name].make_context(name, arguments, parent=command.make_context("", [name])).params


def test_options_as_recipes_have_them(capsys):
    found = parsed("pack DIR --overwrite --modules_to_not_convert a OUT")
    assert found["overwrite"] and str(found["out"]) == "OUT" and list(found["skip"]) == ["a"]
    assert parsed("pack DIR --modules_to_not_convert=a OUT")["skip"] == found["skip"]
    assert str(parsed("pack DIR -- --overwrite")["out"]) == "--overwrite"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("verify ~nobody-of-this-name/x", "~nobody-of-this-name/x: there is no such home folder"),
        ("eval MODEL --text deep.jsonl", "nested too deeply"),
        ("gptq MODEL OUT --text texts.txt --scheme config:bad.yaml", "bad.yaml cannot be read: while parsing"),
        (f"eval {'x' * 300} --text texts.txt --card", "name too long"),
        ("simulate --elements 99999999999999999999999", "--elements"),
        ("pack DIR OUT --modules-to-not-covert a", "--modules-to-not-convert"),
    ],
)
def test_wrong_words_are_one_line(command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("deep.jsonl").write_text("[" * 100_000)
    Path("texts.txt").write_text("some text")
    Path("bad.yaml").write_text("preset: [1")
    done = run(*command.split())
    assert done.exit_code == 2 and message in done.stderr


# ---- recipes --------------------------------------------------------------------------------------------------------


def test_a_recipe_takes_all_words_and_the_configs_that_come_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr("sys.argv", ["hf-mxfp4"])
    monkeypatch.setattr("hf_mxfp4.recipes.grpo.main", seen.append)
    assert run("grpo", "--config", "tiny_cpu", "--max_steps", "1", "--help").exit_code == 0
    assert seen == [["--config", "tiny_cpu", "--max_steps", "1", "--help"]]
    ours = config_path("recipes/configs/tiny_cpu.yaml")
    assert ours == config_path("tiny_cpu") and ours.is_file() and tmp_path not in ours.parents
    Path("tiny_cpu").write_text("max_steps: 1")
    assert config_path("tiny_cpu") == Path("tiny_cpu")
    message = "No such file; the configs that come with the recipes are .*tiny_cpu, tiny_cpu_l"
    with pytest.raises(OSError, match=message):
        config_path("tiny")


# ---- programs that do not import the package ------------------------------------------------------------------------


ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, processes.PATHS)), "HF_HUB_OFFLINE": "1"}
#: What lm_eval, transformers serve and others do with the name of a model.
PROGRAM = """
import sys
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    print(type(model.model.layers[0].mlp.up_proj).__name__)
    model.save_pretrained(folder + "-again")
"""


@pytest.fixture
def saved(tmp_path):
    make_model(layers=1, vocab_size=512).save_pretrained(tmp_path / "plain")
    for mode in ("qat", "packed"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=MXFP4RLConfig(mode=mode))
        model.save_pretrained(tmp_path / mode)
        make_tokenizer("qwen2").save_pretrained(tmp_path / mode)
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def test_a_program_under_run_computes_in_mxfp4(saved):
    job = module("hf_mxfp4.cli", "run", "--", "program.py", "qat", "packed")
    done = processes.run(job, cwd=saved, environment=ENVIRONMENT)
    found = [line for line in done.output.splitlines() if line.endswith("Linear")]
    assert found == ["MXFP4Linear", "MXFP4PackedLinear"], done.output
    for mode in ("qat", "packed"):
        first, second = (json.loads((saved / name / "config.json").read_text()) for name in (mode, f"{mode}-again"))
        assert first == second and first["quantization_config"]["mode"] == mode


@pytest.mark.large
def test_trl_sft_under_run_trains_in_mxfp4(saved):
    """TRL starts another process by accelerate."""
    (saved / "data").mkdir()
    (saved / "data" / "train.jsonl").write_text('{"text": "The quick brown fox"}\n' * 2)
    options = (
        "--model_name_or_path qat --dataset_name data --output_dir out --max_steps 1 --max_length 16 "
        "--per_device_train_batch_size 2 --report_to none --save_strategy no --use_cpu true --num_processes 1"
    )
    environment = {**ENVIRONMENT, "HF_DATASETS_CACHE": str(saved / "cache")}
    job = module("hf_mxfp4.cli", "run", "--", "trl", "sft", *options.split())
    done = processes.run(job, cwd=saved, environment=environment)
    assert done.returncode == 0, done.output
    written = json.loads((saved / "out" / "config.json").read_text())
    assert written["quantization_config"]["mode"] == "qat" and "hf-mxfp4 run" in written["transformers_weights"]


@pytest.fixture
def launched(monkeypatch):
    """What accelerate and torchrun are given to start."""
    given = []
    for owner, name in ((accelerate.commands.launch, "launch_command"), (torch.distributed.run, "run")):
        monkeypatch.setattr(owner, name, given.append)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return given


def _words(arguments: Namespace) -> list[str]:
    return [*(["-m"] if arguments.module else []), arguments.training_script, *arguments.training_script_args]


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("accelerate launch --cpu train.py --lr 1", "train.py --lr 1"),
        ("accelerate launch --cpu -m lm_eval --tasks a", "-m lm_eval --tasks a"),
        ("torchrun --nproc-per-node 2 train.py x", "train.py x"),
        ("python -m torch.distributed.run train.py", "train.py"),
    ],
)
def test_launched_processes_import_the_package(command, script, launched):
    done = run("run", "--", *command.split())
    assert done.exit_code == 0, done.output
    assert [_words(arguments) for arguments in launched] == [["-m", "hf_mxfp4.cli", "run", "--", *script.split()]]


def test_what_is_launched_twice_imports_it_once(launched):
    run("run", "--", "accelerate", "launch", "--cpu", "train.py")
    (arguments,) = launched
    torch.distributed.run.run(arguments)
    assert _words(launched[1]) == ["-m", "hf_mxfp4.cli", "run", "--", "train.py"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["no-such-program"], "no such command"),
        (["-c", "print(1)"], "'-c' is an option of python; -m MODULE is the only one here"),
        (["-m"], "-m needs the name of a module"),
        (["deepspeed", "train.py"], "deepspeed --module hf_mxfp4.cli run -- SCRIPT"),
    ],
)
def test_what_cannot_be_run_is_refused(command, message, launched):
    done = run("run", "--", *command)
    assert done.exit_code == 2 and message in done.stderr
