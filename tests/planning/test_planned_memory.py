# SPDX-License-Identifier: Apache-2.0
"""Predicted bytes against those of real models on the CPU, counted as the benchmark counts them."""

import pytest
import torch

from benchmarks.memory import architecture, make_model, measure, predict
from hf_mxfp4.planning import SavedTensors


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
#: Options, dtype of the weights, dtype of the products, gradient checkpointing.
RUNS = {
    "full precision": (None, FLOAT32, FLOAT32, False),
    "qat, autocast": ({}, FLOAT32, BFLOAT16, False),
    "qat, autocast, checkpointing": ({}, FLOAT32, BFLOAT16, True),
    "qat, bfloat16": ({}, BFLOAT16, BFLOAT16, False),
    "qat, bfloat16, checkpointing": ({}, BFLOAT16, BFLOAT16, True),
    "w4a16": ({"preset": "w4a16"}, FLOAT32, BFLOAT16, False),
    "saved mxfp4": ({"saved_activations": "mxfp4"}, FLOAT32, BFLOAT16, False),
    "saved mxfp4, block mantissas": (
        {"saved_activations": "mxfp4", "macro_search": "blockwise", "outlier_fallback": None},
        FLOAT32,
        BFLOAT16,
        False,
    ),
    "saved mxfp4, checkpointing": ({"saved_activations": "mxfp4"}, FLOAT32, BFLOAT16, True),
    "saved fp8": ({"saved_activations": "fp8"}, FLOAT32, BFLOAT16, False),
    "w4a4g4, saved fp8": ({"preset": "w4a4g4", "saved_activations": "fp8"}, FLOAT32, BFLOAT16, False),
    "rotation, stochastic": (
        {"fprop": {"x": "rceil+stochastic", "rotation": "random-32"}, "saved_activations": "mxfp4"},
        FLOAT32,
        FLOAT32,
        False,
    ),
    "selective fallback": ({"outlier_fallback_rate": 0.25, "saved_activations": "mxfp4"}, FLOAT32, FLOAT32, False),
    "packed + LoRA": ({"mode": "packed"}, BFLOAT16, BFLOAT16, False),
    "packed + LoRA, checkpointing": ({"mode": "packed"}, BFLOAT16, BFLOAT16, True),
    "packed w4a4 + LoRA": ({"mode": "packed", "preset": "w4a4"}, BFLOAT16, BFLOAT16, False),
}
#: In every run; each option, dtype and form of weights and of saved inputs once.
FEW = ("full precision", "qat, autocast, checkpointing", "qat, bfloat16", "w4a16", "saved mxfp4, checkpointing")
FEW += ("w4a4g4, saved fp8", "rotation, stochastic", "packed + LoRA")
SEQUENCES, TOKENS, RANK = 3, 64, 4


def config():
    small = architecture(layers=2, hidden=128)
    small.vocab_size = 512
    return small


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.large) for name in RUNS])
def test_a_step_takes_what_was_predicted(name):
    options, dtype, compute, checkpointing = RUNS[name]
    ids = torch.arange(SEQUENCES * TOKENS).view(SEQUENCES, TOKENS) % 512
    model = make_model(config(), options, dtype, checkpointing, RANK)
    measured = measure(model, ids, compute, checkpointing)
    predicted = predict(config(), options, dtype, compute, checkpointing, SEQUENCES, TOKENS, RANK)
    assert predicted["weights"] == pytest.approx(measured["weights"], rel=0.001)
    assert predicted["gradients"] == measured["gradients"]
    assert predicted["optimizer"] == pytest.approx(measured["optimizer"], rel=0.01)  # but for its step counters
    # Without memory, the fused attention expands keys and values of grouped queries before it saves them.
    assert predicted["saved"] == pytest.approx(measured["saved"], rel=0.05)
    # With estimates of logits and working memory; not of what schemes need that have no fused function.
    assert 0.9 * measured["peak"] < predicted["peak"] < 1.5 * measured["peak"]


def test_the_comparison_would_notice_the_form_of_saved_inputs():
    """The 8 inputs of 14 layers, of which q, k and v share one, and gate and up: from 16 to 8.56 bits, or to 8 and a
    scale per token."""
    saved = [
        predict(config(), options, FLOAT32, BFLOAT16, False, SEQUENCES, TOKENS)["saved"]
        for options in ({}, {"saved_activations": "mxfp4"}, {"saved_activations": "fp8"})
    ]
    values = SEQUENCES * TOKENS * 2 * (3 * 128 + 512)
    assert saved[0] - saved[1] == values * (16 - 8.5625) / 8
    assert saved[0] - saved[2] == values - SEQUENCES * TOKENS * 2 * 4


def test_a_real_pass_saves_less_in_codes():
    ids = torch.arange(SEQUENCES * TOKENS).view(SEQUENCES, TOKENS) % 512
    held = []
    for options in ({}, {"saved_activations": "mxfp4"}):
        model = make_model(config(), options, FLOAT32, False)
        with SavedTensors(model) as saved:
            model(input_ids=ids, labels=ids, use_cache=False)
        held.append(saved.held)
    assert held[0] - held[1] == SEQUENCES * TOKENS * 2 * (3 * 128 + 512) * (32 - 8.5625) / 8
