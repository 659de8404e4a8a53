# SPDX-License-Identifier: Apache-2.0
"""Packing a folder without loading the model: the same files as packing the model and saving it; weights that were
rotated before they were quantized; names of tensors in files that differ from those of the model: what was saved loads
again, folders are packed and exported, and tensors that transformers ignores are left out."""

import pytest
import serving
import torch
import transformers
from commands import run
from export_files import same_files, save_packed, save_plain
from safetensors.torch import load_file, save_file
from same_bits import assert_same, layers_of, logits, tensors_in
from tables import CONFIGS
from tiny_models import make_model
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig, numerics, quantize
from hf_mxfp4.checkpoint import CheckpointError, export, import_checkpoint, pack_checkpoint, verify_folder


@pytest.mark.parametrize(
    ("name", "shard_size", "family"),
    [
        ("default", "50GB", "qwen2"),
        ("floor", "30KB", "qwen2"),
        ("fallback 1", "30KB", "qwen2"),
        ("row tiles", "50GB", "qwen2"),
        ("skips", "30KB", "qwen2"),
        ("tiles", "30KB", "mixtral"),
    ],
)
def test_a_qat_folder_packs_like_its_model(name, shard_size, family, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_mxfp4.checkpoint.folder.MAX_SHARD_SIZE", shard_size)
    options = CONFIGS[name]
    dtype = torch.float32 if shard_size == "30KB" else torch.bfloat16
    sizes = {"intermediate": 80} if family == "mixtral" else {}  # tiles cut short
    plain = save_plain(tmp_path / "plain", family, tie=True, dtype=dtype, **sizes)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=MXFP4RLConfig(**options))
    model.save_pretrained(tmp_path / "qat", max_shard_size=shard_size)
    hf_mxfp4.pack(model).save_pretrained(tmp_path / "packed", max_shard_size=shard_size)
    report = pack_checkpoint(tmp_path / "qat", tmp_path / "out", dtype=str(dtype).removeprefix("torch."))
    same_files(tmp_path / "packed", tmp_path / "out")
    assert report.counts() == {"packed": model.quantization_report.n_quantized}
    # The one model came from the QAT folder's predecessor, and neither folder names a base model.
    assert (tmp_path / "out" / "README.md").read_text() == (tmp_path / "packed" / "README.md").read_text()
    # The model's report looks at some rows of large layers; here it sees all of them.
    assert report.total_sqnr_db == pytest.approx(model.quantization_report.sqnr_db, abs=0.05)


