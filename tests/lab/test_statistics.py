# SPDX-License-Identifier: Apache-2.0
"""Sums of error statistics: literal values, an oracle that knows nothing of blocks, merging and chunking; what
quantization does to routing, and the load of experts; estimates and intervals of shares, of means and of their
differences, against published values and brute force."""

import copy
import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch
from moe_models import make_moe, tokens
from tables import PLAIN, gaussian
from tiny_models import make_model

from hf_mxfp4 import MXFP4RLConfig, pack
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.lab import ErrorStatistics, RouterStatistics, error_statistics, router_statistics
from hf_mxfp4.lab.errors import statistics as module
from hf_mxfp4.lab.evaluation import intervals as stats
from hf_mxfp4.lab.evaluation.intervals import bootstrap_mean, ratio_of_sums, wilson
from hf_mxfp4.model.routers import find_routers, recorded_choices
from hf_mxfp4.numerics import QuantScheme, apply_scheme, decompose_scheme, parse_scheme
from hf_mxfp4.utils import share_text


RCEIL = QuantScheme()
TEXTS = ("rceil", "floor", "even", "mse", "rceil+mbs128", "rceil+mbsrow", "rceil+mbs128-dynamic+of0.5")
SCHEMES = [parse_scheme(text) for text in (*TEXTS, "even+mbs128-blockwise")]


def assert_close(a: ErrorStatistics, b: ErrorStatistics):
    for field in dataclasses.fields(ErrorStatistics):
        mine, theirs = getattr(a, field.name), getattr(b, field.name)
        if isinstance(mine, float):
            assert mine == pytest.approx(theirs, rel=1e-11, abs=1e-12), field.name
        else:
            assert mine == theirs, field.name


