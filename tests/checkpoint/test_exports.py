# SPDX-License-Identifier: Apache-2.0
"""What the exporters write: names, bytes and configs, against the formats' own descriptions; and that full-precision
weights, plain and trained ones, are quantized once."""

import json
import math
from typing import get_args, get_type_hints

import pytest
import torch
from export_files import config_in, decode, save_packed, save_plain, save_with_head
from moe_models import make_moe
from same_bits import IDS, tensors_in
from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizers_utils import should_convert_module

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import CheckpointError, FolderError, export
from hf_mxfp4.checkpoint.formats import FORMATS
from hf_mxfp4.cli import convert


Q_PROJ = "model.layers.0.self_attn.q_proj"
#: Factors of macro blocks, searched.
MACRO = {"macro_block": 128, "macro_search": "hybrid"}
#: As in AMD's published MXFP4 checkpoints.
QUARK_TENSOR = {
    "ch_axis": -1, "dtype": "fp4", "group_size": 32, "is_scale_quant": False, "mx_element_dtype": None,
    "observer_cls": "PerBlockMXObserver", "qscheme": "per_group", "round_method": "half_even",
    "scale_calculation_mode": "even", "scale_format": "e8m0", "scale_type": "float", "symmetric": None,
}  # fmt: skip


def test_the_command_offers_every_format():
    choices = get_type_hints(convert.export)["format"]
    assert set(get_args(choices)) == set(FORMATS)


@pytest.mark.parametrize(
    ("format", "weight"), [("compressed-tensors", "weight_packed"), ("quark", "weight")], ids=["ct", "quark"]
)
@pytest.mark.parametrize("scheme", [{}, {"fprop": {"weight": "even+32x32"}}], ids=["1x32", "32x32"])
def test_plain_mxfp4_is_renamed_and_nothing_else(format, weight, scheme, tmp_path):
    source = save_packed(tmp_path / "packed", config=scheme)
    report = export(source, tmp_path / "out", format)
    before = tensors_in(source)
    after = tensors_in(tmp_path / "out")
    quantized = {name.removesuffix("_scale") for name in before if name.endswith(".weight_scale")}
    assert len(quantized) == 14
    renamed = {(f"{n.removesuffix('weight')}{weight}" if n in quantized else n): t for n, t in before.items()}
    assert after.keys() == renamed.keys()
    for name, tensor in renamed.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    assert after[f"{Q_PROJ}.{weight}"].shape == (64, 32)
    assert after[f"{Q_PROJ}.weight_scale"].shape == (64, 2)
    assert after[f"{Q_PROJ}.bias"].dtype == torch.bfloat16
    assert report.counts() == {"kept": 14}
    assert not report.changed
    assert report.total_sqnr_db == float("inf")


