# SPDX-License-Identifier: Apache-2.0
"""Ten million elements per oracle, random and adversarial, bit for bit; `make test-all`. The smaller sample of
`make test` is in test_numerics_peers.py, and says what is left out of the comparison and why."""

import ml_dtypes
import numpy as np
import pytest
import torch
from tables import ROUNDING_RULES, RULES

import hf_mxfp4
from hf_mxfp4 import numerics
from hf_mxfp4.numerics import decode_e8m0, unpack_codes


pytestmark = [pytest.mark.large, pytest.mark.slow]

PORTIONS, ROWS, COLUMNS = 12, 256, 4096
assert PORTIONS * ROWS * COLUMNS >= 10_000_000
GRID_AND_TIES = (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7)


def portion(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix ``[256, 4096]``: a fifth each Gaussian, over sixty octaves, heavy-tailed, sparse, and on grid points and
    ties next to both sides of every midpoint; block maxima inside the range that is compared."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, COLUMNS, generator=g)
    kind = torch.arange(ROWS) % 5
    octaves = torch.exp2(torch.rand(ROWS, COLUMNS, generator=g) * 60 - 30)
    heavy = torch.sqrt(2 / torch.randn(2, ROWS, COLUMNS, generator=g).square().sum(0))
    sparse = (torch.rand(ROWS, COLUMNS, generator=g) < 0.05).float()
    points = torch.tensor(GRID_AND_TIES)[torch.randint(0, len(GRID_AND_TIES), (ROWS, COLUMNS), generator=g)]
    nudge = 1 + (torch.randint(-1, 2, (ROWS, COLUMNS), generator=g)) * 2.0**-7
    sign = torch.randint(0, 2, (ROWS, COLUMNS), generator=g) * 2 - 1
    scale = torch.exp2(torch.randint(-100, 100, (ROWS, COLUMNS // 32), generator=g).float())
    ties = points * nudge * sign * scale.repeat_interleave(32, dim=1)
    for index, other in enumerate((x * octaves, x * heavy, x * sparse, ties), start=1):
        x = torch.where((kind == index)[:, None], other, x)
    return x.to(dtype)


def canonical(packed: torch.Tensor) -> torch.Tensor:
    codes = unpack_codes(packed, 2 * packed.shape[-1])
    return torch.where(codes == 8, 0, codes)


def by_block(x: torch.Tensor) -> torch.Tensor:
    return x.view(ROWS, COLUMNS // 32, 32)


def rounds_down(x: torch.Tensor) -> torch.Tensor:
    """Blocks whose maximum is within three units in the last place of float32 above ``1.5 * 2**E``. torchao multiplies
    by a rounded 1/6 in float32, which loses that: ``E - 2`` instead of ``ceil(log2(amax / 6))``, and the maximum is
    clipped. No bfloat16 or float16 number lies there."""
    mantissa = by_block(x).float().abs().amax(-1).view(torch.int32) & 0x7FFFFF
    return (mantissa > 0x400000) & (mantissa <= 0x400003)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rule", ROUNDING_RULES)
def test_torchao(rule, dtype):
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    for seed in range(PORTIONS):
        x = portion(seed, dtype)
        scale, codes = mx_tensor.to_mx(
            x, torch.float4_e2m1fn_x2, block_size=32, scaling_mode=ScaleCalculationMode(rule)
        )
        ours = numerics.quantize(x, scale_rule=rule)
        theirs = mx_tensor.to_dtype(codes, scale, torch.float4_e2m1fn_x2, 32, dtype)
        compared = ~rounds_down(x) if rule == "rceil" else torch.ones_like(ours.scale, dtype=torch.bool)
        assert torch.equal(ours.scale[compared], scale.view(torch.uint8)[compared])
        assert torch.equal(
            by_block(canonical(ours.codes))[compared], by_block(canonical(codes.view(torch.uint8)))[compared]
        )
        assert torch.equal(by_block(theirs)[compared], by_block(ours.dequantize())[compared])
        assert (~compared).sum() <= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compressed_tensors(dtype):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
    )
    for seed in range(PORTIONS):
        x = portion(seed, dtype).view(-1, 32)
        x = x[(x != 0).any(-1)]
        blocks = x.view(-1, 1, 32)
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
        theirs = MXFP4PackedCompressor.compress(
            {"weight": x, "weight_scale": scale}, QuantizationScheme(targets=["Linear"], weights=args)
        )
        ours = numerics.quantize(x, scale_rule="even")
        assert torch.equal(ours.scale, theirs["weight_scale"])
        assert torch.equal(canonical(ours.codes), canonical(theirs["weight_packed"]))


@pytest.mark.parametrize("rule", RULES)
def test_ml_dtypes(rule):
    for seed in range(PORTIONS):
        x = portion(seed, torch.bfloat16)
        ours = numerics.quantize(x, scale_rule=rule)
        scale = decode_e8m0(ours.scale, torch.float64).repeat_interleave(32, dim=-1)
        exact = (x.double() / scale).numpy().astype(np.float32)
        codes = exact.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
        np.testing.assert_array_equal(canonical(ours.codes).numpy(), np.where(codes == 8, 0, codes))


def test_the_dequantizer_of_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for seed in range(PORTIONS):
        x = portion(seed, torch.bfloat16)
        ours = numerics.quantize(x)
        blocks = ours.codes.view(1, ROWS, COLUMNS // 32, 16)
        theirs = convert_moe_packed_tensors(blocks, ours.scale.view(1, ROWS, COLUMNS // 32), dtype=torch.bfloat16)
        assert torch.equal(theirs.reshape(COLUMNS, ROWS).T, ours.dequantize())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_the_fast_backend(rule, dtype):
    for seed in range(PORTIONS):
        x = portion(seed, dtype)
        for options in ({}, {"macro_block": 128, "outlier_fallback": 0.5}):
            ours, reference = (f(x, scale_rule=rule, **options) for f in (hf_mxfp4.quantize, numerics.quantize))
            assert torch.equal(ours.codes, reference.codes) and torch.equal(ours.scale, reference.scale)
            assert torch.equal(hf_mxfp4.fake_quantize(x, scale_rule=rule, **options), reference.dequantize())
