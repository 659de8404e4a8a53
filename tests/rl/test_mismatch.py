# SPDX-License-Identifier: Apache-2.0
"""Importance ratios, what they measure, and the recorder of log-probabilities, on numbers."""

import pytest
import torch
from transformers import LogitsProcessorList, TopKLogitsWarper

from hf_mxfp4.rl.rollout.correction import CORRECTION_MODES, MismatchSums, importance_ratios, limit_ratios
from hf_mxfp4.rl.rollout.generation import SampledLogProbs


RATIOS = torch.tensor([[4.0, 0.5], [1.5, 1.0]], dtype=torch.float64)
LIMITS = {
    "token_truncate": [[2.0, 0.5], [1.5, 1.0]],
    "token_mask": [[0.0, 0.5], [1.5, 1.0]],
    "sequence_truncate": [[1.9], [1.5]],  # products 2 and 1.5
    "sequence_mask": [[0.0], [1.5]],
}


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_weights_by_hand(mode):
    cap = 1.9 if mode.startswith("sequence") else 2.0
    weights = limit_ratios(importance_ratios(RATIOS.log(), mode), mode, cap)
    torch.testing.assert_close(weights, torch.tensor(LIMITS[mode], dtype=torch.float64))


def test_ratios_beyond_all_measure_stay_finite():
    assert importance_ratios(torch.tensor([[1e4, -1e4]]), "token_mask").isfinite().all()


def measured(log_ratio, mask=None, parts=1, mode="token_truncate"):
    mask = torch.ones_like(log_ratio) if mask is None else mask
    sums = MismatchSums()
    for part, part_mask in zip(log_ratio.chunk(parts), mask.chunk(parts), strict=True):
        sums.add(part, part_mask, mode, 2.0)
    return sums.measures(lambda rows: rows)


def test_estimates_meet_the_exact_values():
    torch.manual_seed(0)
    trained, sampling = torch.randn(2, 8).log_softmax(-1)
    exact = (sampling.exp() * (sampling - trained)).sum().item()
    tokens = torch.multinomial(sampling.exp(), 200_000, replacement=True)
    found = measured((trained - sampling)[tokens].unsqueeze(1))
    assert found["sampling/kl"] == pytest.approx(exact, rel=0.02)
    assert found["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.02)
    # Of infinitely many samples: 1 / E[w^2].
    second = (sampling.exp() * (2 * (trained - sampling)).exp()).sum().item()
    assert found["sampling/effective_sample_size"] == pytest.approx(1 / second, rel=0.05)
    assert found["sampling/effective_sample_size_sequence"] == pytest.approx(1 / second, rel=0.05)


def test_measures_by_hand():
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    ratios = torch.tensor([[4.0, 0.5, 9.0], [9.0, 1.0, 1.05], [9.0, 9.0, 9.0]])
    found = measured(ratios.log() * mask, mask)
    name = "sampling/importance_sampling_ratio/"
    assert [found[name + key] for key in ("min", "mean", "max", "clipped")] == pytest.approx([0.5, 6.55 / 4, 4, 0.25])
    assert found["sampling/sampling_logp_difference/max"] == pytest.approx(torch.tensor(4.0).log().item())
    assert found["sampling/effective_sample_size"] == pytest.approx(6.55**2 / (4 * (18.25 - 1 + 1.05**2)))
    by_mode = {
        "token_truncate": (2 + 0.5 + 1 + 1.05) ** 2 / (4 * (4 + 0.25 + 1 + 1.05**2)),
        "token_mask": (0.5 + 1 + 1.05) / 4,  # the mean is below 2.55^2 / (4 * 2.3525)
        "sequence_truncate": (2 + 1.05) ** 2 / (2 * (4 + 1.05**2)),  # products 2 and 1.05
    }
    for mode, expected in by_mode.items():
        share = measured(ratios.log() * mask, mask, mode=mode)["sampling/effective_sample_size_weights"]
        assert share == pytest.approx(expected), mode
    none_left = measured(torch.full((2, 2), 3.0), mode="sequence_mask")
    assert none_left["sampling/effective_sample_size_weights"] == 0.0
    assert measured(torch.zeros(2, 3), torch.zeros(2, 3)) == {}


def test_measures_do_not_depend_on_how_tokens_are_spread():
    torch.manual_seed(0)
    log_ratio, mask = 0.5 * torch.randn(8, 5), torch.rand(8, 5) > 0.3
    whole = measured(log_ratio * mask, mask)
    assert measured(log_ratio * mask, mask, parts=4) == pytest.approx(whole)
    ranks = []  # two processes: gathering concatenates their rows
    for part, part_mask in zip((log_ratio * mask).split([3, 5]), mask.split([3, 5]), strict=True):
        sums = MismatchSums()
        sums.add(part, part_mask, "token_truncate", 2.0)
        sums.measures(lambda rows: ranks.append(rows) or rows)
    assert sums.measures(lambda rows: torch.cat(ranks)) == pytest.approx(whole)


# ---- recording ------------------------------------------------------------------------------------------------------


def test_the_recorder_follows_the_tokens_that_were_drawn():
    torch.manual_seed(0)
    recorder = SampledLogProbs()
    chain = LogitsProcessorList([TopKLogitsWarper(top_k=3), recorder])
    ids, expected = torch.tensor([[7], [7]]), []
    for _ in range(4):
        scores = chain(ids, torch.randn(2, 10))
        tokens = torch.multinomial(scores.softmax(-1), 1)
        expected.append(scores.log_softmax(-1).gather(1, tokens))
        ids = torch.cat([ids, tokens], dim=1)
    expected = torch.cat(expected, dim=1)
    rows = recorder.rows([ids[0, 1:].tolist(), ids[1, 1:3].tolist()])
    assert [len(row) for row in rows] == [4, 2]
    torch.testing.assert_close(torch.tensor(rows[0]), expected[0])
    torch.testing.assert_close(torch.tensor(rows[1]), expected[1, :2])
    with pytest.raises(RuntimeError, match="0 sampled positions are recorded for 1 completions of up to 2 tokens"):
        SampledLogProbs().rows([[3, 4]])
