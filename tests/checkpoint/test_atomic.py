# SPDX-License-Identifier: Apache-2.0
"""Folders that appear whole or not at all, saves that are killed at every change of the folder and at random moments,
metadata of files that are replaced in place; files that are replaced in one step, and files of JSON lines."""

import contextlib
import itertools
import json
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest
import torch
import transformers.modeling_utils
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import (
    FolderError,
    atomic_folder,
    open_checkpoint,
    read_header,
    staged,
    verify_folder,
    write_metadata,
)
from hf_mxfp4.files import append_lines, break_links, json_clean, lock, one_writer, replace_file, replacing, write_json


INDEX = "model.safetensors.index.json"
FILES = ["config.json", "generation_config.json", "mxfp4_manifest.json"]


def contents(folder) -> dict[str, str]:
    return {file.name: file.read_text() for file in Path(folder).iterdir()}


def test_a_folder_appears_at_the_end(tmp_path):
    target = tmp_path / "deep" / "out"
    with atomic_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
        assert folder.parent == target.parent
    assert contents(target) == {"a": "1"}
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(("error", "existing"), [(RuntimeError, True), (KeyboardInterrupt, False)])
def test_after_an_error_all_is_as_before(error, existing, tmp_path):
    target = tmp_path / "out"
    if existing:
        target.mkdir()
        (target / "config.json").write_text("old")
    with pytest.raises(error), atomic_folder(target, overwrite=True) as folder:
        (folder / "config.json").write_text("new")
        raise error
    assert list(tmp_path.iterdir()) == ([target] if existing else [])
    assert not existing or contents(target) == {"config.json": "old"}


def test_an_interruption_between_the_two_renames_brings_the_old_folder_back(tmp_path, monkeypatch):
    target = tmp_path / "out"
    rename = Path.rename
    target.mkdir()
    (target / "config.json").write_text("old")

    def interrupted(self, to):
        if ".partial-" in self.name:
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_folder(target, overwrite=True) as folder:
        (folder / "config.json").write_text("new")
    assert list(tmp_path.iterdir()) == [target]
    assert contents(target) == {"config.json": "old"}


def test_an_empty_folder_is_used_and_a_checkpoint_replaced_on_request_only(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    with atomic_folder(target) as folder:
        (folder / "config.json").write_text("1")
        (folder / "old-shard").write_text("1")
    with pytest.raises(FolderError, match="is not empty"), atomic_folder(target):
        pass
    with atomic_folder(target, overwrite=True) as folder:
        (folder / "config.json").write_text("2")
    assert contents(target) == {"config.json": "2"}
    assert list(tmp_path.iterdir()) == [target]


def test_what_is_no_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("x")
    (tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("x")
    for name, words in (("file", "is a file"), ("notes", "no config.json"), ("run", "the folder checkpoint-1")):
        with pytest.raises(FolderError, match=words), atomic_folder(tmp_path / name, overwrite=True):
            pytest.fail("must not get here")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "notes", "run"]


def test_a_folder_filled_meanwhile_is_not_overwritten(tmp_path):
    target = tmp_path / "out"
    with pytest.raises(FolderError, match="is not empty"), atomic_folder(target) as folder:
        (folder / "config.json").write_text("mine")
        target.mkdir()
        (target / "config.json").write_text("theirs")
    assert contents(target) == {"config.json": "theirs"}


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_folder(tmp_path / "link") as folder:
        (folder / "a").write_text("1")
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "real") == {"a": "1"}


class Killed(BaseException):
    pass


