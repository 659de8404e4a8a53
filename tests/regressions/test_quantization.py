# SPDX-License-Identifier: Apache-2.0
"""Mistakes that other projects made with fake quantization, B16 and B18: gradients that do not pass the quantizers, and
master weights that turn into their quantized values."""

from functools import partial

import pytest
import torch
from factors import factors_config
from peft import LoraConfig, get_peft_model
from same_bits import assert_same, weights
from tiny_models import make_model

from hf_mxfp4 import fake_quantize
from hf_mxfp4.integrations.transformers.swap import quantize_linears


IDS = torch.arange(24).reshape(2, 12) % 32
LORA = {"target_modules": "all-linear", "r": 2, "task_type": "CAUSAL_LM"}
PROJECTIONS = 7  # q, k, v, o, gate, up, down


def quantized_model(scheme=None, **options):
    model = make_model(**options)
    quantize_linears(model, scheme or factors_config())
    return model


@pytest.mark.parametrize("preset", ["w4a16", "w4a4"])
def test_b16_gradients_pass_the_quantizers_and_reach_layer_0(preset):
    model = quantized_model(factors_config(preset=preset), layers=4)
    full = make_model(layers=4)
    grads = []
    for policy in (model, full):
        torch.manual_seed(0)
        policy = get_peft_model(policy, LoraConfig(**LORA))
        policy(input_ids=IDS, labels=IDS).loss.backward()
        found = {n: p.grad for n, p in policy.named_parameters() if "lora_B" in n and ".layers.0." in n}
        assert len(found) == PROJECTIONS and all(grad.abs().max() > 0 for grad in found.values())
        grads.append(torch.cat([grad.flatten() for grad in found.values()]))
    assert torch.cosine_similarity(*grads, dim=0) > 0.7  # of the adapters of both, which start alike


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
    model = quantized_model()
    before = weights(model)
    use(model)
    assert_same(weights(model), before)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert not torch.equal(fake_quantize(weight.detach(), macro_block=128, outlier_fallback=0.5), weight)