def test_the_config_of_compressed_tensors(tmp_path):
    source = save_packed(tmp_path / "packed")
    export(source, tmp_path / "out", "compressed-tensors")
    written = config_in(tmp_path / "out")
    weights = {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
        "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8",
    }  # fmt: skip
    group = {"targets": ["Linear"], "format": "mxfp4-pack-quantized", "weights": weights}
    group |= {"input_activations": None, "output_activations": None}
    assert written.pop("quantization_config") == {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    original = config_in(source)
    del original["quantization_config"], original["transformers_weights"]
    assert written == original


@pytest.mark.parametrize("preset", ["w4a16", "w4a4"])
def test_the_config_of_quark(preset, tmp_path):
    export(save_packed(tmp_path / "packed", config={"preset": preset}), tmp_path / "out", "quark")
    written = config_in(tmp_path / "out")["quantization_config"]
    assert written["quant_method"] == "quark"
    assert written["exclude"] == ["lm_head"]
    packing = {"pack_method": "reorder", "weight_format": "real_quantized", "weight_merge_groups": None}
    assert written["export"] == {"kv_cache_group": [], "min_kv_scale": 0.0, **packing}
    scheme = written["global_quant_config"]
    assert scheme["weight"] == {**QUARK_TENSOR, "is_dynamic": False}
    assert scheme["input_tensors"] == ({**QUARK_TENSOR, "is_dynamic": True} if preset == "w4a4" else None)
    assert scheme["output_tensors"] is None
    assert scheme["bias"] is None
    assert not any(written[key] for key in ("layer_quant_config", "layer_type_quant_config", "kv_cache_quant_config"))


def test_exactly_what_is_not_quantized_is_ignored(tmp_path):
    skips = ["experts", "layers.1.self_attn.o_proj"]
    source = save_packed(tmp_path / "packed", "qwen3_moe", config={"modules_to_not_convert": skips})
    for format, key in (("compressed-tensors", "ignore"), ("quark", "exclude")):
        export(source, tmp_path / format, format)
        experts = [
            f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
            for layer in range(2)
            for expert in range(4)
            for projection in ("gate", "up", "down")
        ]
        routers = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
        expected = {"lm_head", "model.layers.1.self_attn.o_proj", *experts, *routers}
        ignored = config_in(tmp_path / format)["quantization_config"][key]
        assert set(ignored) == expected
        assert len(ignored) == len(expected)


@pytest.mark.parametrize(
    ("format", "key", "n_layers"),
    [
        ("gpt-oss", "modules_to_not_convert", 1),
        ("nvfp4-modelopt", "ignore", 1),
        ("compressed-tensors", "ignore", 2),  # which has no place for any of these experts
    ],
)
@pytest.mark.parametrize("mode", ["qat", "packed", None], ids=str)
def test_experts_in_one_tensor_are_ignored_by_their_module(mode, format, key, n_layers, tmp_path):
    source = save_plain(tmp_path / "plain", "gpt_oss")
    skips = {"modules_to_not_convert": ["layers.1.mlp.experts"]}
    if mode is not None:
        config = MXFP4RLConfig(mode=mode, preset="w4a16", scale_rule="even", macro_block=None, **skips)
        model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.float32)
        model.save_pretrained(tmp_path / "saved")
        source = tmp_path / "saved"
        skips = {}
    export(source, tmp_path / "out", format, "dequantize", **skips)
    ignored = config_in(tmp_path / "out")["quantization_config"][key]
    found = [name for name in ignored if "experts" in name]
    assert found == [f"model.layers.{layer}.mlp.experts" for layer in range(2 - n_layers, 2)]
    if format == "gpt-oss":
        assert not should_convert_module("model.layers.1.mlp.experts", ignored)
        assert should_convert_module("model.layers.0.mlp.experts", ignored)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("config", [{}, {**MACRO, "outlier_fallback": 0.5}], ids=str)
def test_bf16_is_the_plain_model_with_the_dequantized_values(family, config, tmp_path):
    source = save_packed(tmp_path / "packed", family, config=config)
    report = export(source, tmp_path / "out", "bf16")
    assert "quantization_config" not in config_in(tmp_path / "out")
    assert tensors_in(tmp_path / "out").keys() == tensors_in(tmp_path / "packed-plain").keys()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert plain.dtype == torch.bfloat16
    assert type(plain.get_submodule(Q_PROJ)) is torch.nn.Linear
    expected = AutoModelForCausalLM.from_pretrained(source).dequantize()
    theirs = dict(expected.named_parameters())
    assert theirs.keys() == dict(plain.named_parameters()).keys()
    for name, ours in plain.named_parameters():
        assert torch.equal(ours, theirs[name]), name
    assert torch.equal(plain(IDS).logits, expected(IDS).logits)
    # The static factors divide, so that their values are rounded to bfloat16; plain ones are exact in it.
    assert report.counts() == {"dequantized": report.n_layers}
    assert sum(cost.matrices for cost in report.changed) == (report.n_layers if config else 0)
    assert report.total_sqnr_db == float("inf") if not config else 45 < report.total_sqnr_db < 65


MISFITS = {
    "mbs": (MACRO, "macro-block factors (mbs128-dynamic)"),
    "mantissas": ({"macro_block": 128, "macro_search": "block_mantissas"}, "macro-block factors (mbs128-block"),
    "three mantissas": (
        {"macro_block": 128, "macro_search": "block_mantissas_fp8"},
        "macro-block factors (mbs128-block_mantissas_fp8)",
    ),
    "residual": ({"outlier_fallback": 0.5}, "the outlier-fallback residual (of0.5)"),
    "both": (
        {"macro_block": "row", "outlier_fallback": 0.25},
        "macro-block factors (mbsrow-dynamic) and the outlier-fallback residual (of0.25)",
    ),
}


