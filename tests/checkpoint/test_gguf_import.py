# SPDX-License-Identifier: Apache-2.0
"""GGUF files with the config.json of their model become packed checkpoints, bit for bit."""

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from export_files import config_in, decode, save_packed, save_plain
from same_bits import tensors_in
from transformers import AutoModelForCausalLM

from hf_mxfp4.checkpoint import CheckpointError, ShardError, export, import_checkpoint


FILE = "model-MXFP4.gguf"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "llama": ("llama", {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 65536}),
    "llama, tied, with biases": ("llama", {"tie": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {"rope_parameters": YARN, "tie": True}),
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe, no experts": (
        "qwen3_moe",
        {"norm_topk_prob": True, "config": {"modules_to_not_convert": ["experts"]}},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral, one layer": ("mixtral", {"config": {"modules_to_not_convert": ["layers.0.mlp.experts"]}}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, one layer": ("gpt_oss", {"config": {"modules_to_not_convert": ["layers.0.mlp.experts"]}}),
}


def rewritten(folder, change) -> None:
    """The file in ``folder`` with other contents: ``change`` gets metadata and tensors, by name, with types."""
    reader = gguf.GGUFReader(folder / FILE)
    fields = {
        name: (field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    tensors = {tensor.name: (np.array(tensor.data), tensor.tensor_type) for tensor in reader.tensors}
    change(fields, tensors)
    writer = gguf.GGUFWriter(folder / "other.gguf", fields.pop("general.architecture")[0])
    for name, field in fields.items():
        writer.add_key_value(name, *field)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "other.gguf").replace(folder / FILE)


@pytest.fixture
def exported(tmp_path):
    """A folder with the file and its config, of a model whose float tensors are random."""
    save_plain(tmp_path / "plain", "llama", layers=1)
    export(tmp_path / "plain", tmp_path / "out", "gguf")
    (tmp_path / "alone").mkdir()
    for name in (FILE, "config.json"):
        shutil.copyfile(tmp_path / "out" / name, tmp_path / "alone" / name)
    return tmp_path / "alone"


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_gives_the_same_tensors(case, tmp_path):
    family, options = CASES[case]
    source = save_packed(tmp_path / "packed", family, **options)
    export(source, tmp_path / "out", "gguf")
    report = import_checkpoint(tmp_path / "out", tmp_path / "back")
    before, after = tensors_in(source), tensors_in(tmp_path / "back")
    if case != "qwen3_moe, no experts":  # its experts are the model's one tensor for all there
        assert after.keys() == before.keys()
    for name in after.keys() & before.keys():
        assert after[name].dtype == before[name].dtype and torch.equal(after[name], before[name]), name
    ids = torch.arange(2, 14).view(2, 6)
    model, again = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, tmp_path / "back"))
    assert again.quantization_report.n_quantized == model.quantization_report.n_quantized
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert set(report.counts()) == {"kept"} and report.source_sqnr_db is None
    beside, original = config_in(tmp_path / "back"), config_in(source)
    for config in (beside, original):
        config["quantization_config"].pop("modules_to_not_convert")
    assert beside == original


