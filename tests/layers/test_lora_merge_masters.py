# SPDX-License-Identifier: Apache-2.0
"""Merging adapters into trainable weights: PEFT's sums, and what quantizing them costs, measured and said."""

import math

import lora_models
import pytest
import torch
import torch.nn.functional as F
from factors import factors_config
from lora_models import IDS, UP, delta, fill, same_tensors, stored
from peft import LoraConfig
from tiny_models import make_model
from transformers import AutoModelForCausalLM

import hf_mxfp4.integrations.peft
from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, fake_quantize, merge_adapters
from hf_mxfp4.integrations.peft import MXFP4LoraMasterLinear
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.layers import MXFP4Experts


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ROTATED = {"fprop": {"x": "full", "weight": "rceil", "rotation": "deterministic-32"}}


def qat(family="qwen2", dtype=torch.float32, layers=1, **scheme):
    assert hf_mxfp4.integrations.peft.MXFP4LoraModel  # registered by its import; loading a model does it too
    model = make_model(family, layers=layers, dtype=dtype)
    quantize_linears(model, factors_config(**{"preset": "w4a16", **scheme}))
    return model


def with_lora(model, std=0.01, **options):
    return lora_models.with_lora(model, std=std, **options)


def energy(tensor) -> float:
    return tensor.double().square().sum().item()


def quantized(layer, weight):
    scheme = layer.config.weight_scheme
    return fake_quantize(
        weight,
        scale_rule=scheme.scale_rule,
        macro_block=scheme.macro_block,
        macro_search=scheme.macro_search,
        outlier_fallback=scheme.outlier_fallback,
    )


# ---- what it costs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("std", "loses_more_than_half"), [(1e-3, True), (1e-2, False)])
@torch.no_grad()
def test_the_loss_is_measured_as_it_is_and_said(std, loses_more_than_half, capsys):
    base = qat()
    plain = base(IDS).logits
    model = with_lora(base, std)
    layers = {n: m for n, m in model.base_model.model.named_modules() if isinstance(m, MXFP4LoraMasterLinear)}
    assert len(layers) == 7
    update = noise = 0.0
    for layer in layers.values():
        weight, change = layer.base_layer.weight, delta(layer)
        error = quantized(layer.base_layer, weight + change) - (quantized(layer.base_layer, weight) + change)
        update, noise = update + energy(change), noise + energy(error)
    adapted = model(IDS).logits
    capsys.readouterr()
    merged = model.merge_and_unload()
    report = merged.merge_report
    assert report.kind == "trainable" and list(report.layers) == list(layers)
    assert report.total.update_sqnr_db == pytest.approx(10 * math.log10(update / noise), abs=1e-3)
    # Of the logits: more than the whole effect is gone at the smaller one, and nobody was told.
    lost = ((merged(IDS).logits - adapted).norm() / (adapted - plain).norm()).item()
    assert (lost > 1) == (report.total.update_sqnr_db < 0) == loses_more_than_half
    said = capsys.readouterr().err
    assert "quantizing the merged weights kept the adapters' change at an SQNR of only" in said
    assert f"{report.total.update_sqnr_db:.1f} dB: part of what was trained is lost" in said
    assert "merge_adapters(model, into='bf16')" in said
    assert str(report).startswith("merged into 7 trainable layers: SQNR ")


def test_a_change_that_survives_is_no_alarm(capsys):
    base = qat()
    plain = base(IDS).logits
    model = with_lora(base, std=1.0)
    adapted = model(IDS).logits
    merged = model.merge_and_unload()
    assert merged.merge_report.total.update_sqnr_db > 10
    # The sum is quantized again, hence near and not equal; without the adapter it would be far.
    assert (merged(IDS).logits - adapted).norm() < 0.5 * (plain - adapted).norm()
    assert sum(isinstance(module, MXFP4Linear) for module in merged.modules()) == 7
    assert not any("lora_" in name for name, _ in merged.named_parameters())
    assert "lost" not in capsys.readouterr().err


def test_an_adapter_that_does_nothing_costs_nothing(capsys):
    model = with_lora(qat(), std=0.0)
    model.merge_adapter()
    total = model.base_model.merge_report.total
    assert total.noise == 0 and total.signal > 0 and math.isnan(total.update_sqnr_db)
    assert "lost" not in capsys.readouterr().err


