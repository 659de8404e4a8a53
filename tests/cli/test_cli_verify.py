# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 verify`: what it finds in folders, files and repositories, what it prints, and its exit codes; folders made
to harm, of which `verify`, `pack` and `export` run no code, and end with one line."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from commands import run
from safetensors.torch import save_file
from same_bits import edit_config, shards
from tiny_models import make_model
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import MANIFEST, verify_folder
from hf_mxfp4.lab import load
from hf_mxfp4.lab.planning import read_config


INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("verified")
    make_model("qwen2", layers=1, hidden=32, intermediate=64).save_pretrained(base / "plain")
    model = AutoModelForCausalLM.from_pretrained(base / "plain", quantization_config=MXFP4RLConfig())
    model.save_pretrained(base / "master", max_shard_size="20KB")
    hf_mxfp4.pack(model).save_pretrained(base / "packed")
    plain = make_model("llama", layers=1)
    hf_mxfp4.pack(plain, MXFP4RLConfig(mode="packed", macro_block=None)).save_pretrained(base / "hostile")
    return {name: base / name for name in ("plain", "master", "packed", "hostile")}


def flip(file: Path, *names: str) -> None:
    """Flip the first bit of each tensor."""
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    for name in header.keys() & set(names):
        content[start + header[name]["data_offsets"][0]] ^= 1
    file.write_bytes(content)


