# SPDX-License-Identifier: Apache-2.0
"""A checkpoint keeps its choice of layers, whichever version made it; what no file has stays plain."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_mxfp4 import MXFP4RLConfig, module_names
from hf_mxfp4.integrations.transformers import quantizer


SIZES = {"vocab_size": 64, "d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}
IDS = torch.arange(2, 12).view(2, 5)


@pytest.fixture
def t5(tmp_path) -> Path:
    torch.manual_seed(0)
    config = T5Config(**SIZES, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def load(folder: Path, mode: str | None = None, auto=AutoModelForSeq2SeqLM, **options):
    scheme = {} if mode is None else {"quantization_config": MXFP4RLConfig(mode=mode)}
    return auto.from_pretrained(folder, dtype=torch.float32, **scheme, **options).eval()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS, decoder_input_ids=IDS).logits


def scheme_in(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_a_checkpoint_whose_feed_forward_was_quantized_still_loads_so(mode, t5, tmp_path, monkeypatch):
    """As versions wrote them that did not look for readers of weights, and recorded nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(module_names, "find_weight_readers", lambda model: {})
        patch.setattr(quantizer, "full_precision_record", lambda model, reasons: None)
        old = load(t5, mode)
        assert sum(name.endswith("wo") for name in old.quantization_report.quantized) == 2
        old.save_pretrained(tmp_path / "old")
        if mode == "qat":
            expected = logits(old)
    again = load(tmp_path / "old")
    assert again.quantization_report.quantized == old.quantization_report.quantized
    if mode == "qat":
        assert torch.equal(logits(again), expected)


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_logits_are_those_of_the_saved_model(mode, t5, tmp_path):
    model = load(t5, mode)
    report = model.quantization_report
    readers = {reason for name, reason in report.skip_reasons.items() if name.endswith("wo")}
    assert readers == {"T5DenseActDense.forward reads its weight"}
    assert "2 layers in full precision: T5DenseActDense.forward reads its weight" in str(report)
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.quantization_report.quantized == report.quantized
    assert torch.equal(logits(again), logits(model))


def test_what_names_do_not_tell_is_recorded_and_used(t5, tmp_path, monkeypatch):
    model = load(t5, "qat")
    model.save_pretrained(tmp_path / "saved")
    kept = scheme_in(tmp_path / "saved")["full_precision"]
    assert kept == [
        "encoder.block.0.layer.1.DenseReluDense.wo",
        "decoder.block.0.layer.2.DenseReluDense.wo",
        "lm_head",
    ]
    # A version that would choose otherwise.
    monkeypatch.setattr(module_names, "find_weight_readers", lambda model: {})
    again = load(tmp_path / "saved")
    assert again.quantization_report.quantized == model.quantization_report.quantized
    again.save_pretrained(tmp_path / "again")
    assert scheme_in(tmp_path / "again") == scheme_in(tmp_path / "saved")


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_a_new_head_and_a_new_pooler_are_plain_and_initialized(mode, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(**sizes, vocab_size=64, pad_token_id=0)).save_pretrained(tmp_path / "plain")
    saved = load(tmp_path / "plain", mode, AutoModelForMaskedLM)
    saved.save_pretrained(tmp_path / "saved")
    for folder, how in (("plain", mode), ("saved", None)):
        model = load(tmp_path / folder, how, AutoModelForSequenceClassification, num_labels=3)
        for head in (model.bert.pooler.dense, model.classifier):
            assert type(head) is torch.nn.Linear and head.weight.isfinite().all() and 0 < head.weight.std() < 0.1
        assert len(model.quantization_report.quantized) == 6
        model.save_pretrained(tmp_path / "again")
        again = load(tmp_path / "again", None, AutoModelForSequenceClassification)
        with torch.no_grad():
            assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_every_way_to_pack_records_the_same(t5, tmp_path):
    from hf_mxfp4 import pack
    from hf_mxfp4.checkpoint import pack_checkpoint

    config = MXFP4RLConfig(mode="packed")
    load(t5, "packed").save_pretrained(tmp_path / "loaded")
    pack(load(t5), config).save_pretrained(tmp_path / "packed")
    pack_checkpoint(t5, tmp_path / "folder", config)
    kept = {name: scheme_in(tmp_path / name)["full_precision"] for name in ("loaded", "packed", "folder")}
    assert kept["loaded"] == kept["packed"] == kept["folder"] and len(kept["loaded"]) == 3


def test_a_model_that_saves_itself_by_passing_its_arguments_on(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    class Own(Qwen2ForCausalLM):
        def save_pretrained(self, save_directory, *args, **kwargs):
            super().save_pretrained(save_directory, *args, **kwargs)

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    model = Own(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0))
    model.save_pretrained(tmp_path / "plain")
    load(tmp_path / "plain", "qat", Qwen2ForCausalLM)  # the parent class saves our way too, from now on
    model = load(tmp_path / "plain", "qat", Own)
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "saved", None, Own)(IDS).logits, model(IDS).logits)
