# SPDX-License-Identifier: Apache-2.0
"""Save and load: the scheme and the choice of layers come back by themselves, the masters bit for bit, in this process
and in a new one; `save_pretrained` writes the state dict it is given. Packed models: made from full-precision
checkpoints and trained models, saved, loaded, and made plain again."""

from pathlib import Path

import pytest
import torch
import transformers
from export_files import config_in, header_and_data
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from same_bits import IDS, assert_same, edit_config, layers_of, logits, tensors_in, weights
from tables import CONFIGS, some
from tiny_models import make_model
from torch import nn
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig, cached_weights, lab, pack, quantize
from hf_mxfp4.checkpoint import export, pack_checkpoint, take_state_dict, verify_folder
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.model import layer_names


@pytest.mark.parametrize(
    ("scheme", "family", "tie", "shard_size"),
    [
        ("default", "qwen2", False, "5GB"),
        ("w4a16 plain", "llama", True, "20KB"),
        ("skips", "qwen3", False, "20KB"),
        ("w4a8g8", "gemma", True, "5GB"),
    ],
)
def test_the_scheme_comes_back_without_being_named(scheme, family, tie, shard_size, checkpoint, tmp_path):
    source = checkpoint(family, tie=tie)
    target = tmp_path / "saved"
    config = MXFP4RLConfig(smooth=False, **CONFIGS[scheme])
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    model.save_pretrained(target, max_shard_size=shard_size)
    assert (len(list(target.glob("*.safetensors"))) > 2) == (shard_size == "20KB")
    assert config_in(target)["quantization_config"] == config.to_dict()

    again = AutoModelForCausalLM.from_pretrained(target)
    assert again.hf_quantizer.quantization_config == config
    assert again.quantization_report == model.quantization_report
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_only_the_scheme_is_added_and_saving_again_changes_nothing(mode, checkpoint, tmp_path):
    source = checkpoint("qwen2", dtype=torch.bfloat16)
    config = MXFP4RLConfig(mode=mode)
    AutoModelForCausalLM.from_pretrained(source, quantization_config=config).save_pretrained(tmp_path / "one")
    before, after = (config_in(folder) for folder in (source, tmp_path / "one"))
    assert after.pop("quantization_config") == config.to_dict()
    assert "import hf_mxfp4" in after.pop("transformers_weights")  # which stops transformers without it
    assert after == before
    AutoModelForCausalLM.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "two")
    # But for the order of the entries of its metadata, which safetensors writes in any.
    one, two = (header_and_data(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one == two
    assert (tmp_path / "one" / "config.json").read_bytes() == (tmp_path / "two" / "config.json").read_bytes()


SIZES = {"vocab_size": 64, "d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}


@pytest.fixture
def t5(tmp_path) -> Path:
    torch.manual_seed(0)
    config = transformers.T5Config(**SIZES, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


TEXT = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0,
}  # fmt: skip


def make_wrapper() -> nn.Module:
    """A model of images and text, whose text model can be loaded by itself."""
    torch.manual_seed(0)
    text = {**TEXT, "head_dim": 32, "layer_types": ["full_attention"] * 2}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16}
    tokens = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **tokens)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def load_as(folder: Path | None, mode: str | None = None, auto=transformers.AutoModelForSeq2SeqLM, **options):
    scheme = {} if mode is None else {"quantization_config": MXFP4RLConfig(mode=mode)}
    return auto.from_pretrained(folder, dtype=torch.float32, **scheme, **options).eval()


@torch.no_grad()
def predictions(model) -> torch.Tensor:
    return model(input_ids=IDS, decoder_input_ids=IDS).logits


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
    monkeypatch.setattr(layer_names, "find_weight_readers", lambda model: {})
    again = load_as(tmp_path / "saved")
    assert again.quantization_report.quantized == model.quantization_report.quantized
    assert torch.equal(predictions(again), predictions(model))
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


def test_packed_files_show_what_is_packed_without_a_record(t5, tmp_path, monkeypatch):
    model = load_as(t5, "packed")
    model.save_pretrained(tmp_path / "saved")
    scheme = config_in(tmp_path / "saved")["quantization_config"]
    del scheme["full_precision"]
    edit_config(tmp_path / "saved", quantization_config=scheme)
    monkeypatch.setattr(layer_names, "find_weight_readers", lambda model: {})
    again = load_as(tmp_path / "saved")
    assert again.quantization_report.quantized == model.quantization_report.quantized


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_a_recorded_scheme_chooses_the_layers_of_a_plain_checkpoint(mode, t5, monkeypatch):
    """As the scheme in `adapter_config.json` does, for the base that the adapter was trained on."""
    model = load_as(t5, mode)
    monkeypatch.setattr(layer_names, "find_weight_readers", lambda model: {})
    scheme = MXFP4RLConfig.from_dict(model.config.quantization_config.to_dict())
    again = load_as(t5, quantization_config=scheme)
    assert again.quantization_report.quantized == model.quantization_report.quantized
    assert len(load_as(t5, mode).quantization_report.quantized) == len(model.quantization_report.quantized) + 2


def test_what_another_model_recorded_is_not_used(t5):
    scheme = MXFP4RLConfig().keeping(("bert.pooler", "cls"))
    assert load_as(t5, quantization_config=scheme).quantization_report == load_as(t5, "qat").quantization_report


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_a_state_dict_is_loaded_with_the_config_of_a_quantized_model(mode, t5, monkeypatch):
    model = load_as(t5, mode)
    monkeypatch.setattr(layer_names, "find_weight_readers", lambda model: {})
    again = load_as(None, auto=type(model), config=model.config, state_dict=model.state_dict())
    assert again.quantization_report.quantized == model.quantization_report.quantized
    assert isinstance(model.config.quantization_config, MXFP4RLConfig)
    assert torch.equal(predictions(again), predictions(model))


def test_full_precision_files_under_the_config_of_a_packed_model_are_refused(t5):
    config = load_as(t5, "packed").config
    with pytest.raises(ValueError, match="config describes packed weights, and the files hold full-precision ones"):
        load_as(t5, config=config)


def test_a_scheme_may_be_put_into_a_config_by_hand(checkpoint):
    source = checkpoint("qwen2")
    config = transformers.AutoConfig.from_pretrained(source)
    config.quantization_config = scheme = MXFP4RLConfig(smooth=False)
    expected = load_as(source, auto=AutoModelForCausalLM, quantization_config=scheme).quantization_report
    assert load_as(source, auto=AutoModelForCausalLM, config=config).quantization_report == expected


WRAPPER_NAMES = {
    "a wrapper's name": (["model.language_model.layers.1"], ["model.layers.1"]),
    "an expression": ([r"re:model\.language_model\.layers\.1\..*"], ["model.layers.1"]),
    "and one of a part that is not loaded": (["layers.1", "model.visual.merger"], ["layers.1"]),
}


@pytest.mark.parametrize(("skips", "own"), WRAPPER_NAMES.values(), ids=WRAPPER_NAMES)
@pytest.mark.parametrize("mode", ["qat", "packed"])
@torch.no_grad()
def test_the_text_model_of_a_wrapper_leaves_the_same_layers_alone(mode, skips, own, tmp_path):
    make_wrapper().save_pretrained(tmp_path / "plain")
    scheme = MXFP4RLConfig(mode=mode, modules_to_not_convert=skips)
    whole = load_as(tmp_path / "plain", auto=transformers.AutoModelForImageTextToText, quantization_config=scheme)
    whole.save_pretrained(tmp_path / "saved")
    for auto in (AutoModelForCausalLM, transformers.Qwen3_5ForCausalLM):
        text = load_as(tmp_path / "saved", auto=auto)
        assert len(text.quantization_report.quantized) == len(whole.quantization_report.quantized) == 7
        torch.testing.assert_close(text(IDS).logits, whole(IDS).logits)
        text.save_pretrained(tmp_path / auto.__name__)
        again = load_as(tmp_path / auto.__name__, auto=auto)
        assert config_in(tmp_path / auto.__name__)["quantization_config"]["modules_to_not_convert"] == own
        assert torch.equal(again(IDS).logits, text(IDS).logits)


@torch.no_grad()
def test_names_of_the_model_that_wrote_the_files_may_differ_from_those_in_them(tmp_path):
    """Files of Mllama have `language_model.model.layers`, the whole model `model.language_model.layers`, and the text
    model `model.layers`."""
    text = {**TEXT, "cross_attention_layers": []}
    vision = {"hidden_size": 32, "attention_heads": 2, "num_hidden_layers": 1, "num_global_layers": 1, "image_size": 28}
    vision |= {"max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]], "intermediate_layers_indices": [0]}
    config = transformers.MllamaConfig(text_config=text, vision_config={**vision, "vision_output_dim": 64})
    transformers.MllamaForConditionalGeneration(config).save_pretrained(tmp_path / "plain")
    scheme = MXFP4RLConfig(modules_to_not_convert=["model.language_model.layers.1"])
    for source, options in (("plain", {"quantization_config": scheme}), ("saved", {})):
        whole = load_as(tmp_path / source, auto=transformers.AutoModelForImageTextToText, **options)
        text = load_as(tmp_path / source, auto=transformers.MllamaForCausalLM, **options)
        assert len(text.quantization_report.quantized) == len(whole.quantization_report.quantized) == 7
        assert text.config.quantization_config.modules_to_not_convert == ("model.layers.1",)
        torch.testing.assert_close(text(IDS).logits, whole(IDS).logits)
        whole.save_pretrained(tmp_path / "saved")


def test_what_is_saved_of_a_wrapper_made_plain_names_no_scheme(tmp_path):
    make_wrapper().save_pretrained(tmp_path / "plain")
    load_as(tmp_path / "plain", "qat", transformers.AutoModelForImageTextToText).save_pretrained(tmp_path / "saved")
    assert "transformers_weights" in config_in(tmp_path / "saved")["text_config"]
    whole = load_as(tmp_path / "saved", auto=transformers.AutoModelForImageTextToText)
    whole.dequantize().save_pretrained(tmp_path / "out")
    export(tmp_path / "saved", tmp_path / "exported", "bf16")
    for folder in ("out", "exported"):
        config = config_in(tmp_path / folder)
        for part in (config, config["text_config"]):
            assert not part.keys() & {"quantization_config", "transformers_weights"}


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_a_new_head_and_a_new_pooler_are_plain_and_initialized(mode, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, vocab_size=64, pad_token_id=0)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "plain")
    saved = load_as(tmp_path / "plain", mode, transformers.AutoModelForMaskedLM)
    saved.save_pretrained(tmp_path / "saved")
    for folder, how in (("plain", mode), ("saved", None)):
        model = load_as(tmp_path / folder, how, transformers.AutoModelForSequenceClassification, num_labels=3)
        for head in (model.bert.pooler.dense, model.classifier):
            assert type(head) is torch.nn.Linear
            assert head.weight.isfinite().all()
            assert 0 < head.weight.std() < 0.1
        assert len(model.quantization_report.quantized) == 6


def test_a_model_that_saves_itself_by_passing_its_arguments_on(tmp_path):
    class Own(transformers.Qwen2ForCausalLM):
        def save_pretrained(self, save_directory, *args, **kwargs):
            super().save_pretrained(save_directory, *args, **kwargs)

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    model = Own(transformers.Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0))
    model.save_pretrained(tmp_path / "plain")
    load_as(tmp_path / "plain", "qat", transformers.Qwen2ForCausalLM)  # the parent class saves our way too, from now on
    model = load_as(tmp_path / "plain", "qat", Own)
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(load_as(tmp_path / "saved", None, Own)(IDS).logits, model(IDS).logits)


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
    assert set(vars(model)) == attributes
    assert take_state_dict(model) is None
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same(weights(again), given)
    assert again.quantization_report.n_quantized == 14
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        model.save_pretrained(tmp_path / "file" / "saved", state_dict=shifted(model))
    assert set(vars(model)) == attributes
    assert take_state_dict(model) is None


