# SPDX-License-Identifier: Apache-2.0
"""The card of an adapter on a quantized base: what it says, that its code runs, and whose text it leaves alone."""

import copy
import pickle
import re

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.peft.merge.merge_cost import merge_cost


IDS = torch.arange(2, 14).view(2, 6)
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture
def load(checkpoint):
    def load(family="qwen2", **scheme):
        config = MXFP4RLConfig(**{"mode": "packed", **scheme})
        return AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32, quantization_config=config)

    return load


def with_lora(model, adapter="default", **options) -> PeftModel:
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False, **options}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings), adapter_name=adapter).eval()


def rows(text: str) -> dict[str, str]:
    found = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in found if len(row) == 2}


def card(folder) -> str:
    return (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (
            {"macro_block": None},
            {
                "mode of the base": "`packed`",
                "preset": "`w4a16`",
                "scheme": "`w4a16 [weights mxfp4+even, activations full precision]`",
                "bits per quantized weight": "4.25",
                "quantized linear maps": "14",
                "rank": "4",
                "alpha": "6",
                "targets": "`q_proj`, `up_proj`",
            },
        ),
        ({"mode": "qat", "preset": "w4a4"}, {"mode of the base": "`qat`", "preset": "`w4a4`"}),
    ],
    ids=["packed", "qat"],
)
def test_what_it_says(load, scheme, expected, tmp_path):
    model = with_lora(load(**scheme))
    model.save_pretrained(tmp_path)
    text = card(tmp_path)
    assert text.count("More Information Needed") == 0 and "# LoRA adapter for Qwen2ForCausalLM in MXFP4" in text
    found = rows(text)
    assert {name: found[name] for name in expected} == expected
    assert re.search(r"ratio of -?\d+\.\d dB\. Below 10 dB part of what was trained is lost", text)
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.library_name == "peft" and {"lora", "mxfp4", "hf-mxfp4"} <= set(data.tags)
    assert data.base_model is None and not any(tag.startswith("base_model:") for tag in data.tags)


def test_a_base_from_the_hub_is_named(load, tmp_path):
    model = load()
    model.config._name_or_path = model.name_or_path = "Qwen/Qwen2.5-3B"
    with_lora(model).save_pretrained(tmp_path)
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.base_model == "Qwen/Qwen2.5-3B" and "base_model:adapter:Qwen/Qwen2.5-3B" in data.tags
    assert 'from_pretrained(\n    "Qwen/Qwen2.5-3B",\n    quantization_config=hf_mxfp4.MXFP4RLConfig(' in card(tmp_path)


@pytest.mark.parametrize("name", ["default", "mine"])
@pytest.mark.parametrize("scheme", [{}, {"mode": "qat", "preset": "w4a16", "macro_block": None}, None], ids=str)
def test_its_code_loads_the_adapter(load, checkpoint, scheme, name, tmp_path):
    base, place = load(**(scheme or {})), checkpoint("qwen2")
    if scheme is None:  # a base whose files have the scheme
        base.save_pretrained(tmp_path / "base")
        place = tmp_path / "base"
        base = AutoModelForCausalLM.from_pretrained(place)
    model = with_lora(base, name)
    expected = model(IDS).logits
    model.save_pretrained(tmp_path / "adapter")
    text = card(tmp_path / "adapter")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert ("quantization_config" in code) == (scheme is not None)
    code = code.replace("<the base model>", str(place)).replace(
        "<this repository or folder>", str(tmp_path / "adapter")
    )
    names: dict = {}
    exec(code, names)
    assert torch.equal(names["model"].eval()(IDS).logits, expected)


def test_an_unedited_card_is_renewed_and_an_edited_one_stays(load, tmp_path):
    model = with_lora(load(), init_lora_weights=True)
    model.save_pretrained(tmp_path)
    first = card(tmp_path)
    assert "When this adapter was saved it changed nothing yet." in first
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.01)
    model.save_pretrained(tmp_path)
    second = card(tmp_path)
    assert second != first and "it changed nothing yet" not in second
    (tmp_path / "README.md").write_text(second.replace("## Merging", "My own words.\n\n## Merging"))
    model.save_pretrained(tmp_path)
    assert "My own words." in card(tmp_path)


def test_a_card_that_somebody_wrote_stays(load, tmp_path):
    (tmp_path / "README.md").write_text("---\nlicence: mit\n---\n# My adapter\n\nFor nothing in particular.\n")
    with_lora(load()).save_pretrained(tmp_path)
    assert "For nothing in particular." in card(tmp_path) and "How to load" not in card(tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data["licence"] == "mit"


def test_adapters_on_plain_models_have_pefts_card(tmp_path):
    with_lora(make_model()).save_pretrained(tmp_path)
    assert "More Information Needed" in card(tmp_path)


def test_a_model_is_not_held_and_copies_know_what_was_said(load, tmp_path):
    model = with_lora(load())
    config = model.peft_config["default"]
    assert config._base.model is model.get_base_model()
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert copied._base.model is None and copied._base.n_quantized == 14
    twin = copy.deepcopy(model)
    twin.save_pretrained(tmp_path)
    assert "Not measured when this adapter was saved." in card(tmp_path)


@pytest.mark.parametrize(
    ("family", "scheme", "targets"),
    [
        ("qwen2", {}, {"target_modules": "all-linear"}),
        ("qwen2", {"weight_block": "32x32"}, {"target_modules": "all-linear"}),
        ("qwen2", {"mode": "qat", "preset": "w4a4"}, {"target_modules": "all-linear"}),
        ("gpt_oss", {}, {"target_modules": ["experts", "q_proj"]}),
        ("gpt_oss", {"mode": "qat"}, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    ],
)
def test_the_estimate_is_near_what_a_merge_costs(load, family, scheme, targets):
    model = with_lora(load(family, **scheme), **targets)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    estimate = merge_cost(model.get_base_model(), "default")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    found = model.merge_and_unload().merge_report
    assert set(estimate.layers) == set(found.layers)
    assert estimate.total.update_sqnr_db == pytest.approx(found.total.update_sqnr_db, abs=1.0)


def test_what_cannot_be_estimated(load):
    model = with_lora(load())
    assert merge_cost(model.get_base_model(), "other") is None
    model.merge_adapter()
    assert merge_cost(model.get_base_model(), "default") is None
