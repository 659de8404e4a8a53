# SPDX-License-Identifier: Apache-2.0
"""The parts of the benchmark of ties that its numbers rest on."""

import json
import math

import pytest
import torch
from tiny_models import make_model

from benchmarks import records, tie_tables
from benchmarks.export_perplexity import tensors_in
from benchmarks.tie_dither import (
    checkpoint_differences,
    dither_to_both_sides,
    load,
    movement,
    spread_over,
    step_samples,
    tie_densities,
)
from benchmarks.tie_steps import log_probabilities, mean_kl, nudge_norms, share_of_digits, turn_at_random
from hf_mxfp4.layers import trainable_matrices
from hf_mxfp4.rl.callbacks.weight_samples import sample_weights


PLAIN = {"macro_block": None, "outlier_fallback": None}
IDS = torch.arange(2, 14).view(1, 12)


@pytest.fixture
def half(tmp_path):
    """A checkpoint in bfloat16."""
    make_model("llama", dtype=torch.bfloat16, hidden=256, intermediate=512).save_pretrained(tmp_path / "half")
    return tmp_path / "half"


def test_the_dither_is_seen_in_the_movement(half):
    plain, model = (load(half, dither, **PLAIN)[0] for dither in (False, True))
    without, with_it = (movement(sample_weights(each, 2**25), 1e-6) for each in (plain, model))
    assert without.ratio > 10 and without.n_changed > 10 * with_it.n_changed
    assert abs(with_it.ratio - 1) < 5 * with_it.standard_error
    assert movement(sample_weights(plain, 2**25), 1e-6, spread=4.5).ratio < 5


def test_rotated_weights_are_stepped_on_as_well(half):
    rotated = {**PLAIN, "fprop": {"rotation": "deterministic-16"}}
    model, _ = load(half, True, **rotated)
    samples = step_samples(model)
    assert not sample_weights(model, 2**25)
    assert sum(sample.n_weights for sample in samples) == model.quantization_report.dither.n_weights
    found = movement(samples, 2e-6)
    assert abs(found.ratio - 1) < 5 * found.standard_error
    assert checkpoint_differences(model, tensors_in(half)) == (0, 0)


def test_rows_that_are_padding_are_refused(tmp_path):
    make_model("llama", dtype=torch.bfloat16, hidden=48, intermediate=80).save_pretrained(tmp_path)
    model, _ = load(tmp_path, False, preset="paper_b")
    with pytest.raises(ValueError, match="q_proj has rows that do not fill a tile"):
        movement(sample_weights(model, 2**25), 1e-6)


def test_spreading_goes_over_so_many_numbers():
    weight = torch.tensor([1.0, -1.5, 0.0, 3.0]).repeat(4000, 1)
    change = (spread_over(weight, 4.5, torch.Generator().manual_seed(0)) - weight).abs().amax(dim=0)
    expected = torch.tensor([4.5 * 2**-7, 4.5 * 2**-7, 0.0, 4.5 * 2**-6])  # above 1, 8 bits end at 2^-7
    assert torch.allclose(change, expected, rtol=5e-3)


def test_differences_from_the_checkpoint_are_counted(half):
    model, _ = load(half, True, **PLAIN)
    checkpoint = tensors_in(half)
    assert checkpoint_differences(model, checkpoint) == (0, 0)
    matrix = next(trainable_matrices(model))
    number = matrix.weight()[0, 0].item()
    matrix.weight()[0, 0] = -number
    assert checkpoint_differences(model, checkpoint) == (1, 1)
    dither_to_both_sides(model := load(half, False, **PLAIN)[0], seed=0)
    not_rounding_back, differing = checkpoint_differences(model, checkpoint)
    assert not_rounding_back == 0 and differing > 100


