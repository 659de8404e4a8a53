# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 simulate`, `env`, the command itself, the names of its options, and `run`, which makes programs that do not
import the package compute in MXFP4 (that they stop otherwise is in `tests/checkpoint/test_export_engines.py`); `pack`,
`export` and `import`: what they print, what they write, how they fail."""

import json
import os
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
    assert len(cpu) == 12 and {row["backend"] for row in cpu} <= {"cpu", "eager"}
    found = {(row["preset"], row["hardware"], row["product"]): row for row in data["products"]}
    assert "full precision" in found["w4a16", "sm_90", "fprop"]["reason"]
    assert {row["linear"] for row in data["products"] if row["hardware"] == "sm_80"} == {"dense"}
    lines = run("env").stdout.splitlines()
    assert len(lines) <= 16 and f"hf-mxfp4      {hf_mxfp4.__version__}" in lines and "GPUs          none" in lines
    assert lines[-1].endswith("hf-mxfp4 env --verbose")


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


def test_a_recipe_takes_all_words_and_the_configs_that_come_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr("sys.argv", ["hf-mxfp4"])
    monkeypatch.setattr("hf_mxfp4.recipes.grpo.main", seen.append)
    assert run("grpo", "--config", "tiny_cpu", "--max_steps", "1").exit_code == 0
    assert seen == [["--config", "tiny_cpu", "--max_steps", "1"]]
    ours = config_path("recipes/configs/tiny_cpu.yaml")
    assert ours == config_path("tiny_cpu") and ours.is_file() and tmp_path not in ours.parents
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
    finish("run", "--", *command.split())
    assert [_words(arguments) for arguments in launched] == [["-m", "hf_mxfp4.cli", "run", "--", *script.split()]]


def test_what_is_launched_twice_imports_it_once(launched):
    run("run", "--", "accelerate", "launch", "--cpu", "train.py")
    (arguments,) = launched
    torch.distributed.run.run(arguments)
    assert _words(launched[1]) == ["-m", "hf_mxfp4.cli", "run", "--", "train.py"]


@pytest.mark.parametrize("interpreter", [[], ["python"], ["/usr/bin/python3.11"]], ids=str)
def test_a_script_whose_name_begins_with_python_is_no_interpreter(interpreter, tmp_path, launched):
    script, data = tmp_path / "python_demo.py", tmp_path / "data.py"
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
    assert done.exit_code == 2 and message in done.stderr


@pytest.fixture
def plain(tmp_path):
    make_model("llama", layers=1, dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def table_in(result) -> list[list[str]]:
    rows = [line for line in result.stdout.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def scheme_in(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("words", [("pack",), ("export", "--format", "gguf"), ("smooth",), ("gptq",)])
def test_on_a_full_disk_nothing_is_written_and_the_error_is_one_line(words, plain, tmp_path):
    if words[0] in ("smooth", "gptq"):
        save_tokenizer(plain)
        words = (*words, "--text", save_texts(tmp_path / "sums.jsonl", [{"text": "1+1=2"}]))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        done = run(words[0], plain, tmp_path / "out", *words[1:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.exit_code == 2 and f"error: {tmp_path / 'out'} could not be written" in done.stderr
    assert not (tmp_path / "out").exists()


def test_names_with_control_characters_do_not_reach_the_terminal(plain, tmp_path):
    title = "\x1b]0;title\x07"
    folder = save_tokenizer(plain).rename(tmp_path / f"m{title}")
    texts = save_texts(tmp_path / "sums.jsonl", [{"text": "1+1=2"}])
    commands = [
        ("pack", folder, tmp_path / f"packed{title}"),
        ("verify", tmp_path / f"packed{title}"),
        ("analyze", folder, "--scheme", "rceil", "--out", tmp_path / f"analysis{title}"),
        ("gptq", folder, tmp_path / f"rounded{title}", "--text", texts),
        ("smooth", folder, tmp_path / f"smoothed{title}", "--text", texts),
        ("eval", folder, "--text", texts, "--scheme", "w4a16:rceil", "--out", tmp_path / f"evaluation{title}"),
    ]
    for words in commands:
        done = finish(*words)
        assert r"\x1b" in done.output and "\x1b" not in done.output


def test_a_file_for_llama_cpp(plain, tmp_path):
    result = finish("export", plain, tmp_path / "out", "--format", "gguf", "--scale-rule", "mse", "--skip", "q_proj")
    assert "out: gguf, 6 layers: 6 quantized from full precision" in result.stdout
    assert "takes token numbers only" in result.stdout and "16 -> 4.25" in result.stdout
    assert f"serve it: llama-server -m {tmp_path / 'out'}/*.gguf" in result.stdout
    assert (tmp_path / "out" / "model-MXFP4.gguf").is_file()
    result = finish("import", tmp_path / "out", tmp_path / "back", code=2)
    assert "only safetensors checkpoints are read" in result.stderr


def test_nvfp4_and_back(plain, tmp_path):
    packed, out, back = (tmp_path / name for name in ("packed", "out", "back"))
    finish("pack", plain, packed, "--scale-rule", "even", "--skip", "mlp.up_proj")
    result = finish("export", packed, out)
    blocks = sum(layer["blocks"] for layer in json.loads((out / "export_report.json").read_text())["layers"])
    assert "out: nvfp4, 6 layers: 6 kept, with rewritten scales" in result.stdout
    assert f"\n{blocks} of {blocks} blocks exact\n" in result.stdout and "bit for bit" in result.stdout
    result = finish("import", out, back)
    assert "6 layers: 6 kept, with rewritten scales" in result.stdout
    assert f"\n{blocks} of {blocks} blocks exact\n" in result.stdout and "byte for byte" not in result.stdout
    assert scheme_in(back)["modules_to_not_convert"] == ["model.layers.0.mlp.up_proj"]
    assert scheme_in(back)["macro_search"] == "block_mantissas"


def test_pack_export_import(plain, tmp_path):
    packed, out, back = (tmp_path / name for name in ("packed", "out", "back"))
    result = finish("pack", plain, packed, "--scale-rule", "even", "--macro-block", "none", "--skip", "mlp.up_proj")
    assert "mxfp4_rl, 6 layers: 6 quantized from full precision" in result.stdout
    assert f"serve it: vllm serve {packed} " in result.stdout
    assert "weights: SQNR 1" in result.stdout and " dB against the full-precision weights" in result.stdout
    expected = MXFP4RLConfig(mode="packed", scale_rule="even", macro_block=None, modules_to_not_convert=["mlp.up_proj"])
    assert scheme_in(packed) == expected.to_dict()
    result = finish("export", packed, out, "--format", "compressed-tensors")
    assert "6 layers: 6 kept byte for byte" in result.stdout and "q_proj" not in result.stdout
    assert "weights: bit for bit the packed values, which themselves have SQNR 1" in result.stdout
    assert scheme_in(out)["ignore"] == ["lm_head", "model.layers.0.mlp.up_proj"]
    result = finish("import", out, back, "--json")
    report = json.loads(result.stdout)
    assert report["actions"] == {"kept": 6} and report["sqnr_db"] is None and report["format"] == "mxfp4_rl"
    ids = torch.arange(2, 14).view(2, 6)
    one, other = (AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (packed, back))
    assert torch.equal(one, other)


def test_a_qat_checkpoint_keeps_its_scheme(plain, tmp_path):
    config = MXFP4RLConfig(scale_rule="floor")
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=config).save_pretrained(tmp_path / "qat")
    finish("pack", tmp_path / "qat", tmp_path / "packed")
    assert scheme_in(tmp_path / "packed") == config.packed().to_dict()
    result = finish("pack", tmp_path / "qat", tmp_path / "other", "--scale-rule", "even", code=2)
    assert "was trained under a scheme of its own" in result.stderr


def test_a_mismatch_is_refused_and_each_choice_reports_its_cost(plain, tmp_path):
    finish("pack", plain, tmp_path / "packed")
    result = finish("export", tmp_path / "packed", tmp_path / "out", "--format", "quark", code=2)
    assert "error: format 'quark' cannot hold 7 of 7 layers" in result.stderr
    assert "--on-mismatch requantize" in result.stderr
    assert result.stderr.index("export the original full-precision checkpoint") < result.stderr.index("--on-mismatch")
    assert not (tmp_path / "out").exists() and result.stdout == ""
    arguments = ("export", tmp_path / "packed", tmp_path / "out", "--format", "quark", "--on-mismatch")
    result = finish(*arguments, "requantize")
    assert "7 layers: 7 quantized again" in result.stdout and "quantized a second time" in result.stdout
    report = json.loads((tmp_path / "out" / "export_report.json").read_text())
    assert report["actions"] == {"requantized": 7} and 10 < report["sqnr_db"] < 40
    names = [*(f"self_attn.{name}" for name in "qkvo"), "mlp.gate", "mlp.up", "mlp.down"]
    assert [row[0] for row in table_in(result)] == [f"{name}_proj" for name in names]
    stderr = finish(*arguments, "dequantize", code=2).stderr
    assert "is not empty" in stderr and "--overwrite" in stderr
    result = finish(*arguments, "dequantize", "--overwrite")
    assert "7 dequantized" in result.stdout and "plain checkpoint" in result.stdout
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "nowhere", "out", "--format", "bf16"], "nowhere is not a folder"),
        (
            ["export", "qat", "out", "--format", "quark", "--skip", "mlp", "--skip", "v_proj"],
            "--skip mlp --skip v_proj",
        ),
        (["import", "plain", "out"], "is not quantized; there is nothing to import"),
        (["export", "plain", "out", "--format", "bf16", "--preset", "w4a4"], "--preset w4a4) has no effect in format"),
        (["export", "plain", "out", "--format", "quark", "--scale-rule", "ceil"], "'ceil' is not one of"),
        (["export", "plain", "out", "--format", "quark", "--skip", "nonsense"], "'nonsense', which matches no module"),
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
    assert words in result.stderr and "Traceback" not in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "qat"]
