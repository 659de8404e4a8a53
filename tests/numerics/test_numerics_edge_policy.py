# SPDX-License-Identifier: Apache-2.0
"""Zeros, tiny and huge numbers, NaN and infinity, odd shapes, layouts, dtypes and bad arguments."""

import math

import pytest
import torch
from tables import gaussian

from hf_mxfp4.numerics import QuantScheme, apply_scheme, fake_quantize, parse_scheme, quantize


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SCHEMES = {
    text: vars(parse_scheme(text))
    for text in (
        "rceil", "floor", "even", "mse", "rceil+of0.5", "rceil+of1", "rceil+mbs32", "rceil+mbs128", "rceil+mbsrow",
        "rceil+mbs128-dynamic", "rceil+mbs128+of0.5", "mse+mbs64-dynamic+of0.5", "even+mbs128-blockwise+of0.3",
    )
}  # fmt: skip
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
FUNCTIONS = (fake_quantize, quantize)


@every_scheme
def test_zeros(scheme):
    for dtype in DTYPES:
        x = torch.zeros(2, 70, dtype=dtype)
        x[1] = -0.0
        packed = quantize(x, **scheme)
        for stored in (packed.codes, packed.scale, packed.residual_codes, packed.residual_scale, packed.macro):
            assert stored is None or not stored.any()
        assert torch.equal(fake_quantize(x, **scheme), x)