def test_densities_of_ties():
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(1 << 16, 32, generator=generator)
    weight[:, 0] = 5.5  # of scale 1
    densities = tie_densities([weight.bfloat16()])
    assert densities[:2] == pytest.approx([1.0, 1.0], abs=0.08) and all(map(math.isnan, densities[2:]))
    weight[:, 1:3] = 0.25
    assert tie_densities([weight.bfloat16()])[0] > 5


def test_the_distance_of_policies():
    before = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).double().log()
    after = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).double().log()
    assert mean_kl(before, before) == 0.0
    assert mean_kl(after, before) == pytest.approx((0.75 * math.log(3) - 0.25 * math.log(3)) / 2)
    assert share_of_digits(["a1b2", "", "none"]) == [0.5, 0.0, 0.0]


def test_random_signs_keep_the_length_of_a_step(half):
    model, _ = load(half, False, **PLAIN)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    turn_at_random(model, masters)
    for name, parameter in model.named_parameters():
        change = parameter.detach() - masters[name]
        assert torch.allclose(change.abs(), torch.ones_like(change), atol=1e-5)
        assert abs(float(change.mean())) < 6 / math.sqrt(change.numel())


def test_a_nudge_is_one_number(half):
    model, _ = load(half, False, **PLAIN)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    nudge_norms(model, {name: p for name, p in before.items() if p.dim() == 1}, seed=0)
    for name, parameter in model.named_parameters():
        distance = (parameter.detach().view(torch.int32) - before[name].view(torch.int32)).abs()
        assert distance.unique().tolist() == [int(parameter.dim() == 1)]


def test_log_probabilities_with_and_without_quantization(half):
    model = load(half, False, **PLAIN)[0].train()
    quantized, full = log_probabilities(model, IDS), log_probabilities(model, IDS, quantized=False)
    assert model.training and quantized.shape == (12, model.config.vocab_size)
    assert torch.allclose(quantized.exp().sum(dim=-1), torch.ones(12).double())
    assert mean_kl(quantized, full) > 0


def test_tables(tmp_path, monkeypatch):
    def moved(weights):
        by_step = {"1e-06": [350.0, 1.0, 9], "1e-05": [35.04, 1.0, 9]}
        return {
            "name": f"movement / {weights} / rceil", "shape": [1000], "n_left": 5, "n_not_rounding_back": 0,
            "n_bytes_differing": 0, "share_on_boundaries": [0.0103, 0.00001], "load_cpu_seconds": [1.0, 1.0001],
            "movement": {
                "without": by_step, "with": {"1e-06": [1.284, 0.034, 9], "1e-05": [1.0, 0.01, 9]},
                "spread": {"1e-06": [1.0, 0.03, 9]},
            },
        }  # fmt: skip

    step = {
        "name": "steps / w4a16 / dither off", "value": 0.0201, "kl_random_signs": 1e-5, "kl_full_precision": 2e-7,
        "end_token": [0.1, 0.9], "movement": [[2, 571.7, 5.7, 0.0151], [3, 65.6, 1.3, 0.004]],
    }  # fmt: skip
    floor = {"name": "floor / w4a16", "value": 3e-9}
    (tmp_path / "tie_dither.json").write_text(json.dumps([moved("Gaussian"), moved("model"), step, floor]))
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    cell = "350 → 1.28 ± 0.03 | 35 → 1.00 ± 0.01"
    assert tie_tables.tie_movement().splitlines()[2] == f"| rceil | {cell} | {cell} | 1.00 ± 0.03 |"
    assert tie_tables.tie_checks().splitlines()[2] == (
        "| rceil | 1.03 → 0.001 | 1.03 → 0.001 | 0 | 0 | 0.500 | 1.0 | 1.0 | 100 |"
    )
    assert tie_tables.tie_steps().splitlines()[2] == (
        "| w4a16 | off | 572 ± 5.7 | 1.510 | 2.0e-02 | 1.0e-05 | 3.0e-09 | 2.0e-07 | 0.1000 → 0.9000 |"
    )
