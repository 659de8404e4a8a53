# SPDX-License-Identifier: Apache-2.0
"""Architectures of transformers: each that was tried is right, or refused by name."""

import pytest
import torch

from benchmarks import architectures
from benchmarks.records import records
from hf_mxfp4.model import layer_names


LARGE = ("mamba", "smolvlm")
FOUND = {record["name"]: record for record in records("architectures")}


@pytest.mark.parametrize("name", ["qwen3_moe", "t5", *(pytest.param(each, marks=pytest.mark.large) for each in LARGE)])
def test_an_architecture_of_each_kind_is_right(name):
    assert architectures.try_architecture(name)["outcome"] == "right"


def test_an_architecture_on_conv1d_is_refused():
    found = architectures.try_architecture("gpt2")
    assert found["outcome"] == "refused"
    assert "Conv1D" in found["detail"]


def test_a_layer_that_model_code_goes_around_is_noticed(monkeypatch):
    """T5 casts to the dtype of a weight: with stored bytes there, it cannot be right."""
    monkeypatch.setattr(layer_names, "find_weight_readers", lambda model: {})
    found = architectures.try_architecture("t5")
    assert found["outcome"] == "wrong"
    assert found["detail"].startswith("packed: ")


def test_a_difference_to_the_twin_is_noticed():
    expected = torch.ones(4)
    architectures._compare(expected * (1 + 1e-6), expected)
    for other in (expected * 1.001, expected * float("nan")):
        with pytest.raises(ValueError, match="differ from those of the dequantized model"):
            architectures._compare(other, expected)


@pytest.mark.large
@pytest.mark.parametrize("name", [name for name, record in FOUND.items() if record["outcome"] != "not tried"])
def test_the_record_is_true(name):
    assert architectures.try_architecture(name)["outcome"] == FOUND[name]["outcome"]
