# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints come from, and what is said when there is none."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

from hf_mxfp4.checkpoint import ShardError
from hf_mxfp4.lab import SourceError, open_source


INDEX = "model.safetensors.index.json"


def test_a_sharded_folder(checkpoint):
    folder = Path(checkpoint(shard_size="60KB"))
    source = open_source(str(folder))
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) > 2 and list(source.expected) == files
    assert (source.name, source.kind) == (folder.name, "folder")
    assert source.config["model_type"] == "qwen2"
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    assert {name: shard for shard, names in source.expected.items() for name in names} == index
    assert source.path(files[0]) == folder / files[0]


def test_a_folder_of_one_file_and_that_file_itself(checkpoint):
    folder = Path(checkpoint())
    source = open_source(str(folder))
    assert source.expected == {"model.safetensors": ()}
    alone = open_source(str(folder / "model.safetensors"))
    assert (alone.name, alone.kind, alone.expected) == ("model", "file", source.expected)
    assert alone.config == source.config


def test_files_beside_the_model_are_left_alone(checkpoint):
    folder = Path(checkpoint())
    save_file({"w": torch.ones(2, 2)}, folder / "consolidated.safetensors")
    assert list(open_source(str(folder)).expected) == ["model.safetensors"]


def test_a_folder_without_an_index(tmp_path):
    for name in ("b", "a"):
        save_file({name: torch.ones(2, 2)}, tmp_path / f"{name}.safetensors")
    assert list(open_source(str(tmp_path)).expected) == ["a.safetensors", "b.safetensors"]


def test_a_missing_shard_is_told_when_it_is_asked_for(checkpoint):
    folder = Path(checkpoint(shard_size="60KB"))
    source = open_source(str(folder))
    name = list(source.expected)[1]
    (folder / name).unlink()
    assert open_source(str(folder)).expected == source.expected
    with pytest.raises(ShardError, match=f"{name} is missing"):
        source.path(name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: d / "gone", "does not exist; give a checkpoint's folder, a .safetensors file or a hub id"),
        (lambda d: d, "holds no .safetensors file$"),
        (lambda d: (d / "pytorch_model.bin").touch() or d, "it has .bin files: convert them to safetensors first"),
        (lambda d: (d / "m.gguf").touch() or d / "m.gguf", "is not a .safetensors file"),
        (lambda d: (d / INDEX).write_text('{"weight_map": {}}') and d, "no usable weight_map"),
        (lambda d: (d / INDEX).write_text("{") and d, "cannot be read"),
        (lambda d: (d / INDEX).write_text('{"weight_map": {"w": "../x.safetensors"}}') and d, "outside of its folder"),
        (lambda d: (d / "config.json").write_text("[]") and d, "config.json is not a JSON object"),
    ],
)
def test_nothing_to_analyse(tmp_path, make, message):
    with pytest.raises(SourceError, match=message):
        open_source(str(make(tmp_path)))


def test_an_adapter_is_no_model(tmp_path):
    save_file({"w": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(SourceError, match="holds an adapter"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("name", ["./gone", "/gone", "a/b/c", "with space"])
def test_no_hub_is_asked_for_what_cannot_be_an_id(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    with pytest.raises(SourceError, match="does not exist"):
        open_source(name)


def test_a_model_on_the_hub(checkpoint, monkeypatch):
    folder, asked = Path(checkpoint(shard_size="60KB")), []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **options: asked.append(options) or folder)
    source = open_source("someone/model")
    assert (source.name, source.kind) == ("someone/model", "hub")
    assert source.expected == open_source(str(folder)).expected and source.folder == folder
    assert asked == [{"allow_patterns": ["*.safetensors", "*.json"], "ignore_patterns": ["*/*", "consolidated*"]}]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("offline"), "not in the local cache, and the Hub cannot be reached"),
        (OSError("404: nobody/nothing"), "404: nobody/nothing"),
    ],
)
def test_what_the_hub_lacks(error, message, monkeypatch):
    def download(repo, **options):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(SourceError, match=f"neither a local path nor a readable model on the Hub: .*{message}"):
        open_source("nobody/nothing")
