# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing gives the gradients of a plain backward pass to the bit, of every kind of quantized layer."""

import contextlib

import pytest
import torch
from lora_models import gradients, with_lora
from tiny_models import make_model

import hf_mxfp4.integrations.peft
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.transformers.swap import quantize_linears


STOCHASTIC = {"preset": "w4a4g4", "wgrad": {"grad": "rceil+stochastic", "rotation": "random-16"}}
PARAMETERS = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
#: Family, scheme, options of adapters or none.
MODELS = {
    "w4a4": ("qwen2", {}, None),
    "w4a16": ("qwen2", {"preset": "w4a16"}, None),
    "saved as mxfp4": ("qwen2", {"saved_activations": "mxfp4"}, None),
    "selective": ("qwen2", {"saved_activations": "mxfp4", "outlier_fallback_rate": 0.25}, None),
    "saved as fp8": ("qwen2", {"preset": "w4a4g4", "saved_activations": "fp8"}, None),
    "experts": ("qwen3_moe", {}, None),
    "experts at random": ("qwen3_moe", STOCHASTIC, None),
    "adapters": ("qwen2", {"mode": "packed", "preset": "w4a4"}, {}),
    "adapters of packed experts": ("qwen3_moe", {"mode": "packed"}, {"target_modules": ["experts"]}),
    "adapters of trainable experts": ("qwen3_moe", {"preset": "w4a16"}, PARAMETERS),
}


@pytest.mark.parametrize(
    ("name", "reentrant", "autocast"),
    [
        *((name, number % 2 == 0, False) for number, name in enumerate(MODELS)),
        *(pytest.param(name, number % 2 == 1, False, marks=pytest.mark.large) for number, name in enumerate(MODELS)),
        ("w4a4", True, True),
        ("w4a4", False, True),
    ],
)
def test_the_gradients_are_those_of_a_plain_backward_pass(name, reentrant, autocast):
    assert hf_mxfp4.integrations.peft.MXFP4LoraModel  # registered by its import
    family, scheme, lora = MODELS[name]
    found, calls = [], []
    for checkpointing in (False, True):
        model = make_model(family)
        quantize_linears(model, MXFP4RLConfig(**scheme))
        block = model.model.layers[0].mlp
        if lora is not None:
            model = with_lora(model, **lora)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
            block.register_forward_pre_hook(lambda *_: calls.append(1))
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            found.append(gradients(model))
    expected, found = found
    assert len(calls) == 2, "the block was not recomputed"
    assert found.keys() == expected.keys() and len(found) >= 8
    for parameter, grad in expected.items():
        assert torch.equal(found[parameter], grad) and grad.isfinite().all(), parameter
