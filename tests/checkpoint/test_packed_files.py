# SPDX-License-Identifier: Apache-2.0
"""Packed checkpoints that do not fit their config: an error that names file and tensor, never a wrong model."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from transformers import AutoConfig, AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig


LAYER = "model.layers.0.mlp.up_proj"  # [96, 64]
PACKED = MXFP4RLConfig(mode="packed")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A packed checkpoint in one file."""
    folder = tmp_path_factory.mktemp("packed")
    make_model(dtype=torch.bfloat16).save_pretrained(folder / "base")
    AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=PACKED).save_pretrained(folder / "saved")
    return folder / "saved"


@pytest.fixture
def saved(packed, tmp_path):
    """A copy of it, and its tensors."""
    shutil.copytree(packed, tmp_path / "saved")
    return tmp_path / "saved", load_file(tmp_path / "saved" / "model.safetensors")


def rewritten(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    target = folder.with_name("damaged")
    shutil.copytree(folder, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def refusal(folder, **options) -> str:
    with pytest.raises(ValueError) as error:
        AutoModelForCausalLM.from_pretrained(folder, **options)
    return str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        *(f"{LAYER}.{part}" for part in ("weight", "weight_scale", "weight_macro")),
        "model.layers.1.self_attn.q_proj.bias",
        "model.norm.weight",
        "lm_head.weight",
        "model.embed_tokens.weight",
    ],
)
def test_a_missing_tensor(name, saved):
    folder, tensors = saved
    del tensors[name]
    assert name in refusal(rewritten(folder, tensors))


def test_a_missing_layer(saved):
    folder, tensors = saved
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(LAYER)}
    assert f"{LAYER}.weight" in refusal(rewritten(folder, others))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["weight", "weight_scale", "weight_macro"])
def test_another_dtype(name, dtype, saved):
    folder, tensors = saved
    tensors[f"{LAYER}.{name}"] = tensors[f"{LAYER}.{name}"].to(dtype)
    message = refusal(rewritten(folder, tensors))
    assert "model.safetensors" in message and f"{LAYER}.{name}" in message and str(dtype).split(".")[1] in message


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight", lambda t: t[:, :-1]),
        ("weight", lambda t: t[:-1]),
        ("weight", lambda t: t.t()),
        ("weight_scale", lambda t: t[:, :1]),
        ("weight_scale", lambda t: t.flatten()),
        ("weight_macro", lambda t: t.repeat(1, 2)),
    ],
)
def test_another_shape(name, change, saved):
    folder, tensors = saved
    tensors[f"{LAYER}.{name}"] = change(tensors[f"{LAYER}.{name}"]).contiguous()
    message = refusal(rewritten(folder, tensors))
    assert "model.safetensors" in message and f"{LAYER}.{name}" in message


def test_residuals_against_the_scheme(saved):
    folder, tensors = saved
    extra = {**tensors, f"{LAYER}.weight_residual": tensors[f"{LAYER}.weight"].clone()}
    message = refusal(rewritten(folder, extra))
    assert "model.safetensors" in message and f"{LAYER}.weight_residual" in message
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["outlier_fallback"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    assert re.search(r"model\.layers\.0\.\w+\.\w+\.weight_residual", refusal(folder))


@pytest.mark.parametrize("name", ["model.layers.7.mlp.up_proj.weight_scale", "lm_head.weight_scale"])
def test_packed_tensors_of_no_packed_layer(name, saved):
    folder, tensors = saved
    tensors[name] = tensors[f"{LAYER}.weight_scale"].clone()
    message = refusal(rewritten(folder, tensors))
    assert "model.safetensors" in message and name in message


def test_full_precision_weights_under_a_packed_config(checkpoint, tmp_path):
    source = checkpoint("qwen2", dtype=torch.bfloat16)
    trainable = AutoModelForCausalLM.from_pretrained(source, quantization_config=MXFP4RLConfig())
    trainable.save_pretrained(tmp_path / "qat")
    config = AutoConfig.from_pretrained(tmp_path / "qat")
    config.quantization_config = PACKED.to_dict()
    message = refusal(tmp_path / "qat", config=config)
    assert "model.safetensors: model.layers.0" in message and "bfloat16" in message and "hf_mxfp4.pack" in message


def test_packed_weights_without_their_config(saved):
    folder, _ = saved
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((RuntimeError, ValueError)):
        AutoModelForCausalLM.from_pretrained(folder)
    for config in (PACKED, MXFP4RLConfig()):
        message = refusal(folder, quantization_config=config)
        assert "model.safetensors holds packed weights" in message and "restore the config.json" in message


def test_a_source_without_a_weight_or_with_one_of_another_shape(checkpoint, tmp_path):
    source = Path(checkpoint("qwen2"))
    tensors = load_file(source / "model.safetensors")
    weight = tensors.pop(f"{LAYER}.weight")
    folder = rewritten(source, tensors)
    assert f"{LAYER}.weight is in no file of the checkpoint" in refusal(folder, quantization_config=PACKED)
    save_file({**tensors, f"{LAYER}.weight": weight[:, :32].contiguous()}, folder / "model.safetensors")
    with pytest.raises(RuntimeError, match="issues during automatic conversion"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=PACKED)
