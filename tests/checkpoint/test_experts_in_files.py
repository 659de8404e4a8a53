# SPDX-License-Identifier: Apache-2.0
"""Experts that are saved and loaded, trainable and packed; in conversions: packing a folder, exports, and the way back;
the names that files have for experts; OpenAI's gpt-oss format, checked with transformers' own functions."""

import pytest
import torch
from export_files import config_in, decode, same_files, save_packed, save_plain
from same_bits import IDS, assert_same, logits, tensors_in
from tiny_models import make_model, save_openai
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import CheckpointError, FileNames, Piece, export, import_checkpoint, pack_checkpoint
from hf_mxfp4.ops import weight_values


#: gate, up and down of expert 1 of layer 0, as the files of each family have them.
ONE_EXPERT = {
    "qwen3_moe": [f"model.layers.0.mlp.experts.1.{name}_proj" for name in ("gate", "up", "down")],
    "qwen2_moe": [f"model.layers.0.mlp.experts.1.{name}_proj" for name in ("gate", "up", "down")],
    "mixtral": [f"model.layers.0.block_sparse_moe.experts.1.{name}" for name in ("w1", "w3", "w2")],
}
EXPERTS = "model.layers.0.mlp.experts"
EXPERTS_ONLY = {"modules_to_not_convert": ["self_attn"]}


#: Linear maps in 2 decoder layers: 4 of attention, 2 for each of 4 experts, 3 of a shared expert.
N_QUANTIZED = {"qwen3_moe": 24, "qwen2_moe": 30, "mixtral": 24, "gpt_oss": 24}


@pytest.mark.parametrize("family", N_QUANTIZED)
def test_trainable_experts_are_saved_as_they_came(family, checkpoint, tmp_path):
    source = checkpoint(family)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=MXFP4RLConfig(smooth=False))
    report = model.quantization_report
    assert report.n_quantized == N_QUANTIZED[family]
    assert "model.layers.1.mlp.experts.3.gate_up_proj" in report.quantized
    assert report.n_skipped == (3 if family == "qwen2_moe" else 1)
    assert 15 < report.sqnr_db < 25
    model.save_pretrained(tmp_path / "saved")
    assert_same(tensors_in(source), tensors_in(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model))
    assert not torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(source)))


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("family", N_QUANTIZED)
def test_packed_experts(family, checkpoint, tmp_path):
    source = checkpoint(family)
    config = MXFP4RLConfig(smooth=False)
    trained = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    expected = logits(trained)
    report = trained.quantization_report
    packed = AutoModelForCausalLM.from_pretrained(source, quantization_config=config.packed())
    assert torch.equal(logits(packed), expected)  # quantized while the checkpoint was read
    assert packed.quantization_report.n_quantized == N_QUANTIZED[family]
    assert packed.quantization_report.sqnr_db == pytest.approx(report.sqnr_db, abs=1e-3)
    packed.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), expected)
    hf_mxfp4.pack(trained).save_pretrained(tmp_path / "by-hand")
    assert_same(tensors_in(tmp_path / "by-hand"), tensors_in(tmp_path / "saved"))


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("qwen3_moe", {"preset": "w4a16", "macro_block": None}),
        ("gpt_oss", {"preset": "w4a4", "outlier_fallback": 1.0}),
        ("gpt_oss", {"preset": "w4a4", "fprop": {"weight": "rceil+mbs128-dynamic+32x32"}}),
        ("mixtral", {"preset": "w4a4", "macro_search": "block_mantissas"}),
        ("gpt_oss", {"preset": "w4a4", "scale_rule": "mse", "macro_block": "row", "macro_search": "hybrid"}),
    ],
    ids=["plain", "fallback", "transposed-tiles", "mantissas", "mse-row"],
)
def test_packed_experts_repeat_the_trainable_ones_under_other_schemes(family, scheme, checkpoint, tmp_path):
    source = checkpoint(family, dtype=torch.bfloat16, layers=1)
    config = MXFP4RLConfig(smooth=False, **scheme)
    expected = logits(AutoModelForCausalLM.from_pretrained(source, quantization_config=config))
    packed = AutoModelForCausalLM.from_pretrained(source, quantization_config=config.packed(), dtype=torch.bfloat16)
    assert torch.equal(logits(packed), expected)
    packed.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), expected)


