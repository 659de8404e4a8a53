# SPDX-License-Identifier: Apache-2.0
"""What the tests of export and import share: folders to start from, and what is in them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import pack_checkpoint


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def config_in(folder) -> dict:
    return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))


def header_and_data(file) -> tuple[str, bytes]:
    """The header with its metadata in a fixed order and without padding, and the bytes of the tensors."""
    content = Path(file).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    metadata = header.pop("__metadata__")
    return json.dumps([sorted(metadata.items()), list(header.items())]), content[8 + size :]


def decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Plain MXFP4 bytes in float64, straight from the format's definition."""
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return E2M1[nibbles.long()] * torch.exp2(scale.double() - 127).repeat_interleave(32, dim=-1)


def decode_nvfp4(tensors: dict, layer: str) -> torch.Tensor:
    """A layer's values in float64, straight from the format's definition; the tensor scale is a divisor."""
    codes, scale, divisor = (tensors[f"{layer}.weight_{part}"] for part in ("packed", "scale", "global_scale"))
    assert (codes.dtype, scale.dtype, divisor.dtype) == (torch.uint8, torch.float8_e4m3fn, torch.float32)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return E2M1[nibbles.long()] * (scale.double() / divisor.double()).repeat_interleave(16, dim=-1)


def save_plain(folder, family="qwen2", **options) -> Path:
    make_model(family, **{"dtype": torch.bfloat16, **options}).save_pretrained(folder)
    return Path(folder)


def save_with_head(folder, drop: str | None = None) -> dict[str, torch.Tensor]:
    """Save a Llama whose config ties the head and whose file has another one; return the file's tensors, without one
    if it is named."""
    save_plain(folder, "llama", tie=True)
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    head = torch.randn(tensors["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(0))
    tensors["lm_head.weight"] = head.to(torch.bfloat16)
    tensors.pop(drop, None)
    save_file(tensors, file, {"format": "pt"})
    return tensors


def save_packed(folder, family="qwen2", config: dict | None = None, **options) -> Path:
    """A packed checkpoint of a small model, by default in plain MXFP4."""
    plain = save_plain(Path(folder).with_name(f"{Path(folder).name}-plain"), family, **options)
    scheme = {"macro_block": None, "scale_rule": "even", **(config or {})}
    pack_checkpoint(plain, folder, MXFP4RLConfig(mode="packed", **scheme))
    return Path(folder)


def same_files(one: Path, other: Path) -> None:
    """Two checkpoints have the same config, the same weights in the same files, and the same indices."""
    assert config_in(one) == config_in(other)
    files, others = (sorted(folder.glob("*.safetensors*")) for folder in (one, other))
    assert [file.name for file in files] == [file.name for file in others]
    for file, twin in zip(files, others, strict=True):
        if file.suffix == ".json":
            indices = [json.loads(index.read_text()) for index in (file, twin)]
            assert indices[0]["weight_map"] == indices[1]["weight_map"]
            assert indices[0]["metadata"]["total_size"] == indices[1]["metadata"]["total_size"]
        else:
            (header, data) = header_and_data(file)
            (other_header, other_data) = header_and_data(twin)
            assert header == other_header
            assert (data == other_data) is True, file.name  # without printing the bytes
