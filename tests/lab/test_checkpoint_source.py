# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints come from, and what is said when there is none."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import save_file

from hf_mxfp4.checkpoint.io.reader import ShardError
from hf_mxfp4.lab.errors.source import INDEX, SourceError, open_source


def test_a_sharded_folder(checkpoint):
    folder = Path(checkpoint(shard_size="60KB"))
    source = open_source(str(folder))
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) > 2 and source.shards == tuple(files)
    assert (source.name, source.kind) == (folder.name, "folder")
    assert source.config["model_type"] == "qwen2"
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    assert {name: shard for shard, names in source.expected.items() for name in names} == index
    assert source.path(files[0]) == folder / files[0]


def test_a_folder_of_one_file_and_that_file_itself(checkpoint):
    folder = Path(checkpoint())
    source = open_source(str(folder))
    assert source.shards == ("model.safetensors",) and source.expected == {}
    alone = open_source(str(folder / "model.safetensors"))
    assert (alone.name, alone.kind, alone.shards) == ("model", "file", source.shards)
    assert alone.config == source.config


def test_files_beside_the_model_are_left_alone(checkpoint):
    folder = Path(checkpoint())
    save_file({"w": torch.ones(2, 2)}, folder / "consolidated.safetensors")
    assert open_source(str(folder)).shards == ("model.safetensors",)


def test_a_folder_without_an_index(tmp_path):
    for name in ("b", "a"):
        save_file({name: torch.ones(2, 2)}, tmp_path / f"{name}.safetensors")
    assert open_source(str(tmp_path)).shards == ("a.safetensors", "b.safetensors")


def test_a_missing_shard_is_told_when_it_is_asked_for(checkpoint):
    folder = Path(checkpoint(shard_size="60KB"))
    source = open_source(str(folder))
    (folder / source.shards[1]).unlink()
    assert open_source(str(folder)).shards == source.shards
    with pytest.raises(ShardError, match=f"{source.shards[1]} is missing"):
        source.path(source.shards[1])


def test_identity_changes_with_the_file(checkpoint):
    folder = Path(checkpoint())
    source = open_source(str(folder))
    file = source.path("model.safetensors")
    before = source.identity(file)
    assert source.identity(file) == before
    file.write_bytes(file.read_bytes()[:-1])
    assert source.identity(file) != before


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
def test_no_hub_is_asked_for_what_cannot_be_an_id(name):
    def download(repo, file):
        raise AssertionError("asked the hub")

    with pytest.raises(SourceError, match="does not exist"):
        open_source(name, download)


class Hub:
    """A downloader that serves a folder and remembers what it was asked for."""

    def __init__(self, folder, cache):
        self.folder, self.cache, self.asked = Path(folder), cache, []

    def __call__(self, repo, file):
        self.asked.append((repo, file))
        if not (self.folder / file).is_file():
            raise EntryNotFoundError(f"404: {file}")
        self.cache.mkdir(exist_ok=True)
        return shutil.copy(self.folder / file, self.cache / file)


def test_hub_files_come_one_by_one(checkpoint, tmp_path):
    folder = checkpoint(shard_size="60KB")
    hub = Hub(folder, tmp_path / "cache")
    source = open_source("someone/model", hub)
    assert (source.name, source.kind) == ("someone/model", "hub")
    assert hub.asked == [("someone/model", "config.json"), ("someone/model", INDEX)]
    assert source.shards == open_source(folder).shards
    assert source.total_bytes == json.loads(Path(folder, INDEX).read_text())["metadata"]["total_size"]
    source.path(source.shards[0])
    assert hub.asked[2:] == [("someone/model", source.shards[0])]


def test_a_hub_model_of_one_file(checkpoint, tmp_path):
    source = open_source("someone/model", Hub(checkpoint(), tmp_path / "cache"))
    assert source.shards == ("model.safetensors",)
    assert source.path("model.safetensors").is_file()


def test_what_the_hub_lacks(checkpoint, tmp_path):
    folder = Path(checkpoint(shard_size="60KB"))
    source = open_source("someone/model", Hub(folder, tmp_path / "cache"))
    (folder / source.shards[0]).unlink()
    with pytest.raises(ShardError, match=f"someone/model has no {source.shards[0]}"):
        source.path(source.shards[0])
    with pytest.raises(SourceError, match="neither a local path nor a readable model on the hub"):
        open_source("nobody/nothing", Hub(tmp_path, tmp_path / "cache"))


def test_no_network():
    def download(repo, file):
        raise LocalEntryNotFoundError("offline")

    with pytest.raises(SourceError, match="config.json of someone/model is not in the local cache"):
        open_source("someone/model", download)