def forget(folder: Path, file: Path) -> None:
    """Take a file out of the manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["files"][file.name]
    (folder / MANIFEST).write_text(json.dumps(manifest))


def where(folder: Path) -> list[str]:
    return [problem.where for problem in verify_folder(folder).problems]


def test_a_checkpoint_as_it_was_written(saved):
    settings = ["config.json", "generation_config.json"]
    n_bytes = sum((saved["packed"] / name).stat().st_size for name in ["model.safetensors", *settings])
    done = run("verify", saved["packed"])
    assert (done.exit_code, done.stderr) == (0, "")
    size = f"29 tensors in 3 files, {n_bytes / 1e6:.1f} MB"
    assert done.stdout == f"{saved['packed']}: {size}: all as it was written\n"
    done = run("verify", saved["master"], "--json")
    assert done.exit_code == 0 and json.loads(done.stdout) == {
        "model": str(saved["master"]),
        "checked": [*(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)), INDEX, *settings],
        "unchecked": [],
        "tensors": 15,
        "bytes": sum(
            file.stat().st_size
            for file in [*shards(saved["master"]), *(saved["master"] / name for name in [INDEX, *settings])]
        ),
        "problems": [],
        "notes": [],
    }


def test_every_damaged_file_is_named(copy):
    folder = copy("master")
    first, *_, last = shards(folder)
    flip(first, "lm_head.weight", "model.embed_tokens.weight")
    flip(last, "model.norm.weight")
    done = run("verify", folder)
    assert done.exit_code == 1 and "2 problems" in done.stdout.splitlines()[-1]
    for file in (first, last):
        assert f"{file.name} is damaged: its checksum is " in done.stdout
    problems = json.loads(run("verify", folder, "--json").stdout)["problems"]
    assert [problem["where"] for problem in problems] == [first.name, last.name]
    assert run("verify", last).exit_code == 1 and run("verify", shards(folder)[1]).exit_code == 0


def test_files_that_are_missing_truncated_or_of_another_checkpoint(copy, saved):
    folder = copy("master")
    files = shards(folder)
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-1])
    assert where(folder) == [files[0].name, files[1].name]
    shutil.copy(saved["master"] / files[0].name, files[1])
    shutil.copy(saved["master"] / files[0].name, files[0])
    assert set(where(folder)) == {files[1].name}
    (folder / MANIFEST).unlink()
    assert run("verify", folder, "--add").exit_code == 1 and set(where(folder)) == {INDEX}


@pytest.mark.parametrize("what", ["place", "name", "text", "nothing", "outside"])
def test_an_index_that_does_not_fit(copy, what):
    folder = copy("master")
    index = json.loads((folder / INDEX).read_text())
    places, files = index["weight_map"], [file.name for file in shards(folder)]
    if what == "place":
        places["model.norm.weight"] = files[0]
    elif what == "name":
        places["model.norm.weighs"] = places.pop("model.norm.weight")
    elif what == "outside":
        places["model.norm.weight"] = f"../{files[0]}"
    text = {"text": "{", "nothing": "{}"}.get(what, json.dumps(index))
    (folder / INDEX).write_text(text)
    done = run("verify", folder)
    assert done.exit_code == 1 and set(where(folder)) == {INDEX}
    assert all(line.startswith(f"{INDEX} is damaged: ") for line in done.stdout.splitlines()[:-1])


@pytest.mark.parametrize("name", ["master", "packed"])
def test_a_config_of_another_model_or_scheme(copy, name):
    folder = copy(name)
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, intermediate_size=96)
    done = run("verify", folder)
    assert done.exit_code == 1 and "the model needs" in done.stdout
    config["quantization_config"]["mode"] = {"qat": "packed", "packed": "qat"}[config["quantization_config"]["mode"]]
    edit_config(folder, **config)
    assert where(folder) == ["config.json"]
    (folder / "config.json").write_text("{")
    assert where(folder) == ["config.json"]


@pytest.mark.parametrize(
    "edit",
    [{"rms_norm_eps": 0.5}, {"quantization_config": None}, {"quantization_config.modules_to_not_convert": ["up_proj"]}],
)
def test_a_config_that_computes_otherwise(copy, edit):
    """The weights fit it."""
    folder = copy("master")
    config = json.loads((folder / "config.json").read_text())
    for name, value in edit.items():
        *outer, name = name.split(".")
        (config[outer[0]] if outer else config)[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    done = run("verify", folder)
    assert done.exit_code == 1 and "config.json is damaged: " in done.stdout and "changed on purpose" in done.stdout
    assert run("verify", folder, "--add").exit_code == 1
    (folder / MANIFEST).unlink()
    assert run("verify", folder, "--add").exit_code == 0 and run("verify", folder).exit_code == 0


@pytest.mark.parametrize("name", [MANIFEST, "config.json", "model.safetensors"])
def test_files_without_an_end_are_not_read(copy, name):
    folder = copy("packed")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert where(folder) == [name]
    export = run("export", folder, folder.with_name("out"), "--format", "bf16")
    assert export.exit_code == (0 if name == MANIFEST else 2), export.output
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    assert where(folder) == [name]


def test_nothing_to_compare(saved, tmp_path):
    done = run("verify", saved["plain"])
    assert done.exit_code == 2 and "without checksums: model.safetensors, config.json, gen" in done.stderr
    save_file({"x": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    done = run("verify", tmp_path)
    assert done.exit_code == 2 and "without checksums: adapter_model.safetensors" in done.stderr
    (tmp_path / "empty").mkdir()
    assert run("verify", tmp_path / "empty").exit_code == 2
    done = run("verify", tmp_path / "nowhere")
    assert done.exit_code == 2 and "does not exist" in done.stderr


def test_a_file_of_another_tool_beside_and_among_the_others(copy):
    folder = copy("packed")
    save_file({"x": torch.ones(1)}, folder / "adapter_model.safetensors")
    done = run("verify", folder)
    assert done.exit_code == 0 and "not compared, without checksums: adapter_model.safetensors" in done.stdout
    folder = copy("master")
    forget(folder, shards(folder)[1])
    done = run("verify", folder)
    assert done.exit_code == 2
    assert f"error: not compared, without checksums: {shards(folder)[1].name}. save_pretrained" in done.stderr


def test_adding_checksums(copy):
    folder = copy("master")
    files = shards(folder)
    forget(folder, files[1])
    done = run("verify", folder, "--add")
    assert done.exit_code == 0 and "checksums added to 1 files" in done.stderr, done.stdout
    assert "15 tensors in 6 files" in done.stdout
    flip(files[1], "model.layers.0.mlp.up_proj.weight")
    assert where(folder) == [files[1].name]
    before = files[0].read_bytes()
    done = run("verify", folder, "--add")
    assert done.exit_code == 1 and "no checksums were added to what is damaged" in done.stderr
    assert files[0].read_bytes() == before and where(folder) == [files[1].name]
    done = run("verify", files[0], "--add")
    assert done.exit_code == 2 and "--add writes into a folder" in done.stderr


RECORD = '{"size": 1, "xxh3_128": "0"}'


@pytest.mark.parametrize(
    ("name", "text"), [("config.json", "[" * 100_000), (MANIFEST, f'{{"files": {{"a\\u0000b": {RECORD}}}}}')]
)
def test_hostile_files_are_damage_in_one_line(copy, name, text):
    folder = copy("master")
    (folder / name).write_text(text)
    done = run("verify", folder)
    assert done.exit_code == 1 and done.exception.__class__ is SystemExit, done.output
    assert len(done.output.splitlines()) <= 3


def test_what_cannot_be_checked_is_not_damage(copy, monkeypatch):
    def fail(*arguments):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr("hf_mxfp4.checkpoint.manifest.record_of", fail)
    done = run("verify", copy("packed"))
    assert done.exit_code == 2 and "could not be checked: ZeroDivisionError: a mistake" in done.stderr


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved["hostile"], tmp_path / "model")


def assert_one_line(folder, words: str = "") -> None:
    """Check that `verify` finds damage, and that `export` ends with one line."""
    export = ("export", folder, folder.with_name("out"), "--format", "bf16")
    verified, exported = (run(*each, input="y\n") for each in (("verify", folder), export))
    for result in (verified, exported):
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert verified.exit_code == 1, verified.output
    assert exported.exit_code == 2 and exported.output.count("\n") == 1 and words in exported.output, exported.output


def test_code_in_the_folder_is_not_run_and_not_asked_about(folder, tmp_path):
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit_config(folder, model_type="evil", auto_map=classes)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert_one_line(folder)
    with pytest.raises(ValueError):
        read_config(str(folder))
    with pytest.raises(ValueError):
        load(str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "options", [{"_attn_implementation": "evil/kernel"}, {"text_config": {"_experts_implementation": "evil/kernel"}}]
)
def test_kernels_of_the_hub_are_refused(folder, options):
    edit_config(folder, **options)
    assert_one_line(folder, "asks for the kernel")
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
        ({"quantization_config": {"quant_method": []}}, ""),
        ({"architectures": ["pipeline"]}, "'pipeline'"),
        ({"architectures": ["LlamaConfig"]}, "'LlamaConfig'"),
        ({"architectures": [3]}, "3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_makes_no_model_is_damage_or_refused(folder, options, words):
    edit_config(folder, **options)
    assert_one_line(folder, words)


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
    assert_one_line(folder)


@pytest.mark.parametrize("file", ["model\0.safetensors", "..", "x" * 5000, 3])
def test_files_of_an_index(folder, file):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_one_line(folder)