def write(folder: Path, shards: int, number: int) -> None:
    """A checkpoint of 12 tensors that all hold ``number``, as does its config."""
    names = [f"t{i}" for i in range(12)]
    write_json(folder / "config.json", {"number": number}, sort_keys=True)  # as `guard_folder` does
    (folder / "generation_config.json").write_text("{}")
    if shards == 1:
        save_file({name: torch.tensor([number]) for name in names}, folder / "model.safetensors")
        return
    places = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({n: torch.tensor([number]) for n, place in places.items() if place == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def read(folder: Path) -> set[int]:
    """The numbers in the config and in the weights that transformers would load."""
    config = json.loads((folder / "config.json").read_text())
    usual = "model.safetensors" if (folder / "model.safetensors").is_file() else INDEX
    weights = config.get("transformers_weights", usual)
    if weights.endswith(".json"):
        places = json.loads((folder / weights).read_text())["weight_map"]
        tensors = {name: load_file(folder / file)[name] for name, file in places.items()}
    else:
        tensors = load_file(folder / weights)
    assert len(tensors) == 12
    assert all(torch.equal(stored.read(), tensors[name]) for name, stored in open_checkpoint(folder).tensors.items())
    return {config["number"], *(int(tensor) for tensor in tensors.values())}


CHANGES = [(os, "replace"), (os, "rename"), (os, "link"), (Path, "unlink")]


def kill_after(monkeypatch, changes: int) -> None:
    """Let so many changes of the folder happen, then none."""
    left = itertools.count(changes, -1)

    def limited(function):
        def change(*args, **kwargs):
            if next(left) <= 0:
                raise Killed
            return function(*args, **kwargs)

        return change

    for owner, name in CHANGES:
        monkeypatch.setattr(owner, name, limited(getattr(owner, name)))
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)


@pytest.fixture
def no_sync(monkeypatch):
    """Power failures are not what is tested here, and waiting for the disk takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def save(folder: Path, shards: int, number: int) -> None:
    with staged(folder) as staging:
        write(staging, shards, number)


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize(("old", "new"), [(1, 1), (1, 3), (3, 1), (3, 2), (3, 3)])
def test_killed_at_every_change(tmp_path, old, new):
    """Saves of one file or several shards."""
    seen = []
    killed = True
    for changes in range(60):
        folder = tmp_path / str(changes)
        save(folder, old, 1)
        (folder / "trainer_state.json").write_text("{}")
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, changes)
            try:
                save(folder, new, 2)
                killed = False
            except Killed:
                pass
        assert (folder / "trainer_state.json").is_file()
        seen += read(folder)
        assert not verify_folder(folder).problems
        # What the killed process left does not disturb the next save, of any shape.
        for number, shards in enumerate([3, 2, 2, 1], start=3):
            save(folder, shards, number)
            assert read(folder) == {number}
        assert {path.name for path in folder.iterdir()} == {*FILES, "model.safetensors", "trainer_state.json"}
        if not killed:  # more changes than a save makes: nothing new
            break
    assert not killed
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}


def killed_save(folder: Path, changes: int, shards: int, number: int) -> None:
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        kill_after(patch, changes)
        save(folder, shards, number)


@pytest.mark.usefixtures("no_sync")
def test_killed_again_after_a_save_that_was_killed(tmp_path):
    n_pending = 0
    for first in range(20):
        pending = tmp_path / str(first)
        save(pending, 1, 1)
        killed_save(pending, first, 2, 2)
        if "transformers_weights" not in (pending / "config.json").read_text():
            continue
        n_pending += 1
        seen = []
        for second in range(25):
            folder = shutil.copytree(pending, tmp_path / f"{first}-{second}")
            killed_save(folder, second, 1, 3)
            seen += read(folder)
        assert seen == sorted(seen)
        assert set(seen) == {2, 3}
    assert n_pending > 3


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("Operation not supported")

    monkeypatch.setattr(os, "link", fail)
    for number, shards in enumerate([1, 1, 2, 1], start=1):
        save(tmp_path, shards, number)
        assert read(tmp_path) == {number}
    assert {path.name for path in tmp_path.iterdir()} == {*FILES, "model.safetensors"}


def scheme_and_weights(folder: Path) -> tuple[dict | None, dict[str, bytes]]:
    """What transformers loads from a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = getattr(model.config, "quantization_config", None)
    weights = {name: value.numpy().tobytes() for name, value in model.state_dict().items()}
    return None if config is None else config.to_dict(), weights


def save_model(folder: Path, seed: int, scheme: dict | None, shard_size: str) -> None:
    """Save a model, quantized if there is a scheme."""
    plain = folder.with_name(f"{folder.name}-plain")
    model = make_model("qwen2", layers=1, seed=seed)
    if scheme is not None:
        model.save_pretrained(plain)
        model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=MXFP4RLConfig(**scheme))
    model.save_pretrained(folder, max_shard_size=shard_size)


def inodes(folder: Path) -> set[tuple[str, int, int]]:
    """Names of a folder's files and which files they are."""
    entries = [entry for entry in os.scandir(folder) if entry.is_file()]
    return {(entry.name, entry.inode(), entry.stat().st_mtime_ns) for entry in entries}


PACKED = {"mode": "packed"}
FLOOR = {"scale_rule": "floor"}


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize(
    ("old", "new"),
    [((None, "1GB"), (PACKED, "60KB")), ((PACKED, "60KB"), ({}, "1GB")), (({}, "1GB"), (FLOOR, "60KB"))],
    ids=["plain to packed", "packed to trained", "trained to another scheme"],
)
def test_a_killed_save_leaves_the_old_scheme_and_weights_or_the_new_ones(tmp_path, old, new):
    save_model(tmp_path / "old", 1, *old)
    save_model(tmp_path / "new", 2, *new)
    old_loaded = scheme_and_weights(tmp_path / "old")
    new_loaded = scheme_and_weights(tmp_path / "new")
    seen = []
    killed = True
    for changes in range(60):
        folder = tmp_path / str(changes)
        shutil.copytree(tmp_path / "old", folder)
        before = inodes(folder)
        with pytest.MonkeyPatch.context() as patch:
            try:
                with staged(folder) as staging:
                    shutil.copytree(tmp_path / "new", staging, dirs_exist_ok=True)
                    kill_after(patch, changes)
                killed = False
            except Killed:
                pass
        loaded = old_loaded if inodes(folder) == before else scheme_and_weights(folder)
        assert loaded in (old_loaded, new_loaded)
        seen.append(loaded == new_loaded)
        assert not verify_folder(folder).problems
        if not killed:
            break
    assert not killed
    assert seen == sorted(seen)
    assert set(seen) == {False, True}


