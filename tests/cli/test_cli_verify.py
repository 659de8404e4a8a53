# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 verify`: what it finds in folders, files and repositories, what it prints, and its exit codes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import make_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import MANIFEST, verify_folder
from hf_mxfp4.cli import app


INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("verified")
    make_model("qwen2", layers=1, hidden=32, intermediate=64).save_pretrained(base / "plain")
    model = AutoModelForCausalLM.from_pretrained(base / "plain", quantization_config=MXFP4RLConfig())
    model.save_pretrained(base / "master", max_shard_size="20KB")
    hf_mxfp4.pack(model).save_pretrained(base / "packed")
    return {name: base / name for name in ("plain", "master", "packed")}


def run(*arguments):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


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
    n_bytes = (saved["packed"] / "model.safetensors").stat().st_size
    done = run(saved["packed"])
    assert (done.exit_code, done.stderr) == (0, "")
    size = f"43 tensors in 1 files, {n_bytes / 1e6:.1f} MB"
    assert done.stdout == f"{saved['packed']}: {size}: all as it was written\n"
    done = run(saved["master"], "--json")
    assert done.exit_code == 0 and json.loads(done.stdout) == {
        "model": str(saved["master"]),
        "checked": [*(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)), INDEX],
        "unchecked": [],
        "tensors": 15,
        "bytes": sum(file.stat().st_size for file in [*shards(saved["master"]), saved["master"] / INDEX]),
        "problems": [],
        "notes": [],
    }


def test_every_damaged_file_is_named(copy):
    folder = copy("master")
    first, *_, last = shards(folder)
    flip(first, "lm_head.weight", "model.embed_tokens.weight")
    flip(last, "model.norm.weight")
    done = run(folder)
    assert done.exit_code == 1 and "2 problems" in done.stdout.splitlines()[-1]
    for file in (first, last):
        assert f"{file.name} is damaged: its checksum is " in done.stdout
    problems = json.loads(run(folder, "--json").stdout)["problems"]
    assert [problem["where"] for problem in problems] == [first.name, last.name]
    assert run(last).exit_code == 1 and run(shards(folder)[1]).exit_code == 0


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
    assert run(folder, "--add").exit_code == 1 and set(where(folder)) == {INDEX}


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
    done = run(folder)
    assert done.exit_code == 1 and set(where(folder)) == {INDEX}
    assert all(line.startswith(f"{INDEX} is damaged: ") for line in done.stdout.splitlines()[:-1])


@pytest.mark.parametrize("name", ["master", "packed"])
def test_a_config_of_another_model_or_scheme(copy, name):
    folder = copy(name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    done = run(folder)
    assert done.exit_code == 1 and "the model needs" in done.stdout
    config["quantization_config"]["mode"] = {"qat": "packed", "packed": "qat"}[config["quantization_config"]["mode"]]
    (folder / "config.json").write_text(json.dumps(config))
    assert where(folder) == ["config.json"]
    (folder / "config.json").write_text("{")
    assert where(folder) == ["config.json"]


def test_nothing_to_compare(saved, tmp_path):
    done = run(saved["plain"])
    assert (
        done.exit_code == 2
        and "not compared, without checksums: model.safetensors. save_pretrained, hf-mxfp4 pack" in done.stderr
    )
    save_file({"x": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    done = run(tmp_path)
    assert done.exit_code == 2 and "without checksums: adapter_model.safetensors" in done.stderr
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty").exit_code == 2
    done = run(tmp_path / "nowhere")
    assert done.exit_code == 2 and "does not exist" in done.stderr


def test_a_file_of_another_tool_beside_and_among_the_others(copy):
    folder = copy("packed")
    save_file({"x": torch.ones(1)}, folder / "adapter_model.safetensors")
    done = run(folder)
    assert done.exit_code == 0 and "not compared, without checksums: adapter_model.safetensors" in done.stdout
    folder = copy("master")
    forget(folder, shards(folder)[1])
    done = run(folder)
    assert done.exit_code == 2
    assert f"error: not compared, without checksums: {shards(folder)[1].name}. save_pretrained" in done.stderr


def test_adding_checksums(copy):
    folder = copy("master")
    files = shards(folder)
    forget(folder, files[1])
    done = run(folder, "--add")
    assert done.exit_code == 0 and "checksums added to 1 files" in done.stderr, done.stdout
    assert "15 tensors in 4 files" in done.stdout
    flip(files[1], "model.layers.0.mlp.up_proj.weight")
    assert where(folder) == [files[1].name]
    before = files[0].read_bytes()
    done = run(folder, "--add")
    assert done.exit_code == 1 and "no checksums were added to what is damaged" in done.stderr
    assert files[0].read_bytes() == before and where(folder) == [files[1].name]
    done = run(files[0], "--add")
    assert done.exit_code == 2 and "--add writes into a folder" in done.stderr


def test_a_repository(copy, monkeypatch):
    folder = copy("master")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **options: folder)
    done = run("me/model")
    assert done.exit_code == 0 and done.stdout.startswith("me/model: 15 tensors in 4 files"), done.stderr
    flip(shards(folder)[2], "model.norm.weight")
    done = run("me/model")
    assert done.exit_code == 1 and f"{shards(folder)[2].name} is damaged" in done.stdout


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "[" * 100_000),
        (INDEX, '{"metadata": ' + "[" * 100_000),
        (MANIFEST, '{"files": ' + "[" * 100_000),
        (INDEX, '{"metadata": {}, "weight_map": {"x": "a\\u0000b.safetensors"}}'),
        (MANIFEST, '{"files": {"a\\u0000b": 1}}'),
        ("header", "[" * 100_000),
        ("header", '{"a\\u0000b": ' + "[" * 100_000),
    ],
)
def test_hostile_files_are_damage_in_one_line(copy, name, text):
    folder = copy("master")
    if name == "header":
        (folder / shards(folder)[0].name).write_bytes(len(text).to_bytes(8, "little") + text.encode())
    else:
        (folder / name).write_text(text)
    done = run(folder)
    assert done.exit_code == 1 and done.exception.__class__ is SystemExit, done.output
    assert len(done.output.splitlines()) <= 3


def test_what_cannot_be_checked_is_not_damage(copy, monkeypatch):
    def fail(*arguments):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr("hf_mxfp4.checkpoint.manifest.record_of", fail)
    done = run(copy("packed"))
    assert done.exit_code == 2 and "could not be checked: ZeroDivisionError: a mistake" in done.stderr