def test_tensors_on_disk(checkpoint, tmp_path):
    config = MXFP4RLConfig(mode="packed")
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_moe"), quantization_config=config)
    model.save_pretrained(tmp_path / "saved", max_shard_size="30KB")
    stored = tensors_in(tmp_path / "saved")
    prefix = "model.layers.1.mlp.experts."
    found = {n.removeprefix(prefix): (t.dtype, list(t.shape)) for n, t in stored.items() if n.startswith(prefix)}
    assert found == {
        "gate_up_proj": (torch.uint8, [4, 64, 32]),
        "gate_up_proj_scale": (torch.uint8, [4, 64, 2]),
        "gate_up_proj_macro": (torch.uint8, [4, 64, 1]),
        "down_proj": (torch.uint8, [4, 64, 16]),
        "down_proj_scale": (torch.uint8, [4, 64, 1]),
        "down_proj_macro": (torch.uint8, [4, 64, 1]),
    }
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.quantization_report.bits_per_weight == pytest.approx(4.3, abs=0.15)


@pytest.mark.parametrize("mode", ["qat", "packed"])
@pytest.mark.parametrize(
    ("family", "skips", "quantized", "skipped"),
    [
        ("qwen3_moe", ["layers.1"], 12, 13),
        ("qwen3_moe", ["layers.1.mlp.experts"], 16, 9),
        ("qwen3_moe", [r"re:model\.layers\.\d+\.mlp\.experts"], 8, 17),
        ("qwen3_moe", ["self_attn"], 16, 9),
        ("mixtral", ["experts"], 8, 17),
    ],
    ids=str,
)
def test_skips(mode, family, skips, quantized, skipped, checkpoint, tmp_path):
    source = checkpoint(family)
    config = MXFP4RLConfig(mode=mode, smooth=False, modules_to_not_convert=skips)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    report = model.quantization_report
    assert (report.n_quantized, report.n_skipped) == (quantized, skipped)
    model.save_pretrained(tmp_path / "saved")
    original = tensors_in(source)
    stored = tensors_in(tmp_path / "saved")
    if mode == "qat":
        assert_same(stored, original)
    if skipped == 17:  # experts stay one by one
        assert all(".self_attn." in name for name in report.quantized)
        assert original.keys() <= stored.keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.quantization_report.quantized == report.quantized
    assert torch.equal(logits(again), logits(model))