PACKED = ("weight", "weight_scale", "weight_macro", "weight_residual", "weight_residual_scale")
# Of mode "qat"; the packed twin of each is what `pack` makes of it.
TRAINED = some(
    CONFIGS, "default", "w4a8", "w4a16 plain", "fallback of weights", "fallback of activations",
    "fallback 1", "tiles", "block_mantissas", "block_mantissas_fp8", "mse row, no fallback",
    "skips",
)  # fmt: skip
#: Tried in bfloat16 too in every run.
BFLOAT16 = ("default", "fallback 1", "tiles")


def load_packed(folder, *, device_map=None, dtype="auto", **options):
    config = MXFP4RLConfig(mode="packed", **options)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map=device_map, dtype=dtype)


def metadata_of(folder) -> dict[str, str]:
    with safe_open(Path(folder) / "model.safetensors", "pt") as file:
        return file.metadata()


@pytest.mark.parametrize(
    ("family", "tie", "shard_size"), [("llama", False, "20KB"), ("qwen2", True, "5GB"), ("gemma", True, "20KB")]
)
def test_bfloat16_to_packed_to_disk_and_back(family, tie, shard_size, checkpoint, tmp_path):
    source = checkpoint(family, tie=tie, dtype=torch.bfloat16, shard_size=shard_size)
    saved = tmp_path / "saved"
    model = load_packed(source)
    expected = logits(model)
    model.save_pretrained(saved, max_shard_size=shard_size)
    again = AutoModelForCausalLM.from_pretrained(saved)
    assert torch.equal(logits(again), expected)
    assert again.dtype == torch.bfloat16
    assert again.hf_quantizer.quantization_config == MXFP4RLConfig(mode="packed")
    assert len(layers_of(again)) == 14
    assert (again.lm_head.weight is again.get_input_embeddings().weight) == tie
    with cached_weights(again):
        arguments = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(again.generate(IDS, **arguments), model.generate(IDS, **arguments))


