# SPDX-License-Identifier: Apache-2.0
"""Layers with selective outlier fallback, and with weights in blocks of 32 x 32."""

import copy
import pickle

import pytest
import torch
from factors import factors_config
from torch.utils.checkpoint import checkpoint

from hf_mxfp4 import MXFP4Linear
from hf_mxfp4.layers import cached_weights, fallback_thresholds, update_fallback_thresholds
from hf_mxfp4.numerics import fake_quantize


RATE = 0.25
OPTIONS = {"macro_block": 128, "outlier_fallback": 0.5, "fallback_rate": RATE}


def make_layer(in_features=256, out_features=48, seed=0, **options):
    torch.manual_seed(seed)
    options = {"outlier_fallback_rate": RATE, "macro_search": "static", **options}
    return MXFP4Linear(in_features, out_features, config=factors_config(**options))


def batch(rows=64, seed=1, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 256, generator=generator) * torch.randn(rows, 1, generator=generator).exp() * scale


def quantized_input(layer, x):
    return layer.quantized_input(x, x.dtype)


def test_weights_and_inputs_have_the_share_of_blocks():
    layer, x = make_layer(), batch()
    weight = fake_quantize(layer.weight.detach(), **OPTIONS)
    assert torch.equal(layer.quantized_weight(layer.weight, torch.float32), weight)
    assert not torch.equal(weight, fake_quantize(layer.weight.detach(), macro_block=128, outlier_fallback=0.5))
    assert torch.equal(quantized_input(layer, x), fake_quantize(x, **OPTIONS))
    assert torch.allclose(make_layer()(x), fake_quantize(x, **OPTIONS) @ weight.T + layer.bias, atol=1e-4)


def test_a_row_does_not_depend_on_what_the_layer_saw():
    layer, x = make_layer(), batch()
    expected = layer(x)
    for scale in (0.01, 100.0):
        layer(batch(seed=2, scale=scale))
    with torch.no_grad(), cached_weights(layer):
        layer(batch(seed=3, scale=1000.0))
    assert torch.equal(layer(x), expected)
    torch.testing.assert_close(layer(torch.cat([batch(seed=4, scale=50.0), x]))[64:], expected, rtol=1e-6, atol=1e-5)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), expected)


def test_the_names_of_the_version_with_thresholds():
    layer = make_layer()
    assert fallback_thresholds(layer) == {} and list(layer.state_dict()) == ["weight", "bias"]
    with pytest.raises(RuntimeError, match="has no thresholds; remove this call"):
        update_fallback_thresholds(layer)


def test_recomputation_under_gradient_checkpointing_is_exact():
    gradients = []
    for recompute in (False, True):
        layer, x = make_layer(256, 256), batch().requires_grad_()
        y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        # Another pass between forward and backward, as of the next micro-batch.
        layer(batch(seed=9, scale=7.0))
        y.square().sum().backward()
        gradients.append((x.grad, layer.weight.grad))
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_gradients_pass_straight_through():
    layer, x = make_layer(), batch().requires_grad_()
    layer(x).sum().backward()
    weight = fake_quantize(layer.weight.detach(), **OPTIONS)
    assert torch.allclose(x.grad, weight.sum(dim=0).expand_as(x), atol=1e-5)
    assert torch.allclose(layer.weight.grad, fake_quantize(x.detach(), **OPTIONS).sum(dim=0).expand(48, 256), atol=1e-4)


def test_stochastic_rounding_of_selected_blocks_repeats_within_a_step():
    layer = make_layer(macro_block=None, fprop={"x": "rceil+of1@0.25+stochastic"})
    x = batch()
    first = layer(x)
    assert torch.equal(layer(x), first)
    layer.set_step(1)
    assert not torch.equal(layer(x), first)


def test_weights_without_selection_beside_selective_activations():
    layer = make_layer(outlier_fallback_operands="activations")
    weight = layer.quantized_weight(layer.weight, torch.float32)
    assert torch.equal(weight, fake_quantize(layer.weight.detach(), macro_block=128))
    assert torch.equal(quantized_input(layer, batch()), fake_quantize(batch(), **OPTIONS))


def test_other_backends_refuse():
    layer = make_layer(backend="triton")
    with pytest.raises(ValueError, match="backend='triton' cannot quantize here: the tensor is on cpu"):
        quantized_input(layer, batch())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype):
    layer, x = make_layer().to(dtype), batch().to(dtype)
    assert layer(x).dtype == dtype
    assert torch.equal(quantized_input(layer, x), fake_quantize(x, **OPTIONS))


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