@pytest.mark.parametrize("format", ["bf16", "compressed-tensors"])
def test_what_transformers_keeps_in_float32_is_not_rounded(format, tmp_path):
    model = make_moe("deepseek_v3", intermediate_size=64, q_lora_rank=32, kv_lora_rank=32)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    torch.nn.init.normal_(bias, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "plain")
    report = export(tmp_path / "plain", tmp_path / "out", format)
    loaded = tensors_in(tmp_path / "out")
    assert torch.equal(loaded["model.layers.1.mlp.gate.e_score_correction_bias"], bias)
    assert loaded["model.norm.weight"].dtype == torch.bfloat16
    assert "keeps in float32" in report.notes[-1]


@torch.no_grad()
def test_a_head_of_its_own_unties_the_config(tmp_path):
    stored = save_with_head(tmp_path / "plain")
    report = export(tmp_path / "plain", tmp_path / "out", "bf16")
    assert config_in(tmp_path / "plain")["tie_word_embeddings"]
    assert "head differs" in report.notes[0]
    assert config_in(tmp_path / "out")["tie_word_embeddings"] is False
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])
    assert torch.equal(model.model.embed_tokens.weight, stored["model.embed_tokens.weight"])


def test_a_format_that_leaves_out_a_tensor_is_refused(tmp_path, monkeypatch):
    source = save_packed(tmp_path / "packed", layers=1)
    monkeypatch.setattr(FORMATS["bf16"], "others", lambda tensors, *_: tensors[1:])

    with pytest.raises(CheckpointError, match="no place for lm_head.weight"):
        export(source, tmp_path / "out", "bf16")

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("config", "parts"), MISFITS.values(), ids=MISFITS)
def test_what_has_no_place_is_refused_with_both_choices(config, parts, tmp_path):
    source = save_packed(tmp_path / "packed", layers=1, config=config)
    with pytest.raises(CheckpointError) as refusal:
        export(source, tmp_path / "out", "quark")
    for words in ("quark", "7 of 7 layers", parts, "on_mismatch='requantize'", "'dequantize'"):
        assert words in str(refusal.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["mbs", "mantissas", "three mantissas", "both"])
def test_requantizing_is_plain_mxfp4_of_the_dequantized_values(name, tmp_path):
    config = {"scale_rule": "rceil", **MISFITS[name][0]}
    source = save_packed(tmp_path / "packed", layers=1, config=config)
    report = export(source, tmp_path / "out", "quark", "requantize")
    after = tensors_in(tmp_path / "out")
    costs = {cost.name: cost for cost in report.layers}
    model = AutoModelForCausalLM.from_pretrained(source)
    for name, cost in costs.items():
        values = model.get_submodule(name).dequantized_weight(torch.float32)
        expected = hf_mxfp4.quantize(values, scale_rule="rceil")
        assert torch.equal(after[f"{name}.weight"], expected.codes)
        assert torch.equal(after[f"{name}.weight_scale"], expected.scale)
        error = (decode(expected.codes, expected.scale) - values.double()).square().sum().item()
        assert cost.action == "requantized"
        assert cost.noise == pytest.approx(error)
        assert error > 0
    assert len(costs) == 7
    assert 10 < report.total_sqnr_db < 40


