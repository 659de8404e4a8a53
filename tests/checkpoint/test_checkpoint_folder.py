# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints as they are read without a model: what is refused, and which dtype the model has."""

import json

import pytest
import torch
from safetensors.torch import save_file

from hf_mxfp4.checkpoint.io.folder import CheckpointError, ShardError, model_dtype, open_checkpoint


INDEX = "model.safetensors.index.json"


def write(folder, config=None, **tensors):
    (folder / "config.json").write_text(json.dumps(config or {}))
    save_file(tensors or {"weight": torch.ones(2, 2)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    "index, words",
    [
        ({}, "no usable weight_map; is it complete"),
        ({"weight_map": ["weight"]}, "no usable weight_map"),
        ({"weight_map": {"weight": 1}}, "no usable weight_map"),
        ({"weight_map": {"weight": "../model.safetensors"}}, "points outside of its folder: '../model.safetensors'"),
        ({"weight_map": {"bias": "model.safetensors"}}, f"model.safetensors lacks bias, though {INDEX} says otherwise"),
    ],
)
def test_an_index_that_says_nothing(tmp_path, index, words):
    write(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises((CheckpointError, ShardError), match=words):
        open_checkpoint(tmp_path)


def test_no_folder_and_no_weights(tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder; give that of a checkpoint"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has neither .* nor model.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "torch.bfloat16"}, torch.bfloat16),
        ({"dtype": "auto"}, torch.float64),
        ({"dtype": "nn"}, torch.float64),  # torch.nn is no dtype
        ({}, torch.float64),
    ],
)
def test_the_dtype_is_named_or_that_of_the_largest_tensor(tmp_path, config, expected):
    write(
        tmp_path,
        config,
        small=torch.ones(2),
        large=torch.ones(64, dtype=torch.float64),
        codes=torch.ones(4096, dtype=torch.uint8),
    )
    assert model_dtype(open_checkpoint(tmp_path)) == expected
