# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 simulate`, `env`, the command itself, the names of its options, and `run`, which makes programs that do not
import the package compute in MXFP4 (that they stop otherwise is in `tests/checkpoint/test_export_engines.py`); `pack`,
`export` and `import`: what they print, what they write, how they fail."""

import json
import os
import re
import resource
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import accelerate.commands.launch
import processes
import pytest
import torch
import torch.distributed.run
import typer
from commands import finish, run, save_texts, save_tokenizer
from processes import module
from same_bits import edit_config
from tiny_models import make_model, make_tokenizer
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig, decompose, utils
from hf_mxfp4.cli import app
from hf_mxfp4.lab import sample
from hf_mxfp4.recipes.common.options import config_path


def test_version_and_help():
    assert run("--version").stdout == f"hf-mxfp4 {hf_mxfp4.__version__}\n"
    text = run("--help").stdout
    for name in ("analyze", "compare", "simulate", "report", "env"):
        assert name in text
        assert run(name, "--help").exit_code == 0
    assert run("analyse").exit_code == 2


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
    assert "gaussian, 4,096 elements, seed 0" in table
    assert "mxfp4+even" in table
    assert "SQNR dB" in table
    assert run("simulate", "--distribution", "cauchy").exit_code == 2


def test_environment(monkeypatch):
    monkeypatch.setattr(utils, "present_gpus", list)
    facts = json.loads(run("env", "--json").stdout)
    assert facts["versions"]["hf-mxfp4"] == hf_mxfp4.__version__
    assert torch.__version__.startswith(facts["versions"]["torch"])  # without "+cu130" of a build on PyPI
    assert set(utils.PACKAGES) < set(facts["versions"])
    assert facts["cpu"]["cores"] == os.cpu_count()


def test_what_computes_what(monkeypatch):
    monkeypatch.setattr(utils, "present_gpus", list)
    facts = json.loads(run("env", "--json").stdout)
    assert len(facts["quantization"]) == 12
    assert {row["backend"] for row in facts["quantization"]} <= {"cpu", "eager"}
    products = {(row["preset"], row["hardware"], row["product"]): row for row in facts["products"]}
    assert "full precision" in products["w4a16", "sm_90", "fprop"]["reason"]
    assert {row["linear"] for row in facts["products"] if row["hardware"] == "sm_80"} == {"dense"}


def test_the_environment_on_screen(monkeypatch):
    monkeypatch.setattr(utils, "present_gpus", list)
    lines = run("env").stdout.splitlines()
    assert f"hf-mxfp4      {hf_mxfp4.__version__}" in lines
    assert "GPUs          none" in lines
    assert len(lines) <= 16
    assert lines[-1].endswith("hf-mxfp4 env --verbose")


def parsed(words):
    """Values that a command is called with."""
    name, *arguments = words.split()
    command = typer.main.get_command(app)
    return command.commands[name].make_context(name, arguments, parent=command.make_context("", [name])).params


def test_options_as_recipes_have_them(capsys):
    found = parsed("pack DIR --overwrite --modules_to_not_convert a OUT")
    assert found["overwrite"]
    assert str(found["out"]) == "OUT"
    assert list(found["skip"]) == ["a"]
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
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_recipe_takes_all_words_and_the_configs_that_come_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr("sys.argv", ["hf-mxfp4"])
    monkeypatch.setattr("hf_mxfp4.recipes.grpo.main", seen.append)
    assert run("grpo", "--config", "tiny_cpu", "--max_steps", "1").exit_code == 0
    assert seen == [["--config", "tiny_cpu", "--max_steps", "1"]]
    ours = config_path("recipes/configs/tiny_cpu.yaml")
    assert ours == config_path("tiny_cpu")
    assert ours.is_file()
    assert tmp_path not in ours.parents
    Path("tiny_cpu").write_text("max_steps: 1")
    assert config_path("tiny_cpu") == Path("tiny_cpu")
    message = "No such file; the configs that come with the recipes are .*tiny_cpu, tiny_cpu_l"
    with pytest.raises(OSError, match=message):
        config_path("tiny")


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
    layers = [line for line in done.output.splitlines() if line.endswith("Linear")]
    assert layers == ["MXFP4Linear", "MXFP4PackedLinear"], done.output
    for mode in ("qat", "packed"):
        assert scheme_in(saved / f"{mode}-again") == scheme_in(saved / mode)


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
    assert written["quantization_config"]["mode"] == "qat"
    assert "hf-mxfp4 run" in written["transformers_weights"]


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
    finish("run", "--", *command.split())
    assert [_words(arguments) for arguments in launched] == [["-m", "hf_mxfp4.cli", "run", "--", *script.split()]]


def test_what_is_launched_twice_imports_it_once(launched):
    run("run", "--", "accelerate", "launch", "--cpu", "train.py")
    (arguments,) = launched
    torch.distributed.run.run(arguments)
    assert _words(launched[1]) == ["-m", "hf_mxfp4.cli", "run", "--", "train.py"]


@pytest.mark.parametrize("interpreter", [[], ["python"], ["/usr/bin/python3.11"]], ids=str)
def test_a_script_whose_name_begins_with_python_is_no_interpreter(interpreter, tmp_path, launched):
    script = tmp_path / "python_demo.py"
    data = tmp_path / "data.py"
    script.write_text("import sys\nprint('script', *sys.argv)\n")
    data.write_text("print('data')\n")
    assert finish("run", "--", *interpreter, script, data).stdout == f"script {script} {data}\n"


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
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.fixture
def plain(tmp_path):
    make_model("llama", layers=1, dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def table_in(result) -> list[list[str]]:
    rows = [line for line in result.stdout.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def scheme_in(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("words", [("pack",), ("export", "--format", "gguf"), ("smooth",)])
def test_on_a_full_disk_nothing_is_written_and_the_error_is_one_line(words, plain, tmp_path):
    save_tokenizer(plain)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        done = run(words[0], plain, tmp_path / "out", *words[1:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.exit_code == 2
    assert f"error: {tmp_path / 'out'} could not be written" in done.stderr
    assert not (tmp_path / "out").exists()


def test_names_with_control_characters_do_not_reach_the_terminal(plain, tmp_path):
    title = "\x1b]0;title\x07"
    folder = save_tokenizer(plain).rename(tmp_path / f"m{title}")
    texts = save_texts(tmp_path / "sums.jsonl", [{"text": "1+1=2"}])
    commands = [
        ("pack", folder, tmp_path / f"packed{title}"),
        ("verify", tmp_path / f"packed{title}"),
        ("analyze", folder, "--scheme", "rceil", "--out", tmp_path / f"analysis{title}"),
        ("eval", folder, "--text", texts, "--scheme", "w4a16:rceil", "--out", tmp_path / f"evaluation{title}"),
    ]
    for words in commands:
        done = finish(*words)
        assert r"\x1b" in done.output
        assert "\x1b" not in done.output


def test_a_file_for_llama_cpp(plain, tmp_path):
    result = finish("export", plain, tmp_path / "out", "--format", "gguf", "--scale-rule", "mse", "--skip", "q_proj")
    assert "out: gguf, 6 layers: 6 quantized from full precision" in result.stdout
    assert "takes token numbers only" in result.stdout
    assert "16 -> 4.25" in result.stdout
    assert f"serve it: llama-server -m {tmp_path / 'out'}/*.gguf" in result.stdout
    assert (tmp_path / "out" / "model-MXFP4.gguf").is_file()
    result = finish("import", tmp_path / "out", tmp_path / "back", code=2)
    assert "only safetensors checkpoints are read" in result.stderr


def test_nvfp4_and_back(plain, tmp_path):
    packed, out, back = (tmp_path / name for name in ("packed", "out", "back"))
    finish("pack", plain, packed, "--scale-rule", "even", "--skip", "mlp.up_proj")
    exported = finish("export", packed, out)
    assert "out: nvfp4, 6 layers: 6 kept, with rewritten scales" in exported.stdout
    assert re.search(r"\n(\d+) of \1 blocks exact\n", exported.stdout)
    imported = finish("import", out, back)
    assert "6 layers: 6 kept, with rewritten scales" in imported.stdout
    assert "byte for byte" not in imported.stdout
    assert scheme_in(back)["modules_to_not_convert"] == ["model.layers.0.mlp.up_proj"]


def test_pack(plain, tmp_path):
    packed = tmp_path / "packed"
    done = finish("pack", plain, packed, "--scale-rule", "even", "--macro-block", "none", "--skip", "mlp.up_proj")
    assert "mxfp4_rl, 6 layers: 6 quantized from full precision" in done.stdout
    assert f"serve it: vllm serve {packed} " in done.stdout
    assert "weights: SQNR 1" in done.stdout
    assert " dB against the full-precision weights" in done.stdout
    expected = MXFP4RLConfig(mode="packed", scale_rule="even", macro_block=None, modules_to_not_convert=["mlp.up_proj"])
    assert scheme_in(packed) == expected.to_dict()


def test_export_and_import_of_packed_bytes(plain, tmp_path):
    packed, out, back = (tmp_path / name for name in ("packed", "out", "back"))
    finish("pack", plain, packed, "--macro-block", "none")
    exported = finish("export", packed, out, "--format", "compressed-tensors")
    assert "7 layers: 7 kept byte for byte" in exported.stdout
    assert "q_proj" not in exported.stdout
    assert "weights: bit for bit the packed values, which themselves have SQNR 1" in exported.stdout
    report = json.loads(finish("import", out, back, "--json").stdout)
    assert report["actions"] == {"kept": 7}
    assert report["sqnr_db"] is None
    assert report["format"] == "mxfp4_rl"


def test_a_qat_checkpoint_keeps_its_scheme(plain, tmp_path):
    config = MXFP4RLConfig(scale_rule="floor")
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=config).save_pretrained(tmp_path / "qat")
    finish("pack", tmp_path / "qat", tmp_path / "packed")
    assert scheme_in(tmp_path / "packed") == config.packed().to_dict()
    result = finish("pack", tmp_path / "qat", tmp_path / "other", "--scale-rule", "even", code=2)
    assert "was trained under a scheme of its own" in result.stderr


@pytest.fixture
def packed(plain, tmp_path):
    """Weights with macro factors, which other engines do not have."""
    finish("pack", plain, tmp_path / "packed")
    return tmp_path / "packed"


def test_a_mismatch_is_refused(packed, tmp_path):
    done = finish("export", packed, tmp_path / "out", "--format", "quark", code=2)
    assert "error: format 'quark' cannot hold 7 of 7 layers" in done.stderr
    assert done.stderr.index("export the original full-precision checkpoint") < done.stderr.index("--on-mismatch")
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()


def test_what_a_mismatch_costs_is_shown_by_layer(packed, tmp_path):
    done = finish("export", packed, tmp_path / "out", "--format", "quark", "--on-mismatch", "requantize")
    assert "7 layers: 7 quantized again" in done.stdout
    assert "quantized a second time" in done.stdout
    names = [*(f"self_attn.{name}" for name in "qkvo"), "mlp.gate", "mlp.up", "mlp.down"]
    assert [row[0] for row in table_in(done)] == [f"{name}_proj" for name in names]


def test_a_folder_is_replaced_on_request(packed, tmp_path):
    out = tmp_path / "out"
    arguments = ("export", packed, out, "--format", "quark", "--on-mismatch", "dequantize")
    shutil.copytree(packed, out)
    refused = finish(*arguments, code=2)
    assert "--overwrite" in refused.stderr
    done = finish(*arguments, "--overwrite")
    assert "7 dequantized" in done.stdout
    assert "plain checkpoint" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "nowhere", "out", "--format", "bf16"], "nowhere is not a folder"),
        (
            ["export", "qat", "out", "--format", "quark", "--skip", "mlp", "--skip", "v_proj"],
            "--skip mlp --skip v_proj",
        ),
        (["import", "plain", "out"], "is not quantized; there is nothing to import"),
        (["export", "plain", "out", "--format", "gptq"], "'gptq'"),
        (["pack", "plain", "out", "--macro-block", "48"], "macro_block=48 is not supported"),
        (["pack", "plain", "out", "--skip", "nonsense"], "'nonsense', which matches no module"),
        (["pack", "plain", "plain"], "must be apart"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_mistakes_are_told_and_nothing_is_written(arguments, words, plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(plain, tmp_path / "qat")
    edit_config(tmp_path / "qat", quantization_config=MXFP4RLConfig().to_dict())
    result = finish(*arguments, code=2)
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "qat"]
