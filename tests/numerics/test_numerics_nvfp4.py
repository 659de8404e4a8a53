# SPDX-License-Identifier: Apache-2.0
"""NVFP4 against torchao and compressed-tensors bit for bit, its values by hand, and its errors in the reports."""

import math

import pytest
import torch

from hf_mxfp4 import numerics
from hf_mxfp4.lab import error_statistics
from hf_mxfp4.numerics import NVFP4, fake_quantize_nvfp4, nvfp4_tensor_scale, parse_scheme, quantize_nvfp4


def gaussian(dtype=torch.float32, rows: int = 64, columns: int = 512) -> torch.Tensor:
    """Rows whose standard deviations are spread over three octaves."""
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(rows, columns, generator=generator) * torch.exp2(3 * torch.rand(rows, 1, generator=generator))
    ).to(dtype)


def positive_zero(codes: torch.Tensor, length: int) -> torch.Tensor:
    codes = numerics.unpack_codes(codes, length)
    return torch.where(codes == 8, 0, codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_and_scales_are_those_of_torchao(dtype):
    theirs = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = gaussian(dtype)
    codes, scale, tensor_scale = quantize_nvfp4(x)
    factor = theirs.per_tensor_amax_to_scale(x.abs().max())
    their_scale, their_codes = theirs.nvfp4_quantize(x, 16, factor)
    assert torch.equal(tensor_scale[0], factor) and scale.float().min() > 2.0**-6
    assert torch.equal(scale.view(torch.uint8), their_scale.view(torch.uint8))
    assert torch.equal(positive_zero(codes, 512), positive_zero(their_codes, 512))
    values = theirs.NVFP4Tensor(codes, scale, 16, dtype, per_tensor_scale=factor).dequantize(dtype)
    assert torch.equal(values, fake_quantize_nvfp4(x))
    assert torch.equal(values, numerics.dequantize_nvfp4(codes, scale, tensor_scale, 512, dtype))


def test_scales_are_those_of_compressed_tensors():
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    options = {"num_bits": 4, "type": "float", "symmetric": True, "scale_dtype": torch.float8_e4m3fn}
    args = quantization.QuantizationArgs(strategy="group", group_size=16, **options)
    x = gaussian()
    groups, divisor = x.unflatten(1, (-1, 16)), generate_gparam(x.min(), x.max())
    theirs, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, divisor)
    assert torch.equal(theirs, quantize_nvfp4(x)[1].float())
    torch.testing.assert_close(1 / divisor, nvfp4_tensor_scale(x))


def test_literal():
    # Tensor scale 1; groups of scales 448, 7 / 6 -> 1.125, and 2**-9 / 6, which is below the smallest.
    x = torch.zeros(1, 50)
    x[0, :3] = torch.tensor([2688.0, -112.0, 111.0])
    x[0, 16:19] = torch.tensor([7.0, -5.7, 0.28])
    x[0, 32] = 2.0**-9
    codes, scale, tensor_scale = quantize_nvfp4(x)
    assert tensor_scale.tolist() == [1.0] and scale.tolist() == [[448.0, 1.125, 2.0**-9, 1.0]]
    assert codes[0, [0, 1, 8, 9, 16]].tolist() == [0x07, 0x00, 0xF7, 0x00, 0x02] and codes.shape == (1, 25)
    values = fake_quantize_nvfp4(x)
    # 7 / 1.125 saturates at 6, 5.7 / 1.125 rounds to 6 and .28 / 1.125 to 0; -112 / 448 is a tie and becomes 0.
    assert values[0, [0, 1, 2, 16, 17, 18, 32]].tolist() == [2688.0, 0.0, 0.0, 6.75, -6.75, 0.0, 2.0**-9]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_edges(dtype):
    x = gaussian(rows=5, columns=40).to(dtype)
    x[0, 3], x[1, 20], x[2, :16] = math.nan, -math.inf, 0
    values, (codes, scale, _) = fake_quantize_nvfp4(x), quantize_nvfp4(x)
    nan = torch.zeros(5, 40, dtype=torch.bool)
    nan[0, :16] = nan[1, 16:32] = True
    assert torch.equal(values.isnan(), nan) and values.dtype == dtype
    assert not codes[0, :8].any() and scale.isnan().sum() == 2 and scale[2, 0] == 1 and not values[2, :16].any()
    assert torch.equal(values[3:], fake_quantize_nvfp4(x[3:], nvfp4_tensor_scale(x)))  # groups do not see others' NaN
    largest = torch.full((2, 16), torch.finfo(dtype).max, dtype=dtype)
    assert fake_quantize_nvfp4(largest).isfinite().all() and fake_quantize_nvfp4(x[:0]).shape == (0, 40)
    rows = torch.cat([fake_quantize_nvfp4(row[None]) for row in x])
    per_row = fake_quantize_nvfp4(x, nvfp4_tensor_scale(x, per_row=True))
    assert torch.equal(rows.nan_to_num(), per_row.nan_to_num())
    with pytest.raises(TypeError, match="needs a floating-point tensor"):
        quantize_nvfp4(torch.ones(2, 16, dtype=torch.int32))


def test_errors_are_decomposed_in_groups_of_sixteen_under_one_tensor_scale():
    x = gaussian(rows=300, columns=520)
    error = (fake_quantize_nvfp4(x) - x).double()
    parts, found = numerics.decompose_scheme(x, NVFP4), error_statistics(x, NVFP4)
    assert torch.equal(parts.total, error) and parts.scale_ratio.numel() == 300 * 33
    assert 0.94 < parts.scale_ratio.min() and parts.scale_ratio.max() < 1.07  # E4M3 rounds by at most 1 / 16
    assert found.relative_mse == pytest.approx(float(error.square().sum() / x.double().square().sum()), rel=1e-9)
    assert found.blocks == 300 * 33 and found.deadzone == pytest.approx(float(parts.deadzone.square().sum()))
    assert found.total == pytest.approx(error_statistics(x.t().contiguous(), NVFP4, axis=0).total)


def test_the_text():
    assert parse_scheme("nvfp4") is NVFP4 and str(NVFP4) == "nvfp4"
    with pytest.raises(ValueError, match=r"'nvfp4\+of1': 'nvfp4' has no options"):
        parse_scheme("nvfp4+of1")
    with pytest.raises(ValueError, match="did you mean 'nvfp4'"):
        parse_scheme("nvpf4")
