# SPDX-License-Identifier: Apache-2.0
"""Gradients on their way back through quantized layers, against full precision."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import make_model
from torch import nn

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.analysis.policy.gradient_gain import _loss_and_gradient, decoder_layers, gradient_gain
from hf_mxfp4.analysis.policy.injection import INJECTABLE
from hf_mxfp4.numerics import QuantScheme, decompose_scheme
from hf_mxfp4.quantizer.swap import quantize_linears


DTYPES = [torch.float32, torch.bfloat16]
IDS = torch.tensor([[3, 7, 1, 30, 12, 9], [8, 8, 2, 31, 5, 6]])
#: One value per row and block: 2.2 has the scale 1/2 under rceil (1.36 times the ideal one) and becomes 2.
ONE_VALUE, ITS_QUANTIZED = 2.2, 2.0


def quantized_model(model, config):
    model = copy.deepcopy(model)
    quantize_linears(model, config)
    return model


class Stack(nn.Module):
    """Embedding, bare linear layers, head: a stack whose gradients can be worked out by hand."""

    def __init__(self, layers=3, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width, bias=False)) for _ in range(layers))
        self.lm_head = nn.Linear(width, 8, bias=False)
        for layer in self.layers:
            layer[0].weight.data = torch.eye(width) * ONE_VALUE

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return SimpleNamespace(logits=self.lm_head(hidden))


def test_scale_ratios_are_no_gains():
    """Every weight block has scale ratio 1.36 and the gain 2 / 2.2: only the gain multiplies."""
    model = Stack(layers=3)
    assert decompose_scheme(model.layers[0][0].weight, QuantScheme()).scale_ratio.unique().tolist() == pytest.approx(
        [0.5 * 6 / ONE_VALUE]
    )
    gain = gradient_gain(model, IDS % 8, QuantScheme(), operands="weights", backward_only=True)
    assert [entry.name for entry in gain.depths] == ["output", "layers.2", "layers.1", "layers.0"]
    for depth, entry in enumerate(gain.depths):
        assert entry.depth == depth
        assert entry.log2_gain == pytest.approx(depth * math.log2(ITS_QUANTIZED / ONE_VALUE), abs=1e-6)
        assert entry.cosine == pytest.approx(1, abs=1e-6)
        assert entry.relative_error == pytest.approx(1 - (ITS_QUANTIZED / ONE_VALUE) ** depth, abs=1e-6)
        assert entry.log2_gain_spread == pytest.approx(0, abs=1e-6)
        assert entry.predicted_sd == pytest.approx(math.sqrt(depth / 12))
    assert gain.log2_growth_per_layer == pytest.approx(math.log2(ITS_QUANTIZED / ONE_VALUE), abs=1e-6)
    assert gain.loss == gain.loss_quantized and gain.n_layers == 3


def test_gradients_are_those_of_the_quantized_model():
    """Against hidden states and gradients that transformers itself gives out."""
    model, config = make_model(layers=3), MXFP4RLConfig()
    gradients = []
    for either in (model, quantized_model(model, config)):
        output = either(IDS, labels=IDS, output_hidden_states=True)
        gradients.append(torch.autograd.grad(output.loss, output.hidden_states[:3]))
    gain = gradient_gain(model, IDS, config)
    assert gain.n_layers == 21 and len(gain.depths) == 4
    for index in range(3):
        g, q = (part[index].double().flatten() for part in gradients)
        entry = gain.depths[3 - index]
        assert entry.name == f"model.layers.{index}"
        assert entry.log2_gain == pytest.approx(math.log2(q.norm() / g.norm()), abs=1e-4)
        assert entry.cosine == pytest.approx(F.cosine_similarity(g, q, dim=0).item(), abs=1e-5)
        assert entry.relative_error == pytest.approx(float((q - g).norm() / g.norm()), rel=1e-4)
    assert gain.loss == pytest.approx(model(IDS, labels=IDS).loss.item(), rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_error_no_change_of_gradients(dtype):
    gain = gradient_gain(make_model(dtype=dtype), IDS, QuantScheme(), component="none", backward_only=True)
    assert all((entry.log2_gain, entry.relative_error) == (0, 0) for entry in gain.depths)
    assert all(entry.cosine == pytest.approx(1) for entry in gain.depths)


def test_forward_error_shows_at_depth_zero_only_when_there_is_one():
    model = make_model()
    whole = gradient_gain(model, IDS, QuantScheme())
    back = gradient_gain(model, IDS, QuantScheme(), backward_only=True)
    assert whole.depths[0].relative_error > 1e-4 and back.depths[0].relative_error == 0
    assert whole.loss != whole.loss_quantized and back.loss == back.loss_quantized
    assert back.depths[1].relative_error > 1e-3


def test_the_model_is_left_alone_and_frozen_weights_do_not_matter():
    model = make_model().train()
    expected = gradient_gain(model, IDS, QuantScheme())
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model.requires_grad_(False)
    with torch.no_grad():
        frozen = gradient_gain(model, IDS, QuantScheme())
    assert frozen == expected


def test_labels_select_the_loss():
    model, labels = make_model(), IDS.clone()
    labels[1] = -100
    gain = gradient_gain(model, IDS, QuantScheme(), labels)
    alone = gradient_gain(model, IDS[:1], QuantScheme())
    assert gain.loss == pytest.approx(alone.loss, rel=1e-5)
    assert gain.depths[2].log2_gain == pytest.approx(alone.depths[2].log2_gain, abs=1e-4)
    assert math.isnan(gain.depths[0].log2_gain_spread)  # one sequence with a gradient


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loss_in_parts_has_the_gradient_of_the_whole(monkeypatch, dtype):
    monkeypatch.setattr("hf_mxfp4.analysis.policy.gradient_gain._ROWS", 3)
    logits, targets = torch.randn(8, 5).to(dtype), torch.arange(8) % 5
    whole = logits.clone().requires_grad_(True)
    expected = F.cross_entropy(whole.float(), targets)
    loss, gradient = _loss_and_gradient(logits, targets)
    assert loss == pytest.approx(expected.item(), rel=1e-6) and gradient.dtype == dtype
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, whole)[0])


def test_the_spread_is_over_sequences_that_have_a_gradient():
    model, ids = make_model(), torch.cat([IDS, IDS.flip(1)[:1]])
    labels = ids.clone()
    labels[2] = -100
    each = [gradient_gain(model, IDS[i : i + 1], QuantScheme()).depths[2].log2_gain for i in range(2)]
    spread = gradient_gain(model, ids, QuantScheme(), labels).depths[2].log2_gain_spread
    assert spread == pytest.approx(abs(each[0] - each[1]) / math.sqrt(2), rel=1e-3)


def test_decoder_layers_are_found_by_structure():
    model = make_model(layers=3)
    assert list(decoder_layers(model)) == [f"model.layers.{i}" for i in range(3)]
    model.other = nn.ModuleList([nn.ModuleList([nn.Linear(32, 32)])])
    assert len(decoder_layers(model)) == 3
    with pytest.raises(ValueError, match="no single stack.*no ModuleList"):
        decoder_layers(nn.Sequential(nn.Linear(32, 32)))
    with pytest.raises(ValueError, match="no single stack.*a, b"):
        decoder_layers(nn.ModuleDict({"a": nn.ModuleList([nn.Linear(4, 4)]), "b": nn.ModuleList([nn.Linear(4, 4)])}))


def test_every_component_can_be_asked_for():
    assert INJECTABLE == ("scale_bias", "deadzone", "grid", "all", "none")
    model = make_model(layers=1)
    errors = {c: gradient_gain(model, IDS, QuantScheme(), component=c).depths[1].relative_error for c in INJECTABLE}
    assert errors["none"] == 0 < errors["deadzone"] < errors["grid"]