@every_scheme
def test_one_bad_element_poisons_its_own_block_only(scheme):
    """Every second row has one bad element; the rows between do not notice."""
    bad = torch.tensor([math.nan, -math.nan, math.inf, -math.inf]).repeat_interleave(4)
    position = torch.tensor([31, 32, 127, 169]).repeat(4)
    rows = 2 * torch.arange(16) + 1
    clean = gaussian(33, 170)
    x = clean.clone()
    x[rows, position] = bad
    blocks = torch.zeros(33, 6, dtype=torch.bool)
    blocks[rows, position // 32] = True
    poisoned = blocks.repeat_interleave(32, dim=1)[:, :170]

    packed = quantize(x, **scheme)
    values = fake_quantize(x, **scheme)
    for out in (values, packed.dequantize(), packed.dequantize(torch.float64)):
        assert torch.equal(out.isnan(), poisoned)
        assert not out.isinf().any()
    assert torch.equal(packed.scale == 255, blocks)
    # A block has 16 bytes of codes, the last one of a row 5.
    assert not packed.codes[blocks.repeat_interleave(16, dim=1)[:, :85]].any()
    if packed.residual_codes is not None:
        assert not packed.residual_scale[blocks].any()
        assert not packed.residual_codes[blocks.repeat_interleave(16, dim=1)[:, :85]].any()
    assert torch.equal(values[::2], fake_quantize(clean, **scheme)[::2])


@pytest.mark.parametrize("search", ["static", "dynamic"])
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_the_healthy_blocks_of_a_poisoned_macro_block_are_quantized_without_a_factor(bad, search):
    x = gaussian(1, 256)
    x[0, 40] = bad
    packed = quantize(x, macro_block=128, macro_search=search)
    assert packed.macro[0, 0] == 0
    healthy = torch.ones(256, dtype=torch.bool)
    healthy[32:64] = False
    out = packed.dequantize()
    assert torch.equal(out[0, :128][healthy[:128]], fake_quantize(x)[0, :128][healthy[:128]])
    assert torch.equal(out[0, 128:], fake_quantize(x[:, 128:], macro_block=128, macro_search=search)[0])


@every_scheme
def test_empty_tensors(scheme):
    for shape in ((0,), (0, 40), (3, 0), (2, 0, 5), (0, 0)):
        x = torch.empty(shape, dtype=torch.bfloat16)
        for axis in (0, -1):
            for out in (fake_quantize(x, axis=axis, **scheme), quantize(x, axis=axis, **scheme).dequantize()):
                assert out.shape == x.shape
                assert out.dtype == x.dtype


@every_scheme
def test_every_axis_equals_the_moved_one(scheme):
    x = gaussian(40, 5, 70)
    for axis in range(3):
        moved = x.movedim(axis, -1).contiguous()
        expected = fake_quantize(moved, **scheme).movedim(-1, axis)
        for same in (axis, axis - 3):
            assert torch.equal(fake_quantize(x, axis=same, **scheme), expected)
            assert torch.equal(quantize(x, axis=same, **scheme).dequantize(), expected)


@every_scheme
def test_layout_of_the_input_does_not_matter_and_the_input_is_never_written(scheme):
    base = gaussian(70, 70)
    views = {
        "strided": base[:, ::2],
        "transposed": base.t(),
        "offset": base[1:, 3:],
        "flipped": base.flip(1),
        "expanded": base[:1].expand(4, 70),
        "broadcast column": base[:, :1].expand(70, 64),
        "whole": base,
    }
    before = base.clone()
    for name, view in views.items():
        for axis in (0, 1):
            expected = fake_quantize(view.clone(memory_format=torch.contiguous_format), axis=axis, **scheme)
            version = view._version
            assert torch.equal(fake_quantize(view, axis=axis, **scheme), expected), name
            assert torch.equal(quantize(view, axis=axis, **scheme).dequantize(), expected), name
            assert view._version == version
    assert torch.equal(base, before)


def test_the_caller_s_random_state_is_left_alone():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    fake_quantize(torch.ones(4, 32), macro_block=128, macro_search="dynamic")
    fake_quantize(torch.ones(4, 32), rounding="stochastic", seed=0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("x", "named"),
    [(torch.ones(32, dtype=torch.int32), "int32"), (torch.ones(32) * 1j, "complex64"), ([1.0], "list")],
    ids=["int32", "complex", "list"],
)
def test_input_that_is_not_a_floating_point_tensor(x, named):
    for function in FUNCTIONS:
        with pytest.raises(TypeError, match=rf"floating-point tensor, got .*{named}"):
            function(x)
        with pytest.raises(ValueError, match="at least one axis, got a scalar tensor"):
            function(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_rule": "ceil"}, "scale_rule='ceil' is not supported.*'rceil', 'floor', 'even', 'mse'"),
        ({"macro_block": 100}, "macro_block=100 is not supported.*None, 32, 64, 128, 256, 'row'"),
        ({"macro_block": 0}, "macro_block=0"),
        ({"macro_block": True}, "macro_block=True"),
        ({"macro_block": 128.0}, "macro_block=128.0"),
        ({"macro_block": "column"}, "macro_block='column'"),
        ({"macro_search": "exhaustive"}, "macro_search='exhaustive' is not supported.*'static', 'dynamic'"),
        ({"macro_search": "hybrid"}, "macro_search='hybrid' means dynamic for weights"),
        ({"rounding": "up"}, "rounding='up' is not supported.*'nearest', 'stochastic'"),
        ({"outlier_fallback": 0}, r"outlier_fallback=0 must be None or a number in \(0, 1\]"),
        ({"outlier_fallback": 1.5}, "outlier_fallback=1.5"),
        ({"outlier_fallback": math.nan}, "outlier_fallback=nan"),
        ({"outlier_fallback": True}, "outlier_fallback=True"),
        ({"outlier_fallback": "0.5"}, "outlier_fallback='0.5'"),
        ({"block_rows": 16}, "block_rows=16"),
        ({"block_rows": True}, "block_rows=True"),
        ({"axis": 2}, "axis=2 is out of range for a tensor with 2 axes"),
    ],
    ids=lambda value: "-".join(f"{k}-{v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_bad_options_are_named(options, message):
    for function in FUNCTIONS:
        with pytest.raises(ValueError, match=message):
            function(torch.ones(2, 32), **options)


@every_scheme
def test_apply_scheme_and_the_packed_tensor_carry_the_scheme(scheme):
    x = gaussian(2, 45)
    described = QuantScheme(**scheme)
    assert torch.equal(apply_scheme(x, described), fake_quantize(x, **scheme))
    assert quantize(x, **scheme).scheme == described


def test_float64_stays_finite_within_and_beyond_float32():
    within = torch.full((32,), 3.4e38, dtype=torch.float64)
    beyond = torch.full((32,), 1e300, dtype=torch.float64)
    assert fake_quantize(within, outlier_fallback=1.0).isfinite().all()
    assert torch.equal(fake_quantize(beyond), fake_quantize(within))
    assert fake_quantize(torch.full((32,), float("inf"), dtype=torch.float64)).isnan().all()
