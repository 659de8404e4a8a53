# SPDX-License-Identifier: Apache-2.0
"""A mistake that other projects made with fake quantization, B18: master weights that turn into quantized values."""

from functools import partial

import pytest
import torch
from factors import factors_config
from same_bits import assert_same, weights
from tiny_models import make_model

from hf_mxfp4 import fake_quantize
from hf_mxfp4.integrations.transformers.swap import quantize_linears


IDS = torch.arange(24).reshape(2, 12) % 32


def failing(model):
    model.lm_head.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(IDS)


def no_grad_forward(model):
    with torch.no_grad():
        model(IDS)


def generating(model):
    model.generate(IDS[:, :4], max_new_tokens=3, do_sample=False)


def checkpointed_backward(model, reentrant=False):
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    "use",
    [no_grad_forward, generating, failing, partial(checkpointed_backward, reentrant=True), checkpointed_backward],
    ids=["no_grad", "generate", "exception", "reentrant checkpointing", "checkpointing"],
)
def test_b18_masters_are_bit_identical_after(use):
    model = make_model()
    quantize_linears(model, factors_config())
    before = weights(model)
    use(model)
    assert_same(weights(model), before)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert not torch.equal(fake_quantize(weight.detach(), macro_block=128, outlier_fallback=0.5), weight)
