# SPDX-License-Identifier: Apache-2.0
"""Outputs of layers can be changed in place, as those of plain layers."""

import pytest
import torch
from torch import nn

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.layers import MXFP4Linear, MXFP4PackedLinear


CONFIGS = {
    "w4a4": {},
    "w4a16": {"preset": "w4a16"},
    "eager": {"backend": "eager"},
    "rotated": {"preset": "w4a4_h64"},
    "packed": {"mode": "packed"},
    "packed, dense values": {"mode": "packed", "backend": "eager"},
    "packed, rotated": {"mode": "packed", "fprop": {"rotation": "deterministic-64"}},
}


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", CONFIGS)
def test_in_place_changes_have_the_gradients_of_new_tensors(name, has_bias):
    torch.manual_seed(0)
    config = MXFP4RLConfig(**CONFIGS[name])
    layer = (MXFP4PackedLinear if config.mode == "packed" else MXFP4Linear).from_linear(
        nn.Linear(64, 32, has_bias), config
    )
    for shape in ((64,), (5, 64), (2, 5, 64), (2, 3, 5, 64)):
        inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
        results = [layer(x) for x in inputs]
        results[0].mul_(2).add_(results[0].detach().roll(1)).relu_()
        results[1] = (results[1] * 2 + (results[1] * 2).detach().roll(1)).relu()
        for result in results:
            result.square().sum().backward()
        assert torch.equal(*results) and torch.equal(inputs[0].grad, inputs[1].grad)