def test_layers_of_odd_length_are_dequantized_and_ignored(tmp_path):
    source = save_packed(tmp_path / "packed", layers=1, intermediate=80)
    with pytest.raises(CheckpointError, match=r"1 of 7 layers.*mlp.down_proj, in_features=80 is not a multiple of 32"):
        export(source, tmp_path / "out", "compressed-tensors")
    report = export(source, tmp_path / "out", "compressed-tensors", "dequantize")
    assert report.counts() == {"kept": 6, "dequantized": 1}
    (odd,) = [cost for cost in report.layers if cost.action == "dequantized"]
    assert (odd.name, odd.sqnr_db) == ("model.layers.0.mlp.down_proj", float("inf"))
    assert odd.reason == "in_features=80 is not a multiple of 32"
    assert config_in(tmp_path / "out")["quantization_config"]["ignore"] == ["lm_head", odd.name]
    layer = AutoModelForCausalLM.from_pretrained(source).get_submodule(odd.name)
    weight = tensors_in(tmp_path / "out")[f"{odd.name}.weight"]
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, layer.dequantized_weight(torch.bfloat16))


def test_shards_side_files_and_report(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_mxfp4.checkpoint.folder.MAX_SHARD_SIZE", "20KB")
    source = save_packed(tmp_path / "packed", config=MACRO)
    for name in ("tokenizer.json", "optimizer.pt", "README.md"):
        (source / name).write_text(name, encoding="utf-8")
    seen = []
    report = export(source, tmp_path / "out", "quark", "requantize", on_bytes=lambda count, name: seen.append(count))
    files = {file.name for file in (tmp_path / "out").iterdir()}
    shards = {name for name in files if name.endswith(".safetensors")}
    assert len(shards) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == shards
    assert set(index["weight_map"]) == set(tensors_in(tmp_path / "out"))
    copied = {"tokenizer.json", "generation_config.json"}
    written = {"config.json", "model.safetensors.index.json", "export_report.json", "mxfp4_manifest.json"}
    assert files - shards == copied | written
    assert json.loads((tmp_path / "out" / "export_report.json").read_text()) == json.loads(json.dumps(report.to_dict()))
    assert sum(seen) == sum(tensor.nbytes for tensor in tensors_in(source).values())


def test_what_cannot_be_exported_says_why(tmp_path):
    with pytest.raises(ValueError, match="'compressed-tensors', 'nvfp4', 'nvfp4-modelopt', 'quark'"):
        export(tmp_path, tmp_path / "out", "gptq")
    with pytest.raises(ValueError, match="'refuse', 'requantize', 'dequantize'"):
        export(tmp_path, tmp_path / "out", "quark", "ask")
    packed = save_packed(tmp_path / "packed", layers=1)
    with pytest.raises(FolderError, match="must be apart"):
        export(packed, packed / "out", "quark")
    export(packed, tmp_path / "quark", "quark")
    with pytest.raises(CheckpointError, match="is quantized by 'quark'; import it first"):
        export(tmp_path / "quark", tmp_path / "out", "bf16")
    (packed / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="only safetensors checkpoints are read"):
        export(packed, tmp_path / "out", "bf16")
    assert not (tmp_path / "out").exists()


TRAINED = MXFP4RLConfig(scale_rule="rceil", smooth=False)


def save_qat(folder):
    plain = save_plain(folder.with_name(f"{folder.name}-plain"), "llama", layers=1, dtype=torch.float32)
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=TRAINED).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("rule", "shard_size"), [("rceil", "50GB"), ("floor", "30KB"), ("mse", "50GB"), (None, "30KB")]
)
def test_codes_and_scales_are_those_of_quantize(rule, shard_size, tmp_path):
    plain = save_plain(tmp_path / "plain", "llama")
    AutoModelForCausalLM.from_pretrained(plain).save_pretrained(tmp_path / "source", max_shard_size=shard_size)
    report = export(tmp_path / "source", tmp_path / "out", "compressed-tensors", scale_rule=rule)
    before = tensors_in(tmp_path / "source")
    after = tensors_in(tmp_path / "out")
    layers = {name.removesuffix("_packed") for name in after if name.endswith(".weight_packed")}
    assert len(layers) == 14
    assert report.counts() == {"packed": 14}
    for name in layers:
        expected = hf_mxfp4.quantize(before[name], scale_rule=rule or "even")
        assert torch.equal(after[f"{name}_packed"], expected.codes), name
        assert torch.equal(after[f"{name}_scale"], expected.scale), name
    for name in before.keys() - layers:
        assert torch.equal(after[name], before[name]), name
    assert report.weights == f"mxfp4+{rule or 'even'}"
    assert report.scheme == "full precision"