@pytest.mark.parametrize("scheme", [{"outlier_fallback": 0.5}, {"weight_block": "32x32"}, ROTATED], ids=str)
@torch.no_grad()
def test_the_measured_weights_are_those_of_the_forward_pass(scheme):
    model = with_lora(qat(**scheme), target_modules=["up_proj"])
    layer = model.get_submodule(UP)
    x = torch.eye(64)
    before = layer(x).T
    layer.merge()
    assert layer.merge_error.signal == pytest.approx(energy(before), rel=1e-3)
    assert layer.merge_error.noise == pytest.approx(energy(layer(x).T - before), rel=1e-3)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@torch.no_grad()
def test_experts_are_measured_parameter_by_parameter(family, capsys):
    model = with_lora(qat(family), target_modules=["q_proj"], target_parameters=EXPERTS)
    experts = next(m for m in model.modules() if isinstance(m, MXFP4Experts))
    before = {name: experts.to_experts().get_parameter(name).clone() for name in experts.projections}
    masters_before = {name: getattr(experts, name).clone() for name in experts.projections}
    capsys.readouterr()
    merged = model.merge_and_unload()
    report = merged.merge_report
    names = [f"model.layers.0.mlp.experts.{name}" for name in experts.projections]
    assert set(report.layers) == {"model.layers.0.self_attn.q_proj", *names}
    for name, place in zip(experts.projections, names, strict=True):
        change = getattr(experts, name) - masters_before[name]
        noise = energy(experts.to_experts().get_parameter(name) - before[name] - change)
        assert report.layers[place].noise == pytest.approx(noise, rel=1e-3) and noise > 0
        assert report.layers[place].update == pytest.approx(energy(change), rel=1e-3)
    assert "merged weights kept the adapters' change" in capsys.readouterr().err


def test_what_cannot_be_merged_is_refused_before_anything_is_touched():
    random = {"fprop": {**ROTATED["fprop"], "rotation": "random-32"}}
    model = with_lora(qat(**random))
    before = [(name, type(module)) for name, module in model.named_modules()], stored(model)
    with pytest.raises(ValueError, match="rotates .* drawn anew"):
        merge_adapters(model, into="packed")
    assert [(name, type(module)) for name, module in model.named_modules()] == before[0]
    assert same_tensors(stored(model), before[1])


# ---- merged and taken apart -----------------------------------------------------------------------------------------


def test_a_merged_layer_quantizes_the_sum():
    model = with_lora(qat(preset="w4a4"))
    layer = model.get_submodule(UP)
    x = torch.randn(3, 64)
    before, master = layer(x), layer.base_layer.weight.detach().clone()
    merged = master + delta(layer)
    model.merge_adapter()
    weight = layer.base_layer.weight.detach()
    torch.testing.assert_close(weight, merged, rtol=1e-6, atol=1e-6)
    quantized_x = fake_quantize(x, macro_block=128, macro_search="static", outlier_fallback=0.5)
    assert torch.equal(layer(x), F.linear(quantized_x, quantized(layer.base_layer, weight)))
    model.unmerge_adapter()
    torch.testing.assert_close(layer(x), before, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("safe", [False, True], ids=["in-place", "safe"])
def test_merging_and_unmerging_are_pefts(safe):
    model, plain = with_lora(qat()), with_lora(make_model(layers=1))
    before = stored(model)
    for one in (model, plain):
        one.merge_adapter(safe_merge=safe)
    assert same_tensors(stored(model), stored(plain))
    assert model.get_submodule(UP).merge_error is not None
    for one in (model, plain):
        one.unmerge_adapter()
    assert same_tensors(stored(model), stored(plain))
    for name, tensor in stored(model).items():
        torch.testing.assert_close(tensor, before[name], rtol=1e-6, atol=1e-7)
    assert model.get_submodule(UP).merge_error is None


@torch.no_grad()
def test_several_adapters_are_measured_together_however_they_are_merged():
    errors = []
    for steps in ([["default", "second"]], [["default"], ["second"]]):
        model = with_lora(qat(), target_modules=["up_proj"])
        model.add_adapter("second", LoraConfig(r=2, lora_alpha=2, target_modules=["up_proj"]))
        fill(model, "second", 0.02)
        layer = model.get_submodule(UP)
        before = quantized(layer.base_layer, layer.base_layer.weight.clone())
        change = delta(layer) + delta(layer, "second")
        for names in steps:
            layer.merge(adapter_names=names)
        expected = energy(quantized(layer.base_layer, layer.base_layer.weight) - before - change)
        assert layer.merged_adapters == ["default", "second"]
        assert layer.merge_error.noise == pytest.approx(expected, rel=1e-2)
        assert layer.merge_error.update == pytest.approx(energy(change), rel=1e-4)
        errors.append(layer.merge_error.update_sqnr_db)
    assert errors[0] == pytest.approx(errors[1], abs=0.05)


def test_a_sum_that_is_not_finite_is_refused_by_a_safe_merge():
    model = with_lora(qat(), target_modules=["up_proj"])
    layer = model.get_submodule(UP)
    layer.lora_B["default"].weight.data[0, 0] = math.nan
    before = stored(model)
    with pytest.raises(ValueError, match="NaNs detected in the merged weights"):
        model.merge_adapter(safe_merge=True)
    assert not layer.merged and layer.merge_error is None
    assert same_tensors(stored(model), before)


def test_merging_the_same_adapters_again_and_again_is_said_once(capsys):
    model = with_lora(qat(), std=1e-3)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["up_proj"]))
    fill(model, "second", 1e-3)
    capsys.readouterr()
    said = []
    for names in (["default"], ["default"], ["second"], ["second"]):
        model.merge_adapter(adapter_names=names)
        said.append("merged weights kept" in capsys.readouterr().err)
        assert model.base_model.merge_report is not None
        model.unmerge_adapter()
    assert said == [True, False, True, False]


