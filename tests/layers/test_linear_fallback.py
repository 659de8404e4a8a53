# SPDX-License-Identifier: Apache-2.0
"""Layers with selective outlier fallback, and with weights in blocks of 32 x 32."""

import copy
import math
import pickle

import pytest
import torch
from factors import factors_config
from tiny_models import make_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_mxfp4 import MXFP4Linear
from hf_mxfp4.layers import cached_weights, fallback_thresholds, update_fallback_thresholds
from hf_mxfp4.numerics import apply_scheme, fake_quantize
from hf_mxfp4.quantizer.swap import quantize_linears


RATE = 0.25
OPTIONS = {"macro_block": 128, "outlier_fallback": 0.5, "fallback_rate": RATE}


def make_layer(in_features=128, out_features=48, seed=0, **options):
    torch.manual_seed(seed)
    options = {"outlier_fallback_rate": RATE, "macro_search": "static", **options}
    return MXFP4Linear(in_features, out_features, config=factors_config(**options))


def batch(rows=64, seed=1, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 128, generator=generator) * torch.randn(rows, 1, generator=generator).exp() * scale


def quantized_input(layer, x):
    return layer.quantized_input(x, x.dtype)


def test_weights_and_the_first_input_have_the_exact_share():
    layer, x = make_layer(), batch()
    weight = fake_quantize(layer.weight.detach(), **OPTIONS)
    assert torch.equal(layer.quantized_weight(layer.weight, torch.float32), weight)
    assert not torch.equal(weight, fake_quantize(layer.weight.detach(), macro_block=128, outlier_fallback=0.5))
    assert torch.equal(quantized_input(layer, x), fake_quantize(x, **OPTIONS))
    assert update_fallback_thresholds(layer) == RATE
    assert torch.allclose(make_layer()(x), fake_quantize(x, **OPTIONS) @ weight.T + layer.bias, atol=1e-5)


def test_the_threshold_stands_still_within_a_step():
    layer, x = make_layer(), batch()
    first = quantized_input(layer, x)
    start = layer.fallback_threshold.value
    for scale in (0.01, 100.0):
        quantized_input(layer, batch(seed=2, scale=scale))
    with torch.no_grad(), cached_weights():
        layer(batch(seed=3, scale=1000.0))
    assert layer.fallback_threshold.value == start
    assert torch.equal(quantized_input(layer, x), first)
    assert update_fallback_thresholds(layer) > 1.25 * RATE
    assert layer.fallback_threshold.value == 1.3 * start
    scheme = layer.config.activation_scheme
    assert torch.equal(quantized_input(layer, x), apply_scheme(x, scheme, fallback_threshold=1.3 * start))


def test_counts_of_all_layers_are_read_at_once(monkeypatch):
    """Reading a number waits for a GPU: once per step, not once per layer."""
    model = nn.Sequential(make_layer(), make_layer(seed=1), make_layer(seed=2), nn.Identity())
    for seed, layer in enumerate(model[:2]):
        quantized_input(layer, batch(seed=seed))
        quantized_input(layer, batch(seed=seed, scale=100.0 * seed))
    expected = [int(layer.fallback_threshold._selected) for layer in model[:2]]
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or tolist(tensor))
    monkeypatch.setattr(torch.Tensor, "__int__", None)
    monkeypatch.setattr(torch.Tensor, "item", None)
    rate = update_fallback_thresholds(model)
    assert reads == [(2,)]
    blocks = 2 * 64 * 128 // 32
    assert rate == sum(expected) / (2 * blocks) and expected[0] != expected[1]
    assert model[2].fallback_threshold.value is None


