# SPDX-License-Identifier: Apache-2.0
"""The benchmark of data that preparation needs: what it draws and records, that it goes on where it stopped, and the
table of its records."""

import json
from argparse import Namespace

import pytest
import torch
from tiny_models import make_model, make_tokenizer

from benchmarks import preparation
from benchmarks.documents import prepared
from benchmarks.preparation import NONE, OWN, RANDOM, TEXT, Calibration


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model("llama", layers=1, hidden=128, intermediate=128, vocab_size=400).save_pretrained(folder)
    make_tokenizer("qwen2").save_pretrained(folder)
    rows = [{"text": f"Natalia sold {i} clips to {48 - i} of her friends in May."} for i in range(3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_calibrations_have_the_shape_and_the_seed_that_they_say(folder):
    original = preparation.load(str(folder), "bfloat16")
    for kind in (RANDOM, OWN):
        first, again, other = (Calibration(kind, 2, 9, seed).batches(original, "") for seed in (1, 1, 2))
        assert [ids.shape for ids in first] == [(1, 9)] * 2
        assert torch.equal(torch.cat(first), torch.cat(again))
        assert not torch.equal(torch.cat(first), torch.cat(other))
    assert [ids.shape for ids in Calibration(TEXT, 2, 9).batches(original, str(folder / "rows.jsonl"))] == [(1, 9)] * 2


@pytest.mark.parametrize("step", ["smoothing", "GPTQ", "distillation"])
def test_a_run_goes_on_where_it_stopped(folder, step, tmp_path, monkeypatch):
    cases = [Calibration(NONE), Calibration(TEXT, 2, 9), Calibration(RANDOM, 2, 9, 1)]
    monkeypatch.setattr(preparation, "SMOOTHED_ON", Calibration(RANDOM, 1, 9, 1))
    monkeypatch.setattr(preparation, "ROWS", 1)
    monkeypatch.setitem(preparation.STEPS, step, (cases, [preparation.W4A8]))
    rows = folder / "rows.jsonl"
    out = tmp_path / "records.json"
    options = Namespace(model=folder, step=step, calibrate=rows, text=[rows], samples=2, out=str(out), cases=1)
    preparation.run(options)
    first = json.loads(out.read_text())
    options.cases = None
    preparation.run(options)
    found = json.loads(out.read_text())
    assert found[:1] == first
    assert [r["calibration"]["kind"] for r in found] == [NONE, TEXT, RANDOM]
    assert len({r["value"] for r in found}) == 3, "each calibration prepares another model"


def entry(kind, seed, kls):
    tokens = [10, 10, 20]
    return {
        "step": "smoothing", "model": "M", "name": "w4a8", "text": "gsm8k/test.jsonl", "value": sum(kls) / sum(tokens),
        "standard_error": 0.01, "kl_by_text": kls, "tokens_by_text": tokens,
        "calibration": {"kind": kind, "rows": 4, "length": 64, "seed": seed},
    }  # fmt: skip


def test_the_table_has_the_mean_over_seeds_and_its_difference_to_texts(monkeypatch):
    found = [
        entry(NONE, 0, [4.0, 4.0, 8.0]),
        entry(TEXT, 0, [2.0, 2.0, 4.0]),
        entry(OWN, 1, [2.1, 2.1, 4.2]),
        entry(RANDOM, 1, [2.0, 2.0, 4.0]),
        entry(RANDOM, 2, [2.4, 2.4, 4.8]),
    ]
    monkeypatch.setattr(prepared, "records", lambda name: found)
    cells = prepared.preparation().splitlines()[-1].strip("| ").split(" | ")
    assert cells[:4] == ["smoothing, 4 x 64", "M", "`w4a8`", "GSM8K"]
    assert cells[4:6] == ["0.400 (+0.200 ± 0.000)", "0.200 ± 0.010"]
    assert cells[6:] == ["0.210 (+0.010 ± 0.000)", "0.220 (+0.020 ± 0.020, 2 seeds)"]