def test_a_variant_leaves_the_other_weights_alone(tmp_path):
    save(tmp_path, 3, 1)
    with staged(tmp_path, "fp16") as staging:
        save_file({"t0": torch.tensor([2])}, staging / "model.fp16.safetensors")
    assert read(tmp_path) == {1}
    assert (tmp_path / "model.fp16.safetensors").is_file()


def test_saves_at_the_same_time_do_not_remove_each_others_files(tmp_path):
    with staged(tmp_path) as one:
        with staged(tmp_path) as other:
            write(other, 3, 2)
        assert read(tmp_path) == {2}
        assert one.is_dir()
        write(one, 1, 1)
    assert read(tmp_path) == {1}
    assert not list(tmp_path.glob(".saving-*"))


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, checkpoint, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2"), quantization_config=MXFP4RLConfig())
    model.save_pretrained(tmp_path / "saved")
    shutil.copytree(tmp_path / "saved", tmp_path / "copy")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", full)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path / "saved")
    names = sorted(path.name for path in (tmp_path / "copy").iterdir())
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == names
    assert all((tmp_path / "saved" / n).read_bytes() == (tmp_path / "copy" / n).read_bytes() for n in names)


@pytest.mark.parametrize("final", ["12345678901234567890", "1"])
def test_metadata_may_shrink_at_the_end(final, tmp_path):
    tensors = {"b": torch.arange(6.0).view(2, 3), "ü": torch.arange(5, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "x.safetensors", {"k": "12345678901234567890"})
    write_metadata(tmp_path / "x.safetensors", {"k": final})
    loaded = load_file(tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert header.metadata == {"k": final}
    with pytest.raises(ValueError, match="the header of x.safetensors has"):
        write_metadata(tmp_path / "x.safetensors", {"k": "1" * 40})


def test_a_file_is_replaced_and_its_folder_made(tmp_path):
    path = tmp_path / "new" / "a.txt"
    for content in ("one", b"two", "drei: ä"):
        replace_file(path, content)
        path.chmod(0o640)
    assert path.read_bytes() == "drei: ä".encode()
    assert os.listdir(path.parent) == ["a.txt"]
    replace_file(path, "2")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_what_fails_before_the_end_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch, function):
    path = tmp_path / "a.json"
    write_json(path, [1])

    def fail(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match="no space left"):
        write_json(path, [2])
    assert json.loads(path.read_text()) == [1]
    assert os.listdir(tmp_path) == ["a.json"]


def test_drafts_are_never_shared_and_follow_no_link(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    path = tmp_path / "folder" / "a"
    victim.write_text("precious")
    path.parent.mkdir()
    for name in ("a.part", ".draft-00"):
        (path.parent / name).symlink_to(victim)
    with replacing(path) as one, replacing(path) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one"  # whole, and of the last to finish
    monkeypatch.setattr("secrets.token_hex", lambda n: "00")  # a stranger who guessed the name
    with pytest.raises(FileExistsError):
        replace_file(path, "two")
    assert victim.read_text() == "precious"
    assert path.read_bytes() == b"one"


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_lines_reach_no_other_file_through_a_link(tmp_path, link):
    (tmp_path / "other").write_text('{"a": 1}\n')
    link(tmp_path / "log", tmp_path / "other")
    append_lines(tmp_path / "log", [{"a": 2}])
    assert (tmp_path / "other").read_text() == '{"a": 1}\n'
    assert (tmp_path / "log").read_text() == '{"a": 1}\n{"a": 2}\n'


def test_a_link_to_nothing_becomes_a_file(tmp_path):
    (tmp_path / "log").symlink_to(tmp_path / "nothing")
    break_links(tmp_path / "log")
    assert (tmp_path / "log").read_bytes() == b""
    assert os.listdir(tmp_path) == ["log"]


def test_one_writer_at_a_time(tmp_path):
    entered = threading.Event()
    order = []

    def other():
        with one_writer(tmp_path):
            order.append("other")

    thread = threading.Thread(target=other)
    with one_writer(tmp_path):
        thread.start()
        descriptor = os.open(tmp_path, os.O_RDONLY)
        assert not lock(descriptor, wait=False)
        os.close(descriptor)
        entered.wait(0.05)
        order.append("first")
    thread.join(10)
    assert order == ["first", "other"]
    assert os.listdir(tmp_path) == []


def test_the_form_of_json(tmp_path):
    write_json(tmp_path / "a.json", {"b": [1], "a": "ä"}, sort_keys=True)
    assert (tmp_path / "a.json").read_text() == '{\n  "a": "\\u00e4",\n  "b": [\n    1\n  ]\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", float("nan"), allow_nan=False)
    assert json_clean({1: (float("inf"), 0.5)}) == {"1": [None, 0.5]}


def test_lines_are_appended_after_one_that_was_torn(tmp_path):
    path = tmp_path / "log.jsonl"
    append_lines(path, [{"a": 1}, {"a": 2}])
    with path.open("ab") as file:
        file.write(b'{"a":')
    append_lines(path, [{"a": 3}])
    append_lines(path, [])
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n{"a":\n{"a": 3}\n'
