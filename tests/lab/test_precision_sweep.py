# SPDX-License-Identifier: Apache-2.0
"""The error against the precision of the scale, on Gaussian data with known values."""

import math

import pytest
import torch

from hf_mxfp4.lab import PrecisionSweep, error_statistics, precision_sweep
from hf_mxfp4.lab import sweep as module
from hf_mxfp4.numerics import QuantScheme


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(512, 1024, generator=generator) * torch.exp2(torch.rand(512, 1, generator=generator))


@pytest.fixture(scope="module")
def swept(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SAMPLE_ELEMENTS", data.numel())
        return precision_sweep(data)


# Relative MSE in percent on 2 million Gaussian elements, the phase of the row maxima averaged (papers, section 9.1).
@pytest.mark.parametrize(("bits", "percent"), [(0, 1.366), (2, 1.295), (3, 1.228), (4, 1.200), (8, 1.183)])
def test_mantissa_shared_by_128(swept, bits, percent):
    assert 100 * swept.relative_mse(128)[bits] == pytest.approx(percent, rel=0.01)


def test_mantissa_per_block_reaches_the_floor(swept):
    values = swept.relative_mse(32)
    assert 100 * values[8] == pytest.approx(1.024, rel=0.01)
    assert 100 * swept.floor_relative_mse == pytest.approx(1.021, rel=0.01)
    assert all(a > b for a, b in zip(values, values[1:], strict=False))


def test_the_ends_are_known_schemes(data, swept):
    assert swept.relative_mse(32)[0] == swept.relative_mse(128)[0] == error_statistics(data, QuantScheme()).relative_mse
    static = error_statistics(data, QuantScheme("rceil", 128)).relative_mse
    assert swept.relative_mse(128)[8] == pytest.approx(static, rel=1e-9)


def test_the_sample_is_the_first_rows(data):
    rows = module.SAMPLE_ELEMENTS // 1024
    assert precision_sweep(data) == precision_sweep(data[:rows])
    assert precision_sweep(data[:1].expand(1, 1024).repeat(1, 40)).energy > 0  # one row, longer than the sample


def test_merging_and_json(data):
    a, b = precision_sweep(data[:7]), precision_sweep(data[7:20])
    assert (a + b).relative_mse(128) == pytest.approx(precision_sweep(data[:20]).relative_mse(128), rel=1e-12)
    assert PrecisionSweep.from_dict(a.to_dict()) == a


def test_zeros_and_nothing():
    for x in (torch.zeros(2, 64), torch.zeros(0, 64)):
        swept = precision_sweep(x)
        assert math.isnan(swept.floor_relative_mse) and all(math.isnan(v) for v in swept.relative_mse(32))