#: Matrices in two decoder layers of each.
FAMILIES = {"llama": 14, "qwen3": 14, "gemma": 14, "qwen3_moe": 24, "qwen2_moe": 30, "mixtral": 24, "gpt_oss": 24}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_folder_packs_like_its_model(family, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_mxfp4.checkpoint.folder.MAX_SHARD_SIZE", "60KB")
    dense = FAMILIES[family] == 14
    config = MXFP4RLConfig(mode="packed", scale_rule="mse" if dense else "rceil")
    plain = save_plain(tmp_path / "plain", family)
    model = hf_mxfp4.pack(AutoModelForCausalLM.from_pretrained(plain), config)
    model.save_pretrained(tmp_path / "packed", max_shard_size="60KB")
    report = pack_checkpoint(plain, tmp_path / "out", config)
    same_files(tmp_path / "packed", tmp_path / "out")
    assert report.counts() == {"packed": model.quantization_report.n_quantized}
    assert report.n_layers == FAMILIES[family]
    # The model's report looks at some rows of large layers, and its card says what it has seen.
    assert report.total_sqnr_db == pytest.approx(model.quantization_report.sqnr_db, abs=0.2)
    if dense:
        assert (tmp_path / "out" / "README.md").read_text() == (tmp_path / "packed" / "README.md").read_text()


@pytest.mark.parametrize(
    ("saved", "dtype", "written"),
    [
        ("trained", None, torch.bfloat16),
        ("trained", "float32", torch.float32),
        ("plain", None, torch.float32),
        ("plain", "float16", torch.float16),
    ],
)
def test_what_is_not_quantized_has_the_dtype_asked_for(saved, dtype, written, tmp_path):
    """By default that of the checkpoint; only training needs float32 masters."""
    plain = save_plain(tmp_path / "plain", layers=1, dtype=torch.float32)
    serving.save_policy(plain, tmp_path / "trained", "w4a16")
    config = MXFP4RLConfig(mode="packed") if saved == "plain" else None
    report = pack_checkpoint(tmp_path / saved, tmp_path / "out", config, dtype=dtype)
    assert (len(report.notes) == 1) == (written != torch.float32)
    before = tensors_in(tmp_path / saved)
    after = tensors_in(tmp_path / "out")
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(after[name], before[name].to(written))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == written
    export(tmp_path / saved, tmp_path / "bf16", "bf16", dtype=dtype)
    exported = tensors_in(tmp_path / "bf16")["model.embed_tokens.weight"].dtype
    assert str(exported) == f"torch.{dtype or 'bfloat16'}"


def test_what_cannot_be_packed_says_why(tmp_path):
    plain = save_plain(tmp_path / "plain", layers=1)
    config = MXFP4RLConfig(mode="packed")
    with pytest.raises(CheckpointError, match="has no scheme; give one"):
        pack_checkpoint(plain, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is packed already"):
        pack_checkpoint(save_packed(tmp_path / "packed", layers=1), tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=MXFP4RLConfig()).save_pretrained(tmp_path / "qat")
    with pytest.raises(CheckpointError, match="a scheme of its own"):
        pack_checkpoint(tmp_path / "qat", tmp_path / "out", config)
    with pytest.raises(CheckpointError, match="'nonsense', which matches no module"):
        pack_checkpoint(plain, tmp_path / "out", MXFP4RLConfig(mode="packed", modules_to_not_convert=["nonsense"]))
    tensors = tensors_in(plain)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: torch.zeros(3, 4)}, plain / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"is torch.float32 \[3, 4\]; the model needs floating-point \[96, 64\]"):
        pack_checkpoint(plain, tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


SCHEME = {"scale_rule": "even", "macro_search": "block_mantissas", "fprop": {"rotation": "deterministic-32"}}
ROTATED = MXFP4RLConfig(mode="packed", **SCHEME)


def load(folder, config=None, **options):
    options |= {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def qat(folder, **options):
    scheme = {"preset": "w4a16", "outlier_fallback": None, "dither_ties": False, "smooth": False, **SCHEME, **options}
    return load(folder, MXFP4RLConfig(**scheme))


@pytest.fixture
def packed_folder(checkpoint, tmp_path):
    source = checkpoint(dtype=torch.bfloat16)
    out = tmp_path / "packed"
    pack_checkpoint(source, out, ROTATED)
    return source, out


def test_files_hold_the_codes_of_rotated_weights_and_load_to_the_same_model(checkpoint, tmp_path):
    source = checkpoint(dtype=torch.bfloat16)
    model = load(source, ROTATED)
    expected = logits(model)
    report = model.quantization_report
    model.save_pretrained(tmp_path / "saved")
    stored = tensors_in(tmp_path / "saved")
    original = tensors_in(source)
    pack_checkpoint(source, tmp_path / "folder", ROTATED)
    assert_same(tensors_in(tmp_path / "folder"), stored)
    for name in layers_of(model):
        rotated = numerics.rotate(original[f"{name}.weight"].float(), 32)
        tensor = quantize(rotated, scale_rule="even", macro_block=128, macro_search="block_mantissas")
        assert torch.equal(stored[f"{name}.weight"], tensor.codes), name
        assert torch.equal(stored[f"{name}.weight_macro"], tensor.macro), name
    again = load(tmp_path / "saved")
    assert torch.equal(logits(again), expected)
    assert again.hf_quantizer.quantization_config == ROTATED
    assert "rotation deterministic-32" in str(again.quantization_report)
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "rotation deterministic-32" in card
    # Errors are those of the values rotated back: what is lost is what any packing of such weights loses.
    plain = load(source, MXFP4RLConfig(mode="packed", scale_rule="even", macro_search="block_mantissas"))
    assert report.sqnr_db == pytest.approx(plain.quantization_report.sqnr_db, abs=1.5)


def test_rotations_that_do_not_divide_the_inputs_of_a_layer_are_refused_by_its_name(checkpoint, tmp_path):
    source = checkpoint(intermediate=96)
    config = MXFP4RLConfig(mode="packed", fprop={"rotation": "deterministic-64"})
    words = r"down_proj has 96 inputs, no multiple of 64.*modules_to_not_convert"
    with pytest.raises(CheckpointError, match=words):
        pack_checkpoint(source, tmp_path / "out", config)
    with pytest.raises(ValueError, match=words):
        load(source, config)
    result = run("pack", source, tmp_path / "out", "--rotation", "random-16")
    assert result.exit_code == 2
    assert "drawn anew in every step" in " ".join(result.output.split())


@pytest.mark.parametrize("kind", ["packed", "qat"])
def test_of_other_formats_bfloat16_alone_takes_the_weights_and_rotates_them_back(kind, packed_folder, tmp_path):
    source, folder = packed_folder
    if kind == "qat":
        qat(source).save_pretrained(tmp_path / "qat")
    origin = {"packed": folder, "qat": tmp_path / "qat"}[kind]
    for format, on_mismatch in (("compressed-tensors", "refuse"), ("quark", "requantize"), ("gguf", "dequantize")):
        with pytest.raises(CheckpointError, match=f"rotate both operands .*, and format '{format}' cannot hold"):
            export(origin, tmp_path / "other", format, on_mismatch)
    report = export(origin, tmp_path / "plain", "bf16")
    assert any("rotated back" in note for note in report.notes)
    stored = tensors_in(tmp_path / "plain")
    packed = load(folder)
    for name, layer in layers_of(packed).items():
        assert torch.equal(stored[f"{name}.weight"], layer.dequantized_weight(torch.float32).bfloat16()), name
    torch.testing.assert_close(logits(load(tmp_path / "plain")), logits(packed), rtol=0.1, atol=0.1)


IDS = torch.arange(4, 12)[None]
PACKED = MXFP4RLConfig(mode="packed", macro_block=None)
TEXT = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def gpt_neox():
    sizes = {key: value for key, value in TEXT.items() if key != "num_key_value_heads"}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes))


