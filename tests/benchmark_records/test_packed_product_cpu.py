# SPDX-License-Identifier: Apache-2.0
"""The benchmark of products with packed weights on CPUs: that it runs, compares within a round, and notices a wrong
product."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import packed_product_cpu
from benchmarks.packed_product_cpu import BASELINE, NATIVE, SCHEMES, VARIABLE


def test_it_runs_on_a_small_weight(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    out, threads = tmp_path / "records.json", torch.get_num_threads()
    options = ["--shapes", "64x96", "--rows", "1", "5", "--threads", "1", "--rounds", "2", "--out", str(out)]
    packed_product_cpu.main(options)
    records = json.loads(out.read_text())
    arms = [BASELINE, *SCHEMES]
    assert [(r["name"], r["shape"]) for r in records] == [(arm, [m, 64, 96]) for m in (1, 5) for arm in arms]
    assert all(r["value"] > 0 < r["ratio"] and r["unit"] == "ms" and r["variant"] == NATIVE for r in records)
    assert records[0]["ratio"] == 1 and records[0]["rounds"] == 2 and torch.get_num_threads() == threads


def test_a_ratio_above_one_is_ahead_of_the_baseline(monkeypatch):
    monkeypatch.setenv(VARIABLE, "avx2")
    bench = packed_product_cpu.Bench(3)
    found = bench._records({BASELINE: [2.0, 8.0, 4.0], "other": [1.0, 2.0, 4.0]}, [1, 64, 96], threads=1)
    assert [(r["value"], r["ratio"], r["variant"]) for r in found] == [(4000.0, 1.0, "avx2"), (2000.0, 2.0, "avx2")]


def test_contenders_take_turns_behind_other_memory():
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = packed_product_cpu.measure(runs, 2, lambda: calls.append("fill"))
    assert calls == ["a", "b", *["fill", "a", "fill", "b"] * 2]
    assert [len(seconds) for seconds in times.values()] == [2, 2]


def test_a_wrong_product_is_an_error(monkeypatch):
    expected = torch.ones(4, 4)
    packed_product_cpu.check("a", expected * 1.009, expected, 0.01)
    with pytest.raises(RuntimeError, match="a does not compute the product: relative error 0.011"):
        packed_product_cpu.check("a", expected * 1.011, expected, 0.01)
    with pytest.raises(RuntimeError, match="nan"):
        packed_product_cpu.check("a", expected * torch.nan, expected, 0.01)


def test_each_variant_has_a_process_of_its_own(monkeypatch, tmp_path):
    seen = []

    def run(command, env, check):
        variant, flag, out = command[-3:]
        assert command[-4] == "--variants" and flag == "--out"
        seen.append((variant, env.get(VARIABLE)))
        Path(out).write_text(json.dumps([{"variant": variant}]))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(packed_product_cpu.subprocess, "run", run)
    monkeypatch.setenv(VARIABLE, "portable")
    out = tmp_path / "records.json"
    packed_product_cpu.main(["--variants", "native", "avx2", "--out", str(out)])
    assert seen == [("native", None), ("avx2", "avx2")] and os.environ[VARIABLE] == "portable"
    assert json.loads(out.read_text()) == [{"variant": "native"}, {"variant": "avx2"}]
