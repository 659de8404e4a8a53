# SPDX-License-Identifier: Apache-2.0
"""Files that are replaced in one step, and files of JSON lines."""

import json
import os
import stat
import threading

import pytest

from hf_mxfp4.files import append_lines, json_clean, lock, one_writer, replace_file, replacing, write_json


def test_a_file_is_replaced_and_its_folder_made(tmp_path):
    path = tmp_path / "new" / "a.txt"
    for content in ("one", b"two", "drei: ä"):
        replace_file(path, content)
        path.chmod(0o640)
    assert path.read_bytes() == "drei: ä".encode() and os.listdir(path.parent) == ["a.txt"]
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
    assert json.loads(path.read_text()) == [1] and os.listdir(tmp_path) == ["a.json"]


def test_drafts_are_never_shared_and_follow_no_link(tmp_path, monkeypatch):
    victim, path = tmp_path / "victim", tmp_path / "folder" / "a"
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
    assert victim.read_text() == "precious" and path.read_bytes() == b"one"


def test_one_writer_at_a_time(tmp_path):
    entered, order = threading.Event(), []

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
    assert order == ["first", "other"] and os.listdir(tmp_path) == []


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