def test_the_names_of_experts_in_files():
    names = FileNames(make_model("mixtral", layers=1, hidden=32, intermediate=48))
    assert names.whole["model.layers.0.mlp.gate.weight"] == "model.layers.0.block_sparse_moe.gate.weight"
    assert names.whole["lm_head.weight"] == "lm_head.weight"
    assert names.pieces.keys() == {f"model.layers.0.mlp.experts.{p}" for p in ("gate_up_proj", "down_proj")}
    stem = "model.layers.0.block_sparse_moe.experts"
    assert names.pieces["model.layers.0.mlp.experts.gate_up_proj"][2:5] == (
        Piece(f"{stem}.1.w1.weight", 1, slice(0, 48, 1)),
        Piece(f"{stem}.1.w3.weight", 1, slice(48, 96, 1)),
        Piece(f"{stem}.2.w1.weight", 2, slice(0, 48, 1)),
    )
    assert names.pieces["model.layers.0.mlp.experts.down_proj"][3] == Piece(f"{stem}.3.w2.weight", 3, slice(0, 32, 1))
    assert FileNames(make_model("gpt_oss", layers=1)).pieces == {}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_left_alone_in_a_trainers_checkpoint_get_their_names_in_files(family, checkpoint, tmp_path):
    config = MXFP4RLConfig(modules_to_not_convert=["experts"])
    model = AutoModelForCausalLM.from_pretrained(checkpoint(family), quantization_config=config)
    model.save_pretrained(tmp_path / "saved")
    model._weight_conversions = []  # as a Trainer saves it
    model.save_pretrained(tmp_path / "own")
    assert f"{EXPERTS}.down_proj" in tensors_in(tmp_path / "own")
    for folder in ("saved", "own"):
        export(tmp_path / folder, tmp_path / f"{folder}-out", "compressed-tensors", "requantize")
    assert_same(tensors_in(tmp_path / "own-out"), tensors_in(tmp_path / "saved-out"))
    assert config_in(tmp_path / "own-out") == config_in(tmp_path / "saved-out")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_some_experts_left_alone(family, tmp_path):
    config = MXFP4RLConfig(mode="packed", modules_to_not_convert=["layers.0.mlp.experts"])
    plain = save_plain(tmp_path / "plain", family)
    hf_mxfp4.pack(AutoModelForCausalLM.from_pretrained(plain), config).save_pretrained(tmp_path / "packed")
    pack_checkpoint(plain, tmp_path / "out", config)
    same_files(tmp_path / "packed", tmp_path / "out")
    stored = tensors_in(tmp_path / "out")
    # One tensor again, joined expert by expert.
    joined = stored["model.layers.0.mlp.experts.gate_up_proj"]
    source = tensors_in(plain)
    gate, up, down = (source[f"{name}.weight"] for name in ONE_EXPERT[family])
    assert joined.dtype == torch.bfloat16
    assert torch.equal(joined[1], torch.cat([gate, up]))
    assert torch.equal(stored["model.layers.0.mlp.experts.down_proj"][1], down)
    # And apart again on the way out.
    export(tmp_path / "out", tmp_path / "bf16", "bf16")
    out = tensors_in(tmp_path / "bf16")
    assert out.keys() == source.keys()
    assert all(torch.equal(out[f"{name}.weight"], source[f"{name}.weight"]) for name in ONE_EXPERT[family])


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral"])
@pytest.mark.parametrize(
    ("format", "weight"), [("compressed-tensors", "weight_packed"), ("quark", "weight")], ids=["ct", "quark"]
)
def test_one_matrix_in_each_tensor_and_back(format, weight, family, tmp_path):
    source = save_packed(tmp_path / "packed", family, intermediate=96)
    report = export(source, tmp_path / "out", format)
    assert report.counts() == {"kept": report.n_layers}
    assert not report.changed
    ours = tensors_in(source)
    theirs = tensors_in(tmp_path / "out")
    gate, up, down = ONE_EXPERT[family]
    codes, scale = (ours[f"model.layers.0.mlp.experts.gate_up_proj{suffix}"][1] for suffix in ("", "_scale"))
    half = len(codes) // 2
    assert torch.equal(theirs[f"{gate}.{weight}"], codes[:half])
    assert torch.equal(theirs[f"{up}.{weight}"], codes[half:])
    assert torch.equal(theirs[f"{up}.weight_scale"], scale[half:])
    assert half == (96 if family == "mixtral" else 32)
    original = tensors_in(tmp_path / "packed-plain")
    values = decode(theirs[f"{down}.{weight}"], theirs[f"{down}.weight_scale"])
    expected = hf_mxfp4.quantize(original[f"{down}.weight"].float(), scale_rule="even").dequantize(torch.float64)
    assert torch.equal(values, expected)
    # Everything else by the names of plain checkpoints.
    plain = {name for name in original if f"{name.removesuffix('.weight')}.weight_scale" not in theirs}
    assert {name for name in theirs if not name.endswith(("weight_packed", "weight_scale"))} >= plain
    import_checkpoint(tmp_path / "out", tmp_path / "back")
    assert config_in(source) == config_in(tmp_path / "back")
    assert_same(tensors_in(tmp_path / "back"), ours)


@pytest.mark.parametrize(("family", "count"), [("qwen3_moe", "num_experts"), ("mixtral", "num_local_experts")])
def test_a_single_expert(family, count, tmp_path):
    config = MXFP4RLConfig(mode="packed")
    plain = save_plain(tmp_path / "plain", family, layers=1, num_experts_per_tok=1, **{count: 1})
    hf_mxfp4.pack(AutoModelForCausalLM.from_pretrained(plain), config).save_pretrained(tmp_path / "packed")
    pack_checkpoint(plain, tmp_path / "out", config)
    same_files(tmp_path / "packed", tmp_path / "out")
    export(tmp_path / "out", tmp_path / "bf16", "bf16")
    assert tensors_in(tmp_path / "bf16").keys() == tensors_in(plain).keys()


