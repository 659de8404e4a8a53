# SPDX-License-Identifier: Apache-2.0
"""Models of a few thousand parameters that the tests of layers load, each from a checkpoint that is written once."""

import functools

import pytest
import torch
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig


@pytest.fixture(scope="session")
def saved_base(tmp_path_factory):
    """`saved_base(family, layers)`: the folder of a checkpoint in full precision, to be read alone."""

    @functools.cache
    def save(family: str = "qwen2", layers: int = 2) -> str:
        folder = tmp_path_factory.mktemp(f"base-{family}-")
        with torch.random.fork_rng():  # which test asks first changes no other test's numbers
            make_model(family, layers=layers).save_pretrained(folder)
        return str(folder)

    return save


@pytest.fixture
def load(saved_base):
    """`load(family, **scheme)` gives a quantized model of two layers, packed unless ``mode`` says otherwise. Its
    weights are not smoothed, so that they are the checkpoint's."""

    def load(family="qwen2", dtype=torch.float32, **scheme):
        config = MXFP4RLConfig(**{"mode": "packed", "smooth": False, **scheme})
        return AutoModelForCausalLM.from_pretrained(saved_base(family), dtype=dtype, quantization_config=config)

    return load


@pytest.fixture
def fresh_compiler():
    """What a test compiles is forgotten."""
    yield
    torch._dynamo.reset()
