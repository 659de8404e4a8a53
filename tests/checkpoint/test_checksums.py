# SPDX-License-Identifier: Apache-2.0
"""Checksums of a checkpoint's files: who writes them, and what finds a difference. The oracle hashes with xxhash."""

import json
import threading
from pathlib import Path

import pytest
import torch
from export_files import header_and_data, save_plain
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from xxhash import xxh3_128_hexdigest

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import (
    MANIFEST,
    add_to_folder,
    export,
    import_checkpoint,
    pack_checkpoint,
    read_header,
    verify_folder,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """A plain checkpoint, one of master weights in several files, and one of packed weights."""
    base = tmp_path_factory.mktemp("checksums")
    save_plain(base / "plain", layers=1, hidden=32, intermediate=64)
    model = AutoModelForCausalLM.from_pretrained(base / "plain", quantization_config=MXFP4RLConfig())
    model.save_pretrained(base / "master", max_shard_size="15KB")
    assert len(files_in(base / "master")) > 1
    hf_mxfp4.pack(model).save_pretrained(base / "packed")
    return {name: base / name for name in ("plain", "master", "packed")}


def files_in(folder: Path) -> list[Path]:
    return sorted(Path(folder).glob("*.safetensors"))


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / MANIFEST).read_text())["files"]


def flip_last_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 128
    file.write_bytes(content)


def where(folder: Path) -> list[str]:
    return [problem.where for problem in verify_folder(folder).problems]


def test_whatever_writes_weights_records_them(saved, tmp_path):
    pack_checkpoint(saved["master"], tmp_path / "packed", max_shard_size="10KB")
    export(saved["plain"], tmp_path / "exported", "compressed-tensors")
    export(saved["master"], tmp_path / "bf16", "bf16")
    import_checkpoint(tmp_path / "exported", tmp_path / "imported")
    folders = [saved["master"], saved["packed"], *(tmp_path / n for n in ("packed", "exported", "bf16", "imported"))]
    for folder in folders:
        files = [*files_in(folder), *folder.glob("*.index.json")]
        expected = {
            file.name: {"size": file.stat().st_size, "xxh3_128": xxh3_128_hexdigest(file.read_bytes())}
            for file in files
        }
        assert manifest_of(folder) == expected and not where(folder)


def test_master_weights_are_the_files_of_the_plain_model(saved, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(saved["plain"])
    plain.save_pretrained(tmp_path / "plain", max_shard_size="15KB")
    for file, other in zip(files_in(tmp_path / "plain"), files_in(saved["master"]), strict=True):
        assert (file.read_bytes() == other.read_bytes()) is True
    assert not (tmp_path / "plain" / MANIFEST).exists()


@pytest.mark.parametrize("name", ["master", "packed"])
def test_the_same_model_gives_the_same_bytes(saved, tmp_path, name):
    model = AutoModelForCausalLM.from_pretrained(saved[name])
    for folder in ("one", "two"):
        model.save_pretrained(tmp_path / folder, max_shard_size="10KB")
    files = files_in(tmp_path / "one")
    for file, other in zip(files, files_in(tmp_path / "two"), strict=True):
        assert (file.read_bytes() == other.read_bytes()) is True, file.name
    assert len(files) > 1


def test_adapters_have_none(saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved["packed"])
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    assert not (tmp_path / MANIFEST).exists()


def test_a_second_save_keeps_records_of_other_files(copy):
    folder = copy("packed")
    (folder / "extra.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    add_to_folder(folder)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="10KB")
    assert "model.safetensors" not in manifest_of(folder) and "extra.safetensors" in manifest_of(folder)
    assert len(manifest_of(folder)) > 3 and not where(folder)


@pytest.mark.parametrize("name", ["master", "packed"])
def test_verify_finds_what_loading_does_not_read(copy, name):
    folder = copy(name)
    flip_last_bit(files_in(folder)[-1])
    AutoModelForCausalLM.from_pretrained(folder)
    (problem,) = verify_folder(folder).problems
    assert problem.where == files_in(folder)[-1].name and "its checksum is" in problem.reason


def test_checksums_in_the_headers_of_older_files_are_no_checksums_any_more(copy):
    folder = copy("packed")
    (file,) = files_in(folder)
    header = read_header(file)
    old = {"mxfp4_rl_checksums": "{}", "mxfp4_rl_header_checksum": "0"}
    save_file({tensor.name: tensor.read().clone() for tensor in header.tensors}, file, {**header.metadata, **old})
    (folder / MANIFEST).unlink()
    assert AutoModelForCausalLM.from_pretrained(folder).quantization_report.n_quantized == 7
    assert verify_folder(folder).unchecked == [file.name] and add_to_folder(folder) == [file.name]


def test_adding_leaves_the_files_as_they_are(copy):
    folder = copy("plain")
    before, done = header_and_data(folder / "model.safetensors"), []
    assert add_to_folder(folder, lambda count, name: done.append(count)) == ["model.safetensors"]
    assert sum(done) == (folder / "model.safetensors").stat().st_size
    assert header_and_data(folder / "model.safetensors") == before and not where(folder)
    assert add_to_folder(folder) == []


def test_what_is_recorded_is_not_replaced(copy):
    folder = copy("packed")
    (folder / "more.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    flip_last_bit(folder / "model.safetensors")
    assert add_to_folder(folder) == ["more.safetensors"] and where(folder) == ["model.safetensors"]


def test_saves_into_one_folder_take_turns(saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved["packed"])
    failures = []

    def save():
        try:
            model.save_pretrained(tmp_path, max_shard_size="10KB")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=save) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and not where(tmp_path) and not list(tmp_path.glob(".saving-*"))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight, model.lm_head.weight)
