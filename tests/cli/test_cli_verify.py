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
SETTINGS = ("config.json", "generation_config.json")


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
    folder = saved["packed"]
    n_bytes = sum((folder / name).stat().st_size for name in ("model.safetensors", *SETTINGS))
    done = run("verify", folder)
    assert done.exit_code == 0
    assert done.stderr == ""
    assert done.stdout == f"{folder}: 29 tensors in 3 files, {n_bytes / 1e6:.1f} MB: all as it was written\n"


def test_the_verdict_as_json(saved):
    folder = saved["master"]
    names = [*(file.name for file in shards(folder)), INDEX, *SETTINGS]
    done = run("verify", folder, "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {
        "model": str(folder),
        "checked": names,
        "unchecked": [],
        "tensors": 15,
        "bytes": sum((folder / name).stat().st_size for name in names),
        "problems": [],
        "notes": [],
    }


def test_every_damaged_file_is_named(copy):
    folder = copy("master")
    first, whole, last = shards(folder)
    flip(first, "lm_head.weight", "model.embed_tokens.weight")
    flip(last, "model.norm.weight")
    done = run("verify", folder)
    assert done.exit_code == 1
    assert "2 problems" in done.stdout.splitlines()[-1]
    for file in (first, last):
        assert f"{file.name} is damaged: its checksum is " in done.stdout
    assert run("verify", last).exit_code == 1
    assert run("verify", whole).exit_code == 0


def test_files_that_are_missing_or_truncated(copy):
    folder = copy("master")
    missing, truncated, _ = shards(folder)
    missing.unlink()
    truncated.write_bytes(truncated.read_bytes()[:-1])
    assert where(folder) == [missing.name, truncated.name]


def test_a_file_in_the_place_of_another(copy):
    folder = copy("master")
    first, second, _ = shards(folder)
    shutil.copy(first, second)
    assert set(where(folder)) == {second.name}
    (folder / MANIFEST).unlink()
    assert run("verify", folder, "--add").exit_code == 1
    assert set(where(folder)) == {INDEX}


def test_an_index_that_cannot_be_read(copy):
    folder = copy("master")
    (folder / INDEX).write_text("{")
    done = run("verify", folder)
    assert done.exit_code == 1
    assert set(where(folder)) == {INDEX}
    assert all(line.startswith(f"{INDEX} is damaged: ") for line in done.stdout.splitlines()[:-1])


def test_a_config_of_another_model(copy):
    folder = copy("packed")
    edit_config(folder, intermediate_size=96)
    done = run("verify", folder)
    assert done.exit_code == 1
    assert "the model needs" in done.stdout


@pytest.mark.parametrize(("name", "mode"), [("master", "packed"), ("packed", "qat")])
def test_a_config_of_another_scheme(copy, name, mode):
    folder = copy(name)
    scheme = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_config(folder, quantization_config={**scheme, "mode": mode})
    assert where(folder) == ["config.json"]


def test_a_config_that_computes_otherwise(copy):
    """The weights fit it."""
    folder = copy("master")
    edit_config(folder, rms_norm_eps=0.5)
    done = run("verify", folder)
    assert done.exit_code == 1
    assert "config.json is damaged: " in done.stdout
    assert "changed on purpose" in done.stdout


def test_a_config_that_was_changed_on_purpose_gets_new_checksums(copy):
    folder = copy("master")
    edit_config(folder, rms_norm_eps=0.5)
    assert run("verify", folder, "--add").exit_code == 1
    (folder / MANIFEST).unlink()
    assert run("verify", folder, "--add").exit_code == 0
    assert run("verify", folder).exit_code == 0


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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda saved, folder: saved["plain"], "without checksums: model.safetensors, config.json, gen"),
        (lambda saved, folder: folder, ""),
        (lambda saved, folder: folder / "nowhere", "does not exist"),
    ],
    ids=["plain", "empty", "missing"],
)
def test_nothing_to_compare(saved, tmp_path, make, words):
    done = run("verify", make(saved, tmp_path))
    assert done.exit_code == 2
    assert words in done.stderr


def test_a_file_of_another_tool_next_to_the_model(copy):
    folder = copy("packed")
    save_file({"x": torch.ones(1)}, folder / "adapter_model.safetensors")
    done = run("verify", folder)
    assert done.exit_code == 0
    assert "not compared, without checksums: adapter_model.safetensors" in done.stdout


def test_a_file_of_the_model_without_a_checksum(copy):
    folder = copy("master")
    file = shards(folder)[1]
    forget(folder, file)
    done = run("verify", folder)
    assert done.exit_code == 2
    assert f"error: not compared, without checksums: {file.name}. save_pretrained" in done.stderr


def test_adding_checksums(copy):
    folder = copy("master")
    file = shards(folder)[1]
    forget(folder, file)
    done = run("verify", folder, "--add")
    assert done.exit_code == 0, done.stdout
    assert "checksums added to 1 files" in done.stderr
    assert "15 tensors in 6 files" in done.stdout
    flip(file, "model.layers.0.mlp.up_proj.weight")
    assert where(folder) == [file.name]


def test_damaged_files_get_no_new_checksums(copy):
    folder = copy("master")
    file = shards(folder)[1]
    flip(file, "model.layers.0.mlp.up_proj.weight")
    done = run("verify", folder, "--add")
    assert done.exit_code == 1
    assert "no checksums were added to what is damaged" in done.stderr
    assert where(folder) == [file.name]


def test_checksums_are_added_to_folders_only(saved):
    done = run("verify", shards(saved["master"])[0], "--add")
    assert done.exit_code == 2
    assert "--add writes into a folder" in done.stderr


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
    assert done.exit_code == 2
    assert "could not be checked: ZeroDivisionError: a mistake" in done.stderr


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
        ({"rope_parameters": [1]}, "describes no model"),
        ({"quantization_config": {"quant_method": "mxfp4_rl", "mode": "packed", "macro_block": "x"}}, ""),
        ({"quantization_config": {"quant_method": []}}, ""),
        ({"architectures": ["LlamaConfig"]}, "'LlamaConfig'"),
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