class Recorder(nn.Module):
    """A layer that keeps what its input was quantized to, at every pass."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = make_layer(128, 128), []

    def forward(self, x):
        self.seen.append(self.layer.fallback_threshold.value)
        return self.layer(x).relu()


@pytest.mark.parametrize("steps", [1, 4])
def test_recomputation_under_gradient_checkpointing_is_exact(steps):
    gradients = []
    for recompute in (False, True):
        block = Recorder()
        for step in range(steps):
            x = batch(seed=step, scale=3.0**step).requires_grad_()
            block.zero_grad()
            y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            # Another pass between forward and backward, as of the next micro-batch.
            block(batch(seed=9, scale=7.0))
            y.square().sum().backward()
            update_fallback_thresholds(block)
        gradients.append((x.grad, block.layer.weight.grad))
        thresholds = block.seen
        assert len(set(thresholds[1:])) >= steps, "it moves between steps"
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)
    if steps > 1:
        assert thresholds[-1] == thresholds[-3], "the recomputed pass ran on the threshold of its first"


def test_gradients_pass_straight_through():
    layer, x = make_layer(), batch().requires_grad_()
    layer(x).sum().backward()
    weight = fake_quantize(layer.weight.detach(), **OPTIONS)
    assert torch.allclose(x.grad, weight.sum(dim=0).expand_as(x), atol=1e-5)
    assert torch.allclose(layer.weight.grad, fake_quantize(x.detach(), **OPTIONS).sum(dim=0).expand(48, 128), atol=1e-4)


def test_the_threshold_is_no_saved_state():
    layer, plain = make_layer(), make_layer(outlier_fallback_rate=None)
    layer(batch())
    assert list(layer.state_dict()) == list(plain.state_dict()) == ["weight", "bias"]
    assert not list(layer.buffers())
    layer.load_state_dict(plain.state_dict())
    assert plain.fallback_threshold is None


def test_copies_keep_it():
    layer, x = make_layer(), batch()
    layer(x)
    value = layer.fallback_threshold.value
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.fallback_threshold.value == value
        assert torch.equal(other(x), layer(x))
        other(batch(seed=5, scale=100))
        update_fallback_thresholds(other)
        assert other.fallback_threshold.value != value == layer.fallback_threshold.value


@pytest.mark.parametrize(
    "options",
    [{"outlier_fallback_rate": None}, {"preset": "w4a16"}, {"outlier_fallback_operands": "weights"}],
    ids=["no-rate", "weight-only", "weights"],
)
def test_layers_without_selective_activations_have_no_threshold(options):
    layer = make_layer(**options)
    layer(batch())
    assert layer.fallback_threshold is None and fallback_thresholds(layer) == []
    with pytest.raises(ValueError, match="MXFP4Linear has no layer with selective.*set outlier_fallback_rate"):
        update_fallback_thresholds(layer)


def test_weights_without_selection_beside_selective_activations():
    layer = make_layer(outlier_fallback_operands="activations")
    weight = layer.quantized_weight(layer.weight, torch.float32)
    assert torch.equal(weight, fake_quantize(layer.weight.detach(), macro_block=128))
    assert len(fallback_thresholds(layer)) == 1


def test_a_model_reports_the_mean_rate_of_the_layers_that_ran():
    layers = nn.Sequential(make_layer(128, 128), make_layer(128, 128, seed=1), nn.Linear(128, 4))
    unused = make_layer()
    model = nn.ModuleDict({"layers": layers, "unused": unused})
    assert math.isnan(update_fallback_thresholds(model))
    layers(batch())
    assert update_fallback_thresholds(model) == RATE
    layers(batch())
    layers[0](batch(seed=2, scale=100.0))
    first, second = 0.625, RATE  # all blocks of the second batch exceed the threshold of the first
    assert update_fallback_thresholds(model) == pytest.approx((first + second) / 2, abs=0.01)
    assert unused.fallback_threshold.value is None


def test_rate_is_held_in_a_layer():
    layer, rates = make_layer(), []
    for step in range(60):
        with torch.no_grad():
            layer(batch(seed=step, scale=10 ** (step / 60)))
        rates.append(update_fallback_thresholds(layer))
    assert sum(rates) / len(rates) == pytest.approx(RATE, rel=0.25)


def test_other_backends_refuse():
    layer = make_layer(backend="triton")
    with pytest.raises(ValueError, match="backend='triton' cannot quantize here: the tensor is on cpu"):
        quantized_input(layer, batch())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype):
    layer, x = make_layer().to(dtype), batch().to(dtype)
    assert layer(x).dtype == dtype
    assert torch.equal(quantized_input(layer, x), fake_quantize(x, **OPTIONS))


def test_inference_and_training_count_alike():
    layer, x = make_layer(), batch()
    with torch.inference_mode():
        layer(x)
    layer(x.requires_grad_()).sum().backward()
    assert update_fallback_thresholds(layer) == RATE


def test_all_layers_of_a_model_have_one():
    model = make_model()
    names, _ = quantize_linears(model, factors_config(outlier_fallback_rate=0.2))
    assert len(fallback_thresholds(model)) == len(names)
    model(torch.arange(8).view(1, 8))
    assert all(threshold.value > 0 for threshold in fallback_thresholds(model))
    assert 0 < update_fallback_thresholds(model) < 0.4


# ---- weights in blocks of 32 x 32 --------------------------------------------------------------------------------


def test_square_blocks_are_those_of_the_weight_alone():
    layer = make_layer(weight_block="32x32", macro_block=None, outlier_fallback=None, outlier_fallback_rate=None)
    weight, x = layer.weight.detach(), batch()
    quantized = layer.quantized_weight(layer.weight, torch.float32)
    assert torch.equal(quantized, fake_quantize(weight, block_rows=32))
    assert torch.equal(fake_quantize(weight.T, block_rows=32).T, quantized)
    assert torch.equal(quantized_input(layer, x), fake_quantize(x))
    assert "32x32" in repr(layer)


def test_a_plain_layer_of_square_blocks_has_their_values():
    layer = make_layer(weight_block="32x32")
    plain = layer.to_linear()
    assert torch.equal(plain.weight, layer.quantized_weight(layer.weight, torch.float32))
    assert torch.equal(plain.weight, fake_quantize(layer.weight.detach(), block_rows=32, **OPTIONS))