def test_experts_of_gpt_oss_have_no_place_in_formats_of_single_matrices(tmp_path):
    source = save_packed(tmp_path / "packed", "gpt_oss", layers=1)
    with pytest.raises(CheckpointError, match="all experts in one tensor, and this format one matrix in each"):
        export(source, tmp_path / "out", "quark")
    report = export(source, tmp_path / "out", "quark", "dequantize")
    assert report.counts() == {"kept": 4, "dequantized": 8}


def test_the_layout(tmp_path):
    source = save_packed(tmp_path / "packed", "gpt_oss", config=EXPERTS_ONLY)
    report = export(source, tmp_path / "out", "gpt-oss")
    assert report.counts() == {"kept": 16}
    assert not report.changed
    assert report.notes == []
    ours = tensors_in(source)
    theirs = tensors_in(tmp_path / "out")
    assert theirs[f"{EXPERTS}.gate_up_proj_blocks"].shape == (4, 192, 2, 16)
    assert theirs[f"{EXPERTS}.gate_up_proj_scales"].shape == (4, 192, 2)
    assert theirs[f"{EXPERTS}.down_proj_blocks"].shape == (4, 64, 3, 16)
    assert torch.equal(theirs[f"{EXPERTS}.down_proj_blocks"].flatten(2), ours[f"{EXPERTS}.down_proj"])
    assert torch.equal(theirs[f"{EXPERTS}.down_proj_scales"], ours[f"{EXPERTS}.down_proj_scale"])
    # Low nibble first, rows of gate and up as they alternate in the model, which has them as columns.
    weight = tensors_in(tmp_path / "packed-plain")[f"{EXPERTS}.gate_up_proj"]
    assert weight.shape == (4, 64, 192)
    stored = decode(theirs[f"{EXPERTS}.gate_up_proj_blocks"].flatten(2), theirs[f"{EXPERTS}.gate_up_proj_scales"])
    expected = hf_mxfp4.quantize(weight[2].t().float(), scale_rule="even").dequantize(torch.float64)
    assert torch.equal(stored[2], expected)
    # As transformers' own function reads them.
    experts = AutoModelForCausalLM.from_pretrained(source).model.layers[0].mlp.experts
    for projection in ("gate_up_proj", "down_proj"):
        parts = (theirs[f"{EXPERTS}.{projection}_{part}"] for part in ("blocks", "scales"))
        assert torch.equal(convert_moe_packed_tensors(*parts), experts.dequantized_weight(projection, torch.bfloat16))
    others = {name for name in theirs if not name.endswith(("_blocks", "_scales"))}
    plain = tensors_in(tmp_path / "packed-plain")
    assert others == {name for name in plain if not name.endswith(("up_proj", "down_proj"))}
    assert {tensor.dtype for name, tensor in theirs.items() if name in others} == {torch.bfloat16}
    skips = "model.layers.*.self_attn model.layers.*.mlp.router model.embed_tokens lm_head".split()
    options = config_in(tmp_path / "out")["quantization_config"]
    assert options == {"quant_method": "mxfp4", "modules_to_not_convert": skips}


def test_openai_checkpoints_come_in_bit_for_bit(tmp_path):
    source = save_openai(tmp_path / "openai", layers=2)
    report = import_checkpoint(source, tmp_path / "packed")
    assert report.counts() == {"kept": 16}
    stored = tensors_in(source)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert not any(info.values())
    experts = model.model.layers[1].mlp.experts
    assert model.quantization_report.n_quantized == 16
    stem = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(experts.down_proj, stored[f"{stem}_blocks"].flatten(2))
    assert torch.equal(experts.down_proj_scale, stored[f"{stem}_scales"])
    # Merging: 6 that becomes 6.5 keeps the scale of its block, by other rules it would double, and .5 be lost.
    weight = torch.full((1, 32), 0.5).index_fill(1, torch.tensor([0]), 6.5)
    assert weight_values(experts.pack_matrix(weight), 32, experts.config.weight_scheme, weight.dtype)[0, 1] == 0.5
    reference = AutoModelForCausalLM.from_pretrained(source, quantization_config=Mxfp4Config(dequantize=True))
    for name, parameter in model.dequantize().named_parameters():
        assert torch.equal(parameter, reference.get_parameter(name)), name
    assert torch.equal(model(IDS).logits, reference(IDS).logits)
