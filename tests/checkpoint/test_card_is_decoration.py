# SPDX-License-Identifier: Apache-2.0
"""A card that cannot be read or made is a warning; weights are saved. Cards name the class that loads the head."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import auto_class


IDS = torch.arange(2, 14).view(2, 6)
BROKEN = [
    "---\n: [unclosed\n---\nhello",
    "---\n- a\n- b\n---\nx",
    "---\ntitle: a: b\n---\nx",
    "---\nbase_model: [a]\ntags: 5\n---\nx",
]


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture
def base(checkpoint, tmp_path):
    AutoModelForCausalLM.from_pretrained(checkpoint("qwen2")).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def load(folder, mode):
    config = MXFP4RLConfig(mode=mode)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_a_readme_that_is_no_card_does_not_end_a_save(base, tmp_path, text, mode):
    (base / "README.md").write_text(text)
    model, target = load(base, mode), tmp_path / "saved"
    target.mkdir()
    (target / "README.md").write_text(text)
    model.save_pretrained(target)
    assert (target / "README.md").read_text() == text
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(target)), logits(model))
    model.save_pretrained(tmp_path / "fresh")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "fresh")), logits(model))


def test_whatever_fails_in_making_a_card_is_a_warning(base, tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise RuntimeError("no card today")

    monkeypatch.setattr("hf_mxfp4.checkpoint.card.make_card", fail)
    model = load(base, "packed")
    model.save_pretrained(tmp_path / "saved")
    assert "no model card was written: RuntimeError: no card today" in capsys.readouterr().err
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(model))


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("Qwen2ForCausalLM", "AutoModelForCausalLM"),
        ("GPT2LMHeadModel", "AutoModelForCausalLM"),
        ("Qwen2ForSequenceClassification", "AutoModelForSequenceClassification"),
        ("BertForTokenClassification", "AutoModelForTokenClassification"),
        ("BertForQuestionAnswering", "AutoModelForQuestionAnswering"),
        ("BertForMaskedLM", "AutoModelForMaskedLM"),
        ("BertModel", "AutoModel"),
        ("T5ForConditionalGeneration", "AutoModelForSeq2SeqLM"),
        ("T5EncoderModel", "T5EncoderModel"),
        ("LlavaForConditionalGeneration", "AutoModelForImageTextToText"),
        ("ModelOfSomebodyForCausalLM", "AutoModelForCausalLM"),
    ],
)
def test_the_class_that_a_card_names_has_the_head(architecture, expected):
    assert auto_class(architecture) == expected
    assert hasattr(transformers, expected)
