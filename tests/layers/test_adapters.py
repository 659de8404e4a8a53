# SPDX-License-Identifier: Apache-2.0
"""PEFT adapters on quantized layers: trained in full precision, over a frozen quantized base."""

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import make_model
from torch import nn

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig, fake_quantize
from hf_mxfp4.quantizer.swap import quantize_linears


WEIGHT = {"scale_rule": "rceil", "macro_block": 128, "macro_search": "dynamic", "outlier_fallback": 0.5}
INPUT = {"scale_rule": "rceil", "macro_block": 128, "macro_search": "static", "outlier_fallback": 0.5}
IDS = torch.arange(2, 14).view(2, 6)


def quantized_model(preset="w4a4", **options):
    model = make_model(**options)
    quantize_linears(model, MXFP4RLConfig(preset=preset))
    return model


def with_lora(model, **options) -> PeftModel:
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, **options}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))


def count(model, kind: type) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def test_adapters_attach_to_every_quantized_layer_and_stay_plain():
    model = with_lora(quantized_model())
    assert count(model, MXFP4Linear) == 14
    adapters = {name: m for name, m in model.named_modules() if ".lora_A." in name or ".lora_B." in name}
    assert len(adapters) == 2 * 14
    assert all(type(module) is nn.Linear for module in adapters.values())
    assert type(model.get_output_embeddings()) is nn.Linear


@pytest.mark.parametrize("preset", ["w4a4", "w4a16"])
def test_only_adapters_train(preset):
    model = with_lora(quantized_model(preset))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    first = model(IDS, labels=IDS).loss
    first.backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        assert (parameter.grad is not None and parameter.grad.norm() > 0) == ("lora_" in name), name
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora_" not in name), name
    assert model(IDS, labels=IDS).loss < first


def test_the_adapter_sees_the_input_in_full_precision():
    model = with_lora(quantized_model(layers=1))
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    x = torch.randn(3, 64)
    base = layer.base_layer
    expected = F.linear(fake_quantize(x, **INPUT), fake_quantize(base.weight.detach(), **WEIGHT))
    adapter = layer.lora_B["default"](layer.lora_A["default"](x)) * 2.0
    torch.testing.assert_close(layer(x), expected + adapter, rtol=1e-6, atol=1e-6)
    with model.disable_adapter():
        assert torch.equal(layer(x), expected)


def test_without_the_adapter_the_base_model_is_back():
    base = quantized_model()
    expected = base(IDS).logits
    model = with_lora(base)
    assert not torch.equal(model(IDS).logits, expected)
    with model.disable_adapter():
        assert torch.equal(model(IDS).logits, expected)


def test_merging_quantizes_the_sum_and_unmerging_restores():
    model = with_lora(quantized_model(layers=1))
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    x = torch.randn(3, 64)
    before, master = layer(x), layer.base_layer.weight.detach().clone()
    merged = master + 2.0 * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).detach()

    model.merge_adapter()
    torch.testing.assert_close(layer.base_layer.weight.detach(), merged, rtol=1e-6, atol=1e-6)
    quantized = fake_quantize(layer.base_layer.weight.detach(), **WEIGHT)
    assert torch.equal(layer(x), F.linear(fake_quantize(x, **INPUT), quantized))

    model.unmerge_adapter()
    torch.testing.assert_close(layer.base_layer.weight.detach(), master, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer(x), before, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("safe", [False, True], ids=["in-place", "safe"])
def test_merge_and_unload_leaves_a_quantized_model(safe):
    base = quantized_model("w4a16")
    plain = base(IDS).logits
    model = with_lora(base, lora_alpha=1)
    adapted = model(IDS).logits
    merged = model.merge_and_unload(safe_merge=safe)
    assert count(merged, MXFP4Linear) == 14 and not any("lora_" in name for name, _ in merged.named_parameters())
    logits = merged(IDS).logits
    # The merged sum is quantized again, hence near and not equal; without the adapter it would be far.
    assert (logits - adapted).norm() < 0.5 * (plain - adapted).norm()


def test_adapters_round_trip_over_a_quantized_base(tmp_path):
    model = with_lora(quantized_model())
    expected = model(IDS).logits
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(quantized_model(), tmp_path)
    assert count(again, MXFP4Linear) == 14
    assert torch.equal(again(IDS).logits, expected)


def test_dora_and_bfloat16_base():
    model = with_lora(quantized_model(dtype=torch.bfloat16), use_dora=True, target_modules=["q_proj", "down_proj"])
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 3 * 4 and all(p.grad.isfinite().all() and p.grad.norm() > 0 for p in trained.values())
    assert count(model, MXFP4Linear) == 14
