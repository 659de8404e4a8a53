# SPDX-License-Identifier: Apache-2.0
"""PEFT's ways with adapters, of every kind of quantized layer: attached, trained, switched, saved and loaded."""

from typing import NamedTuple

import pytest
import torch
from lora_models import IDS, fill, gradients, same_tensors, stored, with_lora
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_mxfp4.integrations import peft as adapters


class Kind(NamedTuple):
    """A quantized model of two layers, what is adapted in it, and by what: a class of layers and tensors of factors."""

    family: str
    scheme: dict
    lora: dict
    layer: type
    layers: int
    factors: int


LINEAR = {"target_modules": "all-linear"}
PARAMETERS = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
KINDS = {
    "packed": Kind("qwen2", {"mode": "packed"}, LINEAR, adapters.MXFP4LoraLinear, 14, 28),
    "trainable": Kind("qwen2", {"mode": "qat"}, LINEAR, adapters.MXFP4LoraMasterLinear, 14, 28),
    "packed experts": Kind(
        "qwen3_moe", {"mode": "packed"}, {"target_modules": ["experts"]}, adapters.MXFP4LoraExperts, 2, 8
    ),
    "trainable experts": Kind(
        "qwen3_moe", {"mode": "qat", "preset": "w4a16"}, PARAMETERS, adapters.MXFP4LoraExpertParameter, 4, 8
    ),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def count(model, kind) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def factors(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


def test_a_new_adapter_changes_nothing_yet(load, kind):
    base = load(kind.family, **kind.scheme)
    expected = base(IDS).logits
    model = with_lora(base, init_lora_weights=True, **kind.lora)
    assert count(model, kind.layer) == kind.layers and torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize(("autocast", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_adapters_on_a_bfloat16_base(load, kind, autocast, dtype):
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, **kind.lora)
    base = load(kind.family, dtype=torch.bfloat16, **kind.scheme)
    model = get_peft_model(base, config, autocast_adapter_dtype=autocast)
    fill(model, "default", 0.05)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {dtype}
    grads = gradients(model).values()
    assert len(grads) == kind.factors
    assert all(grad.dtype == dtype and grad.isfinite().all() and grad.norm() > 0 for grad in grads)
    assert model(IDS).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"preset": "w4a4"}], ids=["", "w4a4"])
def test_training_moves_adapters_and_not_one_bit_of_the_base(load, kind, options):
    model = with_lora(load(kind.family, **{**kind.scheme, **options}), std=0.05, **kind.lora)
    base, before = stored(model), factors(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None and parameter.grad.norm() > 0) == ("lora_" in name), name
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert same_tensors(stored(model), base)
    after = factors(model)
    assert len(after) == kind.factors and not any(torch.equal(after[name], before[name]) for name in before)


def test_several_adapters_and_none(load, kind):
    base = load(kind.family, **kind.scheme)
    plain = base(IDS).logits
    model = with_lora(base, std=0.05, **kind.lora)
    first = model(IDS).logits
    model.add_adapter("second", LoraConfig(r=2, **kind.lora))
    fill(model, "second", 0.07)
    assert count(model, kind.layer) == kind.layers
    model.set_adapter("second")
    second = model(IDS).logits
    assert not torch.equal(first, second) and not torch.equal(first, plain)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in factors(model) if ".second." in name} and len(trained) == kind.factors
    with model.disable_adapter():
        assert torch.equal(model(IDS).logits, plain)
    model.set_adapter("default")
    assert torch.equal(model(IDS).logits, first)
    model.delete_adapter("second")
    model.set_adapter("default")
    assert torch.equal(model(IDS).logits, first)
    assert torch.equal(model.unload()(IDS).logits, plain)


def test_adapters_round_trip_over_a_base_quantized_anew_and_over_a_saved_one(load, kind, tmp_path):
    base = load(kind.family, **kind.scheme)
    base.save_pretrained(tmp_path / "base")
    model = with_lora(base, std=0.05, **kind.lora)
    expected = model(IDS).logits
    model.save_pretrained(tmp_path / "adapter")
    files = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert len(names) == kind.factors and all("lora_" in name for name in names)
    for base in (AutoModelForCausalLM.from_pretrained(tmp_path / "base"), load(kind.family, **kind.scheme)):
        again = PeftModel.from_pretrained(base, tmp_path / "adapter")
        assert count(again, kind.layer) == kind.layers
        assert torch.equal(again(IDS).logits, expected)
        assert again.peft_config["default"].base_quantization["mode"] == kind.scheme["mode"]
        assert not any("lora_" in name and p.requires_grad for name, p in again.named_parameters())
    again.load_adapter(tmp_path / "adapter", "trainable", is_trainable=True)
    again.set_adapter("trainable")
    assert len(gradients(again)) == kind.factors


def test_through_transformers_own_adapter_methods(load, kind, tmp_path):
    model = load(kind.family, **kind.scheme)
    plain = model(IDS).logits
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=2, **kind.lora), "mine")
    fill(model, "mine", 0.05)
    assert count(model, kind.layer) == kind.layers
    expected = model(IDS).logits
    assert not torch.equal(expected, plain)
    model.save_pretrained(tmp_path)
    model.disable_adapters()
    assert torch.equal(model(IDS).logits, plain)
    other = load(kind.family, **kind.scheme)
    other.load_adapter(tmp_path)
    assert torch.equal(other(IDS).logits, expected)
