# SPDX-License-Identifier: Apache-2.0
"""Programs that do not import hf_mxfp4: `hf-mxfp4 run` makes them compute in MXFP4. That they stop otherwise is in
`tests/checkpoint/test_export_engines.py`."""

import json
import os
import sys
from argparse import Namespace

import accelerate.commands.launch
import pytest
import torch.distributed.run
from processes import PATHS, module, run
from tiny_models import make_model, make_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.cli import app


ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS)), "HF_HUB_OFFLINE": "1"}
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
    done = run(module("hf_mxfp4.cli", "run", "--", "program.py", "qat", "packed"), cwd=saved, environment=ENVIRONMENT)
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
    done = run(module("hf_mxfp4.cli", "run", "--", "trl", "sft", *options.split()), cwd=saved, environment=environment)
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


def invoke(*arguments):
    return CliRunner().invoke(app, ["run", *arguments])


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
    done = invoke("--", *command.split())
    assert done.exit_code == 0, done.output
    assert [_words(arguments) for arguments in launched] == [["-m", "hf_mxfp4.cli", "run", "--", *script.split()]]


def test_what_is_launched_twice_imports_it_once(launched):
    invoke("--", "accelerate", "launch", "--cpu", "train.py")
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
    done = invoke("--", *command)
    assert done.exit_code == 2 and message in done.stderr
