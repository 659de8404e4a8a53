# SPDX-License-Identifier: Apache-2.0
"""FP8 E4M3 with power-of-two row scales: literals, ml_dtypes as an independent rounding, and the edges."""

import ml_dtypes
import numpy as np
import pytest
import torch

from hf_mxfp4.numerics import fake_quantize_e4m3


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([448.0, 1.0, 17.0, 19.0], [448.0, 1.0, 16.0, 20.0]),  # scale 1; ties to even
        ([449.0, 1.0, 0.0, -3.0], [448.0, 1.0, 0.0, -3.0]),  # scale 2
        ([1.0, 1.0625, 1.1, -1.75], [1.0, 1.0, 1.125, -1.75]),  # scale 2**-8
        ([0.0, 0.0, 0.0, -0.0], [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_literals(row, expected):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.tensor([row], dtype=torch.float64).to(dtype)
        if x.double().tolist() == [row]:
            assert fake_quantize_e4m3(x).tolist() == [expected]
            assert fake_quantize_e4m3(x).dtype == dtype


@pytest.mark.parametrize("power", [-100, -20, 0, 20, 100])
def test_against_ml_dtypes(power):
    x = torch.randn(50, 77, generator=torch.Generator().manual_seed(0)) * 2.0**power
    x[:, ::3] *= 1e-3
    amax = x.abs().amax(dim=1, keepdim=True).double().numpy()
    scale = 2.0 ** np.ceil(np.log2(amax / 448))
    expected = (x.double().numpy() / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(
        np.float64
    ) * scale
    np.testing.assert_array_equal(fake_quantize_e4m3(x).double().numpy(), expected)


def test_the_largest_numbers_stay_finite():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        largest = torch.finfo(dtype).max
        values = fake_quantize_e4m3(torch.tensor([[largest, -largest, 1.0]], dtype=dtype))
        assert values.isfinite().all() and values[0, 0] > 0.9 * min(largest, torch.finfo(torch.float32).max)


def test_a_row_with_nan_or_infinity_is_nan_and_the_others_are_not():
    x = torch.ones(3, 4)
    x[0, 1], x[2, 3] = torch.nan, torch.inf
    values = fake_quantize_e4m3(x)
    assert values[[0, 2]].isnan().all() and torch.equal(values[1], torch.ones(4))


def test_shapes_and_kinds():
    for shape in ((0, 5), (5, 0)):
        assert fake_quantize_e4m3(torch.zeros(shape)).shape == shape
    assert fake_quantize_e4m3(torch.ones(3)).tolist() == [1.0] * 3
    with pytest.raises(TypeError, match="torch.int64"):
        fake_quantize_e4m3(torch.ones(3, dtype=torch.int64))