def test_a_block_by_hand():
    # amax 7: s* = 7/6, s = 2. 7 -> 8 (ideal 7); 2 -> 2 (ideal 1.5 * 7/6 = 1.75); 0.25 < 7/24 -> 0.
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([7.0, 2.0, 0.25])
    s = error_statistics(x, RCEIL)
    assert (s.elements, s.blocks, s.deadzone_count, s.zero_count) == (32, 1, 30, 1)
    assert s.energy == 49 + 4 + 0.0625
    assert s.scale_bias == 1 + 0.0625 and s.deadzone == 0.0625 and s.grid == 0.0625
    assert s.total == 1 + 0.0625
    assert s.scale_dot_grid == -0.0625
    assert s.quantized_dot == 7 * 8 + 2 * 2
    assert s.unmasked_scale == s.scale_bias and s.unmasked_deadzone == 0.0625 and s.unmasked_dot == 0
    assert s.gamma_mean == pytest.approx(12 / 7, rel=1e-15) and s.gamma_variance == pytest.approx(0, abs=1e-15)
    assert s.delta_mean == pytest.approx(math.log2(12 / 7), rel=1e-15)
    # delta = 0.778: bin (0.778 + 2) * 16 = 44.4
    assert s.histogram == tuple(int(i == 44) for i in range(64))
    assert s.relative_mse == pytest.approx(1.0625 / 53.0625)
    assert s.sqnr_db == pytest.approx(10 * math.log10(53.0625 / 1.0625))
    assert s.energy_ratio == pytest.approx({"scale_bias": 1, "deadzone": 1 / 17, "grid": 1 / 17})
    assert s.cosine_scale_grid == pytest.approx(-0.0625 / math.sqrt(1.0625 * 0.0625))
    assert s.gain == pytest.approx(60 / 53.0625)
    assert s.floor_relative_mse == pytest.approx((0.0625 + 0.0625) / 53.0625)
    assert (s.deadzone_fraction, s.zero_fraction) == (30 / 32, 1 / 32)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_against_whole_tensors(scheme):
    """The same quantities from Q, from a Q* found by trying all grid points, and from the mask |x| < amax / 24."""
    x = gaussian(24, 96, seed=1) * torch.logspace(-3, 3, 24).unsqueeze(1)
    s = error_statistics(x, scheme)
    wide, quantized = x.double(), apply_scheme(x, scheme).double()
    blocks = wide.view(24, 3, 32)
    amax = blocks.abs().amax(-1, keepdim=True)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    nearest = (blocks.abs().unsqueeze(-1) - grid * (amax / 6).unsqueeze(-1)).abs().argmin(-1)
    ideal = (grid[nearest] * (amax / 6) * blocks.sign()).view_as(wide)
    hidden = (blocks.abs() < amax / 24).view_as(wide)
    error, scale, rest = quantized - wide, quantized - ideal, ideal - wide
    expected = {
        "energy": wide.square().sum(),
        "total": error.square().sum(),
        "deadzone": error[hidden].square().sum(),
        "scale_bias": scale[~hidden].square().sum(),
        "grid": rest[~hidden].square().sum(),
        "scale_dot_grid": (scale * rest)[~hidden].sum(),
        "quantized_dot": (quantized * wide).sum(),
        "unmasked_scale": scale.square().sum(),
        "unmasked_deadzone": rest[hidden].square().sum(),
        "unmasked_dot": (scale * rest)[hidden].sum(),
    }
    for name, value in expected.items():
        assert getattr(s, name) == pytest.approx(float(value), rel=1e-5, abs=1e-9 * s.energy), name
    assert s.deadzone_count == int(hidden.sum())
    assert s.zero_count == int(((quantized == 0) & (wide != 0)).sum())
    parts = decompose_scheme(x, scheme)
    assert s.energy_ratio == pytest.approx(parts.energy_ratio, rel=1e-12)
    assert s.gain == pytest.approx(float(((parts.total + x.double()) * x.double()).sum()) / parts.energy, rel=1e-12)
    assert s.gamma_mean == pytest.approx(float(parts.scale_ratio.mean()), rel=1e-12)
    assert s.delta_variance == pytest.approx(float(parts.scale_ratio_log2.var(correction=0)), rel=1e-9)
    assert sum(s.histogram) == s.blocks == parts.scale_ratio.numel()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_chunks_merge_to_the_whole(scheme, monkeypatch):
    x = gaussian(48, 512, seed=2)
    whole = error_statistics(x, scheme)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 512)
    assert_close(error_statistics(x, scheme), whole)
    assert_close(error_statistics(x[:17], scheme) + error_statistics(x[17:], scheme), whole)


def test_axes_and_layouts():
    x = gaussian(4, 64, 96, seed=5)
    along_last = sum((error_statistics(part, RCEIL) for part in x), ErrorStatistics())
    assert_close(error_statistics(x, RCEIL), along_last)
    assert_close(error_statistics(x.transpose(1, 2), RCEIL, axis=1), along_last)
    assert_close(error_statistics(x.transpose(1, 2).contiguous(), RCEIL, axis=1), along_last)
    assert_close(error_statistics(x[0, 0], RCEIL), error_statistics(x[:1, 0], RCEIL))


def test_tiles_do_not_straddle_matrices(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 32 * 64)
    x, scheme = gaussian(3, 40, 64, seed=6), QuantScheme(block_rows=32)
    s = error_statistics(x, scheme)
    error = apply_scheme(x, scheme).double() - x.double()
    assert s.total == pytest.approx(float(error.square().sum()), rel=1e-12)
    assert s.blocks == 3 * 2 * 2
    parts = [decompose_scheme(part, scheme) for part in x]
    assert s.deadzone_count == round(sum(part.deadzone_fraction for part in parts) * 40 * 64)


def test_all_zero_and_empty_tensors():
    for x in (torch.zeros(4, 64), torch.zeros(0, 64), torch.zeros(4, 0)):
        s = error_statistics(x, RCEIL)
        assert (s.elements, s.blocks, s.total) == (x.numel(), 0, 0.0)
        assert math.isnan(s.relative_mse) and math.isnan(s.sqnr_db) and math.isnan(s.gain)
        assert math.isnan(s.gamma_mean) and math.isnan(s.delta_variance)
        assert all(math.isnan(value) for value in (*s.energy_ratio.values(), *s.paper_cosines.values()))
    assert error_statistics(torch.zeros(0, 64), RCEIL) == ErrorStatistics()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_is_refused(bad):
    x = gaussian(4, 64)
    x[2, 5] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        error_statistics(x, RCEIL)


