# SPDX-License-Identifier: Apache-2.0
"""The parts of the benchmark of schemes that its numbers rest on."""

import pytest
import torch
from tiny_models import make_model

from benchmarks.perplexity import losses, mean_loss
from benchmarks.records import records
from benchmarks.scheme_perplexity import SCHEMES, WAYS, as_record, plain_loop, times
from hf_mxfp4.lab import Evaluation, evaluate, read_schemes


TEXTS = [torch.tensor([[3, 5, 7, 9, 2]]), torch.tensor([[4, 6]])]


class Tokenizer:
    """A text of numbers is its tokens."""

    def __call__(self, text, return_tensors):
        return type("Encoding", (), {"input_ids": torch.tensor([[int(word) for word in text.split()]])})


def test_three_loops_over_the_same_texts_agree():
    model = make_model("llama")
    (row,) = evaluate(model, TEXTS)
    assert plain_loop(model, TEXTS) == pytest.approx(row.nats.value, rel=1e-6)
    found = losses(model, Tokenizer(), ["3 5 7 9 2", "4 6"])
    assert mean_loss(found) == pytest.approx(row.nats.value, rel=1e-6)


def test_a_record_has_what_was_found():
    model = make_model("llama")
    evaluation = Evaluation("tiny", "text", evaluate(model, TEXTS, read_schemes(["rceil"])), "full precision", {})
    full, scheme = (as_record(row, evaluation) for row in evaluation.rows)
    assert full["kl"] is None and full["ratio"] == 1.0 and full["shape"] == [2, 5]
    assert scheme["kl"] == evaluation.rows[1].kl.value > 0 and scheme["bits"] == 4.25 and scheme["on_front"]
    assert scheme["ratio"] == pytest.approx(scheme["value"] / full["value"])
    measured = times(model, TEXTS, 2)
    assert [len(seconds) for seconds in measured.values()] == [2, 2]


def test_records_are_of_the_schemes():
    names = [record["name"] for record in records("scheme_perplexity")]
    assert names == ["time in full precision", *(f"memory of {way}" for way in WAYS), "full precision", *SCHEMES]
