# SPDX-License-Identifier: Apache-2.0
"""The benchmark of schemes on a real model: chosen schemes alone, where it goes on, and the table of its records."""

import json
from argparse import Namespace

import pytest
from tiny_models import make_model, make_tokenizer

from benchmarks import evidence
from benchmarks.documents import evidence as tables


@pytest.fixture
def options(tmp_path, monkeypatch):
    folder = tmp_path / "gemma"
    make_model("gemma3_text", layers=1, intermediate=128, vocab_size=400).save_pretrained(folder)
    make_tokenizer("qwen2").save_pretrained(folder)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"Natalia sold {i} clips to her friends."}) + "\n" for i in range(2)))
    monkeypatch.setitem(evidence.CONVERTED, "gemma", "a GGUF file")
    out = tmp_path / "records.json"
    return Namespace(
        model=folder, calibrate=rows, text=rows, samples=2, out=str(out), cores=False, schemes=["rceil", "w8a8"]
    )


def test_chosen_schemes_are_measured_on_each_checkpoint_and_once(options, monkeypatch):
    evidence.run(options)
    with open(options.out) as file:
        found = json.load(file)
    assert [(record["variant"], record["name"]) for record in found] == [
        ("as it is", "rceil"),
        ("as it is", "w8a8"),
        ("smoothed", "rceil"),
        ("smoothed", "w8a8"),
        ("smoothed, GPTQ for H64", "w4a8:even+mbs128-blockwise_fp8, H64"),
    ]
    assert {record["converted_from"] for record in found} == {"a GGUF file"}
    assert found[0]["command"].endswith("--samples 2 --schemes rceil w8a8")
    monkeypatch.setattr(evidence, "compared", None)  # nothing is measured again
    evidence.run(options)


def test_the_table_of_gemma_has_a_column_for_each_variant(monkeypatch):
    entry = {
        "name": "rceil", "text": "gsm8k/test.jsonl", "weight_bits": 4.25, "tensor_cores": ["FP8", "FP4"], "kl": 0.5,
        "value": 9.0, "kl_standard_error": 0.01, "baseline": 7.0, "command": "C", "converted_from": "a GGUF file",
    }  # fmt: skip
    found = [
        entry | {"variant": "as it is"},
        entry | {"variant": "smoothed", "kl": 0.25, "value": 8.0},
        entry | {"variant": "smoothed, GPTQ for H64", "name": "rceil, H64", "kl": 0.125, "value": 7.5},
    ]
    monkeypatch.setattr(tables, "records", lambda name: found)
    lines = tables.gemma().splitlines()
    assert lines[0].endswith("| GSM8K, as it is | GSM8K, smoothed | GSM8K, smoothed, GPTQ for H64 |")
    losses = "0.500 ± 0.010 (9.00) | 0.250 ± 0.010 (8.00) | 0.125 ± 0.010 (7.50)"
    assert lines[2] == f"| `rceil` | 4.25 | FP8 | FP4 | {losses} |"
    assert lines[-1].endswith("`C`; the checkpoint was a GGUF file")
