# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding, rotations and both directions of the quantize kernels: results, and the interface."""

import itertools

import pytest
import torch
from spread_cases import spread_cases

import mxfp4_kernels
from mxfp4_kernels.common.plan import Scheme, both_tile


def test_interpreted_kernels_equal_eager_bit_for_bit(run_script):
    cases = {"stochastic": 13, "rotated": 11, "both": 12, "whole_rows": 11, "converted": 20, "package": 4}
    report = run_script("run_variants.py", ",".join(cases), interpret=True)
    assert report["mismatches"] == []
    assert report["cases"] == cases


#: How many options of each kind the modes of run_variants.py have.
OPTIONS = (
    (8, 5, 3, 3),
    (8, 5, 3, 4, 3, 3),
    (10, 5, 2),
    (3, 8, 3),
    (8, 6, 3, 3),
    (7, 7, 3, 4, 4, 3, 3, 3),
    (7, 8, 3, 4, 5),
)


@pytest.mark.parametrize("sizes", OPTIONS, ids=str)
def test_cases_of_several_options_are_spread(sizes):
    few, many = (list(spread_cases(times * max(sizes), *map(range, sizes))) for times in (1, 15))
    assert (len(few), len(many)) == (max(sizes), 15 * max(sizes))
    for place, size in enumerate(sizes):
        assert {case[place] for case in few} == set(range(size))
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(case[a], case[b]) for case in many} == set(itertools.product(range(sizes[a]), range(sizes[b])))
        # Of pairs, few cases can hold one each.
        assert len({(case[a], case[b]) for case in few}) >= 0.7 * min(len(few), sizes[a] * sizes[b])


X = torch.ones(4, 40)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rounding": "up"}, ValueError, "rounding='up'"),
        ({"rounding": "stochastic"}, TypeError, "needs an integer as its seed, got None"),
        ({"rounding": "stochastic", "seed": 1.5}, TypeError, "1.5"),
        ({"rounding": "stochastic", "seed": True}, TypeError, "True"),
        ({"rounding": "stochastic", "seed": 2**64}, ValueError, "must be in"),
        ({"seed": 3}, ValueError, "seed has no effect"),
        ({"rotation": 8}, ValueError, "rotation=8"),
        ({"rotation": True}, ValueError, "rotation=True"),
        ({"signs": torch.ones(40)}, ValueError, "no effect without a rotation"),
        ({"rotation": 16, "signs": torch.ones(40)}, ValueError, r"\[40\]; the rotated axis has 48 elements"),
        ({"rotation": 16, "signs": torch.ones(48, device="meta")}, ValueError, "meta.*cpu; move them"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("function", [mxfp4_kernels.fake_quantize, mxfp4_kernels.quantize])
def test_wrong_options_raise(function, options, error, words):
    with pytest.raises(error, match=words):
        function(X, **options)


@pytest.mark.parametrize("function", [mxfp4_kernels.fake_quantize_both, mxfp4_kernels.quantize_both])
def test_both_refuses_what_one_refuses(function):
    with pytest.raises(TypeError, match="list"):
        function([1.0])
    with pytest.raises(ValueError, match="at least 2 axes, got 1"):
        function(torch.ones(32))
    with pytest.raises(ValueError, match="macro_block=48"):
        function(X, macro_block=48)
    with pytest.raises(ValueError, match="rounding='up'"):
        function(X, rounding=("nearest", "up"))
    with pytest.raises(TypeError, match="needs an integer as its seed"):
        function(X, rounding=("nearest", "stochastic"), seed=(None, None))
    # Each side has the length of its own axis.
    with pytest.raises(ValueError, match=r"\[16\]; the rotated axis has 48"):
        function(X, rotation=(16, None), signs=(torch.ones(16), None))
    with pytest.raises(ValueError, match=r"\[48\]; the rotated axis has 16"):
        function(X, rotation=(None, 16), signs=(None, torch.ones(48)))


def test_the_output_dtype_is_checked():
    with pytest.raises(TypeError, match="float64"):
        mxfp4_kernels.fake_quantize(X, dtype=torch.float64)


@pytest.mark.parametrize("macro", [None, 32, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 32])
def test_a_tile_holds_whole_macro_blocks_and_rotations(macro, rows):
    tile, strip = both_tile(Scheme("rceil", macro, block_rows=rows))
    assert tile % (macro or 32) == tile % 128 == 0 and tile % strip == 0
    assert rows == 1 or strip == rows
