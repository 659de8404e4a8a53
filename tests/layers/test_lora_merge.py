# SPDX-License-Identifier: Apache-2.0
"""Merging adapters: packed again or quantized anew at a measured cost, undone, or summed in bfloat16."""

import functools
import logging
import math

import accelerate
import lora_models
import pytest
import torch
from lora_models import IDS, UP, delta, qat, same_tensors, stored
from peft import LoraConfig
from tiny_models import make_model
from torch import nn
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, fake_quantize, merge_adapters, quantize
from hf_mxfp4.integrations.peft import MergeReport, MXFP4LoraLinear, MXFP4LoraMasterLinear
from hf_mxfp4.layers import MXFP4Experts


#: What the default does to a weight.
SCHEME = {"scale_rule": "even", "macro_block": 128, "macro_search": "block_mantissas_fp8"}
#: Adapters whose sums with the weights outlive being packed.
with_lora = functools.partial(lora_models.with_lora, lora_alpha=2)
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
with_small_lora = functools.partial(lora_models.with_lora, std=0.01)


def energy(tensor) -> float:
    return tensor.double().square().sum().item()


def quantized(layer, weight):
    return fake_quantize(weight, **vars(layer.config.weight_scheme))


@pytest.mark.parametrize("scheme", [{}, {"macro_block": None, "outlier_fallback": 0.5}], ids=["default", "residuals"])
def test_unmerging_restores_every_bit(load, scheme):
    model = with_lora(load(**scheme))
    before = stored(model)
    logits = model(IDS).logits
    model.merge_adapter()
    merged = stored(model)
    assert merged.keys() == before.keys()
    assert not same_tensors(merged, before)

    model.unmerge_adapter()
    assert same_tensors(stored(model), before)
    assert torch.equal(model(IDS).logits, logits)
    assert model.get_submodule(UP).merge_error is None


def test_the_order_of_merges_does_not_matter_and_errors_do_not_add_up(load):
    results = []
    for order in (["default", "second"], ["second", "default"]):
        model = with_lora(load())
        torch.manual_seed(5)
        second = LoraConfig(r=2, lora_alpha=2, target_modules=["up_proj"], init_lora_weights=False)
        model.add_adapter("second", second)
        layer = model.get_submodule(UP)
        total = layer.base_layer.dequantized_weight() + delta(layer) + delta(layer, "second")
        for name in order:
            layer.merge(adapter_names=[name])
        assert layer.merged_adapters == order
        results.append(stored(layer))
        packed = layer.base_layer
        expected = quantize(total, **SCHEME)
        for part, field in (("weight", "codes"), ("weight_scale", "scale"), ("weight_macro", "macro")):
            assert torch.equal(getattr(packed, part), getattr(expected, field))
        assert not any(p.requires_grad for p in packed.parameters() if p.dtype == torch.uint8)
    assert same_tensors(*results)


def test_safe_merge_refuses_broken_adapters_and_changes_nothing(load):
    model = with_lora(load(), target_modules=["up_proj"])
    layer = model.get_submodule(UP)
    with torch.no_grad():
        layer.lora_B["default"].weight[0, 0] = math.nan
    before = stored(model)
    with pytest.raises(ValueError, match="up_proj: merging default gives weights that are not finite"):
        layer.merge(safe_merge=True)
    assert not layer.merged
    assert same_tensors(stored(model), before)


def test_an_unsafe_merge_leaves_nan_visible_as_pefts_does(load):
    layer = with_lora(load(), target_modules=["up_proj"]).get_submodule(UP)
    with torch.no_grad():
        layer.lora_B["default"].weight[0, 0] = math.nan
    layer.merge()
    assert layer.base_layer.dequantized_weight()[0].isnan().any()
    assert math.isnan(layer.merge_error.sqnr_db)


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
    assert again.hf_quantizer.recorded_sqnr_db is None
    assert "Not measured." in (tmp_path / "README.md").read_text()
    assert torch.equal(again(IDS).logits, logits)


