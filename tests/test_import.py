# SPDX-License-Identifier: Apache-2.0
"""What importing the package does and costs."""

import ast
import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_mxfp4
import mxfp4_kernels
from hf_mxfp4._logging import get_logger, hide_import_noise


PACKAGE = Path(hf_mxfp4.__file__).parent
KERNELS = Path(mxfp4_kernels.__file__).parent


def run_python(*arguments: str) -> subprocess.CompletedProcess:
    """A new process, which has imported nothing. transformers imports torchao where it is installed, which loads much
    that is not ours: the programs below hide it."""
    path = os.pathsep.join([str(PACKAGE.parent), str(KERNELS.parent)])
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


LIGHT = """
import contextlib, io, sys
sys.modules["torchao"] = None
def loaded(*names):
    return sorted(set(names) & sys.modules.keys())
import hf_mxfp4
print(loaded("torch", "transformers"))
sys.argv = ["/somewhere/bin/hf-mxfp4", "--help"]
from hf_mxfp4.cli import app, main
commands = [command.name for command in app.registered_commands]
for arguments in (["--help"], ["--version"], *([name, "--help"] for name in commands)):
    sys.argv[1:] = arguments
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main()
    assert printed.getvalue(), arguments
print(len(commands), loaded("torch", "transformers", "trl", "matplotlib"))

import transformers
print(loaded("torch", "transformers.quantizers", "trl", "mxfp4_kernels.quantization", "triton", "matplotlib", "peft"))
"""


def test_importing_and_asking_for_help_load_nothing_heavy():
    assert run_python("-c", LIGHT).stdout.splitlines() == ["[]", "20 []", "[]"]


AFTER_TRANSFORMERS_WITHOUT_EXTRAS = """
import sys
sys.modules |= dict.fromkeys(["torchao", "matplotlib", "evaluate", "math_verify", "gguf", "deepspeed"])
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as quantizers
from transformers.quantizers.auto import AutoQuantizationConfig
import hf_mxfp4
print("hf_mxfp4.layers" in sys.modules, quantizers["mxfp4_rl"].requires_calibration)
config = AutoQuantizationConfig.from_dict({"quant_method": "mxfp4_rl", "preset": "w4a16"})
print(type(config) is hf_mxfp4.MXFP4RLConfig, config.preset)
for name in hf_mxfp4.__all__:
    getattr(hf_mxfp4, name)
from hf_mxfp4 import checkpoint, model, rl
from hf_mxfp4.lab import evaluate, plan, round_model, smooth_model
sys.argv = ["hf-mxfp4", "simulate"]
from hf_mxfp4.cli import main
sys.stderr = sys.stdout
main()
"""


#: Runs the programs that it is given, each in a fork that has imported what takes longest.
IN_FORKS = """
import os, sys, traceback
sys.modules["torchao"] = None
import torch, transformers.utils.quantization_config
for number, program in enumerate(sys.argv[1:]):
    print(f"program {number}", flush=True)
    if os.fork() == 0:
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            print(traceback.format_exc())
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.wait()
"""

BEFORE_TRANSFORMERS = """
import sys
from hf_mxfp4.cli import app  # as a command begins
import hf_mxfp4
print("transformers.quantizers" in sys.modules)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as configs
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as quantizers
print(configs["mxfp4_rl"], "hf_mxfp4.layers" in sys.modules)
print(type(quantizers["mxfp4_rl"](hf_mxfp4.MXFP4RLConfig())) is hf_mxfp4.MXFP4RLQuantizer)
print(configs["mxfp4_rl"] is hf_mxfp4.MXFP4RLConfig, quantizers["mxfp4_rl"] is hf_mxfp4.MXFP4RLQuantizer)
print(hf_mxfp4.MXFP4RLConfig().describe(), hf_mxfp4.MXFP4Linear(32, 8).out_features)
print(sorted({"trl", "matplotlib", "peft"} & sys.modules.keys()))
"""

