# SPDX-License-Identifier: Apache-2.0
"""Properties over shapes, dtypes, schemes and magnitudes; blocks of 32 x 32 serve a product and its transpose."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import MACROS, RULES
from test_numerics_reference import check

from hf_mxfp4.numerics import (
    E2M1_MAGNITUDES,
    decode_e8m0,
    decompose,
    dequantize_mxfp8,
    fake_quantize,
    quantize,
    quantize_mxfp8,
)


GRID = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64)
NARROW = [torch.float32, torch.bfloat16, torch.float16]
ALPHAS = [None, 0.25, 0.5, 0.75, 1.0, 0.3]
OPTIONS = ("scale_rule", "macro_block", "macro_search", "outlier_fallback")
properties = settings(max_examples=20, deadline=None, derandomize=True, database=None)


@st.composite
def tensors(draw, dtypes=tuple(NARROW), lowest=-149, highest=127, widest=60, special=False):
    """A tensor whose magnitudes end at ``2**centre`` and start up to ``widest`` octaves below, with some zeros."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (*draw(st.lists(st.integers(1, 3), max_size=2)), draw(st.integers(1, 140)))
    dtype = draw(st.sampled_from(dtypes))
    centre = draw(st.integers(lowest, highest))
    spread = draw(st.integers(0, widest))
    exponent = centre - (torch.rand(shape, generator=generator) * spread).floor()
    if draw(st.booleans()):  # few mantissa bits: ties and equal elements
        mantissa = 1 + torch.randint(0, 8, shape, generator=generator) / 8
    else:
        mantissa = 1 + torch.rand(shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    sign[torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.9]))] = 0
    x = sign * mantissa.double() * torch.exp2(exponent.clamp(min=lowest).double())
    largest = torch.finfo(dtype).max
    x = x.clamp(-largest, largest).to(dtype)
    if special and draw(st.booleans()):
        position = draw(st.integers(0, x.numel() - 1))
        x.view(-1)[position] = draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    return x


schemes = st.builds(
    lambda rule, macro, alpha: dict(zip(OPTIONS, (rule, *macro, alpha), strict=True)),
    st.sampled_from(RULES),
    st.sampled_from(MACROS),
    st.sampled_from(ALPHAS),
)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality but for the sign of zeros and the payload of NaN."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


def in_blocks(x: torch.Tensor) -> torch.Tensor:
    """[..., K] as float64 blocks [..., K/32, 32], padded."""
    return torch.nn.functional.pad(x.double(), (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))


@properties
@given(
    x=tensors((*NARROW, torch.float64), special=True),
    scheme=schemes,
    rounding=st.sampled_from(["nearest", "stochastic"]),
    block_rows=st.sampled_from([1, 32]),
    data=st.data(),
)
def test_packed_and_fake_quantized_values_agree(x, scheme, rounding, block_rows, data):
    axis = data.draw(st.integers(-x.dim(), x.dim() - 1))
    options = {**scheme, "rounding": rounding, "axis": axis, "block_rows": block_rows if x.dim() > 1 else 1}
    options["seed"] = 1 if rounding == "stochastic" else None
    packed = quantize(x, **options)
    values = fake_quantize(x, **options)
    assert values.shape == x.shape
    assert values.dtype == x.dtype
    assert same(packed.dequantize(), values)
    assert values.isnan().any() == (not x.isfinite().all())
    assert not values.isinf().any()


@properties
@given(x=tensors(), rule=st.sampled_from(RULES))
def test_quantizing_twice_changes_nothing(x, rule):
    """Without macro block and fallback the values of a block are representable at a scale that each rule finds again:
    the largest is 3, 4 or 6 scales, or whatever the saturated end of the range left."""
    once = fake_quantize(x, scale_rule=rule)
    assert torch.equal(fake_quantize(once, scale_rule=rule), once)


