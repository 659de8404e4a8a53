# SPDX-License-Identifier: Apache-2.0
"""Mistakes that other projects made with fake quantization: B16 to B24 and B34, one test or more named after each."""

import copy
from functools import partial

import pytest
import torch
from factors import factors_config
from peft import LoraConfig, get_peft_model
from same_bits import assert_same, weights
from tables import PLAIN
from tiny_models import make_model
from torch import nn
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4Linear, fake_quantize
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.layers import QUANTIZED


IDS = torch.arange(24).reshape(2, 12) % 32
LORA = {"target_modules": "all-linear", "r": 2, "task_type": "CAUSAL_LM"}
PROJECTIONS = 7  # q, k, v, o, gate, up, down


def quantized_model(scheme=None, **options):
    model = make_model(**options)
    quantize_linears(model, scheme or factors_config())
    return model


def layer_and_input(preset="w4a4", rows=5, size=(24, 64), seed=0, **options):
    """A quantized layer, its input, and the gradient of its output."""
    torch.manual_seed(seed)
    layer = MXFP4Linear.from_linear(nn.Linear(size[1], size[0]), factors_config(preset=preset, **PLAIN, **options))
    return layer, torch.randn(rows, size[1], requires_grad=True), torch.randn(rows, size[0])


# ---- B16, B17, B19: what a layer computes ---------------------------------------------------------------------------


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


@pytest.mark.parametrize("preset", ["w4a16", "w4a4"])
def test_b17_the_backward_pass_takes_the_operands_of_the_forward_pass(preset):
    layer, x, grad = layer_and_input(preset)
    layer(x).backward(grad)
    weight = fake_quantize(layer.weight.detach(), outlier_fallback=None)
    inputs = fake_quantize(x.detach(), outlier_fallback=None) if preset == "w4a4" else x.detach()
    assert not torch.equal(weight, layer.weight)
    torch.testing.assert_close(x.grad, grad @ weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.weight.grad, grad.T @ inputs, rtol=1e-6, atol=1e-6)
    assert (x.grad - grad @ layer.weight).abs().max() > 1e-2  # what the trap gives


def test_b19_inputs_and_weights_are_quantized_and_outputs_are_not():
    layer, x, _ = layer_and_input()
    x = x.detach()
    with torch.no_grad():
        y = layer(x)
    expected = fake_quantize(x) @ fake_quantize(layer.weight.detach()).T
    assert torch.equal(y - layer.bias, expected + layer.bias - layer.bias)
    assert not torch.equal(fake_quantize(y), y)


# ---- B18: master weights that turn into their quantized values ------------------------------------------------------


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


# ---- B20 to B23: which layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_b20_b21_adapters_stay_plain_and_each_projection_counts_once(mode):
    model = quantized_model(factors_config(mode=mode), layers=3)
    if mode == "packed":
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    policy = get_peft_model(model, LoraConfig(**LORA))
    found = [module for module in policy.modules() if isinstance(module, QUANTIZED)]
    assert len(found) == len(set(map(id, found))) == 3 * PROJECTIONS
    plain = [m for name, m in policy.named_modules() if ".lora_A." in name or ".lora_B." in name]
    assert len(plain) == 2 * 3 * PROJECTIONS
    assert all(type(module) is nn.Linear and module.weight.dtype == torch.float32 for module in plain)


@pytest.mark.parametrize("tie", [False, True])
def test_b22_heads_and_embeddings_keep_full_precision(tie):
    model = make_model(tie=tie)
    plain = copy.deepcopy(model)
    _, skipped = quantize_linears(model, factors_config())
    assert list(skipped) == ["lm_head"] and type(model.lm_head) is nn.Linear
    assert type(model.model.embed_tokens) is nn.Embedding
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
    x = torch.randn(3, 64)
    assert torch.equal(model.lm_head(x), plain.lm_head(x))
    assert torch.equal(model.model.embed_tokens(IDS), plain.model.embed_tokens(IDS))


def test_b23_skips_add_to_the_default_ones_and_match_whole_name_parts():
    model = make_model(layers=21, hidden=32, intermediate=32)
    quantized, skipped = quantize_linears(model, factors_config(modules_to_not_convert=["layers.2"]))
    assert len(quantized) == 20 * PROJECTIONS
    assert "lm_head" in skipped and len(skipped) == PROJECTIONS + 1
    assert isinstance(model.model.layers[20].mlp.up_proj, MXFP4Linear)
    assert not isinstance(model.model.layers[2].mlp.up_proj, MXFP4Linear)


# ---- B24: what is evaluated is not what was trained -----------------------------------------------------------------


def test_b24_a_saved_policy_loads_under_its_scheme_and_says_so(checkpoint, tmp_path):
    scheme = factors_config(scale_rule="even", outlier_fallback=None)
    model = AutoModelForCausalLM.from_pretrained(checkpoint(), quantization_config=scheme)
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    report = loaded.quantization_report
    assert report.scheme == scheme.describe() and report.n_quantized == 2 * PROJECTIONS
    assert str(report).startswith(f"n_quantized={report.n_quantized}") and scheme.describe() in str(report)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
        assert not torch.equal(loaded(IDS).logits, make_model()(IDS).logits)
