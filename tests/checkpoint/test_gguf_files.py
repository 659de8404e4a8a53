# SPDX-License-Identifier: Apache-2.0
"""GGUF files: their bytes, names and metadata against the package `gguf` and what transformers loads from them."""

import json

import gguf
import numpy as np
import pytest
import torch
from export_files import decode, save_plain, save_with_head
from same_bits import tensors_in
from tiny_models import CHAT, SPECIAL, SPLITS, make_fallback_tokenizer, make_model, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from hf_mxfp4 import MXFP4RLConfig, fake_quantize
from hf_mxfp4.checkpoint import CheckpointError, export, to_blocks


FILE = "model-MXFP4.gguf"
MXFP4, F32, BF16 = (gguf.GGMLQuantizationType[name] for name in ("MXFP4", "F32", "BF16"))
#: Options under which llama.cpp computes what the model does.
FAMILIES = dict.fromkeys(("qwen2", "qwen3", "mixtral", "gpt_oss"), {})
FAMILIES |= {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3_moe": {"norm_topk_prob": True}}


def tensors_of(folder) -> dict:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(folder / FILE).tensors}


def metadata_of(folder) -> dict:
    return {name: field.contents() for name, field in gguf.GGUFReader(folder / FILE).fields.items()}


def values_of(tensor) -> torch.Tensor:
    return torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32))


def test_every_byte_means_the_same_to_ggml():
    codes = torch.arange(256, dtype=torch.uint8).repeat(255, 1)
    scale = torch.arange(255, dtype=torch.uint8)[:, None].expand(-1, 16).contiguous()
    blocks = to_blocks(codes, scale)
    assert blocks.shape == (255, 16 * 17)
    with np.errstate(over="ignore"):
        found = gguf.dequantize(blocks.numpy(), MXFP4)
    assert torch.equal(torch.from_numpy(found), decode(codes, scale).float())


LAYER = {
    "llama": "attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down attn_norm ffn_norm",
    "gpt_oss": "attn_q attn_k attn_v attn_output attn_sinks attn_norm post_attention_norm ffn_gate_inp ffn_gate_exps "
    "ffn_up_exps ffn_down_exps",
}


@pytest.mark.parametrize("family", LAYER)
def test_names_and_types_are_those_of_llama_cpp(family, tmp_path):
    """The package `gguf` knows the names, and not what is in which type."""
    make_model(family, **FAMILIES[family]).save_pretrained(tmp_path / "plain")
    export(tmp_path / "plain", tmp_path / "out", "gguf", modules_to_not_convert=["q_proj"])
    found = tensors_of(tmp_path / "out")
    of_layer = set(LAYER[family].split())
    assert {name.split(".")[2] for name in found if name.startswith("blk.1.")} == of_layer
    top = {name for name in found if not name.startswith("blk.")}
    assert top == {"token_embd.weight", "output.weight", "output_norm.weight"}
    for name, tensor in found.items():
        is_float = tensor.data.ndim == 1 or name.endswith(".bias") or "ffn_gate_inp" in name
        whole = name in ("token_embd.weight", "output.weight") or ".attn_q." in name
        assert tensor.tensor_type == (F32 if is_float else BF16 if whole else MXFP4), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@torch.no_grad()
