# SPDX-License-Identifier: Apache-2.0
"""Blocks of 32 x 32: one quantized matrix for a product and its transpose."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import RULES

from hf_mxfp4.numerics import QuantScheme, apply_scheme, decompose, fake_quantize, quantize
from hf_mxfp4.numerics.corrections import sum_of_squares


#: Schemes whose factors belong to one tile each.
SYMMETRIC = [
    {},
    {"outlier_fallback": 0.5},
    {"macro_block": 32},
    {"macro_block": 32, "macro_search": "dynamic", "outlier_fallback": 0.5},
    {"macro_block": 128, "macro_search": "blockwise"},
]
SELECTIVE = {"outlier_fallback": 1.0, "fallback_rate": 0.25}


def gaussian(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.exp2(4 * torch.rand(*shape[:-1], 1, generator=generator))


@pytest.mark.parametrize("options", SYMMETRIC, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_a_matrix_and_its_transpose_have_the_same_values(rule, options):
    for shape in ((64, 96), (70, 33), (1, 200), (3, 40, 70)):
        w = gaussian(*shape)
        scheme = {"scale_rule": rule, "block_rows": 32, **options}
        expected = fake_quantize(w, **scheme)
        assert torch.equal(fake_quantize(w.mT, **scheme), expected.mT), shape
        assert torch.equal(fake_quantize(w, axis=-2, **scheme), expected), shape
        assert not torch.equal(expected, w)


def test_literal_tile():
    """The largest magnitude of the tile sets the scale of all of its rows; the next tile has its own."""
    w = torch.zeros(33, 33)
    w[0, 0], w[1, 1], w[31, 31] = 12.0, 0.5, 1.2
    w[0, 32], w[32, 0], w[32, 32] = 0.5, 3.1, 0.1
    packed = quantize(w, block_rows=32)
    assert packed.scale[:, 0].tolist() == [128] * 32 + [127]
    assert packed.scale[:, 1].tolist() == [124] * 32 + [122]
    q = packed.dequantize()
    assert (q[0, 0], q[1, 1], q[31, 31]) == (12.0, 0.0, 1.0)
    assert (q[0, 32], q[32, 0]) == (0.5, 3.0)
    assert q[32, 32] == pytest.approx(0.09375)
    assert q.count_nonzero() == 5


@pytest.mark.parametrize("options", [*SYMMETRIC, SELECTIVE, {"macro_block": 128}, {"macro_block": "row"}], ids=str)
def test_stored_bytes_are_one_per_row(options):
    w = gaussian(70, 300)
    packed = quantize(w, block_rows=32, **options)
    assert packed.codes.shape == (70, 150)
    assert packed.scale.shape == (70, 10)
    stored = [packed.scale]
    if packed.macro is not None:
        size = 300 if options["macro_block"] == "row" else options["macro_block"]
        assert packed.macro.shape == (70, math.ceil(300 / size))
        stored.append(packed.macro)
    if packed.residual_scale is not None:
        stored.append(packed.residual_scale)
    for byte in stored:
        assert byte.dtype == torch.uint8
        for top in range(0, 70, 32):
            assert (byte[top : top + 32] == byte[top]).all()
    assert torch.equal(packed.dequantize(), fake_quantize(w, block_rows=32, **options))


@given(
    shape=st.lists(st.integers(0, 70), min_size=2, max_size=3),
    axis=st.integers(-2, 1),
    rule=st.sampled_from(RULES),
    macro=st.sampled_from([(None, "static"), (32, "dynamic"), (128, "static"), ("row", "static"), (128, "blockwise")]),
    fallback=st.sampled_from([(None, None), (0.5, None), (0.3, 0.4)]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    exponent=st.integers(-130, 120),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
def test_round_trip_over_shapes_and_scales(shape, axis, rule, macro, fallback, rounding, exponent, dtype, seed):
    largest = torch.finfo(dtype).max
    x = (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double() * 2.0**exponent).clamp(
        -largest, largest
    )
    x = x.to(dtype)
    scheme = QuantScheme(rule, *macro, fallback[0], rounding, 32, fallback[1])
    packed = quantize(x, axis=axis, generator=torch.Generator().manual_seed(1), **vars(scheme))
    values = fake_quantize(x, axis=axis, generator=torch.Generator().manual_seed(1), **vars(scheme))
    assert values.shape == x.shape and values.dtype == x.dtype
    assert torch.equal(packed.dequantize(), values)
    assert values.isfinite().all()
    again = apply_scheme(x, scheme, axis=axis, generator=torch.Generator().manual_seed(1))
    assert torch.equal(again, values)


@pytest.mark.parametrize("options", [{}, *SYMMETRIC[1:]], ids=str)
def test_a_bad_element_spoils_its_tile_alone(options):
    everywhere = {"block_rows": 32, **options, "fallback_rate": None}
    bad_tiles = torch.zeros(3, 3, dtype=torch.bool)
    bad_tiles[1, 0] = bad_tiles[0, 1] = bad_tiles[2, 2] = True
    by_row = bad_tiles.repeat_interleave(32, dim=0)[:70]
    spoiled_elements = by_row.repeat_interleave(32, dim=1)[:, :70]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        w = gaussian(70, 70).to(dtype)
        clean = fake_quantize(w, **everywhere)
        w[40, 10], w[0, 63], w[69, 64] = math.nan, math.inf, -math.inf
        packed = quantize(w, **everywhere)
        values = packed.dequantize()
        assert torch.equal(values.isnan(), spoiled_elements)
        assert torch.equal(values[~spoiled_elements], clean[~spoiled_elements])
        assert torch.equal(packed.scale == 255, by_row)
        selective = quantize(w, **{**everywhere, "outlier_fallback": 0.5, "fallback_rate": 0.9})
        assert (selective.residual_scale[by_row] == 0).all()


def test_sums_of_1024_squares_do_not_overflow():
    """Each square fits 31 bits; their sum over a tile does not."""
    assert sum_of_squares(torch.full((2, 1024), 2.0)).tolist() == [2**35] * 2
    assert sum_of_squares(torch.full((4,), 2.0**-12)).tolist() == 0, "cut, not rounded"
    w = torch.full((32, 32), 1.99)
    assert quantize(w, block_rows=32, scale_rule="mse").scale.unique().tolist() == [126]


def test_two_axes_are_needed():
    for call in (fake_quantize, quantize, decompose):
        with pytest.raises(ValueError, match="32 rows need a tensor with at least two axes, got 1"):
            call(torch.ones(64), block_rows=32)


@pytest.mark.parametrize("value", [0, 2, 16, 64, True, "32", None, 32.0])
def test_other_heights_are_refused(value):
    with pytest.raises(ValueError, match=f"block_rows={value!r}"):
        fake_quantize(torch.ones(64, 64), block_rows=value)
