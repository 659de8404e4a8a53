# SPDX-License-Identifier: Apache-2.0
"""A save that is killed leaves the old checkpoint or the new one, whole; both for kills at random moments and, one
after the other, at every single change of the folder."""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from processes import run, script
from safetensors.torch import load_file, save_file

from hf_mxfp4.checkpoint import atomic, staged, verify_folder


INDEX = "model.safetensors.index.json"
FILES = ["config.json", "generation_config.json", "mxfp4_manifest.json"]
SHAPES = {"one": 1, "three": 3, "four": 4}


class Killed(BaseException):
    pass


def write(folder: Path, shards: int, number: int) -> None:
    """A checkpoint of 12 tensors that all hold ``number``."""
    names = [f"t{i}" for i in range(12)]
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    if shards == 1:
        save_file({name: torch.tensor([number]) for name in names}, folder / "model.safetensors")
        return
    places = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({n: torch.tensor([number]) for n, place in places.items() if place == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def read(folder: Path) -> set[int]:
    """The numbers in the checkpoint that transformers would load."""
    assert (folder / "config.json").is_file()
    if (folder / "model.safetensors").is_file():
        tensors = load_file(folder / "model.safetensors")
    else:
        places = json.loads((folder / INDEX).read_text())["weight_map"]
        tensors = {name: load_file(folder / file)[name] for name, file in places.items()}
    assert len(tensors) == 12
    return {int(tensor) for tensor in tensors.values()}


def kill_after(monkeypatch, changes: int) -> None:
    """Let so many changes of the folder happen, then none."""
    left = itertools.count(changes, -1)

    def limited(function):
        def change(*args, **kwargs):
            if next(left) <= 0:
                raise Killed
            return function(*args, **kwargs)

        return change

    monkeypatch.setattr(os, "replace", limited(os.replace))
    monkeypatch.setattr(Path, "unlink", limited(Path.unlink))
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)


@pytest.fixture(autouse=True, scope="module")
def no_sync():
    """Power failures are not what is tested here, and waiting for the disk takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic, "sync_to_disk", lambda path: None)
        yield


def save(folder: Path, shards: int, number: int) -> None:
    with staged(folder) as staging:
        write(staging, shards, number)


@pytest.mark.parametrize("new", SHAPES)
@pytest.mark.parametrize("old", SHAPES)
def test_killed_at_every_change(tmp_path, old, new):
    seen, killed = [], True
    for changes in range(30):
        folder = tmp_path / str(changes)
        save(folder, SHAPES[old], 1)
        (folder / "trainer_state.json").write_text("{}")
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, changes)
            try:
                save(folder, SHAPES[new], 2)
                killed = False
            except Killed:
                pass
        assert (folder / "trainer_state.json").is_file()
        seen += read(folder)
        assert not verify_folder(folder).problems
        # What the killed process left does not disturb the next save, of any shape.
        for number, shards in enumerate([4, 3, 3, 1], start=3):
            save(folder, shards, number)
            assert read(folder) == {number}
        assert {path.name for path in folder.iterdir()} == {*FILES, "model.safetensors", "trainer_state.json"}
        if not killed:  # more changes than a save makes: nothing new
            break
    assert not killed and seen == sorted(seen) and set(seen) == {1, 2}


@pytest.mark.parametrize("new", SHAPES)
@pytest.mark.parametrize("old", SHAPES)
def test_nothing_of_the_old_checkpoint_is_left(tmp_path, old, new):
    save(tmp_path, SHAPES[old], 1)
    save(tmp_path, SHAPES[new], 2)
    assert read(tmp_path) == {2}
    others = [path.name for path in tmp_path.iterdir() if "safetensors" not in path.name]
    assert sorted(others) == FILES
    assert len(list(tmp_path.glob("*.safetensors"))) == SHAPES[new]


def test_a_variant_leaves_the_other_weights_alone(tmp_path):
    save(tmp_path, 3, 1)
    with staged(tmp_path, "fp16") as staging:
        save_file({"t0": torch.tensor([2])}, staging / "model.fp16.safetensors")
    assert read(tmp_path) == {1} and (tmp_path / "model.fp16.safetensors").is_file()


def test_saves_at_the_same_time_do_not_remove_each_others_files(tmp_path):
    with staged(tmp_path) as one:
        with staged(tmp_path) as other:
            write(other, 3, 2)
        assert read(tmp_path) == {2} and one.is_dir()
        write(one, 1, 1)
    assert read(tmp_path) == {1} and not list(tmp_path.glob(".saving-*"))


def test_an_exception_leaves_the_folder_as_it_was(tmp_path):
    save(tmp_path, 3, 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RuntimeError), staged(tmp_path) as staging:
        write(staging, 1, 2)
        raise RuntimeError
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.large)])
def test_killed_at_random_moments(tmp_path, count):
    program = Path(__file__).with_name("run_killed_saves.py")
    done = run(script(program, tmp_path, count), no_warnings=True)
    assert done.returncode == 0, done.stderr
    *trials, end = json.loads(done.stdout.splitlines()[-1])
    assert len(trials) == count
    for trial in trials:
        (number,) = trial["numbers"]
        assert number in (trial["finished"], trial["finished"] + 1)
    assert any(trial["left"] for trial in trials)  # some were killed while they were writing
    assert ".saving-" not in " ".join(end["files"]) and "tokenizer.json" in end["files"]


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, checkpoint, monkeypatch):
    import transformers.modeling_utils
    from transformers import AutoModelForCausalLM

    from hf_mxfp4 import MXFP4RLConfig

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