def test_other_types_are_read_as_what_they_stand_for(exported, tmp_path):
    kinds = gguf.GGMLQuantizationType

    def change(fields, tensors):
        data, kind = tensors["output.weight"]
        values = gguf.dequantize(data, kind)
        tensors["output.weight"] = gguf.quantize(values, kinds.Q8_0), kinds.Q8_0
        data, kind = tensors["blk.0.attn_q.weight"]
        tensors["blk.0.attn_q.weight"] = gguf.quantize(gguf.dequantize(data, kind), kinds.Q4_0), kinds.Q4_0
        data, kind = tensors["token_embd.weight"]
        tensors["token_embd.weight"] = gguf.dequantize(data, kind).astype(np.float16), kinds.F16

    rewritten(exported, change)
    report = import_checkpoint(exported, tmp_path / "back")
    assert "Tensors in Q4_0, Q8_0 are written as the float32 values" in report.notes[1]
    assert config_in(tmp_path / "back")["quantization_config"]["modules_to_not_convert"] == [
        "model.layers.0.self_attn.q_proj"
    ]
    found = tensors_in(tmp_path / "back")
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(exported / FILE).tensors}
    head, q_proj = (
        gguf.dequantize(read[n].data, read[n].tensor_type) for n in ("output.weight", "blk.0.attn_q.weight")
    )
    assert torch.equal(found["lm_head.weight"], torch.from_numpy(head))
    order = [head * 32 + row for head in range(2) for row in (*range(0, 32, 2), *range(1, 32, 2))]
    assert torch.equal(found["model.layers.0.self_attn.q_proj.weight"], torch.from_numpy(q_proj)[order])
    assert found["model.embed_tokens.weight"].dtype == torch.float16
    codes, scale = (found[f"model.layers.0.mlp.down_proj.weight{part}"] for part in ("", "_scale"))
    down = torch.from_numpy(gguf.dequantize(read["blk.0.ffn_down.weight"].data, kinds.MXFP4))
    assert torch.equal(decode(codes, scale).float(), down)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda f, t: f.update({"general.architecture": ("mamba", *f["general.architecture"][1:])}),
            "of the architecture 'mamba', and config.json",
        ),
        (
            lambda f, t: t.pop("blk.0.ffn_norm.weight"),
            "no blk.0.ffn_norm.weight, which is model.layers.0.post_attention",
        ),
        (
            lambda f, t: t.update({"extra.weight": t["output_norm.weight"]}),
            "extra.weight, for which LlamaForCausalLM has",
        ),
        (lambda f, t: t.update({"token_embd.weight": t["blk.0.attn_q.weight"]}), "quantizes token_embd.weight"),
        (
            lambda f, t: t.update({"blk.0.ffn_up.weight": t["blk.0.ffn_down.weight"]}),
            "blk.0.ffn_up.weight is torch.uint8",
        ),
        (
            lambda f, t: t.update(
                {
                    name: (gguf.dequantize(*data).astype(np.float16), gguf.GGMLQuantizationType.F16)
                    for name, data in t.items()
                    if data[1].name == "MXFP4"
                }
            ),
            "nothing in it is quantized",
        ),
    ],
    ids=["architecture", "missing", "extra", "embedding", "shape", "nothing"],
)
def test_what_cannot_be_imported_says_why(change, words, exported, tmp_path):
    rewritten(exported, change)
    with pytest.raises(CheckpointError, match=words):
        import_checkpoint(exported, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_file_that_is_cut_short(exported, tmp_path):
    content = (exported / FILE).read_bytes()
    for size in (3, 100, len(content) // 2, len(content) - 400):
        (exported / FILE).write_bytes(content[:size])
        with pytest.raises(ShardError, match="damaged, truncated or no GGUF file"):
            import_checkpoint(exported, tmp_path / "back")


def test_which_file(exported, tmp_path):
    shutil.copyfile(exported / FILE, exported / "two.gguf")
    with pytest.raises(CheckpointError, match="holds 2 GGUF files; name the one"):
        import_checkpoint(exported, tmp_path / "back")
    with pytest.raises(CheckpointError, match="nowhere.gguf is not a file"):
        import_checkpoint(tmp_path / "nowhere.gguf", tmp_path / "back")
    import_checkpoint(exported / "two.gguf", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "llama"


def test_a_config_that_is_missing_or_of_another_model(exported, tmp_path):
    (exported / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(CheckpointError, match="'llama', and config.json next to it of model_type 'qwen2'"):
        import_checkpoint(exported, tmp_path / "back")
    (exported / "config.json").unlink()
    with pytest.raises(CheckpointError, match="has no config.json; put config.json and the tokenizer files"):
        import_checkpoint(exported, tmp_path / "back")
