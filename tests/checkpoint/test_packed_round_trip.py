# SPDX-License-Identifier: Apache-2.0
"""Packed models: made from full-precision checkpoints and trained models, saved, loaded, and made plain again."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from same_bits import IDS, logits, tensors_in
from tables import CONFIGS, pairwise_params, some
from tiny_models import make_model
from torch import nn
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig, cached_weights, pack, quantize
from hf_mxfp4.integrations.transformers.swap import quantize_linears


PACKED = ("weight", "weight_scale", "weight_macro", "weight_residual", "weight_residual_scale")
# Of mode "qat"; the packed twin of each is what `pack` makes of it.
SCHEMES = some(
    CONFIGS, "default", "w4a8", "w4a16 macro", "w4a16 plain", "fallback of weights", "fallback of activations",
    "selective", "tiles", "blockwise, no fallback", "blockwise_fp8", "mse row, no fallback", "static without a block",
    "skips",
)  # fmt: skip
#: Tried in bfloat16 too in every run.
BFLOAT16 = ("default", "selective", "tiles")


def load(folder, *, device_map=None, dtype="auto", **options):
    config = MXFP4RLConfig(mode="packed", **options)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map=device_map, dtype=dtype)


def layers_of(model, kind=MXFP4PackedLinear) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def metadata_of(folder) -> dict[str, str]:
    with safe_open(Path(folder) / "model.safetensors", "pt") as file:
        return file.metadata()


@pytest.mark.parametrize(
    ("family", "tie", "shard_size"),
    pairwise_params(["llama", "qwen2", "qwen3", "gemma"], [False, True], ["5GB", "20KB"]),
)
def test_bfloat16_to_packed_to_disk_and_back(family, tie, shard_size, checkpoint, tmp_path):
    source = checkpoint(family, tie=tie, dtype=torch.bfloat16, shard_size=shard_size)
    model, saved = load(source), tmp_path / "saved"
    expected = logits(model)
    model.save_pretrained(saved, max_shard_size="10KB" if shard_size == "20KB" else "5GB")
    assert (len(list(saved.glob("*.safetensors"))) > 2) == (shard_size == "20KB")
    again = AutoModelForCausalLM.from_pretrained(saved)
    assert torch.equal(logits(again), expected) and again.dtype == torch.bfloat16
    assert again.hf_quantizer.quantization_config == MXFP4RLConfig(mode="packed")
    assert len(layers_of(again)) == 14 and type(again.lm_head) is nn.Linear
    assert (again.lm_head.weight is again.get_input_embeddings().weight) == tie
    with cached_weights(again):
        arguments = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(again.generate(IDS, **arguments), model.generate(IDS, **arguments))


@pytest.mark.parametrize("search", ["block_mantissas", "block_mantissas_fp8"])
def test_files_say_the_same_of_three_and_four_mantissas(search, checkpoint, tmp_path):
    """Their bytes are read alike, and as older versions wrote it."""
    load(checkpoint(dtype=torch.bfloat16), macro_search=search).save_pretrained(tmp_path / "saved")
    meaning = {"mode": "packed", "macro_block": 128, "blockwise": True, "outlier_fallback": None}
    assert json.loads(metadata_of(tmp_path / "saved")["mxfp4_rl"])["meaning"] == meaning
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.hf_quantizer.quantization_config.macro_search == search
    most = max(int((layer.weight_macro & 3).max()) for layer in layers_of(again).values())
    assert most == (3 if search == "block_mantissas" else 2)


@pytest.mark.parametrize("options", [{}, {"outlier_fallback": 0.5}, {"macro_block": None}], ids=str)
def test_the_files_hold_exactly_the_packed_tensors(options, checkpoint, tmp_path):
    source = checkpoint("qwen2", dtype=torch.bfloat16, hidden=128, intermediate=288)
    model = load(source, **options)
    model.save_pretrained(tmp_path / "saved")
    stored, original = tensors_in(tmp_path / "saved"), tensors_in(source)
    expected, scheme = set(original), model.hf_quantizer.quantization_config.weight_scheme
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
    full, model = AutoModelForCausalLM.from_pretrained(source), load(source, **options)
    report = model.quantization_report
    n_weights = sum(layer.in_features * layer.out_features for layer in layers_of(model).values())
    assert report.n_weights == n_weights and report.bits_per_weight == bits
    assert report.packed_bytes == n_weights * bits / 8
    assert full.get_memory_footprint() - model.get_memory_footprint() == 2 * n_weights - report.packed_bytes
    assert full.num_parameters() - model.num_parameters() == n_weights - report.packed_bytes
    assert f"packed {bits} bits/weight w4a16" in str(report)


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_dequantize(dtype, checkpoint, tmp_path):
    model = load(checkpoint("qwen2", tie=True, dtype=torch.bfloat16))
    expected = logits(model)
    weights = {name: layer.dequantized_weight(dtype) for name, layer in layers_of(model).items()}
    plain = model.dequantize(dtype) if dtype else model.dequantize()
    assert not layers_of(plain) and all(torch.equal(plain.get_submodule(n).weight, w) for n, w in weights.items())
    assert {p.dtype for p in plain.parameters()} == {dtype or torch.bfloat16}
    assert not hasattr(plain, "quantization_report") and not hasattr(plain.config, "quantization_config")
    if dtype is None:
        assert torch.equal(logits(plain), expected)
    plain.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits(again), logits(plain)) and not layers_of(again)


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in SCHEMES), *((name, "bfloat16") for name in BFLOAT16)]
)
def test_pack_repeats_the_trained_models_bits(name, dtype, checkpoint, tmp_path):
    options, dtype = SCHEMES[name], getattr(torch, dtype)
    source = checkpoint("qwen2", dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=MXFP4RLConfig(**options))
    expected, names, before = logits(model), list(layers_of(model, MXFP4Linear)), model.quantization_report
    assert pack(model) is model
    assert list(layers_of(model)) == names and not layers_of(model, MXFP4Linear)
    assert torch.equal(logits(model), expected)
    report = model.quantization_report
    assert (report.quantized, report.skipped, report.scheme) == (before.quantized, before.skipped, before.scheme)
    assert report.bits_per_weight >= 4.25 and report.sqnr_db > 15
    config = MXFP4RLConfig(**options).packed()
    assert model.config.quantization_config == model.hf_quantizer.quantization_config == config
    assert model.is_quantized and not model.hf_quantizer.is_qat_trainable
    model.save_pretrained(tmp_path / "packed", max_shard_size="20KB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert again.hf_quantizer.quantization_config == config
    assert torch.equal(logits(again), expected)


def test_pack_under_another_scheme_keeps_the_choice_of_layers(checkpoint):
    source, skips = checkpoint("qwen2"), ["layers.0"]
    options = {"quantization_config": MXFP4RLConfig(modules_to_not_convert=skips)}
    model = AutoModelForCausalLM.from_pretrained(source, **options)
    pack(model, MXFP4RLConfig(mode="packed", scale_rule="even"))
    expected = load(source, scale_rule="even", modules_to_not_convert=skips)
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
        assert not layers_of(load(tmp_path / "qat"))