def marian():
    layers = {f"{side}_{key}": 1 for side in ("encoder", "decoder") for key in ("layers", "attention_heads")}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    sizes = {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 16}
    return transformers.MarianMTModel(transformers.MarianConfig(vocab_size=64, d_model=64, **layers, **sizes, **tokens))


def qwen2_vl():
    text = {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    tokens = {"image_token_id": 50, "video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 53}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    return transformers.Qwen2VLForConditionalGeneration(config)


def zamba2():
    """Two layers share all weights of a transformer."""
    mamba = {"mamba_d_state": 16, "mamba_headdim": 16, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_head_dim": 32, "attention_hidden_size": 128}
    blocks = {"layers_block_type": ["hybrid", "hybrid"], "num_hidden_layers": 2, "num_mem_blocks": 1, "adapter_rank": 8}
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 16}
    return transformers.Zamba2ForCausalLM(transformers.Zamba2Config(**sizes, **mamba, **heads, **blocks))


MODELS = {
    "gpt_neox": (AutoModelForCausalLM, gpt_neox),
    "marian": (transformers.AutoModelForSeq2SeqLM, marian),
    "qwen2_vl": (transformers.AutoModelForImageTextToText, qwen2_vl),
    "zamba2": (AutoModelForCausalLM, zamba2),
}


@torch.no_grad()
def predictions(model) -> torch.Tensor:
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
    assert torch.equal(predictions(again), predictions(model))
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
