# SPDX-License-Identifier: Apache-2.0
"""Corners that a review of the quantizer and its layers found broken once."""

import gc
import weakref

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
)

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig
from hf_mxfp4.integrations.transformers.swap import quantize_linears


IDS = torch.arange(2, 14).view(2, 6)


@pytest.mark.parametrize("how", ["moved", "argument"])
def test_dequantize_in_another_dtype(how, checkpoint):
    folder = checkpoint("qwen2", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=MXFP4RLConfig(preset="w4a16"))
    if how == "moved":
        model = model.to(torch.float32)
        expected = model(IDS).logits
        assert torch.equal(model.dequantize()(IDS).logits, expected)
    else:
        model.dequantize(torch.float32)(IDS)


def test_convolutions_are_not_experts(tmp_path):
    config = Lfm2Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        full_attn_idxs=[1],
        pad_token_id=0,
    )
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MXFP4RLConfig())


def test_positional_state_dict(checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2"), quantization_config=MXFP4RLConfig())
    model.save_pretrained(tmp_path / "saved", True, model.state_dict())


@pytest.mark.parametrize("preset", ["w4a4", "w4a16"])
def test_meta_forward(preset):
    layer = MXFP4Linear(64, 32, device="meta", config=MXFP4RLConfig(preset=preset))
    assert layer(torch.zeros(2, 64, device="meta")).shape == (2, 32)


def test_a_frozen_weight_does_not_keep_the_input_alive():
    layer = MXFP4Linear(64, 32)
    layer.requires_grad_(False)
    y = layer(torch.randn(2, 64, requires_grad=True))
    assert (2, 64) not in [tuple(t.shape) for t in y.grad_fn.saved_tensors if t is not None]


def test_shared_module():
    linear = torch.nn.Linear(8, 8)
    model = torch.nn.ModuleDict({"a": linear, "b": linear})
    quantize_linears(model, MXFP4RLConfig())
    assert type(model["b"]) is MXFP4Linear and model["a"] is model["b"]


def test_dequantize_keeps_frozen_weights_frozen(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2"), quantization_config=MXFP4RLConfig())
    model.requires_grad_(False)
    assert not any(p.requires_grad for p in model.dequantize().parameters())


def test_a_deleted_model_is_freed_at_once(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2"), quantization_config=MXFP4RLConfig())
    gc.collect()
    reference = weakref.ref(model.lm_head.weight)
    gc.disable()
    del model
    gc.enable()
    assert reference() is None
