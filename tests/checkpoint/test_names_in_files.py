# SPDX-License-Identifier: Apache-2.0
"""Names of tensors in files that differ from those of the model: what was saved loads again, folders are packed and
exported, and tensors that transformers ignores are left out."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from same_bits import assert_same, tensors_in
from tiny_models import make_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MarianConfig,
    MarianMTModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Zamba2Config,
    Zamba2ForCausalLM,
)

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import CheckpointError, export, import_checkpoint, pack_checkpoint, verify_folder


IDS = torch.arange(4, 12)[None]
PACKED = MXFP4RLConfig(mode="packed", macro_block=None)
TEXT = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def gpt_neox():
    sizes = {key: value for key, value in TEXT.items() if key != "num_key_value_heads"}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes))


def marian():
    layers = {f"{side}_{key}": 1 for side in ("encoder", "decoder") for key in ("layers", "attention_heads")}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    sizes = {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 16}
    return MarianMTModel(MarianConfig(vocab_size=64, d_model=64, **layers, **sizes, **tokens))


def qwen2_vl():
    text = {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    tokens = {"image_token_id": 50, "video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 53}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **tokens))


def zamba2():
    """Two layers share all weights of a transformer."""
    mamba = {"mamba_d_state": 16, "mamba_headdim": 16, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_head_dim": 32, "attention_hidden_size": 128}
    blocks = {"layers_block_type": ["hybrid", "hybrid"], "num_hidden_layers": 2, "num_mem_blocks": 1, "adapter_rank": 8}
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 16}
    return Zamba2ForCausalLM(Zamba2Config(**sizes, **mamba, **heads, **blocks))


MODELS = {
    "gpt_neox": (AutoModelForCausalLM, gpt_neox),
    "marian": (AutoModelForSeq2SeqLM, marian),
    "qwen2_vl": (AutoModelForImageTextToText, qwen2_vl),
    "zamba2": (AutoModelForCausalLM, zamba2),
}


@torch.no_grad()
def logits(model) -> torch.Tensor:
    inputs = {"decoder_input_ids": IDS[:, :3]} if model.config.model_type == "marian" else {}
    return model.eval()(IDS, **inputs).logits


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Folders of full-precision models, each saved once."""
    folders = {}

    def get(name: str):
        if name not in folders:
            torch.manual_seed(0)
            folders[name] = tmp_path_factory.mktemp(name)
            MODELS[name][1]().to(torch.bfloat16).save_pretrained(folders[name])
        return folders[name]

    return get


@pytest.mark.parametrize("mode", ["qat", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_what_was_saved_loads(folder_of, tmp_path, name, mode):
    auto = MODELS[name][0]
    model = auto.from_pretrained(folder_of(name), quantization_config=MXFP4RLConfig(mode=mode), dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    again = auto.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(logits(again), logits(model))
    assert not verify_folder(tmp_path / "saved").problems


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_packs_like_its_model(folder_of, tmp_path, name):
    model = MODELS[name][0].from_pretrained(folder_of(name))
    hf_mxfp4.pack(model, PACKED).save_pretrained(tmp_path / "model")
    pack_checkpoint(folder_of(name), tmp_path / "folder", PACKED)
    assert_same(*(tensors_in(tmp_path / kind) for kind in ("model", "folder")))


def test_packed_and_plain_folders_are_exported_to_the_same_names(folder_of, tmp_path):
    name = "qwen2_vl"
    pack_checkpoint(folder_of(name), tmp_path / "packed", PACKED)
    export(tmp_path / "packed", tmp_path / "bf16", "bf16")
    assert tensors_in(tmp_path / "bf16").keys() == tensors_in(folder_of(name)).keys()
    export(tmp_path / "packed", tmp_path / "other", "compressed-tensors")
    import_checkpoint(tmp_path / "other", tmp_path / "back")
    expected, found = (tensors_in(tmp_path / kind) for kind in ("packed", "back"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items() if tensor.dtype == torch.uint8)


def llama_with(change, folder):
    make_model("llama", layers=1).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return folder


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_a_dequantized_model_is_saved_by_the_names_that_it_was_loaded_by(tmp_path, mode):
    base = llama_with(lambda stored: {f"my.{name}": tensor for name, tensor in stored.items()}, tmp_path / "base")
    options = {"key_mapping": {r"^my\.": ""}, "quantization_config": MXFP4RLConfig(mode=mode)}
    AutoModelForCausalLM.from_pretrained(base, **options).dequantize().save_pretrained(tmp_path / "plain")
    assert tensors_in(tmp_path / "plain").keys() == tensors_in(base).keys()


def test_what_transformers_ignores_is_left_out_with_a_note(tmp_path):
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    llama_with(lambda stored: {**stored, extra: torch.ones(3)}, tmp_path / "base")
    report = pack_checkpoint(tmp_path / "base", tmp_path / "packed", PACKED)
    assert any(f"were left out: {extra}" in note for note in report.notes)
    assert extra not in tensors_in(tmp_path / "packed")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "packed").quantization_report.n_quantized == 7


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_a_folder_that_lacks_a_tensor_is_not_converted(tmp_path, name):
    llama_with(lambda stored: {key: tensor for key, tensor in stored.items() if key != name}, tmp_path / "base")
    with pytest.raises(CheckpointError, match=f"has no {name}, which a LlamaForCausalLM needs"):
        pack_checkpoint(tmp_path / "base", tmp_path / "out", PACKED)
