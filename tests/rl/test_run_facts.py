# SPDX-License-Identifier: Apache-2.0
"""What a run report says of the model."""

import pytest
from peft import LoraConfig, get_peft_model
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.rl.callbacks.run_facts import count_parameters


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("options", [{}, {"mode": "packed"}, {"mode": "packed", "outlier_fallback": 0.5}])
def test_parameters_are_those_of_the_plain_model(checkpoint, family, options):
    expected = make_model(family).num_parameters()
    config = MXFP4RLConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(checkpoint(family), quantization_config=config)
    assert count_parameters(model) == expected
    if options:
        assert model.num_parameters() != expected  # bytes


def test_adapters_count_beside_packed_weights(checkpoint):
    config = MXFP4RLConfig(mode="packed")
    model = AutoModelForCausalLM.from_pretrained(checkpoint(), quantization_config=config)
    plain = make_model("qwen2").num_parameters()
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    width = model.config.hidden_size
    assert count_parameters(tuned) == plain + 2 * (2 * width + 2 * width)