def test_masters_in_bfloat16():
    model = with_lora(qat(dtype=torch.bfloat16), std=1.0)
    before = stored(model)
    model.merge_adapter()
    assert 5 < model.base_model.merge_report.total.update_sqnr_db < 40
    model.unmerge_adapter()
    for name, tensor in stored(model).items():
        torch.testing.assert_close(tensor, before[name], rtol=0.02, atol=0.02)


def test_fan_in_fan_out_is_pefts_mistake_to_correct():
    with pytest.warns(UserWarning, match="fan_in_fan_out is set to True but the target module is a linear layer"):
        model = with_lora(qat(), target_modules=["o_proj"], fan_in_fan_out=True)
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.o_proj")
    weight = layer.base_layer.weight.detach().clone()
    model.merge_adapter()
    torch.testing.assert_close(layer.base_layer.weight.detach(), weight + delta(layer))


# ---- without a loss -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen2", {"lora_bias": True, "target_modules": ["q_proj", "k_proj", "v_proj"]}),
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
        ("gpt_oss", {"target_modules": [], "target_parameters": [*EXPERTS, "experts.down_proj_bias"]}),
    ],
)
@pytest.mark.parametrize("merged_before", [False, True], ids=["", "merged"])
@torch.no_grad()
def test_merged_into_bfloat16_the_policy_stays(load, family, targets, merged_before, tmp_path):
    base = load(family, mode="qat", preset="w4a16")
    plain = base(IDS).logits
    model = with_lora(base, std=0.03, **targets)
    adapted = model(IDS).logits
    if merged_before:
        model.merge_adapter()
    merged = merge_adapters(model, into="bf16")
    assert not hasattr(merged.config, "quantization_config") and merged.dtype == torch.bfloat16
    assert not any(isinstance(m, (MXFP4Linear, MXFP4Experts)) for m in merged.modules())
    assert (merged.float()(IDS).logits - adapted).norm() < 0.15 * (adapted - plain).norm()
    merged.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.usefixtures("dense_products")
@torch.no_grad()
def test_merged_and_packed(load):
    model, twin = (with_lora(load(mode="qat", preset="w4a16"), std=0.03) for _ in range(2))
    twin = twin.merge_and_unload()
    packed = merge_adapters(model)
    assert sum(isinstance(m, MXFP4PackedLinear) for m in packed.modules()) == 14
    assert packed.merge_report.kind == "trainable" and len(packed.merge_report.layers) == 14
    assert torch.equal(packed(IDS).logits, twin(IDS).logits)


def test_the_forward_pass_is_pefts():
    model = with_lora(qat())
    layer = model.get_submodule(UP)
    x = torch.randn(3, 64)
    expected = F.linear(x, quantized(layer.base_layer, layer.base_layer.weight)) + x @ delta(layer).T
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert repr(layer).startswith("lora.MXFP4LoraMasterLinear(")
