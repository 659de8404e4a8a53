# SPDX-License-Identifier: Apache-2.0
"""Layers whose weight the model's code reads itself are found in its source."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM, T5Config, T5Model

from hf_mxfp4.weight_readers import find_weight_readers


def project(x, layer, scale=1.0):
    return scale * F.linear(x, layer.weight)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.called = nn.Linear(4, 4), nn.Linear(4, 4)
        self.many = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.is_fused, self.is_slow = True, False


class Direct(Reader):
    def forward(self, x):
        return F.linear(self.called(x), self.read.weight)


class Dtype(Reader):
    def forward(self, x):
        return self.read(self.called(x).to(self.read.weight.dtype))


class Alias(Reader):
    def forward(self, x):
        layer = self.read
        return self.called(x @ layer.weight.t())


class ByFunction(Reader):
    def forward(self, x):
        return project(self.called(x), layer=self.read)


class ByMethod(Reader):
    def forward(self, x):
        return self.called(self.fused(x))

    def fused(self, x):
        return F.linear(x, self.read.weight)


class Inherited(ByMethod):
    def fused(self, x):
        return super().fused(x)


class SwitchedOn(Reader):
    def forward(self, x):
        if self.is_fused and x.dim() == 2:
            return F.linear(x, self.read.weight)
        return self.read(self.called(x))


class InTraining(Reader):
    def forward(self, x):
        if self.training:
            return F.linear(x, self.read.weight)
        return self.read(self.called(x))


class SwitchedOff(Reader):
    def forward(self, x):
        if self.is_slow and self.is_fused:
            return F.linear(x, self.read.weight)
        return self.read(self.called(x))


class NotInForward(Reader):
    def reset(self):
        nn.init.zeros_(self.read.weight)

    def forward(self, x):
        return self.read(x + self.called.bias)


class FromOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = SwitchedOff()

    def forward(self, x):
        return F.linear(self.inner(x), self.inner.read.weight)


@pytest.mark.parametrize("cls", [Direct, Dtype, Alias, ByFunction, ByMethod, Inherited, SwitchedOn, InTraining])
def test_a_weight_that_is_read_is_found(cls):
    model = cls().eval()
    assert list(find_weight_readers(nn.Sequential(model))) == [model.read]


@pytest.mark.parametrize("cls", [SwitchedOff, NotInForward])
def test_a_weight_that_is_not_read_is_not_found(cls):
    assert find_weight_readers(nn.Sequential(cls())) == {}


def test_the_reader_is_named_and_may_be_a_module_around():
    model = FromOutside()
    assert find_weight_readers(model) == {model.inner.read: "FromOutside.forward"}
    model = ByFunction()
    assert find_weight_readers(model) == {model.read: "project"}


class Loop(Reader):
    def forward(self, x):
        for layer in self.many:
            x = F.linear(x, layer.weight)
        return x


class Numbered(Reader):
    def forward(self, x):
        for index, layer in enumerate(self.many):
            x = F.linear(x, layer.weight) + index
        return x


class Index(Reader):
    def forward(self, x):
        return F.linear(x, self.many[0].weight)


@pytest.mark.parametrize("cls", [Loop, Numbered, Index])
def test_elements_of_a_container_are_found(cls):
    model = cls()
    assert set(find_weight_readers(model)) == set(model.many)


def test_models_of_transformers():
    with torch.device("meta"):
        mamba = MambaForCausalLM(MambaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=32))
        t5 = T5Model(T5Config(d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2, vocab_size=32))
        bloom = BloomForCausalLM(BloomConfig(hidden_size=64, n_layer=1, n_head=2, vocab_size=32))
        slow = BloomConfig(hidden_size=64, n_layer=1, n_head=2, vocab_size=32, pretraining_tp=2, slow_but_exact=True)
        slow = BloomForCausalLM(slow)
    mixer = mamba.backbone.layers[0].mixer
    assert set(find_weight_readers(mamba)) == {mixer.x_proj, mixer.dt_proj, mixer.out_proj, mamba.lm_head}
    found = find_weight_readers(t5)
    assert len(found) == 2 and set(found.values()) == {"T5DenseActDense.forward"}
    assert find_weight_readers(bloom) == {}
    block = slow.transformer.h[0]
    assert set(find_weight_readers(slow)) == {block.self_attention.dense, block.mlp.dense_4h_to_h}
