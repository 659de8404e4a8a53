# SPDX-License-Identifier: Apache-2.0
"""Packing a folder without loading the model: the same files as packing the model and saving it."""

import pytest
import torch
from export_files import same_files, save_packed, save_plain
from safetensors.torch import save_file
from same_bits import tensors_in
from tables import CONFIGS, some
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import CheckpointError, pack_checkpoint


SCHEMES = some(
    CONFIGS, "default", "floor", "w4a16 blockwise", "selective", "row tiles", "skips"
)  # fmt: skip


def one_or_many_files(number: int, shard_size: str):
    """Each scheme in one of the two in every run, in the other in the long one."""
    return () if number % 2 == (shard_size == "30KB") else pytest.mark.large


@pytest.mark.parametrize(
    ("name", "shard_size"),
    [
        pytest.param(name, shard_size, marks=one_or_many_files(number, shard_size))
        for number, name in enumerate(SCHEMES)
        for shard_size in ("50GB", "30KB")
    ],
)
def test_a_qat_folder_packs_like_its_model(name, shard_size, tmp_path):
    options, dtype = SCHEMES[name], torch.float32 if shard_size == "30KB" else torch.bfloat16
    plain = save_plain(tmp_path / "plain", tie=True, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=MXFP4RLConfig(**options))
    model.save_pretrained(tmp_path / "qat", max_shard_size=shard_size)
    hf_mxfp4.pack(model).save_pretrained(tmp_path / "packed", max_shard_size=shard_size)
    report = pack_checkpoint(tmp_path / "qat", tmp_path / "out", max_shard_size=shard_size)
    same_files(tmp_path / "packed", tmp_path / "out")
    assert report.counts() == {"packed": model.quantization_report.n_quantized}
    # The one model came from the QAT folder's predecessor, and neither folder names a base model.
    assert (tmp_path / "out" / "README.md").read_text() == (tmp_path / "packed" / "README.md").read_text()
    # The model's report looks at some rows of large layers; here it sees all of them.
    assert report.total_sqnr_db == pytest.approx(model.quantization_report.sqnr_db, abs=0.05)


#: Matrices in two decoder layers of each.
FAMILIES = {
    "llama": 14,
    "qwen3": 14,
    "gemma": 14,
    "qwen3_moe": 2 * (4 + 8),
    "qwen2_moe": 2 * (4 + 3 + 8),
    "mixtral": 2 * (4 + 8),
    "gpt_oss": 2 * (4 + 8),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_folder_packs_like_its_model(family, tmp_path):
    dense = FAMILIES[family] == 14
    config = MXFP4RLConfig(mode="packed", scale_rule="mse" if dense else "rceil")
    plain = save_plain(tmp_path / "plain", family)
    model = hf_mxfp4.pack(AutoModelForCausalLM.from_pretrained(plain), config)
    model.save_pretrained(tmp_path / "packed", max_shard_size="60KB")
    report = pack_checkpoint(plain, tmp_path / "out", config, max_shard_size="60KB")
    same_files(tmp_path / "packed", tmp_path / "out")
    assert report.counts() == {"packed": model.quantization_report.n_quantized}
    assert report.n_layers == FAMILIES[family]
    # The model's report looks at some rows of large layers, and its card says what it has seen.
    assert report.total_sqnr_db == pytest.approx(model.quantization_report.sqnr_db, abs=0.2)
    if dense:
        assert (tmp_path / "out" / "README.md").read_text() == (tmp_path / "packed" / "README.md").read_text()


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
    for name, words in (("model.layers.0.mlp.up_proj.weight", "has no model.layers.0.mlp.up_proj.weight"),):
        missing = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file(missing, plain / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=words):
            pack_checkpoint(plain, tmp_path / "out", config)
        save_file({**tensors, name: torch.zeros(3, 4)}, plain / "model.safetensors", {"format": "pt"})
        with pytest.raises(
            CheckpointError, match=r"is torch.float32 \[3, 4\]; the model needs floating-point \[96, 64\]"
        ):
            pack_checkpoint(plain, tmp_path / "out", config)
    assert not (tmp_path / "out").exists()
