# SPDX-License-Identifier: Apache-2.0
"""Folders made to harm: `verify`, `pack` and `export` run no code of theirs, ask nothing, and end with one line."""

import json
import shutil

import pytest
from tiny_models import make_model
from typer.testing import CliRunner

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.cli import app
from hf_mxfp4.lab import load
from hf_mxfp4.lab.planning import read_config


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    model = make_model("llama", layers=1)
    hf_mxfp4.pack(model, MXFP4RLConfig(mode="packed", macro_block=None)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(packed, tmp_path):
    return shutil.copytree(packed, tmp_path / "model")


def edit(folder, **options) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **options}))


def results(folder):
    """The exit codes and output of `verify` and `export`."""
    verified = CliRunner().invoke(app, ["verify", str(folder)], input="y\n")
    out = str(folder.with_name("out"))
    exported = CliRunner().invoke(app, ["export", str(folder), out, "--format", "bf16"], input="y\n")
    for result in (verified, exported):
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return verified, exported


def assert_one_line(folder, verify_code: int, words: str = "") -> None:
    verified, exported = results(folder)
    assert verified.exit_code == verify_code, verified.output
    assert exported.exit_code == 2 and exported.output.count("\n") == 1 and words in exported.output, exported.output


def test_code_in_the_folder_is_not_run_and_not_asked_about(folder, tmp_path):
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit(folder, model_type="evil", auto_map=classes)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert_one_line(folder, 1)
    with pytest.raises(ValueError):
        read_config(str(folder))
    with pytest.raises(ValueError):
        load(str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["pipeline", "LlamaConfig", 3])
def test_an_architecture_is_a_model(folder, name):
    edit(folder, architectures=[name])
    assert_one_line(folder, 0, f"{name!r}")


@pytest.mark.parametrize(
    "options",
    [
        {"_attn_implementation": "evil/kernel"},
        {"text_config": {"_experts_implementation": "evil/kernel"}},
    ],
)
def test_kernels_of_the_hub_are_refused(folder, options):
    edit(folder, **options)
    assert_one_line(folder, 0, "asks for the kernel")
    for reader in (read_config, lambda model: read_config(f"{model}/config.json"), load):
        with pytest.raises(ValueError, match="asks for the kernel"):
            reader(str(folder))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"hidden_size": 10**18}, "describes no model"),
        ({"rope_parameters": [1]}, "describes no model"),
        ({"quantization_config": {"quant_method": "mxfp4_rl", "mode": "packed", "macro_block": "x"}}, ""),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_numbers_that_make_no_model_are_damage(folder, options, words):
    edit(folder, **options)
    assert_one_line(folder, 1, words)


def test_a_method_that_is_no_name(folder):
    edit(folder, quantization_config={"quant_method": []})
    assert_one_line(folder, 0)


def test_json_that_is_too_deep(folder):
    (folder / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    assert_one_line(folder, 1, "cannot be read")


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}',
        b"{}",
    ],
    ids=["deep", "surrogate", "number", "empty"],
)
def test_headers(folder, header):
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0000" * (header != b"{}"))
    assert_one_line(folder, 1)


@pytest.mark.parametrize("file", ["model\0.safetensors", "..", "x" * 5000, 3])
def test_files_of_an_index(folder, file):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_one_line(folder, 1)
