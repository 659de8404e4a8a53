# SPDX-License-Identifier: Apache-2.0
"""Records of behaviour: what a comparison finds, and what it accepts."""

import sys

import pytest
import torch
from behaviour.__main__ import differences, main
from behaviour.record import Record


@pytest.fixture
def make(tmp_path):
    """`make(name, change)` writes a small record and gives its folder; ``change`` may alter the tensor and entries."""

    def write(name, tensor=None, text="loss 0.5\nreward 1", leave_out=()):
        record = Record(tmp_path / name, "numbers", tmp_path)
        x = torch.tensor([1.0, -2.0, float("nan")]) if tensor is None else tensor
        record.tensor("x", x)
        record.tensor("nothing", None)
        record.text("log", text)
        record.value("steps", 4)
        for entry in leave_out:
            del record.entries[entry]
        record.save()
        return tmp_path / name

    return write


def found(before, after):
    return [(one.name, one.kind) for one in differences(before, after)]


def test_one_changed_bit(make):
    assert found(make("equal"), make("alike")) == []
    x = torch.tensor([1.0, -2.0, float("nan")])
    x.view(torch.int32)[1] ^= 1
    (difference,) = differences(make("a"), make("b", tensor=x))
    assert (difference.name, difference.kind) == ("numbers/x", "changed")
    assert difference.detail == "1 of 3 elements, max abs difference 2.38e-07 (largest value 2)"


def test_the_command_ends_with_1_where_something_is_unexplained(make, tmp_path, monkeypatch, capsys):
    before, after, intended = make("a"), make("b", text="other"), tmp_path / "intended"
    intended.write_text("numbers/*: meant\n")

    def compare(*options):
        monkeypatch.setattr(sys, "argv", ["behaviour", "compare", str(before), *map(str, options)])
        return main()

    assert compare(before) == 0
    assert compare(after, "--intended", intended) == 0
    intended.write_text("numbers/log\n")
    assert compare(after, "--intended", intended) == 2
    assert "line 1: expected 'GLOB: reason'" in capsys.readouterr().err
    assert compare(tmp_path / "nowhere") == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/nowhere holds no record; make one with")
    assert compare(after) == 1
    assert capsys.readouterr().out.splitlines() == [
        "changed: numbers/log: 3 lines of text",
        "    -loss 0.5",
        "    -reward 1",
        "    +other",
        "1 unexplained differences, 0 intended ones",
    ]


def test_texts_are_recorded_without_what_changes_from_run_to_run(tmp_path):
    record = Record(tmp_path, "texts", tmp_path / "work")
    record.text("a", f'{tmp_path}/work/x "transformers_version": "5.1" on 2026-01-02 12:30:00 in 1.5 s, 3 seconds')
    assert record.entries["a"]["text"] == 'FOLDER/x "transformers_version": "VERSION" on DATE in TIME, TIME'
    record.text("progress", "a\n2 MB of 5 MB (40%), 1.2 MB/s, 629 s left, at x.weight\n5 MB (100%) in 71 s\nb 3 MB\n")
    assert record.entries["progress"]["text"] == "a\nb 3 MB\n"
    with pytest.raises(ValueError, match="texts/a is recorded twice"):
        record.text("a", "")
