# SPDX-License-Identifier: Apache-2.0
"""Logits of a prompt depend on the prompt alone: not on what the model was asked before, on other prompts of the batch,
on saving and loading, or on the number of threads."""

import pytest
import torch
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.presets import FORWARD_PRESETS, PRESETS


#: Where sums are added up in another order, an activation at the edge of two values of the grid may get the other one.
#: What a prompt of other history or neighbours did to the logits of selective fallback with thresholds was above 0.1.
ROUNDING = 0.01
SIZES = {"hidden": 128, "intermediate": 256}  # rows of four blocks and more, to select from
SCHEMES = {
    **{preset: {"preset": preset} for preset in PRESETS},
    **{f"packed {preset}": {"mode": "packed", "preset": preset} for preset in FORWARD_PRESETS},
    "packed rate": {"mode": "packed", "preset": "w4a4", "outlier_fallback": 1.0, "outlier_fallback_rate": 0.05},
    "packed rate and rotation": {
        "mode": "packed",
        "preset": "w4a4",
        "outlier_fallback": 1.0,
        "outlier_fallback_rate": 0.05,
        "fprop": {"rotation": "deterministic-64"},
    },
}
PROMPT = torch.randint(2, 32, (1, 9), generator=torch.Generator().manual_seed(1))
OTHER = torch.full((1, 9), 7)


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def difference(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def check(model, folder):
    expected = logits(model, PROMPT)
    assert torch.equal(logits(model, PROMPT), expected), "asked again"
    logits(model, OTHER)
    assert torch.equal(logits(model, PROMPT), expected), "after another prompt"
    assert difference(logits(model, torch.cat([OTHER, PROMPT]))[1:], expected) < ROUNDING, "in a batch"
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert difference(logits(model, PROMPT), expected) < ROUNDING, "with two threads"
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits(loaded, OTHER)
    assert torch.equal(logits(loaded, PROMPT), expected), "saved and loaded, after another prompt"
    return expected


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders of a decoder and of a mixture of experts, with weights whose quantization is seen."""
    folders = {}
    for family, options in (("qwen2", {}), ("qwen3_moe", {"moe_intermediate_size": 128})):
        model = make_model(family, **SIZES, **options)
        for parameter in model.parameters():
            parameter.data *= 4 if parameter.dim() > 1 else 1
        folders[family] = tmp_path_factory.mktemp(family)
        model.save_pretrained(folders[family])
    return folders


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_of_a_prompt(sources, tmp_path, family, scheme):
    config = MXFP4RLConfig(**SCHEMES[scheme])
    model = AutoModelForCausalLM.from_pretrained(sources[family], dtype=torch.float32, quantization_config=config)
    expected = check(model.eval(), tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(sources[family], dtype=torch.float32)
    assert difference(logits(plain.eval(), PROMPT), expected) > 0.001  # something is quantized
