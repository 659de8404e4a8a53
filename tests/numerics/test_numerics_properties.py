# SPDX-License-Identifier: Apache-2.0
"""Properties over shapes, dtypes, schemes and magnitudes; blocks of 32 x 32 serve a product and its transpose."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import MACROS, RULES
from test_numerics_reference import check

from hf_mxfp4.numerics import decompose, fake_quantize, quantize


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
    centre, spread = draw(st.integers(lowest, highest)), draw(st.integers(0, widest))
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


@properties
@given(
    x=tensors((*NARROW, torch.float64), special=True),
    scheme=schemes,
    rounding=st.sampled_from(["nearest", "stochastic"]),
    rate=st.sampled_from([None, 0.4]),
    block_rows=st.sampled_from([1, 32]),
    data=st.data(),
)
def test_packed_and_fake_quantized_values_agree(x, scheme, rounding, rate, block_rows, data):
    axis = data.draw(st.integers(-x.dim(), x.dim() - 1))
    options = {**scheme, "rounding": rounding, "axis": axis, "block_rows": block_rows if x.dim() > 1 else 1}
    options["fallback_rate"] = None if scheme["outlier_fallback"] is None else rate
    options["seed"] = 1 if rounding == "stochastic" else None
    packed, values = quantize(x, **options), fake_quantize(x, **options)
    assert values.shape == x.shape and values.dtype == x.dtype
    assert same(packed.dequantize(), values)
    assert values.isnan().any() == (not x.isfinite().all())
    assert not values.isinf().any()


@settings(properties, max_examples=60)
@given(x=tensors(), scheme=schemes, block_rows=st.sampled_from([1, 32]))
def test_any_tensor_is_quantized_as_the_reference_says(x, scheme, block_rows):
    rule, *macro, alpha = scheme.values()
    check(x.reshape(-1, x.shape[-1]), rule, macro, alpha, block_rows)


#: Schemes whose factors belong to one tile each.
SYMMETRIC = [
    {},
    {"outlier_fallback": 0.5},
    {"macro_block": 32},
    {"macro_block": 32, "macro_search": "dynamic", "outlier_fallback": 0.5},
    {"macro_block": 128, "macro_search": "blockwise"},
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


@pytest.mark.parametrize("options", [{}, *SYMMETRIC[1:]], ids=str)
def test_a_bad_element_spoils_its_tile_alone(options):
    everywhere = {"block_rows": 32, **options, "fallback_rate": None}
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
        selective = quantize(w, **{**everywhere, "outlier_fallback": 0.5, "fallback_rate": 0.9})
        assert (selective.residual_scale[by_row] == 0).all()


def test_sums_of_1024_squares_do_not_overflow():
    """Each square fits 31 bits; their sum over a tile does not."""
    assert quantize(torch.full((32, 32), 1.99), block_rows=32, scale_rule="mse").scale.unique().tolist() == [126]


def test_two_axes_are_needed():
    for call in (fake_quantize, quantize, decompose):
        with pytest.raises(ValueError, match="32 rows need a tensor with at least two axes, got 1"):
            call(torch.ones(64), block_rows=32)


@pytest.mark.parametrize("value", [0, 2, 16, 64, True, "32", None, 32.0])
def test_other_heights_are_refused(value):
    with pytest.raises(ValueError, match=f"block_rows={value!r}"):
        fake_quantize(torch.ones(64, 64), block_rows=value)
