# SPDX-License-Identifier: Apache-2.0
"""E8M0 bytes and the rules that choose them, against integers and exact fractions."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from hf_mxfp4.numerics import ScaleRule, decode_e8m0, scale_from_amax
from hf_mxfp4.numerics.formats import inverse_scale, largest_finite_magnitude


ALL_BYTES = torch.arange(256, dtype=torch.int32)
INF, NAN = float("inf"), float("nan")


def split(amax: float) -> tuple[int, Fraction]:
    """Exponent E and mantissa m in [1, 2) of a positive number, exactly."""
    mantissa, exponent = math.frexp(amax)
    return exponent - 1, Fraction(mantissa) * 2


def expected_byte(amax: float, rule: str) -> int:
    exponent, mantissa = split(amax)
    shift = {"rceil": mantissa > Fraction(3, 2), "floor": False, "even": mantissa >= Fraction(7, 4), "mse": False}[rule]
    return min(max(exponent - 2 + shift + 127, 0), 254)


def boundary_maxima() -> list[float]:
    """Every float32 exponent with the mantissas next to where a rule switches."""
    values = []
    for exponent in range(-126, 128):
        for mantissa in (1.0, 1.25, 1.5, 1.75):
            value = np.float32(math.ldexp(mantissa, exponent))
            values += [np.nextafter(value, np.float32(0)), value, np.nextafter(value, np.float32(INF))]
        values.append(np.nextafter(np.float32(math.ldexp(1.0, exponent)) * np.float32(1.99), np.float32(INF)))
    return [float(value) for value in values]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_decode_matches_ml_dtypes_and_torch(dtype):
    ours = decode_e8m0(ALL_BYTES.to(dtype)).numpy()
    raw = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(ours, raw.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    np.testing.assert_array_equal(ours, torch.from_numpy(raw).view(torch.float8_e8m0fnu).float().numpy())


def test_inverse_scale_is_the_exact_reciprocal():
    product = inverse_scale(ALL_BYTES).double()[:255] * decode_e8m0(ALL_BYTES, torch.float64)[:255]
    assert torch.equal(product, torch.ones(255, dtype=torch.float64))
    assert inverse_scale(ALL_BYTES)[255] == 0


@pytest.mark.parametrize("rule", list(ScaleRule), ids=lambda rule: rule.value)
def test_rule_at_every_boundary_of_every_exponent(rule):
    maxima = boundary_maxima()
    bytes_ = scale_from_amax(torch.tensor(maxima, dtype=torch.float32), rule).tolist()
    wrong = [(amax, byte) for amax, byte in zip(maxima, bytes_, strict=True) if byte != expected_byte(amax, rule.value)]
    assert not wrong[:5]


@pytest.mark.parametrize(("rule", "largest"), [("rceil", 253), ("floor", 252), ("even", 253), ("mse", 252)])
def test_rule_outside_the_normal_range(rule, largest):
    amax = torch.tensor([0.0, 1e-45, 2.0**-126, torch.finfo(torch.float32).max, INF, NAN])
    assert scale_from_amax(amax, ScaleRule(rule)).tolist() == [0, 0, 0, largest, 255, 255]
    nan_with_a_sign = torch.tensor([-1, -0x400000], dtype=torch.int32).view(torch.float32)  # 0xFFFFFFFF, 0xFFC00000
    assert scale_from_amax(nan_with_a_sign, ScaleRule(rule)).tolist() == [255, 255]


def test_clips_says_which_rules_saturate():
    maxima = torch.tensor([math.ldexp(1 + i / 64, 0) for i in range(64)])
    for rule in ScaleRule:
        saturates = bool((maxima > 6 * decode_e8m0(scale_from_amax(maxima, rule))).any())
        assert rule.clips == saturates


def test_largest_finite_magnitude():
    assert largest_finite_magnitude(torch.tensor([0, 127, 252, 255])) is None
    assert largest_finite_magnitude(torch.tensor([252, 253, 254, 255])).tolist() == [6.0, 3.0, 1.5, 6.0]
    for byte, magnitude in ((252, 6), (253, 3), (254, 1.5)):
        following = {6: 8, 3: 4, 1.5: 2}[magnitude]
        assert math.isfinite(np.float32(math.ldexp(magnitude, byte - 127)))
        assert math.ldexp(following, byte - 127) >= 2.0**128
