# SPDX-License-Identifier: Apache-2.0
"""What experts keep of their inputs: the gradients do not change, or little, and the bytes do."""

import pytest
import torch
from tiny_models import make_model

from hf_mxfp4 import MXFP4Experts, MXFP4RLConfig
from hf_mxfp4.layers import fallback_thresholds


NAME = "model.layers.0.mlp.experts"
EXACT = {
    "w4a4": {},
    "w4a4g8": {"preset": "w4a4g8"},
    "blockwise": {"macro_search": "blockwise", "outlier_fallback": None},
    "selective": {"outlier_fallback_rate": 0.25},
    "random": {"fprop": {"x": "rceil+stochastic", "rotation": "random-16"}, "outlier_fallback": None},
}


def experts(form, family="qwen3_moe", **options):
    plain = make_model(family, layers=1, dtype=torch.float32).model.layers[0].mlp.experts
    return MXFP4Experts.from_experts(plain, MXFP4RLConfig(saved_activations=form, **options), NAME)


def step(layer, unused=1):
    """Output, all gradients, and the bytes that the forward pass kept besides the parameters."""
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(41, 64, generator=generator).requires_grad_()
    scores = torch.rand(41, 4, generator=generator)
    scores[:, unused] = -1
    weights, index = scores.topk(2)
    owned = {p.data_ptr() for p in layer.parameters()}
    kept = {}

    def note(tensor):
        if tensor.data_ptr() not in owned:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = layer(states, index, weights)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return [out.detach(), states.grad, *(p.grad for p in layer.parameters())], sum(kept.values())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("scheme", EXACT)
def test_codes_give_the_same_gradients(scheme, family):
    full, bytes_full = step(experts("full", family, **EXACT[scheme]))
    saved, bytes_saved = step(experts("mxfp4", family, **EXACT[scheme]))
    for want, found in zip(full, saved, strict=True):
        assert torch.equal(want, found)
    assert full[2].abs().sum() > 0 and not full[2][1].any()
    assert bytes_saved < bytes_full


def test_selective_fallback_counts_once():
    layer = experts("mxfp4", **EXACT["selective"])
    step(layer)
    assert len(fallback_thresholds(layer)) == 2
    assert all(0 < threshold.update() < 1 for threshold in fallback_thresholds(layer))


@pytest.mark.parametrize("preset", ["w4a4", "w4a16", "w4a4g4"])
def test_fp8_rounds_the_gradient_of_the_weights_alone(preset):
    full, bytes_full = step(experts("full", preset=preset))
    saved, bytes_saved = step(experts("fp8", preset=preset))
    assert torch.equal(full[0], saved[0]) and torch.equal(full[1], saved[1])
    for want, found in zip(full[2:], saved[2:], strict=True):
        assert 0.001 < ((found - want).norm() / want.norm()).item() < 0.12
    assert bytes_saved < bytes_full