@pytest.mark.parametrize("options", [{}, {"outlier_fallback": 0.5}, {"macro_block": None}], ids=str)
def test_the_files_hold_exactly_the_packed_tensors(options, checkpoint, tmp_path):
    source = checkpoint("qwen2", dtype=torch.bfloat16, hidden=128, intermediate=288)
    model = load_packed(source, **options)
    model.save_pretrained(tmp_path / "saved")
    stored = tensors_in(tmp_path / "saved")
    original = tensors_in(source)
    expected = set(original)
    scheme = model.hf_quantizer.quantization_config.weight_scheme
    for name, layer in layers_of(model).items():
        tensor = quantize(original[f"{name}.weight"], **vars(scheme))
        parts = (tensor.codes, tensor.scale, tensor.macro, tensor.residual_codes, tensor.residual_scale)
        for field, part in zip(PACKED, parts, strict=True):
            if part is not None:
                expected.add(f"{name}.{field}")
                assert stored[f"{name}.{field}"].dtype == torch.uint8
                assert torch.equal(stored[f"{name}.{field}"], part), (name, field)
        assert (f"{name}.bias" in stored) == (layer.bias is not None)
    assert set(stored) == expected
    for name, tensor in original.items():
        if name.removesuffix(".weight") not in layers_of(model):
            assert stored[name].dtype == torch.bfloat16 and torch.equal(stored[name], tensor), name
    assert metadata_of(tmp_path / "saved")["format"] == "pt"


