# SPDX-License-Identifier: Apache-2.0
"""Folders that appear whole or not at all, and the writer of shards in them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from export_files import header_and_data
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hf_mxfp4
from hf_mxfp4.checkpoint import atomic_folder
from hf_mxfp4.checkpoint.io.atomic import FolderError
from hf_mxfp4.checkpoint.io.reader import StoredTensor, read_header, read_rows
from hf_mxfp4.checkpoint.io.writer import ShardWriter, TensorSpec


def contents(folder) -> dict[str, str]:
    return {file.name: file.read_text() for file in Path(folder).iterdir()}


def test_a_folder_appears_at_the_end(tmp_path):
    target = tmp_path / "deep" / "out"
    with atomic_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists() and folder.parent == target.parent
    assert contents(target) == {"a": "1"}
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("existing", [False, True])
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interruption_between_the_two_renames_brings_the_old_folder_back(tmp_path, monkeypatch, error):
    target, rename = tmp_path / "out", Path.rename
    target.mkdir()
    (target / "config.json").write_text("old")

    def interrupted(self, to):
        if ".partial-" in self.name:
            raise error
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(error), atomic_folder(target, overwrite=True) as folder:
        (folder / "config.json").write_text("new")
    assert list(tmp_path.iterdir()) == [target] and contents(target) == {"config.json": "old"}


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
    assert (tmp_path / "link").is_symlink() and contents(tmp_path / "real") == {"a": "1"}


KILLED = """
import itertools, sys
from hf_mxfp4.checkpoint.io.atomic import atomic_folder
print("ready", flush=True)
for i in itertools.count():
    with atomic_folder("out", overwrite=True) as folder:
        for name in ("config.json", "a", "b", "c"):
            (folder / name).write_text(f"{i} " * 2000)
    print("saved", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_a_kill_leaves_nothing_half_written(tmp_path):
    root = Path(hf_mxfp4.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    existed = False
    for trial in range(12):
        with subprocess.Popen(
            [sys.executable, str(program)], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
        ) as process:
            for _ in range(1 + trial % 2):  # every other trial sees one save to its end
                process.stdout.readline()
            time.sleep(0.0025 * trial)
            process.send_signal(signal.SIGKILL)
        # Between the two renames of a replacement the old folder waits, whole, under another name.
        places = [tmp_path / "out"] if (tmp_path / "out").exists() else list(tmp_path.glob(".out.replaced-*"))
        existed = existed or bool(places)
        assert not existed or any(is_whole(contents(place)) for place in places), trial
        if (tmp_path / "out").exists():
            assert is_whole(contents(tmp_path / "out")), trial
    assert existed


def is_whole(found: dict[str, str]) -> bool:
    (text, *others) = found.values() or [""]
    return sorted(found) == ["a", "b", "c", "config.json"] and len(text) >= 4000 and set(others) == {text}


TENSORS = {
    "b.float": torch.arange(6.0).view(2, 3),
    "a.bytes": torch.arange(5, dtype=torch.uint8),
    "c.half": torch.ones(4, dtype=torch.bfloat16),
    "ü.double": torch.tensor(2.5, dtype=torch.float64),
    "d.empty": torch.zeros(0, 3),
    "e.bool": torch.tensor([True, False]),
    "f.long": torch.tensor([1, -1]),
    "g.scale": torch.ones(3).to(torch.float8_e8m0fnu),
}


def specs(tensors):
    return {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_the_writer_writes_what_safetensors_does(tmp_path):
    save_file(TENSORS, tmp_path / "reference.safetensors", {"format": "pt"})
    with ShardWriter(tmp_path, specs(TENSORS)) as writer:
        for name in reversed(TENSORS):
            writer.write(name, TENSORS[name])
    files = [tmp_path / "model.safetensors", tmp_path / "reference.safetensors"]
    assert header_and_data(files[0]) == header_and_data(files[1])
    assert files[0].stat().st_size == files[1].stat().st_size


def test_parts_of_several_tensors_may_take_turns(tmp_path):
    one, other = torch.arange(6.0).view(3, 2), torch.arange(6).view(3, 2)
    with ShardWriter(tmp_path, specs({"one": one, "other": other})) as writer:
        for row in range(3):
            writer.append("other", other[row])
            writer.append("one", one[row])
    loaded = load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded["one"], one) and torch.equal(loaded["other"], other)


def test_tensors_may_come_in_parts_and_from_files(tmp_path):
    save_file(TENSORS, tmp_path / "reference.safetensors", {"format": "pt"})
    with ShardWriter(tmp_path, specs(TENSORS)) as writer:
        for stored in read_header(tmp_path / "reference.safetensors"):
            if stored.name == "b.float":
                writer.write_parts(stored.name, TENSORS[stored.name].split(1))
            else:
                raw = StoredTensor(stored.name, stored.file, torch.uint8, (stored.nbytes,), stored.offset)
                writer.write_parts(stored.name, [read_rows(raw, 0, stored.nbytes).view(stored.dtype)])
    assert header_and_data(tmp_path / "model.safetensors") == header_and_data(tmp_path / "reference.safetensors")


@pytest.mark.parametrize("final", ["12345678901234567890", "123456789012", "1", ""])
def test_metadata_may_shrink_at_the_end(final, tmp_path):
    with ShardWriter(tmp_path, specs(TENSORS), metadata={"k": "12345678901234567890"}) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
        writer.metadata = {"k": final}
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == TENSORS.keys() and torch.equal(loaded["b.float"], TENSORS["b.float"])
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "k": final}


def test_the_writer_finds_mistakes(tmp_path):
    def attempt(name, action):
        (tmp_path / name).mkdir()
        with ShardWriter(tmp_path / name, specs({"x": torch.ones(2, 2), "y": torch.ones(1)})) as writer:
            action(writer)

    with pytest.raises(ValueError, match="2 announced tensors were not written in full, such as x"):
        attempt("missing", lambda writer: None)
    with pytest.raises(ValueError, match=r"x has the shape \[4\], but \[2, 2\] was announced"):
        attempt("shape", lambda writer: writer.write("x", torch.ones(4)))
    with pytest.raises(ValueError, match="x is torch.int32, but torch.float32 was announced"):
        attempt("dtype", lambda writer: writer.write("x", torch.ones(2, 2, dtype=torch.int32)))
    with pytest.raises(ValueError, match="x came as 8 bytes, but 16 were announced"):
        attempt("short", lambda writer: writer.write_parts("x", [torch.ones(1, 2)]))
    with pytest.raises(ValueError, match="x came as .* bytes or more, but 16 were announced"):
        attempt("long", lambda writer: writer.write_parts("x", [torch.ones(2, 2), torch.ones(1, 2)]))
    with pytest.raises(ValueError, match="1 announced tensors were not written in full, such as x"):
        attempt("half", lambda writer: [writer.write("y", torch.ones(1)), writer.append("x", torch.ones(1, 2))])
    with pytest.raises(ValueError, match="z was not announced"):
        attempt("unknown", lambda writer: writer.write_parts("z", []))
    with pytest.raises(ValueError, match="y was written already"):
        attempt("twice", lambda writer: [writer.write("y", torch.ones(1)) for _ in range(2)])
