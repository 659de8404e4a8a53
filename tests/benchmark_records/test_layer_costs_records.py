# SPDX-License-Identifier: Apache-2.0
"""Records of a suggestion: the schemes on texts that were held out, and the dearest parts and those chosen."""

import pytest

from benchmarks import layer_costs
from hf_mxfp4.analysis.perplexity.cost_report import CostReport
from hf_mxfp4.analysis.perplexity.costs import Part, PartCost
from hf_mxfp4.analysis.perplexity.results import Evaluation, Mean, Row
from hf_mxfp4.analysis.perplexity.schemes import read_schemes
from hf_mxfp4.analysis.perplexity.scoring import Score
from hf_mxfp4.analysis.perplexity.suggest import Suggestion


def scores(*kls):
    return tuple(Score(10, 20.0, kl, 5) for kl in kls)


def test_records_of_a_report(monkeypatch):
    monkeypatch.setattr(layer_costs, "KEPT", 1)
    (scheme,) = read_schemes(["w4a16:rceil"])
    parts = [Part(f"layers.{i}", (f"layers.{i}",), (f"layers.{i}",)) for i in range(3)]
    costs = tuple(
        PartCost(part, Mean(0.5, 0.1), Mean(gain, 0.1), 0.25) for part, gain in zip(parts, (3, 2, 1), strict=True)
    )
    suggestion = Suggestion(scheme, (parts[2],), 4.5, 4.5)
    rows = (
        Row("full precision", scores(0.0, 0.0)),
        Row("w4a16:rceil", scores(4.0, 6.0), scheme),
        Row(suggestion.name, scores(1.0, 4.0), suggestion.model_scheme()),
    )
    report = CostReport(
        model="m",
        text="t",
        scheme=scheme,
        unit="module",
        bits=4.25,
        kl=Mean(2.0, 0.1),
        texts=4,
        tokens=40,
        costs=costs,
        suggestion=suggestion,
        held_out=Evaluation("m", "t", rows, "full precision", {}),
        seconds=1.0,
    )
    full, single, chosen, first, last = layer_costs.as_records(report, "weights")
    assert (full["kl"], full["bits"], full["ratio"], full["operands"]) == (None, None, 1.0, "weights")
    assert (single["bits"], single["kl"], chosen["bits"], chosen["kl"]) == (4.25, 0.5, 4.5, 0.25)
    # Less by 3 and by 2 over 20 tokens.
    assert single["suggestion_to_it"] == -0.25 and single["suggestion_to_it_standard_error"] == pytest.approx(0.05)
    assert chosen["suggestion_to_it"] is None and chosen["shape"] == [2, 20]
    assert (first["name"], first["gain"], first["chosen"], first["ratio"]) == ("layers.0", 3, False, 0.25)
    assert (last["name"], last["gain"], last["chosen"], last["shape"]) == ("layers.2", 1, True, [4, 40])
    differences = report.to_dict()["held_out"]["kl_differences"]
    assert list(differences) == ["w4a16:rceil"] and differences["w4a16:rceil"]["value"] == -0.25