def test_transformers_computes_the_same_from_the_file(family, tmp_path):
    """Given the config: of the metadata it reads neither the heads' width nor that of the experts."""
    options = {name: value for name, value in FAMILIES[family].items() if not name.endswith("_bias")}
    save_plain(tmp_path / "plain", family, vocab_size=404, **options)
    make_tokenizer("gpt-2").save_pretrained(tmp_path / "plain")
    export(tmp_path / "plain", tmp_path / "out", "gguf")
    export(tmp_path / "plain", tmp_path / "ct", "compressed-tensors")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        gguf_file=FILE,
        config=AutoConfig.from_pretrained(tmp_path / "plain"),
        quantization_config=GgufConfig(dequantize=True, gguf_file=FILE),
        dtype=torch.float32,
    )
    stored = tensors_in(tmp_path / "ct")
    own = {name: tensor.float() for name, tensor in loaded.state_dict().items()}
    layers = [name for name in own if name.endswith("_proj.weight")]
    assert len(layers) == (8 if family == "qwen3_moe" else 14)
    if family == "qwen3_moe":
        parts = [f"model.layers.0.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up")]
        rows = torch.cat([decode(stored[f"{part}_packed"], stored[f"{part}_scale"]) for part in parts]).float()
        assert torch.equal(own["model.layers.0.mlp.experts.gate_up_proj"][3], rows)
    for name in layers:
        codes = stored[name.replace("weight", "weight_packed")]
        scale = stored[f"{name}_scale"]
        assert torch.equal(own[name], decode(codes, scale).float()), name
    assert torch.equal(own["model.norm.weight"], stored["model.norm.weight"].float())


def test_metadata(tmp_path):
    options = {"norm_topk_prob": True, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}}
    options["rope_parameters"]["original_max_position_embeddings"] = 16
    save_plain(tmp_path / "some-model", "qwen3_moe", **options)
    report = export(tmp_path / "some-model", tmp_path / "out", "gguf", scale_rule="rceil")
    assert "no tokenizer" in report.notes[0]
    found = metadata_of(tmp_path / "out")
    general = {"architecture": "qwen3moe", "type": "model", "name": "some-model", "file_type": 38}
    model = {"block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96}
    attention = {"head_count": 2, "head_count_kv": 1, "key_length": 32, "value_length": 32}
    experts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
    tokenizer = {"model": "no_vocab", "eos_token_id": 1, "padding_token_id": 0}
    expected = {
        **{f"general.{name}": value for name, value in (general | {"quantization_version": 2}).items()},
        **{f"qwen3moe.{name}": value for name, value in (model | experts).items()},
        **{f"qwen3moe.attention.{name}": value for name, value in attention.items()},
        "qwen3moe.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "qwen3moe.vocab_size": 32,
        "qwen3moe.rope.freq_base": 5e5,
        **{f"qwen3moe.rope.scaling.{name}": value for name, value in scaling.items()},
        **{f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()},
    }
    assert {name: value for name, value in found.items() if not name.startswith("GGUF.")} == expected


@pytest.mark.parametrize(("split", "begins"), [*((split, False) for split in SPLITS), ("qwen2", True)])
def test_tokenizers_that_merge_bytes(split, begins, tmp_path):
    tokenizer = make_tokenizer(split, begins=begins)
    save_plain(tmp_path / "plain", "llama", layers=1, vocab_size=404)
    tokenizer.save_pretrained(tmp_path / "plain")
    assert not export(tmp_path / "plain", tmp_path / "out", "gguf").notes
    found = metadata_of(tmp_path / "out")
    size = len(tokenizer)
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.pre"] == split
    kinds = [3] * 3 + [1] * (size - 3) + [5] * (404 - size)
    tokens = tokenizer.convert_ids_to_tokens(range(size)) + [f"[PAD{number}]" for number in range(size, 404)]
    assert found["tokenizer.ggml.tokens"] == tokens
    assert found["tokenizer.ggml.token_type"] == kinds
    assert [found[f"tokenizer.ggml.{name}_token_id"] for name in ("padding", "bos", "eos")] == [0, 1, 2]
    assert found["tokenizer.ggml.add_bos_token"] is begins
    assert found["tokenizer.chat_template"] == CHAT
    merges = json.loads((tmp_path / "plain" / "tokenizer.json").read_text())["model"]["merges"]
    assert found["tokenizer.ggml.merges"] == [" ".join(merge) for merge in merges]
    again = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file=FILE)
    assert again.convert_ids_to_tokens(range(size)) == tokens[:size]


