# SPDX-License-Identifier: Apache-2.0
"""OpenAI's gpt-oss format: out, through transformers' own functions, and in."""

import pytest
import torch
from export_files import config_in, decode, header_and_data, save_packed, save_plain
from safetensors.torch import load_file, save_file
from same_bits import tensors_in
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import hf_mxfp4
from hf_mxfp4.backends import dequantize
from hf_mxfp4.checkpoint import export, import_checkpoint
from hf_mxfp4.files import write_json
from hf_mxfp4.gemm import packed_tensor
from hf_mxfp4.layers import MXFP4PackedExperts
from hf_mxfp4.numerics import QuantScheme


IDS = torch.arange(2, 14).view(2, 6)
EXPERTS = "model.layers.0.mlp.experts"
EXPERTS_ONLY = {"modules_to_not_convert": ["self_attn"]}


def save_openai(folder, layers=1):
    """A checkpoint as OpenAI's: blocks and scales of random bytes, the rest bfloat16."""
    save_plain(folder, "gpt_oss", layers=layers)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for layer in range(layers):
        for projection, (rows, columns) in {"gate_up_proj": (192, 64), "down_proj": (64, 96)}.items():
            stem = f"model.layers.{layer}.mlp.experts.{projection}"
            del tensors[stem]
            blocks = torch.randint(0, 256, (4, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(115, 125, (4, rows, columns // 32), dtype=torch.uint8, generator=generator)
            tensors |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    skips = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    options = {"quant_method": "mxfp4", "modules_to_not_convert": skips}
    write_json(folder / "config.json", {**config_in(folder), "quantization_config": options})
    return folder


def test_the_layout(tmp_path):
    source = save_packed(tmp_path / "packed", "gpt_oss", config=EXPERTS_ONLY)
    report = export(source, tmp_path / "out", "gpt-oss")
    assert report.counts() == {"kept": 16} and not report.changed and report.notes == []
    ours, theirs = tensors_in(source), tensors_in(tmp_path / "out")
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
    others = {name for name in theirs if not name.endswith(("_blocks", "_scales"))}
    plain = tensors_in(tmp_path / "packed-plain")
    assert others == {name for name in plain if not name.endswith(("up_proj", "down_proj"))}
    assert {tensor.dtype for name, tensor in theirs.items() if name in others} == {torch.bfloat16}
    assert config_in(tmp_path / "out")["quantization_config"] == {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }


@pytest.mark.parametrize("projection", ["gate_up_proj", "down_proj"])
def test_transformers_own_function_gives_our_values(projection, tmp_path):
    source = save_packed(tmp_path / "packed", "gpt_oss", layers=1, config=EXPERTS_ONLY)
    export(source, tmp_path / "out", "gpt-oss")
    stored = tensors_in(tmp_path / "out")
    values = convert_moe_packed_tensors(*(stored[f"{EXPERTS}.{projection}_{part}"] for part in ("blocks", "scales")))
    experts = AutoModelForCausalLM.from_pretrained(source).model.layers[0].mlp.experts
    assert torch.equal(values, experts.dequantized_weight(projection, torch.bfloat16))


def test_openai_checkpoints_come_in_bit_for_bit(tmp_path):
    source = save_openai(tmp_path / "openai", layers=2)
    report = import_checkpoint(source, tmp_path / "packed")
    assert report.counts() == {"kept": 16}
    stored = tensors_in(source)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert not any(info.values())
    experts = model.model.layers[1].mlp.experts
    assert isinstance(experts, MXFP4PackedExperts) and model.quantization_report.n_quantized == 16
    stem = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(experts.down_proj, stored[f"{stem}_blocks"].flatten(2))
    assert torch.equal(experts.down_proj_scale, stored[f"{stem}_scales"])
    reference = AutoModelForCausalLM.from_pretrained(source, quantization_config=Mxfp4Config(dequantize=True))
    for name, parameter in model.dequantize().named_parameters():
        assert torch.equal(parameter, reference.get_parameter(name)), name
    assert torch.equal(model(IDS).logits, reference(IDS).logits)


def test_out_and_in_again(tmp_path):
    source = save_packed(tmp_path / "packed", "gpt_oss", config={**EXPERTS_ONLY, "scale_rule": "rceil"})
    export(source, tmp_path / "out", "gpt-oss")
    import_checkpoint(tmp_path / "out", tmp_path / "back")
    files = (folder / "model.safetensors" for folder in (source, tmp_path / "back"))
    (_, data), (_, back) = map(header_and_data, files)
    assert (data == back) is True
    # The same layers, told by their full names.
    one, other = (config_in(folder)["quantization_config"] for folder in (source, tmp_path / "back"))
    layers = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qkvo"]
    assert other == {**one, "modules_to_not_convert": layers}
    export(tmp_path / "back", tmp_path / "again", "gpt-oss")
    files = (tmp_path / name / "model.safetensors" for name in ("out", "again"))
    (_, data), (_, back) = map(header_and_data, files)
    assert (data == back) is True


def test_every_byte_means_the_same_to_transformers():
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256 // 16, 16)
    # From 253 on, the largest values overflow bfloat16 or nearly so; 255 is NaN here, and 2^128 there.
    for scale in range(253):
        scales = torch.full((1, 16, 1), scale, dtype=torch.uint8)
        theirs = convert_moe_packed_tensors(codes.unflatten(1, (16, 1)), scales)[0].t()
        layer = {"weight": codes[0], "weight_scale": scales[0]}
        ours = dequantize(packed_tensor(layer, 32, QuantScheme(), torch.float32), torch.bfloat16)
        assert torch.equal(ours, theirs), scale
