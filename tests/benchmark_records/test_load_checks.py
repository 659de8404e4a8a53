# SPDX-License-Identifier: Apache-2.0
"""The benchmark of checking at load measures both kinds of checkpoints, with and without, and leaves the check on."""

import json
import os
import sys

from tiny_models import make_model

from benchmarks import load_checks


def test_both_checkpoints_from_memory_and_from_the_disk(tmp_path, monkeypatch):
    make_model("qwen2", layers=1).save_pretrained(tmp_path / "model")
    monkeypatch.setenv("HF_MXFP4_VERIFY", "0")
    out = tmp_path / "found.json"
    arguments = ["load_checks", str(tmp_path / "model"), "--rounds", "2", "--out", str(out), "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    seen, seconds_of = [], load_checks.seconds_of
    monkeypatch.setattr(load_checks, "seconds_of", lambda *args: seen.append(args[1:]) or seconds_of(*args))
    load_checks.main()
    assert os.environ["HF_MXFP4_VERIFY"] == "1"
    state = [("in the cache", True), ("in the cache", False)]
    turns = [(False, True), (True, False)]
    assert seen[:6] == [*state, *(("in the cache", checked) for turn in turns for checked in turn)]
    records = json.loads(out.read_text())
    names = [record["name"].split(" / ") for record in records]
    assert len(records) == 8 and {name[0].split(",")[0] for name in names} == {"master", "packed"}
    assert {tuple(name[1:]) for name in names} == {(a, b) for a in load_checks.STATES for b in load_checks.MEASURED}
    assert all(record["value"] > 0 < record["check_alone"] and record["bytes"] > 1000 for record in records)