def test_tokenizers_with_bytes_as_a_fallback(tmp_path):
    tokenizer = make_fallback_tokenizer()
    save_plain(tmp_path / "plain", "mixtral", layers=1, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "plain")
    export(tmp_path / "plain", tmp_path / "out", "gguf")
    found = metadata_of(tmp_path / "out")
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.add_space_prefix"] is True
    assert found["tokenizer.ggml.tokens"][:5] == ["<unk>", *SPECIAL, "<0x00>"][:5]
    assert found["tokenizer.ggml.token_type"][:5] == [3, 3, 3, 3, 6]
    assert found["tokenizer.ggml.token_type"][-1] == 1
    scores = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"], strict=True))
    merges = json.loads((tmp_path / "plain" / "tokenizer.json").read_text())["model"]["merges"]
    ranked = ["".join(merge) for merge in merges]
    assert [scores[token] for token in ranked] == [-float(ranked.index(token)) for token in ranked]


def test_tokenizers_that_llama_cpp_has_not_are_left_out_and_it_is_said(tmp_path):
    change = {"pre_tokenizer": {"type": "Whitespace"}}
    save_plain(tmp_path / "plain", "llama", layers=1, vocab_size=404)
    make_tokenizer("gpt-2").save_pretrained(tmp_path / "plain")
    file = tmp_path / "plain" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    report = export(tmp_path / "plain", tmp_path / "out", "gguf")
    assert "no name for the way" in report.notes[0]
    assert metadata_of(tmp_path / "out")["tokenizer.ggml.model"] == "no_vocab"


def test_a_trained_policy_has_its_codes(tmp_path):
    make_model("llama", tie=True).save_pretrained(tmp_path / "plain")
    config = MXFP4RLConfig(mode="qat", preset="w4a4", scale_rule="rceil", macro_block=None, outlier_fallback=None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "policy")
    report = export(tmp_path / "policy", tmp_path / "out", "gguf")
    assert report.counts() == {"packed": 14}
    assert "8-bit integers" in report.notes[0]
    found = tensors_of(tmp_path / "out")
    assert "output.weight" not in found
    assert found["token_embd.weight"].tensor_type == BF16
    master = model.get_parameter("model.layers.0.mlp.down_proj.weight").detach()
    assert torch.equal(values_of(found["blk.0.ffn_down.weight"]), fake_quantize(master, scale_rule="rceil"))


def test_a_head_of_its_own_is_written_though_the_config_ties_it(tmp_path):
    stored = save_with_head(tmp_path / "plain")
    export(tmp_path / "plain", tmp_path / "out", "gguf")
    found = tensors_of(tmp_path / "out")
    assert torch.equal(values_of(found["output.weight"]), stored["lm_head.weight"].float())
    assert torch.equal(values_of(found["token_embd.weight"]), stored["model.embed_tokens.weight"].float())


def test_embeddings_that_are_stored_as_the_head_are_written(tmp_path):
    stored = save_with_head(tmp_path / "plain", drop="model.embed_tokens.weight")
    export(tmp_path / "plain", tmp_path / "out", "gguf")
    found = tensors_of(tmp_path / "out")
    assert torch.equal(values_of(found["token_embd.weight"]), stored["lm_head.weight"].float())
    assert "output.weight" not in found


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("gemma", {}, "the architecture 'gemma' is not one of llama"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob=True alone, not False"),
        ("qwen3", {"attention_bias": True}, "attention_bias=False alone"),
        ("mixtral", {"sliding_window": 8}, "sliding_window=None alone, not 8"),
        ("qwen2", {"head_dim": 16}, "heads of Qwen2"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "by turns"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='silu' alone"),
    ],
)
def test_models_that_llama_cpp_computes_otherwise_are_refused(family, options, words, tmp_path):
    source = save_plain(tmp_path / "plain", family, **options)
    with pytest.raises(CheckpointError, match=words):
        export(source, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_nan_is_refused_since_it_would_become_a_number(tmp_path):
    model = make_model("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="layers.1.mlp.up_proj holds NaN or infinity"):
        export(tmp_path / "plain", tmp_path / "out", "gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    source = save_plain(tmp_path / "plain", "llama")
    with pytest.raises(CheckpointError, match="pip install gguf"):
        export(source, tmp_path / "out", "gguf")
