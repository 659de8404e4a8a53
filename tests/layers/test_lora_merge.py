# SPDX-License-Identifier: Apache-2.0
"""Merging adapters into packed weights: packed again at a measured cost, undone exactly, or summed in bfloat16."""

import functools
import logging
import math

import lora_models
import pytest
import torch
from lora_models import IDS, UP, delta, same_tensors, stored
from peft import LoraConfig
from tiny_models import make_model
from torch import nn
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4 import MXFP4PackedLinear, merge_adapters, quantize
from hf_mxfp4.integrations.peft import MXFP4LoraLinear
from hf_mxfp4.integrations.peft.merge.merge_report import MergeError, MergeReport


SCHEME = {"scale_rule": "rceil", "macro_block": 128, "macro_search": "dynamic"}


#: Adapters whose sums with the weights outlive being packed.
with_lora = functools.partial(lora_models.with_lora, lora_alpha=2)


def add_second(model, **options):
    torch.manual_seed(5)
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["up_proj"], init_lora_weights=False, **options)
    model.add_adapter("second", config)


# ---- packed again ---------------------------------------------------------------------------------------------------


def test_merging_packs_the_sum_of_the_represented_weight_and_the_adapter(load):
    model = with_lora(load())
    layer = model.get_submodule(UP)
    expected = quantize(layer.base_layer.dequantized_weight() + delta(layer), **SCHEME)
    model.merge_adapter()
    assert layer.base_layer.weight.dtype == torch.uint8
    assert torch.equal(layer.base_layer.weight, expected.codes)
    assert torch.equal(layer.base_layer.weight_scale, expected.scale)
    assert torch.equal(layer.base_layer.weight_macro, expected.macro)
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), x @ expected.dequantize().T, rtol=1e-5, atol=1e-5)
    assert not any(p.requires_grad for p in layer.base_layer.parameters() if p.dtype == torch.uint8)


@pytest.mark.parametrize(
    "scheme",
    [{}, {"macro_block": None}, {"outlier_fallback": 0.5}, {"weight_block": "32x32"}],
    ids=["default", "plain", "fallback", "tiles"],
)
def test_unmerging_restores_every_bit(load, scheme):
    model = with_lora(load(**scheme))
    before, logits = stored(model), model(IDS).logits
    model.merge_adapter()
    merged = stored(model)
    assert merged.keys() == before.keys() and not same_tensors(merged, before)
    model.unmerge_adapter()
    assert same_tensors(stored(model), before)
    assert torch.equal(model(IDS).logits, logits)
    assert model.get_submodule(UP).merge_error is None


def test_disabling_merged_adapters_gives_the_base_back(load):
    base = load()
    plain = base(IDS).logits
    model = with_lora(base)
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(model(IDS).logits, plain)


def test_the_order_of_merges_does_not_matter_and_errors_do_not_add_up(load):
    results = []
    for order in (["default", "second"], ["second", "default"]):
        model = with_lora(load())
        add_second(model)
        layer = model.get_submodule(UP)
        total = layer.base_layer.dequantized_weight() + delta(layer) + delta(layer, "second")
        for name in order:
            layer.merge(adapter_names=[name])
        assert layer.merged_adapters == order
        results.append(stored(layer))
        assert torch.equal(layer.base_layer.weight, quantize(total, **SCHEME).codes)
        before_unmerge = layer.base_layer.weight
        layer.unmerge()
        assert not torch.equal(layer.base_layer.weight, before_unmerge) and not layer.merged
    assert same_tensors(*results)


def test_biases_of_adapters_are_merged_and_restored(load):
    model = with_lora(load(), lora_bias=True, target_modules=["q_proj"])
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    with torch.no_grad():
        layer.lora_B["default"].bias.normal_()
    before, logits = layer.base_layer.bias.detach().clone(), model(IDS).logits
    model.merge_adapter()
    expected = before + layer.scaling["default"] * layer.lora_B["default"].bias
    torch.testing.assert_close(layer.base_layer.bias, expected)
    model.unmerge_adapter()
    assert torch.equal(layer.base_layer.bias, before) and torch.equal(model(IDS).logits, logits)


