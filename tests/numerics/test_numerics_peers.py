# SPDX-License-Identifier: Apache-2.0
"""Codes and scale bytes, bit for bit, against torchao, compressed-tensors and ml_dtypes: small samples of every kind,
and in the long run ten million elements per oracle, random and adversarial.

Left out of every comparison, because the libraries themselves differ there: block maxima below 2**-124, non-finite
blocks, and maxima of 1.75 * 2**127 or more, which saturate here instead of becoming infinite.
"""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from tables import ROUNDING_RULES, RULES

from hf_mxfp4.numerics import decode_e8m0, quantize, unpack_codes


ROWS, COLUMNS = 64, 512


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=generator())


def sixty_octaves() -> torch.Tensor:
    exponent = torch.rand(ROWS, COLUMNS, generator=generator(1)) * 60 - 30
    return torch.randn(ROWS, COLUMNS, generator=generator(2)) * torch.exp2(exponent)


def heavy_tailed() -> torch.Tensor:
    """Student-t with two degrees of freedom."""
    chi = torch.randn(2, ROWS, COLUMNS, generator=generator(3)).square().sum(0)
    return torch.randn(ROWS, COLUMNS, generator=generator(4)) * torch.sqrt(2 / chi)


def sparse() -> torch.Tensor:
    x = torch.randn(ROWS, COLUMNS, generator=generator(5))
    return x * (torch.rand(ROWS, COLUMNS, generator=generator(6)) < 0.05)


def ties() -> torch.Tensor:
    """Midpoints of the grid, and the grid itself, at every scale."""
    points = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7])
    picked = points[torch.randint(0, len(points), (ROWS, COLUMNS), generator=generator(7))]
    sign = torch.randint(0, 2, (ROWS, COLUMNS), generator=generator(8)) * 2 - 1
    return picked * sign * torch.exp2(torch.arange(ROWS) - 32.0)[:, None]


def block_maxima() -> torch.Tensor:
    """All 128 bfloat16 mantissas as the block maximum, at exponents across the range, on a tie-rich filling."""
    exponents = torch.tensor([*range(-124, 127, 9), -2, 0, 1, 126, 127])
    mantissas = 1 + torch.arange(128) / 128
    amax = (mantissas[:, None] * torch.exp2(exponents.float())).flatten()
    amax = amax[amax < 1.75 * 2.0**127]
    filling = torch.randint(-128, 129, (len(amax), 32), generator=generator(9)) / 128
    filling[:, 0] = 1
    return (filling * amax[:, None]).view(-1, 32)


DISTRIBUTIONS = [gaussian, sixty_octaves, heavy_tailed, sparse, ties, block_maxima]


def canonical(packed: torch.Tensor) -> torch.Tensor:
    codes = unpack_codes(packed, 2 * packed.shape[-1])
    return torch.where(codes == 8, 0, codes)


@pytest.fixture(params=DISTRIBUTIONS, ids=lambda function: function.__name__)
def x(request, dtype):
    return request.param().to(dtype)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def dtype(request):
    return request.param


def test_data_stays_inside_the_range_that_is_compared(x):
    amax = x.float().view(-1, 32).abs().amax(-1)
    assert torch.isfinite(amax).all() and amax.max() < 1.75 * 2.0**127
    assert amax[amax > 0].min() >= 2.0**-124


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

    args = QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
    )
    # An all-zero block has no scale there: left out.
    x = x.view(-1, 32)
    x = x[(x != 0).any(-1)]
    blocks = x.view(-1, 1, 32)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    theirs = MXFP4PackedCompressor.compress(
        {"weight": x, "weight_scale": scale}, QuantizationScheme(targets=["Linear"], weights=args)
    )
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


def test_compressed_tensors_is_the_even_rule(x):
    check_compressed_tensors(x)


def test_elements_are_those_of_ml_dtypes_at_our_scale(x):
    for rule in RULES:
        check_ml_dtypes(x, rule)


# ---- ten million elements -------------------------------------------------------------------------------------------


PORTIONS, LARGE = 12, (256, 4096)
assert PORTIONS * math.prod(LARGE) >= 10_000_000
GRID_AND_TIES = (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7)


def portion(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix ``[256, 4096]``: a fifth each Gaussian, over sixty octaves, heavy-tailed, sparse, and on grid points and
    ties next to both sides of every midpoint; block maxima inside the range that is compared."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*LARGE, generator=g)
    kind = torch.arange(LARGE[0]) % 5
    octaves = torch.exp2(torch.rand(*LARGE, generator=g) * 60 - 30)
    heavy = torch.sqrt(2 / torch.randn(2, *LARGE, generator=g).square().sum(0))
    sparse = (torch.rand(*LARGE, generator=g) < 0.05).float()
    points = torch.tensor(GRID_AND_TIES)[torch.randint(0, len(GRID_AND_TIES), LARGE, generator=g)]
    nudge = 1 + (torch.randint(-1, 2, LARGE, generator=g)) * 2.0**-7
    sign = torch.randint(0, 2, LARGE, generator=g) * 2 - 1
    scale = torch.exp2(torch.randint(-100, 100, (LARGE[0], LARGE[1] // 32), generator=g).float())
    ties = points * nudge * sign * scale.repeat_interleave(32, dim=1)
    for index, other in enumerate((x * octaves, x * heavy, x * sparse, ties), start=1):
        x = torch.where((kind == index)[:, None], other, x)
    return x.to(dtype)


def rounds_down(x: torch.Tensor) -> torch.Tensor:
    """Blocks whose maximum is within three units in the last place of float32 above ``1.5 * 2**E``. torchao multiplies
    by a rounded 1/6 in float32, which loses that: ``E - 2`` instead of ``ceil(log2(amax / 6))``, and the maximum is
    clipped. No bfloat16 or float16 number lies there."""
    mantissa = x.float().unflatten(-1, (-1, 32)).abs().amax(-1).view(torch.int32) & 0x7FFFFF
    return (mantissa > 0x400000) & (mantissa <= 0x400003)


@pytest.mark.large
@pytest.mark.slow
def test_large_samples_against_torchao_and_compressed_tensors(dtype):
    for seed in range(PORTIONS):
        x = portion(seed, dtype)
        compared = ~rounds_down(x)
        assert (~compared).sum() <= 2
        check_torchao(x, "rceil", compared)
        check_torchao(x, "floor")
        check_torchao(x, "even")
        check_compressed_tensors(x)


@pytest.mark.large
@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_large_samples_against_ml_dtypes(rule):
    for seed in range(PORTIONS):
        check_ml_dtypes(portion(seed, torch.bfloat16), rule)
