# SPDX-License-Identifier: Apache-2.0
"""LoRA on trainable and packed linear layers: what is adapted, and that it is LoRA on the quantized weights."""

import copy

import pytest
import torch
from lora_models import IDS, UP, gradients, with_lora
from peft import LoraConfig, PeftModel

from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, fake_quantize
from hf_mxfp4.integrations.peft import MXFP4LoraLinear, MXFP4LoraMasterLinear


#: Mode -> the class of quantized layers, and of those with adapters.
CLASSES = {"packed": (MXFP4PackedLinear, MXFP4LoraLinear), "qat": (MXFP4Linear, MXFP4LoraMasterLinear)}
MODES = pytest.mark.parametrize("mode", CLASSES)


def float_twin(model: PeftModel) -> PeftModel:
    """The same adapters on plain layers that hold the dequantized weights."""
    twin = copy.deepcopy(model)
    for module in list(twin.modules()):
        if isinstance(module, MXFP4LoraLinear):
            module.base_layer = module.base_layer.to_linear().requires_grad_(False)
    return twin


# ---- attaching ------------------------------------------------------------------------------------------------------


# ---- values and gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options", "scheme"),
    [
        ("qwen2", {}, {}),
        ("llama", {}, {"macro_block": None}),
        ("llama", {"use_rslora": True}, {}),
        ("qwen2", {"rank_pattern": {"q_proj": 2}}, {"outlier_fallback": 0.5}),
        ("qwen2", {}, {"macro_search": "blockwise"}),
        ("llama", {"target_modules": ["v_proj"]}, {"scale_rule": "even"}),
    ],
    ids=["default", "plain", "rslora", "rank-pattern", "mantissas", "one-kind"],
)
def test_values_and_gradients_are_those_of_the_dequantized_weights(load, family, options, scheme):
    model = with_lora(load(family, **scheme), **options)
    twin = float_twin(model)
    torch.testing.assert_close(model(IDS).logits, twin(IDS).logits, rtol=1e-5, atol=1e-5)
    ours, theirs = gradients(model), gradients(twin)
    assert ours.keys() == theirs.keys() and len(ours) >= 4
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


@MODES
def test_quantized_activations_reach_the_base_and_not_the_adapter(load, mode):
    """``y = Q(x) Q(W)^T + 2 B A x``; ``dL/dB = 2 g^T A x``, ``dL/dx = g Q(W) + 2 g B A``."""
    model = with_lora(load("llama", mode=mode, preset="w4a4", outlier_fallback=0.5))
    layer = model.get_submodule(UP)
    torch.manual_seed(1)
    x = torch.randn(3, 64, requires_grad=True)
    a, b = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
    scheme = {"scale_rule": "rceil", "macro_block": 128, "outlier_fallback": 0.5}
    quantized_x = fake_quantize(x.detach(), **scheme, macro_search="static")
    if mode == "packed":
        weight = layer.base_layer.dequantized_weight()
    else:
        weight = fake_quantize(layer.base_layer.weight.detach(), **scheme, macro_search="dynamic")
    y = layer(x)
    torch.testing.assert_close(y, quantized_x @ weight.T + 2 * (x @ a.T @ b.T), rtol=1e-5, atol=1e-5)
    g = torch.randn_like(y)
    y.backward(g)
    torch.testing.assert_close(layer.lora_B["default"].weight.grad, 2 * g.T @ (x.detach() @ a.T), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, g @ weight + 2 * (g @ b @ a), rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        torch.testing.assert_close(layer(x), quantized_x @ weight.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_that_was_switched_on_before_adapters_came(load, reentrant):
    expected = gradients(with_lora(load()))
    base = load()
    base.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients(with_lora(base))
    assert found.keys() == expected.keys() and len(found) == 28
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-7, msg=name)


# ---- training and switching ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "part", "expected"),
    [
        ({"bias": "all"}, ".bias", 2 * 3),
        ({"modules_to_save": ["lm_head", "input_layernorm"]}, "modules_to_save", 3),
        ({"trainable_token_indices": [3, 5]}, "trainable_tokens_delta", 1),
        ({"trainable_token_indices": {"embed_tokens": [3, 5]}}, "trainable_tokens_delta", 1),
    ],
    ids=["biases", "modules", "tokens", "tokens-by-name"],
)
def test_other_parameters_train_on_request(load, options, part, expected):
    grads = gradients(with_lora(load(), **options))
    found = [grad for name, grad in grads.items() if part in name]
    assert len(found) == expected and all(grad.norm() > 0 for grad in found)
    assert sum("lora_" in name for name in grads) == 28
    assert part != "trainable_tokens_delta" or found[0].shape == (2, 64)


def test_rows_of_one_batch_with_different_adapters(load):
    model = with_lora(load(), "first")
    torch.manual_seed(7)
    model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.eval()
    mixed = model(IDS, adapter_names=["__base__", "second"]).logits
    model.set_adapter("second")
    torch.testing.assert_close(mixed[1], model(IDS).logits[1], rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        torch.testing.assert_close(mixed[0], model(IDS).logits[0], rtol=1e-5, atol=1e-5)
