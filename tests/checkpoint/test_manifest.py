# SPDX-License-Identifier: Apache-2.0
"""Checksums of a checkpoint's files: who writes them, what finds a difference, and which checkpoints of a training run
count as whole. The oracle hashes with xxhash."""

import json
from pathlib import Path

import pytest
from export_files import save_plain
from same_bits import shards
from transformers import AutoModelForCausalLM
from xxhash import xxh3_128_hexdigest

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import MANIFEST, add_to_folder, export, import_checkpoint, pack_checkpoint, verify_folder
from hf_mxfp4.checkpoint.manifest import invalidate, last_complete_checkpoint, why_incomplete, write_whole_manifest


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("checksums")
    save_plain(base / "plain", layers=1, hidden=32, intermediate=64)
    model = AutoModelForCausalLM.from_pretrained(base / "plain", quantization_config=MXFP4RLConfig(smooth=False))
    model.save_pretrained(base / "master", max_shard_size="15KB")
    assert len(shards(base / "master")) > 1
    hf_mxfp4.pack(model).save_pretrained(base / "packed")
    return {name: base / name for name in ("plain", "master", "packed")}


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / MANIFEST).read_text())["files"]


def where(folder: Path) -> list[str]:
    return [problem.where for problem in verify_folder(folder).problems]


def test_whatever_writes_weights_records_them(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_mxfp4.checkpoint.folder.MAX_SHARD_SIZE", "10KB")
    pack_checkpoint(saved["master"], tmp_path / "packed")
    export(saved["plain"], tmp_path / "exported", "compressed-tensors")
    export(saved["master"], tmp_path / "bf16", "bf16")
    import_checkpoint(tmp_path / "exported", tmp_path / "imported")
    folders = [saved["master"], saved["packed"], *(tmp_path / n for n in ("packed", "exported", "bf16", "imported"))]
    for folder in folders:
        files = [*shards(folder), *folder.glob("*.index.json"), folder / "config.json"]
        files += folder.glob("generation_config.json")
        expected = {
            file.name: {"size": file.stat().st_size, "xxh3_128": xxh3_128_hexdigest(file.read_bytes())}
            for file in files
        }
        assert manifest_of(folder) == expected
        assert not where(folder)
    # Next to a config.json, under names that the index does not have.
    export(saved["plain"], tmp_path / "gguf", "gguf")
    model = AutoModelForCausalLM.from_pretrained(saved["master"])
    for size, folder in (("15KB", tmp_path / "sharded"), ("1GB", tmp_path / "whole")):
        model.save_pretrained(folder, variant="bf16", max_shard_size=size)
    for folder, number in (("gguf", 3), ("sharded", 5), ("whole", 3)):
        assert not where(tmp_path / folder)
        assert len(manifest_of(tmp_path / folder)) == number


def test_master_weights_are_the_files_of_the_plain_model(saved, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(saved["plain"])
    plain.save_pretrained(tmp_path / "plain", max_shard_size="15KB")
    for file, other in zip(shards(tmp_path / "plain"), shards(saved["master"]), strict=True):
        assert (file.read_bytes() == other.read_bytes()) is True
    assert not (tmp_path / "plain" / MANIFEST).exists()


def test_a_second_save_keeps_records_of_other_files(copy):
    folder = copy("packed")
    (folder / "extra.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    add_to_folder(folder)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="5KB")
    assert "model.safetensors" not in manifest_of(folder)
    assert "extra.safetensors" in manifest_of(folder)
    assert len(manifest_of(folder)) > 3
    assert not where(folder)


OUTSIDE = '{"files": {"../a": {"size": 1, "xxh3_128": "0"}}}'


@pytest.fixture
def make(tmp_path):
    def checkpoint(step, manifest=True):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "global_step").mkdir(parents=True)
        (folder / "optimizer.pt").write_bytes(b"weights")
        (folder / "global_step" / "shard.pt").write_bytes(b"shard")
        (folder / "README.md").write_text("card")
        (folder / ".draft-0123").write_text("{")  # of a killed process
        if manifest:
            assert write_whole_manifest(folder) == 2
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        return folder

    return checkpoint


def test_a_whole_one_is_taken_until_it_is_written_over_and_its_card_may_change(make):
    folder = make(3)
    (folder / "README.md").write_text("edited by hand")
    (folder / "notes.txt").write_text("added later")
    assert why_incomplete(folder) is None
    invalidate(folder)
    assert why_incomplete(folder) == "it has no trainer_state.json: saving it was not finished"
    assert (folder / "optimizer.pt").is_file()
    invalidate(folder)  # again, or of a new folder: nothing to do


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "trainer_state.json").unlink(), "it has no trainer_state.json: saving it was not finished"),
        (lambda f: (f / "trainer_state.json").write_text('{"global_st'), "its trainer_state.json is cut short"),
        (lambda f: (f / "trainer_state.json").write_text(""), "its trainer_state.json is cut short"),
        (lambda f: (f / "optimizer.pt").write_bytes(b"w"), "optimizer.pt: it has 1 bytes instead of 7"),
        (lambda f: (f / "global_step" / "shard.pt").unlink(), "global_step/shard.pt: it is missing"),
        (lambda f: (f / "mxfp4_manifest.json").write_text("{"), "mxfp4_manifest.json is damaged"),
        (lambda f: (f / "mxfp4_manifest.json").write_text("[]"), "mxfp4_manifest.json is damaged"),
        (lambda f: (f / "mxfp4_manifest.json").write_text(OUTSIDE), "mxfp4_manifest.json is damaged: it names '../a'"),
    ],
)
def test_what_is_damaged_is_said(make, damage, reason):
    folder = make(3)
    damage(folder)
    assert why_incomplete(folder).startswith(reason)


@pytest.mark.parametrize("name", ["optimizer.pt", "global_step/shard.pt", "trainer_state.json"])
def test_a_flipped_bit_is_found_by_checksums(make, tmp_path, name):
    make(2)
    folder = make(3)
    assert write_whole_manifest(folder) == 1  # trainer_state.json, now that it is there
    content = bytearray((folder / name).read_bytes())
    content[-2] ^= 1  # of trainer_state.json, the step
    (folder / name).write_bytes(content)
    assert why_incomplete(folder) is None
    assert why_incomplete(folder, checksums=True).startswith(f"{name} was changed since it was saved")
    assert last_complete_checkpoint(tmp_path, checksums=True) == str(tmp_path / "checkpoint-2")
    (folder / MANIFEST).unlink()
    assert last_complete_checkpoint(tmp_path, checksums=True) == str(folder)


def test_the_newest_whole_one_by_number(make, tmp_path):
    assert last_complete_checkpoint(tmp_path) is None
    assert last_complete_checkpoint(tmp_path / "missing") is None
    for step in (2, 9, 10, 11):
        make(step)
    (tmp_path / "checkpoint-30").write_text("a file")
    (tmp_path / "checkpoint-11" / "optimizer.pt").unlink()
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    make(12, manifest=False)  # of another trainer
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-12")