def test_merging_into_bfloat16_rounds_each_sum_once(load):
    model = with_lora(load(), lora_alpha=8, modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2.0)
    head = model.base_model.model.lm_head.modules_to_save["default"].weight.to(torch.bfloat16)
    layer = model.get_submodule(UP)
    expected = (layer.base_layer.dequantized_weight() + delta(layer)).to(torch.bfloat16)
    bias = model.get_submodule(UP.replace("mlp.up_proj", "self_attn.q_proj")).base_layer.bias.detach()
    adapted = model(IDS).logits
    plain = merge_adapters(model, into="bf16")
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16}
    assert not any(isinstance(m, MXFP4PackedLinear) for m in plain.modules())
    first = plain.model.layers[0]
    assert torch.equal(plain.lm_head.weight, head)
    assert type(first.mlp.up_proj) is nn.Linear
    assert torch.equal(first.mlp.up_proj.weight, expected)
    assert torch.equal(first.self_attn.q_proj.bias, bias.to(torch.bfloat16))
    assert (plain(IDS).logits.float() - adapted).norm() < 0.03 * adapted.norm()


def test_what_cannot_be_merged_says_so(load):
    with pytest.raises(ValueError, match="into='fp8' is not supported"):
        merge_adapters(with_lora(load()), into="fp8")
    with pytest.raises(TypeError, match="takes a PeftModel .*, not Qwen2ForCausalLM"):
        merge_adapters(load())
    with pytest.raises(ValueError, match="no adapter of this model is on a quantized layer"):
        merge_adapters(with_lora(make_model()))


def test_offloaded_weights_cannot_be_merged(load):
    offloaded = with_lora(load(mode="qat"), target_modules=["q_proj"])
    accelerate.cpu_offload(offloaded, torch.device("cpu"))
    for into in ("packed", "bf16"):
        with pytest.raises(ValueError, match="embed_tokens.weight is not in memory"):
            merge_adapters(offloaded, into=into)
    with pytest.raises(ValueError, match="embed_tokens.weight is not in memory"):
        offloaded.get_base_model().dequantize()


def decibels(signal: float, noise: float):
    """Compare a ratio of energies as reports have it."""
    return pytest.approx(10 * math.log10(signal / noise), abs=1e-3)


def test_the_cost_is_measured_per_layer_and_overall(load):
    model = with_lora(load())
    layers = {name: m for name, m in model.base_model.model.named_modules() if isinstance(m, MXFP4LoraLinear)}
    expected = {}
    signal = update = noise = 0.0
    for name, layer in layers.items():
        total = layer.base_layer.dequantized_weight() + delta(layer)
        error = energy(quantize(total, **SCHEME).dequantize() - total)
        expected[name] = decibels(energy(total), error)
        signal += energy(total)
        noise += error
        update += energy(delta(layer))

    report = model.merge_and_unload().merge_report

    assert isinstance(report, MergeReport)
    assert {name: layer.sqnr_db for name, layer in report.layers.items()} == expected
    assert report.total.sqnr_db == decibels(signal, noise)
    assert report.total.update_sqnr_db == decibels(update, noise)


@pytest.mark.parametrize(("alpha", "is_lossy"), [(0.1, True), (8.0, False)])
def test_a_merge_says_its_cost_and_warns_where_it_is_high(load, caplog, capsys, alpha, is_lossy):
    caplog.set_level(logging.INFO, logger="hf_mxfp4")
    total = with_lora(load(), lora_alpha=alpha).merge_and_unload().merge_report.total
    said = capsys.readouterr().err
    assert f"merged into 14 quantized layers: SQNR {total.sqnr_db:.2f} dB" in said
    assert "model.layers.1.mlp.down_proj: SQNR" in said
    assert (total.update_sqnr_db < 10) == is_lossy
    assert ("part of what was trained is lost" in said) == is_lossy
    assert ("merge_adapters(model, into='bf16')" in said) == is_lossy


