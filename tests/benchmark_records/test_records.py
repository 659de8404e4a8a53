# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: their options, and what every record says of where and when it was made."""

import datetime
import json

import pytest
import torch

from benchmarks.records import RESULTS, made, median_ratio, option_parser, write


def test_every_record_says_machine_versions_command_and_date():
    found = made("python -m benchmarks.x", ("torch", "no-such-package"), "a machine")
    assert list(found) == ["hardware", "versions", "command", "date"]
    assert found["hardware"] == "a machine" and found["command"] == "python -m benchmarks.x"
    assert list(found["versions"]) == ["torch"] and found["versions"]["torch"].startswith(torch.__version__[:3])
    assert found["date"] == datetime.date.today().isoformat()
    assert f"{torch.get_num_threads()} threads" in made("x", ())["hardware"]


def test_records_go_to_the_file_that_is_named_or_nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert option_parser("What it is.\n\nMore.", "memory").parse_args([]).out == str(RESULTS / "memory.json")
    assert option_parser("What it is.").format_help().count("--out") == 0
    write([{"value": 1}], "-")
    assert not list(tmp_path.iterdir())
    write([{"value": 1}], tmp_path / "found")
    assert json.loads((tmp_path / "found").read_text()) == [{"value": 1}]


def test_ratios_are_taken_within_a_round():
    assert median_ratio([2.0, 40.0, 9.0], [1.0, 10.0, 3.0]) == pytest.approx(3.0)