IN_THREADS = """
import sys, threading, traceback
names = ["hf_mxfp4", "transformers.quantizers", "hf_mxfp4.integrations.transformers.quantizer"]
names += ["transformers.modeling_utils"]
failed, barrier = [], threading.Barrier(len(names))
def work(name):
    barrier.wait()
    try:
        __import__(name)
    except BaseException:
        failed.append(traceback.format_exc())
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=work, args=[name]) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
import hf_mxfp4
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as quantizers
print(failed, quantizers["mxfp4_rl"] is hf_mxfp4.MXFP4RLQuantizer)
"""


def outputs_of(*programs: str) -> list[str]:
    return run_python("-c", IN_FORKS, *programs).stdout.split("program ")[1:]


def test_the_method_is_registered_whoever_is_imported_first_and_the_core_needs_no_extra():
    before, after = outputs_of(BEFORE_TRANSFORMERS, AFTER_TRANSFORMERS_WITHOUT_EXTRAS)
    first = "False|<MXFP4RLConfig of hf_mxfp4, imported on use> False|True|True True"
    first += f"|{hf_mxfp4.MXFP4RLConfig().describe()} 8|[]"
    assert before.splitlines() == ["0", *first.split("|")]
    missing = "error: reports need matplotlib, which is not installed: pip install 'hf-mxfp4[report]'"
    assert after.startswith(f"1\nFalse False\nTrue w4a16\n{missing}") and "SystemExit: 2" in after  # of the lab


@pytest.mark.large
def test_threads_that_import_at_once_do_not_wait_for_each_other():
    assert outputs_of(IN_THREADS) == ["0\n[] True\n"]


def test_public_names():
    assert {"MXFP4RLConfig", "MXFP4Linear", "fake_quantize", "quantize", "decompose"} <= set(hf_mxfp4.__all__)
    for name in hf_mxfp4.__all__:
        assert getattr(hf_mxfp4, name) is not None and name in dir(hf_mxfp4), name
    for name in ("checkpoint", "config", "layers", "model", "numerics", "ops", "prepare", "report"):
        # What another test has imported is an attribute already, so getattr would find it anyway.
        assert hf_mxfp4.__getattr__(name).__name__ == f"hf_mxfp4.{name}"


def test_stubs_name_what_is_imported_on_first_use():
    stubs = [(top, stub) for top in (PACKAGE, KERNELS) for stub in sorted(top.rglob("__init__.pyi"))]
    assert len(stubs) == 7
    for top, stub in stubs:
        package = importlib.import_module(".".join(stub.parent.relative_to(top.parent).parts))
        named = set()
        for statement in ast.parse(stub.read_text()).body:
            if isinstance(statement, ast.ImportFrom) and statement.module:
                level = "." * statement.level
                module = importlib.import_module(f"{level}{statement.module}", package.__name__)
                names = {alias.name for alias in statement.names}
                assert all(getattr(package, name) is getattr(module, name) for name in names)
                named |= names
        assert named == set(package.__all__) - {"__version__"}, stub


@pytest.mark.parametrize(("level", "expected"), [("", 20), ("30", 30), ("debug", 10), ("loud", 20)])
def test_the_level_of_messages_is_a_name_or_a_number(level, expected, monkeypatch):
    logger = logging.getLogger("hf_mxfp4")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setenv("HF_MXFP4_VERBOSITY", level)
    assert get_logger().level == expected


def test_messages_of_torchao_that_say_nothing_here_are_hidden():
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    before = [list(logger.filters) for logger in loggers]
    hide_import_noise()
    try:
        kept = [
            bool(logger.filter(logging.makeLogRecord({"msg": message})))
            for logger in loggers
            for message in ("Failed to load x.so: no CUDA", "X is an Enum subclass and is now", "something else")
        ]
    finally:
        for logger, filters in zip(loggers, before, strict=True):
            logger.filters = filters
    assert kept == [False, True, True, True, False, True]
