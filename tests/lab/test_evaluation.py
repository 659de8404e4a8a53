# SPDX-License-Identifier: Apache-2.0
"""What an evaluation says: figures, standard errors, the front, the files, and the log that a run resumes from."""

import csv
import json
import math

import pytest
import torch
from tiny_models import make_model

from hf_mxfp4.lab import Evaluation, Row, Score, ScoreLog, evaluate, front_figure, read_schemes, write_evaluation
from hf_mxfp4.lab.reports import evaluation_columns, evaluation_table


TEXTS = [torch.randint(0, 32, (1, n), generator=torch.Generator().manual_seed(n)) for n in (9, 30, 5)]
NAMES = ["rceil", "w4a16:even", "even+mbs128-blockwise+of1@0.1"]


def row(name, nlls, kls=None, same=None):
    counts = (2, 2)
    scheme = None if kls is None else read_schemes([name])[0]
    kls, same = kls or (0.0, 0.0), same or counts
    scores = tuple(Score(*values) for values in zip(counts, nlls, kls, same, strict=True))
    return Row(name, scores, scheme, None if scheme is None else 18.5)


def example():
    rows = (
        row("full precision", (2.0, 4.0)),
        row("rceil", (3.0, 5.5), (1.0, 1.0), (1, 1)),
        row("w4a16:even", (2.5, 4.5), (0.25, 0.75), (2, 1)),
        row("default", (2.5, 4.0), (0.5, 0.25), (2, 2)),
        row("rceil+of0.5", (2.25, 4.25), (0.25, 0.125), (2, 2)),
    )
    return Evaluation("tiny", "test.jsonl", rows, "full precision", {"dtype": "float32", "device": "cpu"})


def test_figures_of_an_evaluation():
    found = example()
    full, rceil, even, default, fallback = found.rows
    assert (full.perplexity, rceil.perplexity) == (pytest.approx(math.exp(1.5)), pytest.approx(math.exp(8.5 / 4)))
    difference = rceil.difference(full)
    # 1 and 1.5 nats of 2 tokens each: paired, the texts' own difficulty does not count.
    assert (difference.value, difference.error) == (0.625, pytest.approx(math.sqrt(2 * 2 * 0.25**2) / 4))
    assert (rceil.kl.value, rceil.kl.error, rceil.same_top) == (0.5, 0.0, 0.5)
    assert found.best is default and default.difference(fallback).value == 0.0
    # Weights alone are another kind than both operands; default is beaten by rceil+of0.5, which has fewer bits.
    assert {kind: [each.name for each in rows] for kind, rows in found.fronts.items()} == {
        "weights and activations": ["rceil", "rceil+of0.5"],
        "weights": ["w4a16:even"],
    }
    data = found.to_dict()
    assert [(each["name"], each.get("bits"), each.get("on_front")) for each in data["rows"]] == [
        ("full precision", None, None),
        ("rceil", 4.25, True),
        ("w4a16:even", 4.25, True),
        ("default", 8.5625, False),
        ("rceil+of0.5", 8.5, True),
    ]
    assert data["differences"]["w4a16:even"]["rceil"]["value"] == -0.375
    cells = dict(zip(evaluation_columns(found), evaluation_table(found)[1], strict=True))
    assert cells["difference, nats"] == "+0.625 ± 0.125" and cells["KL, nats"] == "0.5000 ± 0.0000"
    assert cells["to the best, nats"] == "+0.500 ± 0.250" and cells["weight SQNR dB"] == "18.50"


def test_files_of_an_evaluation(tmp_path):
    found = example()
    paths = write_evaluation(found, tmp_path)
    assert [path.name for path in paths] == ["evaluation.json", "texts.csv", "evaluation.html"]
    assert json.loads(paths[0].read_text())["rows"][1]["kl"] == {"value": 0.5, "standard_error": 0.0}
    lines = list(csv.reader(paths[1].open()))
    assert lines[3] == ["rceil", "0", "2", "3.0", "1.0", "1"] and len(lines) == 1 + 5 * 2
    page = paths[2].read_text()
    for text in ("Perplexity of tiny", "2 texts, 4 predicted tokens of test.jsonl", "w4a16:even *", "data:image/png"):
        assert text in page
    figure = front_figure(found)
    fronts = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].get_lines()}
    assert fronts["front of weights and activations"] == [[4.25, 0.5], [8.5, 0.09375]]
    assert fronts["front of weights"] == [[4.25, 0.25]]
    alone = Evaluation("tiny", "test.jsonl", (found.rows[0],), None, {})
    with pytest.raises(ValueError, match="nothing to plot"):
        front_figure(alone)
    assert evaluation_columns(alone) == ["scheme", "perplexity"] and evaluation_table(alone) == [
        ["full precision", "4.482"]
    ]


def log_of(path):
    return ScoreLog(path, {"model": "tiny"})


def test_an_interrupted_run_goes_on_to_the_same_figures(tmp_path):
    model, schemes, told = make_model("llama"), read_schemes(NAMES), []
    whole = evaluate(model, TEXTS, schemes)
    assert [each.name for each in whole] == ["full precision", *NAMES]

    class Stop(Exception):
        pass

    def stop(count, name):
        told.append((count, name))
        if len(told) == 8:
            raise Stop

    with log_of(tmp_path / "progress.jsonl") as log, pytest.raises(Stop):
        evaluate(model, TEXTS, schemes, log=log, on_tokens=stop)
    assert told[3:] == [(8, "rceil"), (29, "rceil"), (4, "rceil"), (8, "w4a16:even"), (29, "w4a16:even")]
    with open(tmp_path / "progress.jsonl", "ab") as file:
        file.write(b'{"scheme": "torn')
    told.clear()
    with log_of(tmp_path / "progress.jsonl") as log:
        assert evaluate(model, TEXTS, schemes, log=log, on_tokens=lambda *told_of: told.append(told_of)) == whole
    assert sum(count for count, _ in told) == 4 * 41  # what was known counts as done
    before = (tmp_path / "progress.jsonl").read_bytes()
    with log_of(tmp_path / "progress.jsonl") as log:
        assert evaluate(model, TEXTS, schemes[1:], log=log) == (whole[0], *whole[2:])
    assert (tmp_path / "progress.jsonl").read_bytes() == before


def test_another_model_as_the_reference():
    model, other = make_model("llama"), make_model("llama", seed=1)
    first, own, scheme = evaluate(model, TEXTS, read_schemes(["rceil"]), reference=other, reference_name="other")
    assert (first.name, own.name, scheme.name) == ("other", "full precision", "rceil")
    assert first.kl.value == 0.0 < own.kl.value and first.scores[0].nll != own.scores[0].nll
    (plain, _) = evaluate(model, TEXTS, read_schemes(["rceil"]))
    assert [score.nll for score in plain.scores] == [score.nll for score in own.scores]
    with pytest.raises(ValueError, match="stored quantized, so no other scheme"):
        evaluate(model, TEXTS, read_schemes(["rceil"]), stored=True)
    (stored,) = evaluate(model, TEXTS, stored=True)
    assert stored.name == "as stored" and stored.kl is None and stored.same_top is None
    assert stored.perplexity == plain.perplexity
