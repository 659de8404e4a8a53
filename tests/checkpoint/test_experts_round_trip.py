# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on their way through files: trainable, packed, and back to plain ones."""

import pytest
import torch
from factors import factors_config
from same_bits import IDS, logits, tensors_in
from transformers import AutoModelForCausalLM

import hf_mxfp4


#: Linear maps in 2 decoder layers: 4 of attention, 2 for each of 4 experts, 3 of a shared expert.
N_QUANTIZED = {"qwen3_moe": 24, "qwen2_moe": 30, "mixtral": 24, "gpt_oss": 24}
U8 = torch.uint8


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=factors_config(**options))


def same_tensors(first, second) -> bool:
    first, second = tensors_in(first), tensors_in(second)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("family", N_QUANTIZED)
def test_trainable_experts_are_saved_as_they_came(family, checkpoint, tmp_path):
    source = checkpoint(family)
    model = load(source)
    report = model.quantization_report
    assert report.n_quantized == N_QUANTIZED[family]
    assert "model.layers.1.mlp.experts.3.gate_up_proj" in report.quantized
    assert report.n_skipped == (3 if family == "qwen2_moe" else 1)
    assert 22 < report.sqnr_db < 30
    model.save_pretrained(tmp_path / "saved")
    assert same_tensors(source, tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model)) and not torch.equal(
        logits(model), logits(AutoModelForCausalLM.from_pretrained(source))
    )


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("family", N_QUANTIZED)
def test_packed_experts(family, checkpoint, tmp_path):
    source = checkpoint(family)
    trained = load(source)
    expected = logits(trained)
    packed = AutoModelForCausalLM.from_pretrained(source, quantization_config=factors_config().packed())
    assert torch.equal(logits(packed), expected)  # quantized while the checkpoint was read
    assert packed.quantization_report.n_quantized == N_QUANTIZED[family]
    assert packed.quantization_report.sqnr_db == pytest.approx(trained.quantization_report.sqnr_db, abs=1e-3)
    assert packed.quantization_report.n_weights == trained.quantization_report.n_weights
    packed.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), expected)
    again.save_pretrained(tmp_path / "twice")
    assert same_tensors(tmp_path / "saved", tmp_path / "twice")
    hf_mxfp4.pack(trained).save_pretrained(tmp_path / "by-hand")
    assert torch.equal(logits(trained), expected) and same_tensors(tmp_path / "saved", tmp_path / "by-hand")
    generated = packed.generate(IDS[:1], max_new_tokens=3, do_sample=False)
    assert torch.equal(generated, again.generate(IDS[:1], max_new_tokens=3, do_sample=False))


def test_tensors_on_disk(checkpoint, tmp_path):
    load(checkpoint("qwen3_moe"), mode="packed").save_pretrained(tmp_path / "saved", max_shard_size="30KB")
    stored = tensors_in(tmp_path / "saved")
    prefix = "model.layers.1.mlp.experts."
    found = {n.removeprefix(prefix): (t.dtype, list(t.shape)) for n, t in stored.items() if n.startswith(prefix)}
    assert found == {
        "gate_up_proj": (U8, [4, 64, 32]),
        "gate_up_proj_scale": (U8, [4, 64, 2]),
        "gate_up_proj_macro": (U8, [4, 64, 1]),
        "down_proj": (U8, [4, 64, 16]),
        "down_proj_scale": (U8, [4, 64, 1]),
        "down_proj_macro": (U8, [4, 64, 1]),
    }
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.quantization_report.bits_per_weight == pytest.approx(4.3, abs=0.15)


@pytest.mark.parametrize("mode", ["qat", "packed"])
@pytest.mark.parametrize(
    ("skips", "quantized", "skipped"),
    [
        (["layers.1"], 12, 13),
        (["layers.1.mlp.experts"], 16, 9),
        ([r"re:model\.layers\.\d+\.mlp\.experts"], 8, 17),
        (["self_attn"], 16, 9),
    ],
    ids=str,
)
def test_skips(mode, skips, quantized, skipped, checkpoint, tmp_path):
    model = load(checkpoint("qwen3_moe"), mode=mode, modules_to_not_convert=skips)
    report = model.quantization_report
    assert (report.n_quantized, report.n_skipped) == (quantized, skipped)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.quantization_report.quantized == report.quantized
    assert torch.equal(logits(again), logits(model))
