# SPDX-License-Identifier: Apache-2.0
"""Files that are replaced in one step, and files of JSON lines."""

import json
import os

import pytest

from hf_mxfp4.files import append_lines, draft_of, json_clean, replace_file, write_json


def test_a_file_is_replaced_and_its_folder_made(tmp_path):
    path = tmp_path / "new" / "a.txt"
    for content in ("one", b"two", "drei: ä"):
        replace_file(path, content)
    assert path.read_bytes() == "drei: ä".encode() and os.listdir(path.parent) == ["a.txt"]


@pytest.mark.parametrize("sync", [False, True])
def test_what_fails_before_the_end_leaves_the_old_file(tmp_path, monkeypatch, sync):
    path = tmp_path / "a.json"
    write_json(path, [1], sync=sync)

    def fail(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync" if sync else "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write_json(path, [2], sync=sync)
    assert json.loads(path.read_text()) == [1] and json.loads(draft_of(path).read_text()) == [2]


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
