# SPDX-License-Identifier: Apache-2.0
"""Sections of the GPU benchmark on tiny shapes in Triton's interpreter: that everything runs, and is right."""

import json
import os

import processes
import pytest

from benchmarks.documents import gpu_tables
from benchmarks.gpu.__main__ import SECTIONS
from benchmarks.gpu.machine import INTERPRETER


def run(out, *sections):
    environment = os.environ | {"TRITON_CACHE_DIR": str(out.parent / "cache")}
    only = ["--only", *sections] if sections else []
    job = processes.module("benchmarks.gpu", "--tiny", "--out", out, *only)
    done = processes.run(job, interpret=True, environment=environment, timeout=600, no_warnings=True)
    assert done.returncode == 0, done.output
    return done.stdout


def check(out, text, sections):
    for section in ("ceilings", *sections):
        records = json.loads((out / f"gpu_{section}.json").read_text())
        assert records and {r["hardware"] for r in records} == {INTERPRETER}
        assert {r["reason"] for r in records if r["status"] != "ok"} <= {"bitsandbytes is not installed"}
        measured = [r for r in records if r["status"] == "ok"]
        assert measured and all(r["value"] > 0 and r["tiny"] and "--tiny" in r["command"] for r in measured)
        assert f"\n{section}\n" in text
    assert " 0 failed" in text
    with pytest.raises(ValueError, match="no number to publish"):
        gpu_tables.gpu(out)


def test_quantizing_and_decoding(tmp_path):
    sections = "quantize_pack", "decode_w4a16"
    check(tmp_path / "out", run(tmp_path / "out", *sections), sections)


@pytest.mark.large
def test_every_section(tmp_path):
    check(tmp_path / "out", run(tmp_path / "out"), SECTIONS)
