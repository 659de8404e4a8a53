# SPDX-License-Identifier: Apache-2.0
"""Save and load: the scheme and the choice of layers come back by themselves, the masters bit for bit, in this process
and in a new one; `save_pretrained` writes the state dict it is given."""

from pathlib import Path

import pytest
import torch
from export_files import config_in, header_and_data
from factors import factors_config
from same_bits import IDS, assert_same, tensors_in, weights
from tables import CONFIGS, some
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_mxfp4 import MXFP4RLConfig, lab, module_names, pack
from hf_mxfp4.checkpoint import pack_checkpoint, take_state_dict, verify_folder
from hf_mxfp4.integrations.transformers import quantizer


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=factors_config(**options))


SCHEMES = some(CONFIGS, "default", "w4a16 plain", "skips", "w4a8g8")
SIZES = "5GB", "20KB", "20KB", "5GB"
FAMILIES = "qwen2", "llama", "qwen3", "gemma"


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("options", "shard_size", "family"), list(zip(SCHEMES.values(), SIZES, FAMILIES, strict=True)))
def test_the_scheme_comes_back_without_being_named(options, shard_size, family, tie, checkpoint, tmp_path):
    source, target = checkpoint(family, tie=tie), tmp_path / "saved"
    model = load(source, **options)
    model.save_pretrained(target, max_shard_size=shard_size)
    assert (len(list(target.glob("*.safetensors"))) > 2) == (shard_size == "20KB")
    assert config_in(target)["quantization_config"] == factors_config(**options).to_dict()

    again = AutoModelForCausalLM.from_pretrained(target)
    assert again.hf_quantizer.quantization_config == factors_config(**options)
    assert again.quantization_report == model.quantization_report
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    arguments = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(again.generate(IDS, **arguments), model.generate(IDS, **arguments))


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_only_the_scheme_is_added_and_saving_again_changes_nothing(mode, checkpoint, tmp_path):
    source = checkpoint("qwen2", dtype=torch.bfloat16)
    load(source, mode=mode).save_pretrained(tmp_path / "one")
    before, after = (config_in(folder) for folder in (source, tmp_path / "one"))
    assert after.pop("quantization_config") == factors_config(mode=mode).to_dict()
    assert "import hf_mxfp4" in after.pop("transformers_weights")  # which stops transformers without it
    assert after == before
    AutoModelForCausalLM.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "two")
    # But for the order of the entries of its metadata, which safetensors writes in any.
    one, two = (header_and_data(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one == two
    assert (tmp_path / "one" / "config.json").read_bytes() == (tmp_path / "two" / "config.json").read_bytes()


# ---- the choice of layers -------------------------------------------------------------------------------------------


SIZES = {"vocab_size": 64, "d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}


@pytest.fixture
def t5(tmp_path) -> Path:
    torch.manual_seed(0)
    config = T5Config(**SIZES, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def load_as(folder: Path, mode: str | None = None, auto=AutoModelForSeq2SeqLM, **options):
    scheme = {} if mode is None else {"quantization_config": MXFP4RLConfig(mode=mode)}
    return auto.from_pretrained(folder, dtype=torch.float32, **scheme, **options).eval()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS, decoder_input_ids=IDS).logits


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_a_checkpoint_whose_feed_forward_was_quantized_still_loads_so(mode, t5, tmp_path, monkeypatch):
    """As versions wrote them that did not look for readers of weights, and recorded nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(module_names, "find_weight_readers", lambda model: {})
        patch.setattr(quantizer, "full_precision_record", lambda model, reasons: None)
        old = load_as(t5, mode)
        assert sum(name.endswith("wo") for name in old.quantization_report.quantized) == 2
        old.save_pretrained(tmp_path / "old")
        if mode == "qat":
            expected = logits(old)
    again = load_as(tmp_path / "old")
    assert again.quantization_report.quantized == old.quantization_report.quantized
    if mode == "qat":
        assert torch.equal(logits(again), expected)


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_what_names_do_not_tell_is_recorded_and_used(mode, t5, tmp_path, monkeypatch):
    model = load_as(t5, mode)
    readers = {reason for name, reason in model.quantization_report.skip_reasons.items() if name.endswith("wo")}
    assert readers == {"T5DenseActDense.forward reads its weight"}
    assert "2 layers in full precision: T5DenseActDense.forward reads its weight" in str(model.quantization_report)
    model.save_pretrained(tmp_path / "saved")
    kept = config_in(tmp_path / "saved")["quantization_config"]["full_precision"]
    assert kept == ["encoder.block.0.layer.1.DenseReluDense.wo", "decoder.block.0.layer.2.DenseReluDense.wo", "lm_head"]
    # A version that would choose otherwise.
    monkeypatch.setattr(module_names, "find_weight_readers", lambda model: {})
    again = load_as(tmp_path / "saved")
    assert again.quantization_report.quantized == model.quantization_report.quantized
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "again")
    assert config_in(tmp_path / "again") == config_in(tmp_path / "saved")
    if mode == "qat":
        assert len(lab.Selection.of(lab.open_source(f"{tmp_path}/saved")).axes) == 14
        pack_checkpoint(tmp_path / "saved", tmp_path / "packed")
        packed = load_as(tmp_path / "packed")
        assert packed.quantization_report.quantized == model.quantization_report.quantized
        assert config_in(tmp_path / "packed")["quantization_config"]["full_precision"] == kept
        assert "| linear layers in full precision | 3 (" in (tmp_path / "packed" / "README.md").read_text()
    for folder in tmp_path.iterdir():
        assert not verify_folder(folder).problems


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_a_new_head_and_a_new_pooler_are_plain_and_initialized(mode, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(**sizes, vocab_size=64, pad_token_id=0)).save_pretrained(tmp_path / "plain")
    saved = load_as(tmp_path / "plain", mode, AutoModelForMaskedLM)
    saved.save_pretrained(tmp_path / "saved")
    for folder, how in (("plain", mode), ("saved", None)):
        model = load_as(tmp_path / folder, how, AutoModelForSequenceClassification, num_labels=3)
        for head in (model.bert.pooler.dense, model.classifier):
            assert type(head) is torch.nn.Linear and head.weight.isfinite().all() and 0 < head.weight.std() < 0.1
        assert len(model.quantization_report.quantized) == 6


def test_every_way_to_pack_records_the_same(t5, tmp_path):
    config = MXFP4RLConfig(mode="packed")
    load_as(t5, "packed").save_pretrained(tmp_path / "loaded")
    pack(load_as(t5), config).save_pretrained(tmp_path / "packed")
    pack_checkpoint(t5, tmp_path / "folder", config)
    ways = ("loaded", "packed", "folder")
    loaded, *others = (config_in(tmp_path / way)["quantization_config"]["full_precision"] for way in ways)
    assert others == [loaded, loaded] and len(loaded) == 3


def test_a_model_that_saves_itself_by_passing_its_arguments_on(tmp_path):
    class Own(Qwen2ForCausalLM):
        def save_pretrained(self, save_directory, *args, **kwargs):
            super().save_pretrained(save_directory, *args, **kwargs)

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    model = Own(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0))
    model.save_pretrained(tmp_path / "plain")
    load_as(tmp_path / "plain", "qat", Qwen2ForCausalLM)  # the parent class saves our way too, from now on
    model = load_as(tmp_path / "plain", "qat", Own)
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(load_as(tmp_path / "saved", None, Own)(IDS).logits, model(IDS).logits)


# ---- state dicts ----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint("qwen2"), quantization_config=MXFP4RLConfig())


def shifted(model) -> dict[str, torch.Tensor]:
    """A state dict that differs from the model's everywhere, as a gathered one does from a shard."""
    return {name: tensor + 1.0 for name, tensor in model.state_dict().items()}


def test_what_is_given_is_what_is_written_and_nothing_is_left_on_the_model(model, tmp_path):
    given = shifted(model)
    attributes = set(vars(model))
    model.save_pretrained(tmp_path / "saved", state_dict=dict(given))
    assert_same(tensors_in(tmp_path / "saved"), given)
    assert set(vars(model)) == attributes and take_state_dict(model) is None
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same(weights(again), given)
    assert again.quantization_report.n_quantized == 14
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        model.save_pretrained(tmp_path / "file" / "saved", state_dict=shifted(model))
    assert set(vars(model)) == attributes and take_state_dict(model) is None