def test_an_adapter_bias_without_a_place_to_go_is_an_error(load):
    with pytest.warns(UserWarning, match="has no bias"):
        model = with_lora(load(), lora_bias=True, target_modules=["up_proj"])
    before = stored(model)
    with pytest.raises(RuntimeError, match="layers.0.mlp.up_proj: the layer has none"):
        model.merge_adapter()
    assert same_tensors(stored(model), before)


def test_safe_merge_refuses_broken_adapters_and_changes_nothing(load):
    model = with_lora(load(), target_modules=["up_proj"])
    layer = model.get_submodule(UP)
    with torch.no_grad():
        layer.lora_B["default"].weight[0, 0] = math.nan
    before = stored(model)
    with pytest.raises(ValueError, match="up_proj: merging default gives weights that are not finite"):
        layer.merge(safe_merge=True)
    assert not layer.merged and same_tensors(stored(model), before)
    layer.merge()  # unsafe, as in PEFT: the NaN stays visible
    assert layer.base_layer.dequantized_weight()[0].isnan().any() and math.isnan(layer.merge_error.sqnr_db)


def test_weights_that_are_not_here_are_an_error(load):
    model = with_lora(load())
    layer = model.get_submodule(UP)
    layer.base_layer.weight = nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="expected uint8"):
        layer.merge()


def test_unmerging_twice_only_warns(load):
    model = with_lora(load(), target_modules=["up_proj"])
    with pytest.warns(UserWarning, match="Already unmerged"):
        model.get_submodule(UP).unmerge()


# ---- the model without adapters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["peft", "ours"])
def test_merge_and_unload_gives_a_packed_model_that_saves_and_loads(load, tmp_path, how):
    model = with_lora(load(), lora_alpha=1)
    adapted = model(IDS).logits
    with model.disable_adapter():
        plain = model(IDS).logits
    merged = model.merge_and_unload() if how == "peft" else merge_adapters(model)
    assert sum(isinstance(m, MXFP4PackedLinear) for m in merged.modules()) == 14
    assert not any("lora" in name for name, _ in merged.named_modules())
    logits = merged(IDS).logits
    assert (logits - adapted).norm() < 0.5 * (plain - adapted).norm()
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.quantization_config.mode == "packed"
    assert torch.equal(again(IDS).logits, logits)


def test_merging_into_bfloat16_rounds_each_sum_once(load):
    model = with_lora(load(), lora_alpha=8)
    layer = model.get_submodule(UP)
    expected = (layer.base_layer.dequantized_weight() + delta(layer)).to(torch.bfloat16)
    bias = model.get_submodule(UP.replace("mlp.up_proj", "self_attn.q_proj")).base_layer.bias.detach()
    adapted = model(IDS).logits
    plain = merge_adapters(model, into="bf16")
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16}
    assert not any(isinstance(m, MXFP4PackedLinear) for m in plain.modules())
    first = plain.model.layers[0]
    assert type(first.mlp.up_proj) is nn.Linear and torch.equal(first.mlp.up_proj.weight, expected)
    assert torch.equal(first.self_attn.q_proj.bias, bias.to(torch.bfloat16))
    assert (plain(IDS).logits.float() - adapted).norm() < 0.03 * adapted.norm()


def test_a_model_merged_into_bfloat16_is_a_plain_one(load, tmp_path):
    plain = merge_adapters(with_lora(load(dtype=torch.bfloat16), target_modules=["q_proj"]), into="bf16")
    assert not hasattr(plain.config, "quantization_config") and not hasattr(plain, "quantization_report")
    plain.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(again.model.layers[0].mlp.up_proj) is nn.Linear
    assert torch.equal(again(IDS).logits, plain(IDS).logits)


def test_merging_into_bfloat16_after_a_packed_merge_starts_from_the_original(load):
    model = with_lora(load())
    layer = model.get_submodule(UP)
    expected = (layer.base_layer.dequantized_weight() + delta(layer)).to(torch.bfloat16)
    model.merge_adapter()
    plain = merge_adapters(model, into="bf16")
    assert torch.equal(plain.model.layers[0].mlp.up_proj.weight, expected)


