# SPDX-License-Identifier: Apache-2.0
"""Gain, scale ratios, and quantization errors one component at a time."""

import math

import pytest
import torch

from hf_mxfp4.numerics import COMPONENTS, QuantScheme, apply_component, decompose, decompose_scheme, fake_quantize


SCHEMES = [
    QuantScheme(),
    QuantScheme("even"),
    QuantScheme("mse", 128, "dynamic"),
    QuantScheme("floor", 128, "blockwise"),
    QuantScheme("rceil", 128, "static", 0.5),
]


def gaussian(rows=1024, columns=512, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.exp2(torch.rand(rows, 1, generator=generator))


@pytest.mark.parametrize(
    ("options", "mean", "variance"),
    [({}, 1.444, 0.0846), ({"macro_block": 128}, 1.224, 0.0525)],
    ids=["rceil", "rceil-mbs128"],
)
def test_scale_ratio_of_gaussian_data(options, mean, variance):
    """A macro factor of 128 elements fixes the block that holds the maximum, not the other three."""
    ratio = decompose(gaussian(), **options).scale_ratio
    assert ratio.numel() == 1024 * 16
    assert float(ratio.mean()) == pytest.approx(mean, rel=0.01)
    assert float(ratio.var()) == pytest.approx(variance, rel=0.03)


def test_scale_ratio_is_literal():
    x = torch.zeros(4, 32)
    x[0, 0], x[1, 0], x[2, 0] = 6.0, 4.0, 7.0  # scales 1, 1 and 2 under rceil; the last block is empty
    parts = decompose(x)
    assert parts.scale_ratio.tolist() == pytest.approx([1.0, 1.5, 12 / 7])
    assert parts.scale_ratio_log2.tolist() == pytest.approx([0.0, math.log2(1.5), math.log2(12 / 7)])
    assert decompose(x, scale_rule="floor").scale_ratio.tolist() == pytest.approx([1.0, 1.5, 6 / 7])


def test_rceil_steps_are_never_below_the_ideal_and_less_than_twice_it():
    delta = decompose(gaussian(64)).scale_ratio_log2
    assert delta.min() >= 0 and delta.max() < 1


@pytest.mark.parametrize(
    ("options", "gain"),
    [
        ({}, 0.990),
        ({"scale_rule": "floor"}, 0.978),
        ({"outlier_fallback": 0.5}, 0.995),
        ({"outlier_fallback": 1.0}, 1.0),
    ],
    ids=["rceil", "floor", "fallback-half", "fallback-full"],
)
def test_gain_is_near_one_although_the_scale_ratio_is_not(options, gain):
    assert decompose(gaussian(), **options).gain == pytest.approx(gain, abs=0.0015)


def test_stochastic_rounding_has_gain_one():
    generator = torch.Generator().manual_seed(1)  # another stream than the data's, or the draws follow the data
    parts = decompose(gaussian(), rounding="stochastic", generator=generator)
    assert parts.gain == pytest.approx(1.0, abs=0.002)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_components_applied_one_by_one_make_up_the_whole_error(scheme):
    x = gaussian(16, 256).double()
    whole = decompose_scheme(x, scheme).total
    summed = sum(apply_component(x, name, scheme) - x.float().double() for name in COMPONENTS)
    assert torch.allclose(summed, whole, atol=1e-12)


def test_deadzone_alone_only_silences_small_elements():
    x = gaussian(16, 256)
    only = apply_component(x, "deadzone", QuantScheme())
    changed = only != x
    assert changed.any() and (only[changed] == 0).all()
    amax = x.view(16, 8, 32).abs().amax(-1, keepdim=True)
    small = (x.view(16, 8, 32).abs() < amax / 24).view(16, 256)
    assert torch.equal(changed, small & (x != 0))


def test_scale_bias_vanishes_where_the_scale_is_ideal():
    x = torch.randint(-12, 13, (8, 32), generator=torch.Generator().manual_seed(0)) / 2.0
    x[:, 0] = 6.0
    assert torch.equal(apply_component(x, "scale_bias", QuantScheme()), x)
    assert torch.equal(apply_component(x, "grid", QuantScheme()), fake_quantize(x).where(x.abs() >= 0.25, x))


def test_other_components_are_refused_and_dtype_is_kept():
    with pytest.raises(ValueError, match="component='noise'"):
        apply_component(torch.ones(2, 32), "noise", QuantScheme())
    assert apply_component(torch.ones(2, 32).bfloat16(), "grid", QuantScheme()).dtype == torch.bfloat16
