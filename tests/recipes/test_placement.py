# SPDX-License-Identifier: Apache-2.0
"""The evaluation before RL where FSDP or DeepSpeed leave the model on the CPU: on the accelerator where it fits there,
and otherwise not at all. Memory and moves are made up: the logic needs no GPU."""

import pytest
import torch
from torch import nn

from recipes.post_training import evaluation as placement
from recipes.post_training.evaluation import placed, why_not_on


GPU = torch.device("cuda:0")


class Model(nn.Linear):
    """A hundred float32 weights; where it was moved is noted instead of done."""

    def __init__(self):
        super().__init__(10, 10, bias=False)
        self.moves = []

    def to(self, device):
        self.moves.append(torch.device(device).type)
        return self


@pytest.fixture
def free(monkeypatch):
    """Sets the free memory of the accelerator; its cache is emptied in name alone."""
    emptied = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(1))

    def put(amount):
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (amount, 10**12))
        return emptied

    return put


def test_a_model_that_fits_is_moved_there_and_back(free):
    model, emptied = Model(), free(500)
    assert why_not_on(GPU, model, copies=False) is None
    with pytest.raises(KeyError), placed(model, GPU):
        assert model.moves == ["cuda"]
        raise KeyError
    assert model.moves == ["cuda", "cpu"] and emptied


def test_a_model_that_does_not_fit_with_a_margin_is_refused(free):
    model = Model()
    free(500)  # of 400 bytes of weights and a quarter
    assert why_not_on(GPU, model, copies=False) is None
    free(499)
    assert "free on cuda:0, and it is sharded only when training begins" in why_not_on(GPU, model, copies=False)
    free(999)  # with copies, which may be as large as the weights
    assert "the whole model takes about" in why_not_on(GPU, model, copies=True)
    assert model.moves == []


def test_one_process_without_room_decides_for_all(free, monkeypatch):
    free(10**6)
    monkeypatch.setattr(placement, "gather_object", lambda mine: [*mine, "no room on the other"])
    assert why_not_on(GPU, Model(), copies=False) == "no room on the other"


def test_sharded_and_placed_models_stay(free):
    free(0)
    partitioned = Model()
    partitioned.weight.ds_id = 3  # as DeepSpeed marks it
    for model, device in ((partitioned, GPU), (Model(), torch.device("cpu"))):
        assert why_not_on(device, model, copies=True) is None
        with placed(model, device):
            pass
        assert model.moves == []


def test_a_model_without_memory_is_not_evaluated():
    with torch.device("meta"):
        model = Model()
    assert "read when training begins" in why_not_on(torch.device("cpu"), model, copies=False)