@pytest.mark.parametrize(("std", "loses_more_than_half"), [(1e-3, True), (1e-2, False)])
@torch.no_grad()
def test_the_loss_is_measured_as_it_is(std, loses_more_than_half):
    base = qat()
    plain = base(IDS).logits
    model = with_small_lora(base, std=std)
    layers = {n: m for n, m in model.base_model.model.named_modules() if isinstance(m, MXFP4LoraMasterLinear)}
    update = noise = 0.0
    for layer in layers.values():
        weight = layer.base_layer.weight
        change = delta(layer)
        error = quantized(layer.base_layer, weight + change) - (quantized(layer.base_layer, weight) + change)
        update += energy(change)
        noise += energy(error)
    adapted = model(IDS).logits

    merged = model.merge_and_unload()

    assert list(merged.merge_report.layers) == list(layers)
    assert merged.merge_report.total.update_sqnr_db == decibels(update, noise)
    # Of the logits, more than the whole effect is gone at the smaller one.
    lost = (merged(IDS).logits - adapted).norm() / (adapted - plain).norm()
    assert (lost > 1) == loses_more_than_half
    assert (update < noise) == loses_more_than_half


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@torch.no_grad()
def test_experts_are_measured_parameter_by_parameter(family):
    model = with_small_lora(qat(family), target_modules=["q_proj"], target_parameters=EXPERTS)
    experts = next(m for m in model.modules() if isinstance(m, MXFP4Experts))
    before = {name: experts.to_experts().get_parameter(name).clone() for name in experts.projections}
    masters_before = {name: getattr(experts, name).clone() for name in experts.projections}
    report = model.merge_and_unload().merge_report
    names = [f"model.layers.0.mlp.experts.{name}" for name in experts.projections]
    assert set(report.layers) == {"model.layers.0.self_attn.q_proj", *names}
    for name, place in zip(experts.projections, names, strict=True):
        change = getattr(experts, name) - masters_before[name]
        noise = energy(experts.to_experts().get_parameter(name) - before[name] - change)
        assert report.layers[place].noise == pytest.approx(noise, rel=1e-3)
        assert noise > 0
        assert report.layers[place].update == pytest.approx(energy(change), rel=1e-3)


def test_what_cannot_be_merged_is_refused_before_anything_is_touched():
    model = with_small_lora(qat(fprop={"x": "full", "weight": "rceil", "rotation": "random-32"}))
    modules = [(name, type(module)) for name, module in model.named_modules()]
    weights = stored(model)
    with pytest.raises(ValueError, match="rotates .* drawn anew"):
        merge_adapters(model, into="packed")
    assert [(name, type(module)) for name, module in model.named_modules()] == modules
    assert same_tensors(stored(model), weights)


@pytest.mark.parametrize("safe", [False, True], ids=["in-place", "safe"])
def test_merging_and_unmerging_are_pefts(safe):
    model = with_small_lora(qat())
    plain = with_small_lora(make_model(layers=1))
    before = stored(model)

    for adapted in (model, plain):
        adapted.merge_adapter(safe_merge=safe)
    assert same_tensors(stored(model), stored(plain))
    assert model.get_submodule(UP).merge_error is not None

    for adapted in (model, plain):
        adapted.unmerge_adapter()
    assert same_tensors(stored(model), stored(plain))
    assert model.get_submodule(UP).merge_error is None
    torch.testing.assert_close(stored(model), before, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen2", {"target_modules": ["q_proj", "k_proj", "v_proj", "lm_head"]}),
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
        ("gpt_oss", {"target_modules": [], "target_parameters": [*EXPERTS, "experts.down_proj_bias"]}),
    ],
)
@pytest.mark.parametrize("merged_before", [False, True], ids=["", "merged"])
@torch.no_grad()
def test_merged_into_bfloat16_the_policy_stays(load, family, targets, merged_before, tmp_path):
    base = load(family, mode="qat", preset="w4a16")
    plain = base(IDS).logits
    model = with_small_lora(base, std=0.03, **targets)
    adapted = model(IDS).logits
    if merged_before:
        model.merge_adapter()
    merged = merge_adapters(model, into="bf16")
    assert not hasattr(merged.config, "quantization_config")
    assert merged.dtype == torch.bfloat16
    assert not any(isinstance(m, (MXFP4Linear, MXFP4Experts)) for m in merged.modules())
    assert (merged.float()(IDS).logits - adapted).norm() < 0.15 * (adapted - plain).norm()
    merged.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.usefixtures("dense_products")
@torch.no_grad()
def test_merged_and_packed(load):
    model, twin = (with_small_lora(load(mode="qat", preset="w4a16"), std=0.03) for _ in range(2))
    twin = twin.merge_and_unload()
    packed = merge_adapters(model)
    assert sum(isinstance(m, MXFP4PackedLinear) for m in packed.modules()) == 14
    assert len(packed.merge_report.layers) == 14
    assert torch.equal(packed(IDS).logits, twin(IDS).logits)
