# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 pack`, `export` and `import`: what they print, what they write, how they fail."""

import json
import shutil

import pytest
import torch
from tiny_models import make_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.cli import app


@pytest.fixture
def run():
    def invoke(*arguments, code=0):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == code, result.output
        return result

    return invoke


@pytest.fixture
def plain(tmp_path):
    make_model("llama", layers=1, dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def table_in(result) -> list[list[str]]:
    """The cells of the rows of a table."""
    rows = [line for line in result.stdout.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def scheme_in(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def test_a_file_for_llama_cpp(run, plain, tmp_path):
    result = run("export", plain, tmp_path / "out", "--format", "gguf", "--scale-rule", "mse", "--skip", "q_proj")
    assert "out: gguf, 6 layers: 6 quantized from full precision" in result.stdout
    assert "takes token numbers only" in result.stdout and "16 -> 4.25" in result.stdout
    assert (tmp_path / "out" / "model-MXFP4.gguf").is_file()
    result = run("import", tmp_path / "out", tmp_path / "back", code=2)
    assert "only safetensors checkpoints are read" in result.stderr


def test_nvfp4_and_back(run, plain, tmp_path):
    packed, out, back = (tmp_path / name for name in ("packed", "out", "back"))
    run("pack", plain, packed, "--scale-rule", "even", "--skip", "mlp.up_proj")
    result = run("export", packed, out, "--format", "nvfp4")
    blocks = sum(layer["blocks"] for layer in json.loads((out / "export_report.json").read_text())["layers"])
    assert "out: nvfp4, 6 layers: 6 kept, with rewritten scales" in result.stdout
    assert f"\n{blocks} of {blocks} blocks exact\n" in result.stdout and "bit for bit" in result.stdout
    result = run("import", out, back)
    assert "6 layers: 6 kept, with rewritten scales" in result.stdout
    assert f"\n{blocks} of {blocks} blocks exact\n" in result.stdout and "byte for byte" not in result.stdout
    assert scheme_in(back)["modules_to_not_convert"] == ["model.layers.0.mlp.up_proj"]
    assert scheme_in(back)["macro_search"] == "block_mantissas"


def test_pack_export_import(run, plain, tmp_path):
    packed, out, back = (tmp_path / name for name in ("packed", "out", "back"))
    result = run("pack", plain, packed, "--scale-rule", "even", "--macro-block", "none", "--skip", "mlp.up_proj")
    assert "mxfp4_rl, 6 layers: 6 quantized from full precision" in result.stdout
    assert "weights: SQNR 1" in result.stdout and " dB against the full-precision weights" in result.stdout
    expected = MXFP4RLConfig(mode="packed", scale_rule="even", macro_block=None, modules_to_not_convert=["mlp.up_proj"])
    assert scheme_in(packed) == expected.to_dict()
    result = run("export", packed, out, "--format", "compressed-tensors")
    assert "6 layers: 6 kept byte for byte" in result.stdout and "q_proj" not in result.stdout
    assert "weights: bit for bit the packed values, which themselves have SQNR 1" in result.stdout
    assert scheme_in(out)["ignore"] == ["lm_head", "model.layers.0.mlp.up_proj"]
    result = run("import", out, back, "--json")
    report = json.loads(result.stdout)
    assert report["actions"] == {"kept": 6} and report["sqnr_db"] is None and report["format"] == "mxfp4_rl"
    ids = torch.arange(2, 14).view(2, 6)
    one, other = (AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (packed, back))
    assert torch.equal(one, other)


def test_a_qat_checkpoint_keeps_its_scheme(run, plain, tmp_path):
    config = MXFP4RLConfig(scale_rule="floor")
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=config).save_pretrained(tmp_path / "qat")
    run("pack", tmp_path / "qat", tmp_path / "packed")
    assert scheme_in(tmp_path / "packed") == config.packed().to_dict()
    result = run("pack", tmp_path / "qat", tmp_path / "other", "--scale-rule", "even", code=2)
    assert "was trained under a scheme of its own" in result.stderr


def test_a_mismatch_is_refused_and_each_choice_reports_its_cost(run, plain, tmp_path):
    run("pack", plain, tmp_path / "packed")
    result = run("export", tmp_path / "packed", tmp_path / "out", "--format", "quark", code=2)
    assert "error: format 'quark' cannot hold 7 of 7 layers" in result.stderr
    assert "--on-mismatch requantize" in result.stderr
    assert result.stderr.index("export the original full-precision checkpoint") < result.stderr.index("--on-mismatch")
    assert not (tmp_path / "out").exists() and result.stdout == ""
    arguments = ("export", tmp_path / "packed", tmp_path / "out", "--format", "quark", "--on-mismatch")
    result = run(*arguments, "requantize")
    assert "7 layers: 7 quantized again" in result.stdout and "quantized a second time" in result.stdout
    report = json.loads((tmp_path / "out" / "export_report.json").read_text())
    assert report["actions"] == {"requantized": 7} and 10 < report["sqnr_db"] < 40
    assert [row[0] for row in table_in(result)] == [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    stderr = run(*arguments, "dequantize", code=2).stderr
    assert "is not empty" in stderr and "--overwrite" in stderr
    result = run(*arguments, "dequantize", "--overwrite")
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
def test_mistakes_are_told_and_nothing_is_written(arguments, words, run, plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(plain, tmp_path / "qat")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = MXFP4RLConfig().to_dict()
    (tmp_path / "qat" / "config.json").write_text(json.dumps(config))
    result = run(*arguments, code=2)
    assert words in result.stderr and "Traceback" not in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "qat"]
