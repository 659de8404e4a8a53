# SPDX-License-Identifier: Apache-2.0
"""Codes and scale bytes, bit for bit, against torchao, compressed-tensors and ml_dtypes: small samples of every kind,
and in the long run ten million elements per oracle, random and adversarial.

Left out of every comparison, because the libraries themselves differ there: block maxima below 2**-124, non-finite
blocks, and maxima of 1.75 * 2**127 or more, which saturate here instead of becoming infinite.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
from tables import ROUNDING_RULES, RULES

from hf_mxfp4.numerics import decode_e8m0, dequantize_mxfp8, quantize, quantize_mxfp8, unpack_codes


Size = tuple[int, int]


def random(size: Size, seed: int, uniform: bool = False) -> torch.Tensor:
    return (torch.rand if uniform else torch.randn)(*size, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, size: Size, seed: int) -> torch.Tensor:
    return torch.randint(low, high, size, generator=torch.Generator().manual_seed(seed))


def sixty_octaves(size: Size, seed: int) -> torch.Tensor:
    return random(size, seed) * torch.exp2(random(size, seed + 1, uniform=True) * 60 - 30)


def heavy_tailed(size: Size, seed: int) -> torch.Tensor:
    """Student-t with two degrees of freedom."""
    return random(size, seed) * torch.sqrt(2 / (random(size, seed + 1).square() + random(size, seed + 2).square()))


def sparse(size: Size, seed: int) -> torch.Tensor:
    return random(size, seed) * (random(size, seed + 1, uniform=True) < 0.05)


def ties(size: Size, seed: int) -> torch.Tensor:
    """Midpoints of the grid, the grid itself, and what lies next to both sides of them, at many scales."""
    points = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7])
    picked = points[integers(0, len(points), size, seed)] * (integers(0, 2, size, seed + 1) * 2 - 1)
    picked *= 1 + integers(-1, 2, (size[0], 1), seed + 2) * 2.0**-7
    return picked * torch.exp2(integers(-100, 100, (size[0], size[1] // 32), seed + 3).float()).repeat_interleave(32, 1)


def block_maxima(size: Size, seed: int) -> torch.Tensor:
    """All 128 bfloat16 mantissas as the block maximum, at exponents across the range, on a tie-rich filling."""
    exponents = torch.tensor([*range(-124, 127, 9), -2, 0, 1, 126, 127])
    mantissas = 1 + torch.arange(128) / 128
    amax = (mantissas[:, None] * torch.exp2(exponents.float())).flatten()
    amax = amax[amax < 1.75 * 2.0**127]
    filling = integers(-128, 129, (len(amax), 32), seed) / 128
    filling[:, 0] = 1
    return filling * amax[:, None]


DISTRIBUTIONS = [random, sixty_octaves, heavy_tailed, sparse, ties, block_maxima]


def canonical(packed: torch.Tensor) -> torch.Tensor:
    codes = unpack_codes(packed, 2 * packed.shape[-1])
    return torch.where(codes == 8, 0, codes)


@pytest.fixture(params=DISTRIBUTIONS, ids=lambda function: function.__name__)
def x(request, dtype):
    return request.param((64, 512), 0).to(dtype)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def dtype(request):
    return request.param


def check_torchao(x: torch.Tensor, rule: str, compared: torch.Tensor | None = None) -> None:
    """``compared``: mask of the blocks in which the libraries agree, by default all."""
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    scale, codes = mx_tensor.to_mx(x, torch.float4_e2m1fn_x2, block_size=32, scaling_mode=ScaleCalculationMode(rule))
    ours = quantize(x, scale_rule=rule)
    theirs = mx_tensor.to_dtype(codes, scale, torch.float4_e2m1fn_x2, 32, x.dtype)
    every = torch.ones_like(ours.scale, dtype=torch.bool) if compared is None else compared

    def blocks(elements: torch.Tensor) -> torch.Tensor:
        return elements.view(*every.shape, 32)[every]

    assert torch.equal(ours.scale[every], scale.view(torch.uint8)[every]), rule
    assert torch.equal(blocks(canonical(ours.codes)), blocks(canonical(codes.view(torch.uint8)))), rule
    assert torch.equal(blocks(theirs), blocks(ours.dequantize())), rule
    assert not (unpack_codes(ours.codes, x.shape[-1]) == 8).any(), rule


def check_compressed_tensors(x: torch.Tensor) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    options = {"num_bits": 4, "type": "float", "symmetric": True, "scale_dtype": torch.uint8}
    args = QuantizationArgs(strategy="group", group_size=32, **options)
    # An all-zero block has no scale there: left out.
    x = x.view(-1, 32)
    x = x[(x != 0).any(-1)]
    blocks = x.view(-1, 1, 32)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    theirs = MXFP4PackedCompressor.compress({"weight": x, "weight_scale": scale}, scheme)
    ours = quantize(x, scale_rule="even")
    assert torch.equal(ours.scale, theirs["weight_scale"])
    assert torch.equal(canonical(ours.codes), canonical(theirs["weight_packed"]))


def check_ml_dtypes(x: torch.Tensor, rule: str) -> None:
    """The elements at our own scale."""
    ours = quantize(x, scale_rule=rule)
    scale = decode_e8m0(ours.scale, torch.float64).repeat_interleave(32, dim=-1)
    exact = (x.double() / scale).numpy()
    codes = exact.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
    assert np.array_equal(exact.astype(np.float32)[np.abs(exact) > 1e-30], exact[np.abs(exact) > 1e-30])
    np.testing.assert_array_equal(canonical(ours.codes).numpy(), np.where(codes == 8, 0, codes), rule)


def test_torchao(x):
    for rule in ROUNDING_RULES:
        check_torchao(x, rule)


def test_mxfp8_is_that_of_torchao(x):
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    byte, elements = mx_tensor.to_mx(x, torch.float8_e4m3fn, 32, scaling_mode=ScaleCalculationMode.RCEIL)
    values = mx_tensor.to_dtype(elements, byte, torch.float8_e4m3fn, 32, x.dtype)
    found, scale = quantize_mxfp8(x)
    # torchao has scale byte 0 for smaller blocks, and takes their elements for zeros.
    compared = x.float().unflatten(-1, (-1, 32)).abs().amax(-1) >= 2.0**-117
    assert compared.sum() > 100
    assert torch.equal(scale[compared], byte.view(torch.uint8)[compared])
    pairs = (found.float(), elements.float()), (dequantize_mxfp8(found, scale, x.dtype), values)
    for ours, theirs in pairs:
        assert torch.equal(ours.unflatten(-1, (-1, 32))[compared], theirs.unflatten(-1, (-1, 32))[compared])


def test_compressed_tensors_is_the_even_rule(x):
    check_compressed_tensors(x)


def test_elements_are_those_of_ml_dtypes_at_our_scale(x):
    for rule in RULES:
        check_ml_dtypes(x, rule)


#: Seeds of the samples, and the size of each.
PORTIONS = range(0, 24, 10)
LARGE = (256, 4096)


def rounds_down(x: torch.Tensor) -> torch.Tensor:
    """Blocks whose maximum is within three units in the last place of float32 above ``1.5 * 2**E``. torchao multiplies
    by a rounded 1/6 in float32, which loses that: ``E - 2`` instead of ``ceil(log2(amax / 6))``, and the maximum is
    clipped. No bfloat16 or float16 number lies there."""
    mantissa = x.float().unflatten(-1, (-1, 32)).abs().amax(-1).view(torch.int32) & 0x7FFFFF
    return (mantissa > 0x400000) & (mantissa <= 0x400003)


@pytest.mark.large
@pytest.mark.slow
@pytest.mark.parametrize("distribution", DISTRIBUTIONS[:-1])
def test_large_samples(distribution, dtype):
    for seed in PORTIONS:
        x = distribution(LARGE, seed).to(dtype)
        compared = ~rounds_down(x)
        assert (~compared).sum() <= 2
        check_torchao(x, "rceil", compared)
        check_torchao(x, "floor")
        check_torchao(x, "even")
        check_compressed_tensors(x)
        for rule in RULES:
            check_ml_dtypes(x, rule)
