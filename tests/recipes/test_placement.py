# SPDX-License-Identifier: Apache-2.0
"""The evaluation before RL where FSDP or DeepSpeed leave the model on the CPU. Moves are made up: no GPU is needed."""

import pytest
import torch
from torch import nn

from recipes.post_training.evaluation import placed


GPU = torch.device("cuda:0")


class Model(nn.Linear):
    """A small layer; where it was moved is noted instead of done."""

    def __init__(self):
        super().__init__(10, 10, bias=False)
        self.moves = []

    def to(self, device):
        self.moves.append(torch.device(device).type)
        return self


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)


def test_a_model_is_moved_there_and_back():
    model = Model()
    with pytest.raises(KeyError), placed(model, GPU):
        assert model.moves == ["cuda"]
        raise KeyError
    assert model.moves == ["cuda", "cpu"]


def test_a_model_that_does_not_fit_ends_with_a_message():
    model = Model()
    with pytest.raises(SystemExit, match="does not fit on cuda:0, .* --evaluate_before false"), placed(model, GPU):
        raise torch.OutOfMemoryError("no memory left")
    assert model.moves == ["cuda", "cpu"]


def test_sharded_and_placed_models_stay():
    partitioned = Model()
    partitioned.weight.ds_id = 3  # as DeepSpeed marks it
    for model, device in ((partitioned, GPU), (Model(), torch.device("cpu"))):
        with placed(model, device):
            pass
        assert model.moves == []