def test_json_round_trip_is_exact():
    s = error_statistics(gaussian(16, 64), QuantScheme("even"))
    assert ErrorStatistics.from_dict(json.loads(json.dumps(s.to_dict()))) == s


def quantized(family="qwen3_moe"):
    model = make_moe(family)
    quantize_linears(model, MXFP4RLConfig(**PLAIN))
    return model


def chosen_sets(model, ids):
    with torch.no_grad(), recorded_choices(find_routers(model)) as choices:
        model(ids)
    return {name: [set(row) for row in passes[0].tolist()] for name, passes in choices.items()}


def test_load_in_numbers():
    choices = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 1]])  # 4, 3 and 1 of 8 choices; the fourth expert is dead
    stats = RouterStatistics.of("gate", choices, 4)
    assert stats.agreement is None and stats.name == "gate"
    assert stats.load_max_over_mean == pytest.approx(4 / 2)
    assert stats.dead_experts == pytest.approx(1 / 4)
    entropy = -(1 / 2 * math.log(1 / 2) + 3 / 8 * math.log(3 / 8) + 1 / 8 * math.log(1 / 8))
    assert stats.load_entropy == pytest.approx(entropy / math.log(4))
    even = RouterStatistics.of("gate", torch.tensor([[0, 1], [2, 3]]), 4)
    assert (even.load_entropy, even.load_max_over_mean, even.dead_experts) == (1.0, 1.0, 0.0)
    single = RouterStatistics.of("gate", torch.tensor([[2], [2]]), 4, torch.tensor([[2], [1]]))
    assert (single.load_entropy, single.load_max_over_mean, single.dead_experts) == (0.0, 4.0, 0.75)
    assert single.agreement == 0.5


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss"])
def test_agreement_is_that_of_the_model_before_quantization(family):
    model, ids = quantized(family), tokens(16, 16)
    theirs, ours = chosen_sets(make_moe(family), ids), chosen_sets(model, ids)
    agreement = {stats.name: stats.agreement for stats in router_statistics(model, ids)}
    for name in ours:
        shared = [len(a & b) / 2 for a, b in zip(ours[name], theirs[name], strict=True)]
        assert agreement[name] == pytest.approx(sum(shared) / len(shared))
    assert 0.5 < min(agreement.values()) < 1
    assert list(agreement) == list(find_routers(model))


def test_padding_does_not_count():
    model, ids = quantized(), tokens(4, 9)
    padded = torch.cat([ids, torch.zeros(4, 30, dtype=torch.long)], dim=1)
    mask = (padded != 0).long()
    for a, b in zip(router_statistics(model, ids), router_statistics(model, padded, mask), strict=True):
        assert a == b
    with pytest.raises(ValueError, match="no token was routed"):
        router_statistics(model, ids, torch.zeros_like(ids))


def test_the_model_is_left_as_it_was():
    model = quantized().train()
    state, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    router_statistics(model, tokens())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or "forward" in module.__dict__ for module in model.modules())


def test_models_without_something_to_compare_with():
    plain, packed = make_moe(), pack(quantized())
    with pytest.raises(ValueError, match="no quantized layer"):
        router_statistics(plain, tokens())
    with pytest.raises(ValueError, match="4 bits only"):
        router_statistics(packed, tokens())
    with pytest.raises(ValueError, match="has no router"):
        router_statistics(make_model(), tokens())


# Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_the_published_ones(correct, n, low, high):
    found = wilson(correct, n)
    assert (found.value, found.n) == (correct / n, n)
    assert (found.low, found.high) == pytest.approx((low, high), abs=6e-5)
    mirrored = wilson(n - correct, n)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - found.high, 1 - found.low))