def test_trained_copies_of_other_modules_come_along(load):
    model = with_lora(load(), modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.fill_(0.25)
    assert (merge_adapters(model, into="bf16").lm_head.weight == 0.25).all()


def test_what_cannot_be_merged_says_so(load):
    with pytest.raises(ValueError, match="into='fp8' is not supported; choose one of 'packed', 'bf16'"):
        merge_adapters(with_lora(load()), into="fp8")
    with pytest.raises(TypeError, match="takes a PeftModel with adapters in its layers, not Qwen2ForCausalLM"):
        merge_adapters(load())
    with pytest.raises(ValueError, match="no adapter of this model is on a quantized layer; use model.merge_and_unlo"):
        merge_adapters(with_lora(make_model()))
    assert hf_mxfp4.merge_adapters is merge_adapters


# ---- the report -----------------------------------------------------------------------------------------------------


def test_the_cost_is_measured_per_layer_and_overall(load, caplog, capsys):
    caplog.set_level(logging.INFO, logger="hf_mxfp4")
    model = with_lora(load())
    layers = {name: m for name, m in model.base_model.model.named_modules() if isinstance(m, MXFP4LoraLinear)}
    signal = update = noise = 0.0
    expected = {}
    for name, layer in layers.items():
        total = layer.base_layer.dequantized_weight() + delta(layer)
        error = (quantize(total, **SCHEME).dequantize() - total).square().sum().item()
        expected[name] = 10 * math.log10(total.square().sum().item() / error)
        signal, noise = signal + total.square().sum().item(), noise + error
        update += delta(layer).square().sum().item()
    capsys.readouterr()
    report = model.merge_and_unload().merge_report
    assert isinstance(report, MergeReport) and list(report.layers) == list(expected)
    for name, value in expected.items():
        assert report.layers[name].sqnr_db == pytest.approx(value, abs=1e-3)
    assert report.total.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)
    assert report.total.update_sqnr_db == pytest.approx(10 * math.log10(update / noise), abs=1e-3)
    text = capsys.readouterr().err
    assert f"merged into 14 packed layers: SQNR {report.total.sqnr_db:.2f} dB" in text
    assert "model.layers.1.mlp.down_proj: SQNR" in text and text.count("SQNR") == 15


@pytest.mark.parametrize(("alpha", "lossy"), [(1e-4, True), (0.5, True), (8.0, False)])
def test_an_update_that_packing_swallows_is_pointed_out(load, capsys, alpha, lossy):
    model = with_lora(load(), lora_alpha=alpha)
    capsys.readouterr()
    merged = model.merge_and_unload()
    assert (merged.merge_report.total.update_sqnr_db < 10) == lossy
    text = capsys.readouterr().err
    assert ("part of what was trained is lost" in text and "merge_adapters(model, into='bf16')" in text) == lossy


def test_a_merge_without_an_update_is_exact_and_no_alarm(load, capsys):
    model = with_lora(load(macro_block=None), init_lora_weights=True, target_modules=["up_proj"])
    layer = model.get_submodule(UP)
    before = layer.base_layer.dequantized_weight()
    model.merge_adapter()
    assert torch.equal(layer.base_layer.dequantized_weight(), before)
    assert model.merge_report.total.sqnr_db == math.inf and math.isnan(model.merge_report.total.update_sqnr_db)
    assert "lost" not in capsys.readouterr().err


def test_energies_as_decibels():
    total, update = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0])
    error = MergeError.of(total, update, torch.tensor([3.0, 4.5]))
    assert (error.signal, error.update, error.noise) == pytest.approx((25.0, 1.0, 0.25))
    assert error.sqnr_db == pytest.approx(20.0) and error.update_sqnr_db == pytest.approx(6.0206, abs=1e-4)
    report = MergeReport({"a": error, "b": MergeError(75.0, 0.0, 0.75)})
    assert report.total == MergeError(100.0, 1.0, 1.0)
    assert report.total.sqnr_db == pytest.approx(20.0) and report.total.update_sqnr_db == pytest.approx(0.0)
    assert str(report).splitlines()[0] == "merged into 2 packed layers: SQNR 20.00 dB, of the adapters' change 0.00 dB"
    assert MergeError(1.0, 0.0, 1.0).update_sqnr_db == -math.inf and math.isnan(MergeError(0.0, 0.0, 0.0).sqnr_db)
