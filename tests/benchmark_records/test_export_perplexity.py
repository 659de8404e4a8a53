# SPDX-License-Identifier: Apache-2.0
"""The parts of the perplexity benchmark that its numbers rest on."""

import json
import math

import pytest
import torch
from tiny_models import make_model

import hf_mxfp4
from benchmarks.export_perplexity import difference, sqnr_db
from benchmarks.perplexity import losses, mean_loss, read_texts
from hf_mxfp4.checkpoint import export


class Tokenizer:
    """A text of numbers is its tokens."""

    def __call__(self, text, return_tensors):
        return type("Encoding", (), {"input_ids": torch.tensor([[int(word) for word in text.split()]])})


def test_losses_are_those_of_transformers():
    model = make_model("llama")
    found = losses(model, Tokenizer(), ["3 5 7 9", "4 6"])
    assert [len(one) for one in found] == [3, 1]
    for one, ids in zip(found, ([[3, 5, 7, 9]], [[4, 6]]), strict=True):
        expected = model(torch.tensor(ids), labels=torch.tensor(ids)).loss.item()
        assert math.fsum(one) / len(one) == pytest.approx(expected, rel=1e-5)


def test_means_and_differences():
    assert mean_loss([[1.0, 2.0, 3.0], [6.0]]) == 3.0
    # Totals differ by 1 and by 3 over 4 tokens; two texts with a variance of 2.
    mean, error = difference([[2.0, 2.0, 3.0], [9.0]], [[1.0, 2.0, 3.0], [6.0]])
    assert (mean, error) == (1.0, 0.5)


def test_texts(tmp_path):
    lines = [{"question": f"What is {i}?", "answer": str(i)} for i in range(3)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert read_texts(tmp_path / "test.jsonl", 2) == ["What is 0?\n0", "What is 1?\n1"]
    (tmp_path / "text.txt").write_text("One\ntwo.\n\nThree.\n\n\n")
    assert read_texts(tmp_path / "text.txt", 5) == ["One\ntwo.", "Three."]


def test_the_sqnr_is_against_the_original_whatever_was_in_between(tmp_path):
    make_model("llama", layers=1, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    report = export(tmp_path / "model", tmp_path / "once", "compressed-tensors", scale_rule="rceil")
    once = sqnr_db(tmp_path / "model", tmp_path / "once")
    assert once == pytest.approx(report.total_sqnr_db, abs=1e-6)
    hf_mxfp4.checkpoint.pack_checkpoint(tmp_path / "model", tmp_path / "packed", hf_mxfp4.MXFP4RLConfig(mode="packed"))
    report = export(tmp_path / "packed", tmp_path / "twice", "compressed-tensors", "requantize")
    assert sqnr_db(tmp_path / "model", tmp_path / "twice") < once - 1 < report.total_sqnr_db