@pytest.mark.parametrize("format", ["compressed-tensors", "bf16"])
def test_errors_are_those_against_the_full_precision_weights(format, tmp_path):
    plain = save_plain(tmp_path / "plain", "llama", layers=1, dtype=torch.float32)
    report = export(plain, tmp_path / "out", format, scale_rule="floor")
    signal = noise = 0.0
    for cost in report.layers:
        weight = tensors_in(plain)[f"{cost.name}.weight"]
        packed = hf_mxfp4.quantize(weight, scale_rule="floor")
        error = (decode(packed.codes, packed.scale) - weight.double()).square().sum().item()
        energy = weight.double().square().sum().item()
        assert cost.sqnr_db == pytest.approx(10 * math.log10(energy / error), abs=1e-3)
        signal = signal + energy
        noise = noise + error
    sqnr = 10 * math.log10(signal / noise)
    assert report.total_sqnr_db == pytest.approx(sqnr, abs=1e-3)
    assert 10 < sqnr < 40
    assert report.error() == f"SQNR {sqnr:.2f} dB against the full-precision weights"
    written = json.loads((tmp_path / "out" / "export_report.json").read_text())
    assert written["sqnr_against"] == "the full-precision weights"
    assert written["source_sqnr_db"] is None
    assert written["sqnr_db"] == pytest.approx(sqnr, abs=1e-3)


def test_what_the_user_leaves_alone_stays(tmp_path):
    plain = save_plain(tmp_path / "plain", "llama")
    report = export(plain, tmp_path / "out", "quark", modules_to_not_convert=["mlp.up_proj"], preset="w4a4")
    assert report.counts() == {"packed": 12}
    scheme = config_in(tmp_path / "out")["quantization_config"]
    assert scheme["exclude"] == ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    assert scheme["global_quant_config"]["input_tensors"]["scale_calculation_mode"] == "even"
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(tensors_in(tmp_path / "out")[name], tensors_in(plain)[name])


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [({"scale_rule": "even"}, "even"), ({"on_mismatch": "requantize"}, "rceil")],
    ids=["rule", "requantize"],
)
def test_a_trained_checkpoint_with_macro_factors_is_quantized_once(arguments, rule, tmp_path):
    source = save_qat(tmp_path / "qat")
    report = export(source, tmp_path / "out", "quark", **arguments)
    expected = hf_mxfp4.quantize(tensors_in(source)[f"{Q_PROJ}.weight"], scale_rule=rule)
    assert torch.equal(tensors_in(tmp_path / "out")[f"{Q_PROJ}.weight"], expected.codes)
    assert report.counts() == {"packed": 7}
    assert any(f"trained with weights in {TRAINED.weight_scheme}" in note for note in report.notes)


@pytest.mark.parametrize(
    ("kind", "format", "arguments", "words"),
    [
        ("packed", "quark", {"scale_rule": "floor"}, "--scale-rule floor. has no effect here: the packed bytes are"),
        ("qat", "bf16", {"scale_rule": "floor"}, "has no effect here: the quantized values are written"),
        ("packed", "bf16", {"preset": "w4a4"}, "--preset w4a4. has no effect in format 'bf16'"),
        ("qat", "quark", {"modules_to_not_convert": ["mlp"]}, r"; leave out modules_to_not_convert=\['mlp'\]"),
        ("plain", "compressed-tensors", {"preset": "w4a4"}, "--preset w4a4. has no effect in format"),
        ("plain", "quark", {"modules_to_not_convert": ["nonsense"]}, "'nonsense', which matches no module"),
        ("plain", "gpt-oss", {}, "is for the architecture 'gpt_oss'"),
    ],
)
def test_arguments_without_effect_are_refused(kind, format, arguments, words, tmp_path):
    make = {"packed": save_packed, "qat": save_qat, "plain": save_plain}[kind]
    source = make(tmp_path / kind) if kind == "qat" else make(tmp_path / kind, layers=1)
    with pytest.raises(CheckpointError, match=words):
        export(source, tmp_path / "out", format, **arguments)
    assert not (tmp_path / "out").exists()