def test_none_of_few_problems_is_no_certainty():
    assert share_text(0.0, 8) == "0.000 [0.000, 0.324]"
    assert share_text(1.0, 8) == "1.000 [0.676, 1.000]"
    low, high = stats.difference_interval((0, 8), (0, 8))
    assert (low, high) == pytest.approx((-0.3244, 0.3244), abs=5e-5)


@pytest.mark.parametrize(
    ("first", "second", "low", "high"),
    [
        # Newcombe (1998), table II, method 10, his differences with the sign turned.
        ((48, 80), (56, 70), 0.0524, 0.3339),
        ((3, 10), (9, 10), 0.1705, 0.8090),
        ((0, 10), (10, 10), 0.6075, 1.0),
        ((0, 20), (0, 10), -0.1611, 0.2775),
    ],
)
def test_differences_are_the_published_ones(first, second, low, high):
    assert stats.difference_interval(first, second) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(n):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        expected = sum(map(any, subsets)) / len(subsets)
        assert stats.pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-15)


def test_bootstrap_agrees_with_the_normal_interval_of_many_problems():
    values = np.random.default_rng(1).beta(2, 3, size=2000)
    found = bootstrap_mean(values)
    half = 1.959964 * values.std() / np.sqrt(len(values))
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)
    assert bootstrap_mean(values) == found != bootstrap_mean(values, seed=1)


def test_a_single_sample_is_a_share_and_more_are_resampled_by_problem():
    assert stats.mean_pass_at_k([1, 0, 1, 1], 1, 1) == wilson(3, 4)
    # Ten equal completions of each problem say no more than one.
    counts = [10 * (i % 3 == 0) for i in range(300)]
    found, share = stats.mean_pass_at_k(counts, 10, 1), wilson(100, 300)
    assert found.method != share.method
    assert (found.low, found.high) == pytest.approx((share.low, share.high), abs=0.01)


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [(10, 2, 158 / 4096), (2, 10, 158 / 4096), (0, 0, 1.0), (5, 5, 1.0), (0, 6, 2 / 64), (1000, 1000, 1.0)],
)
def test_mcnemar_is_the_two_sided_binomial(only_first, only_second, p):
    assert stats.mcnemar(only_first, only_second) == pytest.approx(p)


def test_pairing_sees_what_two_separate_intervals_do_not():
    first = [i < 520 for i in range(1000)]
    second = [i < 500 for i in range(1000)]
    difference, *only = stats.paired_share_difference(first, second)
    assert (
        difference.value == pytest.approx(0.02)
        and difference.low > 0
        and only == [20, 0]
        and stats.mcnemar(*only) < 1e-5
    )
    assert wilson(520, 1000).low < 0.5
    assert stats.paired_mean_difference(first, second).low > 0
    with pytest.raises(ValueError, match="same problems twice, got 3 and 2"):
        stats.paired_share_difference([True] * 3, [True] * 2)
    with pytest.raises(ValueError, match="got 0 and 0"):
        stats.paired_mean_difference([], [])


def test_means_of_groups_and_their_errors():
    assert ratio_of_sums([3.0, 1.0], [2, 2]) == (1.0, pytest.approx(math.sqrt(2 * (1 + 1)) / 4))
    assert ratio_of_sums([2.0, 4.0, 6.0], [1, 2, 3]) == (2.0, 0.0)  # as many items as the sum says
    assert ratio_of_sums([5.0], [2]) == (2.5, None)
    # Groups of one item: the standard error of the mean.
    values = [0.5, 1.5, 4.0, 2.0]
    mean = sum(values) / 4
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / 3 / 4)
    assert ratio_of_sums(values, [1] * 4) == (pytest.approx(mean), pytest.approx(error))
    for sums, counts in (([1.0], [1, 2]), ([], []), ([0.0], [0])):
        with pytest.raises(ValueError, match="a mean over groups needs"):
            ratio_of_sums(sums, counts)
