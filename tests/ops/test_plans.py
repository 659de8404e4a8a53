# SPDX-License-Identifier: Apache-2.0
"""A layer that was used computes, after any change of it, as one that is new."""

import copy
import pickle

import pytest
import torch
from passes import passes
from same_bits import assert_same
from torch import nn

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig, cached_weights


def make_layer(seed: int = 0) -> MXFP4Linear:
    torch.manual_seed(seed)
    return MXFP4Linear(64, 48, config=MXFP4RLConfig(), name="up_proj")


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_computes_as_a_new_layer(layer: MXFP4Linear) -> None:
    plain = nn.Linear(64, 48, device="meta")
    plain.weight, plain.bias = nn.Parameter(layer.weight.detach().clone()), nn.Parameter(layer.bias.detach().clone())
    new = MXFP4Linear.from_linear(plain, layer.config, layer.name)
    x = inputs(layer.weight.dtype)
    assert_same(passes(layer, x), passes(new, x))
    with torch.no_grad():
        assert torch.equal(layer(x), new(x))


CHANGES = {
    "another dtype": lambda layer: layer.to(torch.bfloat16),
    "loaded": lambda layer: layer.load_state_dict(make_layer(seed=1).state_dict()),
    "loaded by assignment": lambda layer: layer.load_state_dict(
        make_layer(seed=1).bfloat16().state_dict(), assign=True
    ),
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(make_layer(seed=1).weight.detach())),
    "another parameter in the dictionary": lambda layer: layer._parameters.update(weight=make_layer(seed=1).weight),
    "other memory": lambda layer: setattr(layer.weight, "data", make_layer(seed=1).weight.data),
    "written": lambda layer: layer.weight.data.mul_(2.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_changed(change):
    layer = make_layer()
    passes(layer, inputs())
    with torch.no_grad(), cached_weights(layer):
        layer(inputs())
    CHANGES[change](layer)
    assert_computes_as_a_new_layer(layer)


def test_other_memory_is_noticed_while_a_cache_is_open():
    layer = make_layer()
    with cached_weights(layer):
        before = layer(inputs()).detach()
        layer.weight.data = make_layer(seed=1).weight.data
        assert_computes_as_a_new_layer(layer)
        assert not torch.equal(layer(inputs()), before)


def test_another_spec():
    layer = make_layer()
    passes(layer, inputs())
    other = MXFP4RLConfig(preset="w4a4g4")
    layer.config = other
    layer.state.spec = MXFP4Linear(64, 48, config=other).state.spec
    assert_computes_as_a_new_layer(layer)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_shares_no_plan(copied):
    layer = make_layer()
    layer(inputs())
    other = copied(layer)
    assert other.state.plans == {}
    other.weight.data.mul_(2.0)
    assert_computes_as_a_new_layer(other)
    assert_computes_as_a_new_layer(layer)
