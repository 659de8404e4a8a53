# SPDX-License-Identifier: Apache-2.0
"""Measuring a run does not change it."""

import pytest
import torch
from grpo_runs import TOKENIZER, logged
from moe_models import make_moe
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig


SCHEMES = {
    "default": {},
    "selective fallback": {"macro_block": None, "outlier_fallback": 1.0, "outlier_fallback_rate": 0.2},
    "stochastic": {
        "preset": "w4a4g4",
        "macro_block": None,
        "outlier_fallback": None,
        "dgrad": {"grad": "rceil+stochastic"},
        "wgrad": {"grad": "rceil+stochastic", "x": "rceil"},
    },
}
#: A metric of each option that measures.
MEASURED = {
    "error_every": "error/activations/grid",
    "movement_every": "movement/total",
}


@pytest.mark.parametrize("name", SCHEMES)
def test_measuring_changes_no_bit_of_training(build, tmp_path, name):
    make_moe().save_pretrained(tmp_path / "moe")
    TOKENIZER.save_pretrained(tmp_path / "moe")
    weights, losses = [], []
    for every in (0, 1):
        scheme = MXFP4RLConfig(**SCHEMES[name])
        policy = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", quantization_config=scheme)
        trainer = build(policy=policy, **dict.fromkeys(MEASURED, every), max_steps=2)
        trainer.train()
        assert [bool(logged(trainer, metric)) for metric in MEASURED.values()] == [bool(every)] * len(MEASURED)
        weights.append(trainer.model.state_dict())
        losses.append(logged(trainer, "loss"))
    assert losses[0] == losses[1]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
