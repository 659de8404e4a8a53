# SPDX-License-Identifier: Apache-2.0
"""What `MXFP4Linear` and `MXFP4Experts` keep of their input for the backward pass."""

import pytest
import torch
from moe_models import routing
from tiny_models import make_model
from torch.autograd.graph import saved_tensors_hooks

from hf_mxfp4 import MXFP4Experts, MXFP4Linear, MXFP4RLConfig


#: Outputs and inputs.
N = 37
K = 256


def kept_bytes(layer: torch.nn.Module, *inputs: torch.Tensor) -> int:
    """Bytes that a forward pass keeps besides the layer's parameters."""
    kept = {}

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in {p.untyped_storage().data_ptr() for p in layer.parameters()}:
            kept[tensor.untyped_storage().data_ptr()] = (tensor, tensor.untyped_storage().nbytes())
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        y = layer(*inputs)
    assert y.requires_grad == any(p.requires_grad for p in layer.parameters())
    return sum(size for _, size in kept.values())


def inputs(*shape: int, dtype=torch.float32) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    x[..., 3] *= 40
    return x.to(dtype)


# Bits per value, by arithmetic: E4M3 has a scale for each row of 256 inputs, a byte or, for FP8 Wgrad, float32.
BITS = [
    ({}, torch.bfloat16, 8 + 8 / 256),
    ({"preset": "w4a8g8"}, torch.float32, 8 + 32 / 256),
    ({"preset": "w4a4"}, torch.float32, 32),
    ({"preset": "w4a4"}, torch.bfloat16, 16),
    ({"wgrad": {"x": "full"}}, torch.bfloat16, 16),
]


@pytest.mark.parametrize(("options", "dtype", "bits"), BITS)
def test_bits_kept_per_value(options, dtype, bits):
    layer = MXFP4Linear(K, N, dtype=dtype, config=MXFP4RLConfig(**options), name="up_proj")
    x = inputs(3, 7, K, dtype=dtype)
    assert 8 * kept_bytes(layer, x) / x.numel() == bits


def test_a_frozen_weight_keeps_nothing():
    layer = MXFP4Linear(K, N)
    layer.weight.requires_grad_(False)
    assert kept_bytes(layer, inputs(5, K)) == 0
    assert kept_bytes(layer.requires_grad_(False), inputs(5, K)) == 0


def test_experts_keep_e4m3_inputs_as_elements_and_scales():
    routed = routing(41, dtype=torch.float32)
    kept = {}
    for preset in ("w4a4", "w4a8"):
        plain = make_model("qwen3_moe", layers=1).model.layers[0].mlp.experts
        layer = MXFP4Experts.from_experts(plain, MXFP4RLConfig(preset=preset), "layers.0.mlp.experts")
        kept[preset] = kept_bytes(layer, *routed)
    assert kept["w4a8"] < kept["w4a4"]