@pytest.mark.parametrize(
    ("options", "bits"), [({"macro_block": None}, 4.25), ({}, 4.3125), ({"outlier_fallback": 0.5}, 8.5625)], ids=str
)
def test_memory_and_counts(options, bits, checkpoint):
    source = checkpoint("llama", hidden=128, intermediate=256, dtype=torch.bfloat16)
    full = AutoModelForCausalLM.from_pretrained(source)
    model = load_packed(source, **options)
    report = model.quantization_report
    n_weights = sum(layer.in_features * layer.out_features for layer in layers_of(model).values())
    assert report.n_weights == n_weights
    assert report.bits_per_weight == bits
    assert report.packed_bytes == n_weights * bits / 8
    assert full.get_memory_footprint() - model.get_memory_footprint() == 2 * n_weights - report.packed_bytes
    assert full.num_parameters() == model.num_parameters()
    assert f"packed {bits} bits/weight w4a16" in str(report)


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_dequantize(dtype, checkpoint, tmp_path):
    model = load_packed(checkpoint("qwen2", tie=True, dtype=torch.bfloat16))
    expected = logits(model)
    weights = {name: layer.dequantized_weight(dtype) for name, layer in layers_of(model).items()}
    plain = model.dequantize(dtype) if dtype else model.dequantize()
    assert not layers_of(plain)
    assert all(torch.equal(plain.get_submodule(n).weight, w) for n, w in weights.items())
    assert {p.dtype for p in plain.parameters()} == {dtype or torch.bfloat16}
    assert not hasattr(plain, "quantization_report")
    assert not hasattr(plain.config, "quantization_config")
    if dtype is None:
        assert torch.equal(logits(plain), expected)
    plain.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits(again), logits(plain))
    assert not layers_of(again)


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in TRAINED), *((name, "bfloat16") for name in BFLOAT16)]
)
def test_pack_repeats_the_trained_models_bits(name, dtype, checkpoint, tmp_path):
    options = TRAINED[name]
    dtype = getattr(torch, dtype)
    source = checkpoint("qwen2", dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=MXFP4RLConfig(**options))
    expected = logits(model)
    names = list(layers_of(model, MXFP4Linear))
    before = model.quantization_report
    assert pack(model) is model
    assert list(layers_of(model)) == names
    assert not layers_of(model, MXFP4Linear)
    assert torch.equal(logits(model), expected)
    report = model.quantization_report
    assert (report.quantized, report.skipped, report.scheme) == (before.quantized, before.skipped, before.scheme)
    assert report.bits_per_weight >= 4.25
    assert report.sqnr_db > 15
    config = MXFP4RLConfig(**options).packed()
    assert model.config.quantization_config == model.hf_quantizer.quantization_config == config
    assert model.is_quantized
    assert not model.hf_quantizer.is_qat_trainable
    model.save_pretrained(tmp_path / "packed", max_shard_size="20KB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert again.hf_quantizer.quantization_config == config
    assert torch.equal(logits(again), expected)


def test_pack_under_another_scheme_keeps_the_choice_of_layers(checkpoint):
    source = checkpoint("qwen2")
    skips = ["layers.0"]
    options = {"quantization_config": MXFP4RLConfig(modules_to_not_convert=skips, smooth=False)}
    model = AutoModelForCausalLM.from_pretrained(source, **options)
    pack(model, MXFP4RLConfig(mode="packed", scale_rule="even"))
    expected = load_packed(source, scale_rule="even", modules_to_not_convert=skips)
    assert torch.equal(logits(model), logits(expected))
    assert model.hf_quantizer.quantization_config == expected.hf_quantizer.quantization_config
    model = AutoModelForCausalLM.from_pretrained(source, **options)
    with pytest.raises(ValueError, match=r"trained with modules_to_not_convert=\('layers.0',\), the config says"):
        pack(model, MXFP4RLConfig(mode="packed", modules_to_not_convert=["layers.1"]))


def test_what_cannot_be_packed():
    config = MXFP4RLConfig(mode="packed")
    with pytest.raises(TypeError, match="pack takes a transformers model, not Linear"):
        pack(nn.Linear(2, 2), config)
    with pytest.raises(ValueError, match=r"no MXFP4Linear layer to pack; pass config=MXFP4RLConfig\(mode='packed'\)"):
        pack(make_model())
    with pytest.raises(ValueError, match="pack needs a config of mode='packed', not 'qat'"):
        pack(make_model(), MXFP4RLConfig())
    with pytest.raises(ValueError, match="Qwen2ForCausalLM is packed already"):
        pack(pack(make_model(), config))
    with pytest.raises(ValueError, match="matches no layer"):
        pack(make_model(), MXFP4RLConfig(mode="packed", modules_to_not_convert=["layers"]))
    with pytest.raises(ValueError, match="q_proj.weight is not here in full .* on meta"):
        pack(make_model().to("meta"), config)
    model = make_model()
    quantize_linears(model, MXFP4RLConfig())
    for adapted in (get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])), model):
        with pytest.raises(ValueError, match="has adapters; merge them into it first"):
            pack(adapted)


def test_a_config_for_a_trainable_checkpoint_is_not_silently_ignored(checkpoint, tmp_path):
    source = checkpoint("qwen2", dtype=torch.bfloat16)
    AutoModelForCausalLM.from_pretrained(source, quantization_config=MXFP4RLConfig()).save_pretrained(tmp_path / "qat")
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        assert not layers_of(load_packed(tmp_path / "qat"))
