# SPDX-License-Identifier: Apache-2.0
"""Components of errors beside the damage of schemes: ranks, what is paired, and the tables."""

import pytest
from tiny_models import make_model

from benchmarks.documents import component_tables
from benchmarks.evidence_components import of_activations, of_weights, relative
from hf_mxfp4.lab import error_statistics
from hf_mxfp4.numerics import QuantScheme


RECORDS = {
    "evidence_components": [
        {
            **{"name": name, "model": "a", "text": "b", "shape": [1, 10], "command": "python x"},
            "weights": dict.fromkeys(component_tables.PARTS, weights),
            "activations": dict.fromkeys(component_tables.PARTS, activations),
        }
        for name, weights, activations in (("one", 0.01, 0.30), ("two", 0.02, 0.20), ("three", 0.03, 0.10))
    ],
    "evidence": [
        {"name": name, "model": "a", "text": text, "variant": variant, "kl": kl}
        for name, text, variant, kl in (
            ("three", "b", "as it is", 0.9),
            ("one", "b", "as it is", 0.5),
            ("two", "b", "as it is", 0.7),
            ("two", "b", "smoothed", 0.1),
            ("two", "c", "as it is", 0.2),
            ("four", "b", "as it is", 0.3),
        )
    ],
}


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(component_tables, "records", RECORDS.__getitem__)


def test_ranks_share_the_mean_of_equal_values():
    assert component_tables.ranks([0.3, 0.1, 0.3, 0.2]) == [3.5, 1.0, 3.5, 2.0]


def test_schemes_by_damage_with_their_components_in_percent(recorded):
    rows = component_tables.evidence_components().splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:5]] == ["`one`", "`two`", "`three`"]
    assert rows[2].split("|")[2:4] == [" 0.500 ", " 1.00 "] and rows[2].split("|")[7] == " 30.00 "


def test_a_component_that_grows_with_the_damage_predicts_it(recorded):
    rows = component_tables.evidence_predictors().splitlines()
    assert rows[2] == "| scale bias | 1.00 | -1.00 | -1.00 |" and rows[-1] == "3 schemes"


def test_components_of_a_model_are_means_over_its_layers():
    model, scheme = make_model("llama"), QuantScheme("rceil")
    found = of_weights(model, [scheme])[scheme]
    layers = [layer.weight for name, layer in model.named_modules() if name.endswith("_proj")]
    expected = relative(error_statistics(weight.detach(), scheme) for weight in layers)
    assert found == pytest.approx(expected) and 0 < found["grid"] < found["total"] < 0.1
    inputs = of_activations(model, [model.dummy_inputs["input_ids"]], [scheme])[scheme]
    assert set(inputs) == set(component_tables.PARTS) and 0 < inputs["total"] < 0.1
