# SPDX-License-Identifier: Apache-2.0
"""Settings and small models that all tests share."""

import os
import sys
from pathlib import Path


os.environ.setdefault("CI", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_MXFP4_VERBOSITY", "warning")

import pytest
import torch
from tiny_models import make_model


RECIPES = Path(__file__).resolve().parents[1] / "recipes"
if str(RECIPES) not in sys.path:
    sys.path.insert(0, str(RECIPES))

torch.set_num_threads(1)


@pytest.fixture
def checkpoint(tmp_path):
    """A factory of saved full-precision checkpoints: `checkpoint(family, **options)` gives the folder."""

    def save(family="qwen2", *, shard_size="5GB", **options):
        folder = tmp_path / f"base-{family}-{len(list(tmp_path.iterdir()))}"
        make_model(family, **options).save_pretrained(folder, max_shard_size=shard_size)
        return str(folder)

    return save