@properties
@given(x=tensors(lowest=-100, highest=120))
def test_mxfp8_is_e4m3_of_ml_dtypes_at_the_smallest_scale_that_clips_nothing(x):
    elements, byte = quantize_mxfp8(x)
    scale = decode_e8m0(byte, torch.float64).unsqueeze(-1)
    blocks = in_blocks(x)
    amax = blocks.abs().amax(-1, keepdim=True)
    assert (amax <= 448 * scale).all()
    assert ((amax > 224 * scale) | (amax == 0)).all()
    expected = (blocks / scale).float().numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    found = in_blocks(elements.double())
    np.testing.assert_array_equal(found.numpy(), expected)
    values = dequantize_mxfp8(elements, byte, x.dtype)
    assert values.dtype == x.dtype
    largest = torch.finfo(x.dtype).max  # 65504 in float16 is rounded to 65536, and saturates
    assert torch.equal(in_blocks(values), (found * scale).clamp(-largest, largest).to(x.dtype).double())


@settings(properties, max_examples=60)
@given(x=tensors(), scheme=schemes, block_rows=st.sampled_from([1, 32]))
def test_any_tensor_is_quantized_as_the_reference_says(x, scheme, block_rows):
    rule, *macro, alpha = scheme.values()
    check(x.reshape(-1, x.shape[-1]), rule, macro, alpha, block_rows)


@properties
@given(x=tensors(dtypes=(torch.float32,)), rule=st.sampled_from(RULES), alpha=st.sampled_from(ALPHAS[1:]))
def test_outlier_fallback_never_increases_an_error(x, rule, alpha):
    """Rounding to nearest moves a residual towards itself, never past twice its size: alpha in (0, 1] stays between.
    The one rounding to float32 of the sum may add a unit in the last place of the result."""
    plain = fake_quantize(x, scale_rule=rule).double()
    corrected = fake_quantize(x, scale_rule=rule, outlier_fallback=alpha).double()
    slack = corrected.abs() * 2.0**-23 + 2.0**-149
    assert ((corrected - x).abs() <= (plain - x).abs() + slack).all()


#: Schemes whose factors belong to one tile each.
SYMMETRIC = [
    {},
    {"outlier_fallback": 0.5},
    {"macro_block": 32},
    {"macro_block": 32, "macro_search": "dynamic", "outlier_fallback": 0.5},
    {"macro_block": 128, "macro_search": "block_mantissas"},
]


def spread_rows(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.exp2(4 * torch.rand(*shape[:-1], 1, generator=generator))


@pytest.mark.parametrize("options", SYMMETRIC, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_a_matrix_and_its_transpose_have_the_same_values(rule, options):
    for shape in ((64, 96), (70, 33), (1, 200), (3, 40, 70)):
        w = spread_rows(*shape)
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


@pytest.mark.parametrize("options", [{}, *SYMMETRIC[1:]], ids=str)
def test_a_bad_element_spoils_its_tile_alone(options):
    everywhere = {"block_rows": 32, **options}
    bad_tiles = torch.zeros(3, 3, dtype=torch.bool)
    bad_tiles[1, 0] = bad_tiles[0, 1] = bad_tiles[2, 2] = True
    by_row = bad_tiles.repeat_interleave(32, dim=0)[:70]
    spoiled_elements = by_row.repeat_interleave(32, dim=1)[:, :70]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        w = spread_rows(70, 70).to(dtype)
        clean = fake_quantize(w, **everywhere)
        w[40, 10], w[0, 63], w[69, 64] = math.nan, math.inf, -math.inf
        packed = quantize(w, **everywhere)
        values = packed.dequantize()
        assert torch.equal(values.isnan(), spoiled_elements)
        assert torch.equal(values[~spoiled_elements], clean[~spoiled_elements])
        assert torch.equal(packed.scale == 255, by_row)
        with_residuals = quantize(w, **{**everywhere, "outlier_fallback": 0.5})
        assert (with_residuals.residual_scale[by_row] == 0).all()


def test_sums_of_1024_squares_do_not_overflow():
    """Each square fits 31 bits; their sum over a tile does not."""
    assert quantize(torch.full((32, 32), 1.99), block_rows=32, scale_rule="mse").scale.unique().tolist() == [126]


def test_two_axes_are_needed():
    for call in (fake_quantize, quantize, decompose):
        with pytest.raises(ValueError, match="32 rows need a tensor with at least two axes, got 1"):
            call(torch.ones(64), block_rows=32)
