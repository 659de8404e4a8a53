# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that look unusual and are whole must load: other heads, renamed tensors, experts, subsets of files."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from same_bits import tensors_in
from tables import pairwise_params
from tiny_models import make_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig


IDS = torch.arange(6)[None]
MODES = ["qat", "packed"]


def save(tmp_path, model, mode, auto=AutoModelForCausalLM, **options):
    """Save a full-precision model, quantize it and save it again; the quantized one and its folder."""
    model.save_pretrained(tmp_path / "base")
    quantized = auto.from_pretrained(tmp_path / "base", quantization_config=MXFP4RLConfig(**options))
    if mode == "packed":
        quantized = hf_mxfp4.pack(quantized)
    quantized.save_pretrained(tmp_path / mode, max_shard_size="30KB")
    return quantized, tmp_path / mode


def same_logits(one, other) -> bool:
    with torch.no_grad():
        return torch.equal(one(IDS)[0], other(IDS)[0])


@pytest.mark.parametrize(
    ("family", "tie", "mode"), pairwise_params(["llama", "qwen2", "qwen3", "gemma"], [False, True], MODES)
)
def test_families_and_tied_heads(tmp_path, family, tie, mode):
    model, folder = save(tmp_path, make_model(family, tie=tie), mode)
    assert same_logits(model, AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("mode", MODES)
def test_a_tied_head_that_was_stored_too(tmp_path, mode):
    model, folder = save(tmp_path, make_model("qwen2", tie=True), mode)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert same_logits(model, AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("family", "part"), [("qwen3_moe", ".experts.0.gate_proj."), ("mixtral", ".block_sparse_moe.")]
)
def test_experts_that_are_stored_one_by_one_and_by_other_names(tmp_path, family, part, mode):
    model, folder = save(tmp_path, make_model(family), mode, modules_to_not_convert=["experts"])
    assert any(part in name for name in tensors_in(folder))
    assert same_logits(model, AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("mode", MODES)
def test_a_new_head(tmp_path, mode):
    model, folder = save(tmp_path, make_model("qwen2"), mode)
    other = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    assert same_logits(model.model, other.model) and other.score.weight.isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_a_base_model_gets_a_head(tmp_path, mode):
    model, folder = save(tmp_path, make_model("qwen2").model, mode, auto=AutoModel)
    assert same_logits(model, AutoModelForCausalLM.from_pretrained(folder).model)


def test_a_variant(tmp_path):
    model, _ = save(tmp_path, make_model("qwen2"), "packed")
    model.save_pretrained(tmp_path / "variants")
    model.save_pretrained(tmp_path / "variants", variant="small", max_shard_size="30KB")
    assert (tmp_path / "variants" / "model.safetensors").is_file()
    assert (tmp_path / "variants" / "model.safetensors.index.small.json").is_file()
    assert same_logits(model, AutoModelForCausalLM.from_pretrained(tmp_path / "variants", variant="small"))
    assert same_logits(model, AutoModelForCausalLM.from_pretrained(tmp_path / "variants"))


def test_master_weights_under_another_scheme(tmp_path):
    _, folder = save(tmp_path, make_model("qwen2"), "qat")
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config = MXFP4RLConfig(preset="w4a16", macro_block=None).to_dict()
    model = AutoModelForCausalLM.from_pretrained(folder, config=config)
    assert model.config.quantization_config.preset == "w4a16"
