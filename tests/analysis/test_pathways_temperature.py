# SPDX-License-Identifier: Apache-2.0
"""The temperature that a change of logits amounts to, on logits for which it is known."""

import math

import pytest
import torch

from hf_mxfp4.analysis.policy.temperature import effective_temperature


def gaussian(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_no_change_is_exactly_one(dtype):
    logits = gaussian(5, 3, 40, scale=3).to(dtype)
    result = effective_temperature(logits, logits.clone())
    assert (result.predicted, result.measured, result.entropy_matched) == (1.0, 1.0, 1.0)
    assert (result.noise_variance, result.kl, result.kl_measured) == (0, 0, 0)
    assert result.entropy_ref == result.entropy_quantized


@pytest.mark.parametrize("temperature", [1.3, 0.7, 1.001, 40.0])
def test_a_temperature_is_found(temperature):
    logits = gaussian(20, 50, scale=2)
    result = effective_temperature(logits, logits / temperature)
    assert result.measured == pytest.approx(temperature, rel=1e-6)
    assert result.entropy_matched == pytest.approx(temperature, rel=1e-6)
    assert result.kl_measured == pytest.approx(0, abs=1e-12) and result.kl > result.kl_measured
    # The prediction takes the whole change for noise, and so cannot see that it is a scale.
    assert result.predicted == pytest.approx(math.sqrt(1 + (1 - 1 / temperature) ** 2))


def test_variances_of_a_literal_case():
    """Gaps 0, 3, 3 between the three logits: mean square 6. Noise 0, 0, 6: variance 12."""
    result = effective_temperature(torch.tensor([[0.0, 0.0, 3.0]]), torch.tensor([[0.0, 0.0, 9.0]]))
    assert result.gap_variance == pytest.approx(6)
    assert result.noise_variance == pytest.approx(12)
    assert result.predicted == pytest.approx(math.sqrt(1 + 2 * 12 / 6))
    assert result.measured == pytest.approx(1 / 3)


@pytest.mark.parametrize("sigma", [0.3, 0.5])
def test_noise_on_broad_logits_sharpens_by_what_it_is_predicted_to_flatten(sigma):
    """Softmax of V Gaussian logits of variance v has entropy log V - v/2 and expected logit v (large V)."""
    logits = gaussian(20, 20000)
    result = effective_temperature(logits, logits + sigma * gaussian(20, 20000, seed=1))
    flattening = math.sqrt(1 + sigma**2)
    assert result.predicted == pytest.approx(flattening, rel=2e-3)
    assert result.entropy_matched == pytest.approx(1 / flattening, rel=5e-3)
    assert result.measured == pytest.approx(1, abs=5e-3)
    assert result.entropy_ref == pytest.approx(math.log(20000) - 0.5, abs=5e-3)
    assert result.entropy_quantized == pytest.approx(math.log(20000) - (1 + sigma**2) / 2, abs=5e-3)


def test_noise_raises_the_entropy_of_sure_positions_and_lowers_that_of_others():
    noise = gaussian(2000, 16, seed=1)
    unsure = torch.zeros(2000, 16, dtype=torch.float64)
    sure = unsure.clone()
    sure[:, 0] = 12.0
    flat, peaked = effective_temperature(unsure, unsure + noise), effective_temperature(sure, sure + noise)
    assert flat.entropy_quantized < flat.entropy_ref == pytest.approx(math.log(16))
    # The chance of each other token is exp(-gap), and its mean grows by exp(2 sigma**2 / 2).
    assert peaked.entropy_quantized > 2 * peaked.entropy_ref
    assert peaked.measured > 1 and peaked.entropy_matched > 1


def test_the_average_over_noise_draws_is_flatter():
    """Two tokens with gap 1: the averaged policy has the temperature that follows from its mean probability."""
    gap, draws = 1.0, gaussian(200000, seed=2, scale=math.sqrt(2))
    mean = torch.sigmoid(gap + draws).mean()
    averaged = torch.stack([mean, 1 - mean]).log()[None]
    result = effective_temperature(torch.tensor([[gap, 0.0]]), averaged)
    assert result.measured == pytest.approx(gap / math.log(mean / (1 - mean)), rel=1e-6)
    assert result.entropy_matched == pytest.approx(result.measured, rel=1e-6)
    # Logistic against Gaussian: sigmoid(z + noise) averages to about sigmoid(z / sqrt(1 + pi s**2 / 8)).
    assert result.measured == pytest.approx(math.sqrt(1 + math.pi * 2 / 8), rel=0.05)


def test_measured_minimises_kl():
    logits = gaussian(30, 12, scale=2)
    changed = logits + gaussian(30, 12, seed=3)
    result = effective_temperature(logits, changed)
    q = changed.softmax(-1)

    def kl(temperature):
        return float((q * (q.log() - (logits / temperature).log_softmax(-1))).sum(-1).mean())

    assert result.kl == pytest.approx(kl(1.0)) and result.kl_measured == pytest.approx(kl(result.measured))
    assert all(kl(result.measured * factor) > result.kl_measured for factor in (0.9, 0.99, 1.01, 1.1))


def test_entropy_matched_matches_the_entropy():
    logits = gaussian(30, 12, scale=2)
    result = effective_temperature(logits, logits + gaussian(30, 12, seed=3))
    p = (logits / result.entropy_matched).softmax(-1)
    assert float(-(p * p.log()).sum(-1).mean()) == pytest.approx(result.entropy_quantized, rel=1e-6)


def test_constants_do_not_matter():
    logits, changed = gaussian(6, 9), gaussian(6, 9, seed=1)
    plain = effective_temperature(logits, changed)
    shifted = effective_temperature(logits + 5, changed - gaussian(6, 1, seed=2))
    assert shifted.predicted == pytest.approx(plain.predicted)
    assert shifted.measured == pytest.approx(plain.measured, rel=1e-6)
    assert shifted.entropy_matched == pytest.approx(plain.entropy_matched, rel=1e-6)


def test_out_of_reach():
    logits = torch.tensor([[2.0, 0.0, 0.0]])
    reversed_ = effective_temperature(logits, -logits)
    assert reversed_.measured == math.inf and math.isnan(reversed_.kl_measured)
    certain = effective_temperature(logits, logits * 1e6)
    assert 0 < certain.measured < 0.1 and 0 < certain.entropy_matched < 0.1
    tied = effective_temperature(torch.tensor([[2.0, 2.0, 0.0]]), torch.tensor([[9e9, 0.0, 0.0]]))
    assert tied.entropy_matched == 0.0  # no temperature breaks a tie
    uniform = effective_temperature(torch.zeros(1, 3), logits)
    assert uniform.predicted == math.inf


@pytest.mark.parametrize(
    ("ref", "changed", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), "different shapes"),
        (torch.zeros(2, 1), torch.zeros(2, 1), "two tokens"),
        (torch.zeros(0, 3), torch.zeros(0, 3), "vocabulary"),
        (torch.tensor(1.0), torch.tensor(1.0), "vocabulary"),
        (torch.zeros(1, 2), torch.tensor([[0.0, -math.inf]]), "NaN or infinity"),
        (torch.tensor([[0.0, math.nan]]), torch.zeros(1, 2), "NaN or infinity"),
    ],
)
def test_refused(ref, changed, message):
    with pytest.raises(ValueError, match=message):
        effective_temperature(ref, changed)
