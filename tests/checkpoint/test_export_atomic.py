# SPDX-License-Identifier: Apache-2.0
"""Folders that appear whole or not at all, and metadata of files that are replaced in place."""

import itertools
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_mxfp4.checkpoint import FolderError, atomic_folder, read_header, write_metadata


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_a_kill_leaves_nothing_half_written(tmp_path):
    out, existed = tmp_path / "out", False
    for trial in range(12):
        if (child := os.fork()) == 0:
            for number in itertools.count():
                with atomic_folder(out, overwrite=True) as folder:
                    for name in ("config.json", "a", "b", "c"):
                        (folder / name).write_text(f"{number} " * 2000)
        time.sleep(0.02 + 0.0025 * trial)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        # Between the two renames of a replacement the old folder waits, whole, under another name.
        places = [out] if out.exists() else list(tmp_path.glob(".out.replaced-*"))
        existed = existed or bool(places)
        assert not existed or any(is_whole(contents(place)) for place in places), trial
        if out.exists():
            assert is_whole(contents(out)), trial
    assert existed


def is_whole(found: dict[str, str]) -> bool:
    (text, *others) = found.values() or [""]
    return sorted(found) == ["a", "b", "c", "config.json"] and len(text) >= 4000 and set(others) == {text}


@pytest.mark.parametrize("final", ["12345678901234567890", "123456789012", "1", ""])
def test_metadata_may_shrink_at_the_end(final, tmp_path):
    tensors = {"b": torch.arange(6.0).view(2, 3), "ü": torch.arange(5, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "x.safetensors", {"k": "12345678901234567890"})
    write_metadata(tmp_path / "x.safetensors", {"k": final})
    loaded, header = load_file(tmp_path / "x.safetensors"), read_header(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert header.metadata == {"k": final}
    with pytest.raises(ValueError, match="the header of x.safetensors has"):
        write_metadata(tmp_path / "x.safetensors", {"k": "1" * 40})
