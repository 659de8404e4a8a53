# SPDX-License-Identifier: Apache-2.0
"""Two mantissa bits per block in the byte of a macro block."""

import math

import numpy as np
import pytest
import torch

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.numerics import E2M1_MAGNITUDES, fake_quantize, quantize
from hf_mxfp4.numerics.macro import mantissa_factor, pack_mantissas, unpack_mantissas


BLOCKWISE = {"macro_block": 128, "macro_search": "blockwise"}
OFFSETS = {"rceil": None, "floor": (0,), "mse": (0, 1, -1)}


def gaussian(rows=256, columns=512, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.rand(rows, 1, generator=generator))
    return torch.randn(rows, columns, generator=generator) * spread


def to_grid(y):
    """Nearest E2M1 value in plain Python, ties to the even code."""
    magnitude = min(abs(y), 6.0)
    code = min(range(8), key=lambda c: (abs(E2M1_MAGNITUDES[c] - magnitude), c % 2))
    return math.copysign(E2M1_MAGNITUDES[code], y)


def reference_block(block, rule):
    """Least squared error over mantissas (and exponents, for mse), by brute force in float64."""
    best = None
    for m in range(4):
        g = np.float32(1 + m / 4)
        z = [float(np.float32(v) / g) for v in block]
        exponent = math.frexp(max(abs(v) for v in z))[1] - 1
        if rule == "rceil":
            candidates = [math.ceil(math.log2(max(abs(v) for v in z) / 6))]
        else:
            candidates = [exponent - 2 + offset for offset in OFFSETS[rule]]
        errors = []
        for e in candidates:
            values = [to_grid(v / 2.0**e) * 2.0**e * float(g) for v in z]
            errors.append((sum((a - b) ** 2 for a, b in zip(values, block, strict=True)), values))
        error, values = min(errors, key=lambda pair: pair[0])
        if best is None or error < best[0] * (1 - 1e-6):
            best = (error, values)
    return best[1]


@pytest.mark.parametrize("rule", ["rceil", "floor", "mse"])
def test_equals_a_brute_force_search(rule):
    x = gaussian(rows=4, columns=128)
    expected = [[v for b in range(4) for v in reference_block(row[32 * b : 32 * b + 32], rule)] for row in x.tolist()]
    assert torch.equal(fake_quantize(x, scale_rule=rule, **BLOCKWISE), torch.tensor(expected))


def test_literal_block_mantissas_and_bytes():
    """Blocks that are the grid times 1, 1.25, 1.5 and 1.75 are exact, and the byte says so: 0b11_10_01_00."""
    grid = torch.tensor([0.5, -1.0, 1.5, -2.0, 3.0, -4.0, 6.0, 0.0]).repeat(4)
    x = torch.cat([grid * g for g in (1.0, 1.25, 1.5, 1.75)])
    packed = quantize(x, **BLOCKWISE)
    assert packed.macro.tolist() == [0b11100100]
    assert packed.scale.tolist() == [127, 127, 127, 127]
    assert torch.equal(packed.dequantize(), x)


def test_packing_all_bytes():
    every = torch.arange(256, dtype=torch.uint8)
    fields = unpack_mantissas(every)
    assert fields[:8].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert torch.equal(pack_mantissas(fields).to(torch.uint8), every)
    assert mantissa_factor(torch.arange(4)).tolist() == [1.0, 1.25, 1.5, 1.75]


def test_values_are_exact_in_bfloat16():
    quantized = fake_quantize(gaussian(), **BLOCKWISE)
    assert torch.equal(quantized.bfloat16().float(), quantized)


def test_a_bad_block_spoils_itself_alone():
    x = gaussian(1, 256)
    clean = fake_quantize(x, **BLOCKWISE)
    for bad in (math.nan, math.inf):
        spoiled = x.clone()
        spoiled[0, 40] = bad
        result = fake_quantize(spoiled, **BLOCKWISE)
        assert result[0, 32:64].isnan().all()
        keep = torch.ones(256, dtype=torch.bool)
        keep[32:64] = False
        assert torch.equal(result[0, keep], clean[0, keep])
    assert quantize(spoiled, **BLOCKWISE).macro[0, 0] & 0b1100 == 0


@pytest.mark.parametrize("size", [32, 64, 256, "row"])
def test_other_macro_sizes_are_refused(size):
    with pytest.raises(ValueError, match="'blockwise' needs macro_block=128"):
        fake_quantize(torch.ones(2, 256), macro_block=size, macro_search="blockwise")
    with pytest.raises(ValueError, match="'blockwise' needs macro_block=128"):
        MXFP4RLConfig(macro_block=size, macro_search="blockwise")


def test_both_operands_of_a_model_get_it():
    config = MXFP4RLConfig(macro_search="blockwise")
    assert config.weight_scheme.macro_search == config.activation_scheme.macro_search == "blockwise"
    assert MXFP4RLConfig.from_dict(config.to_dict()) == config


def test_a_candidate_that_leaves_float32_counts_as_the_largest_number():
    # 0.97 * 2**128: with mantissa 2 it rounds to 6 * 2**125 * 1.5 = 1.125 * 2**128, stored as the largest float, error
    # 0.03; with mantissa 1 to 3 * 2**126 * 1.25 = 0.9375 * 2**128, error 0.0325.
    x = torch.full((1, 128), 0.97 * 2.0**128, dtype=torch.float64).float()
    packed = quantize(x, macro_block=128, macro_search="blockwise")
    assert packed.macro.tolist() == [[0b10101010]]
    assert torch.equal(packed.dequantize(), torch.full_like(x, torch.finfo(torch.float32).max))
    # 0.95: the error of mantissa 1 is 0.0125, that of the largest float 0.05.
    x = torch.full((1, 128), 0.95 * 2.0**128, dtype=torch.float64).float()
    packed = quantize(x, macro_block=128, macro_search="blockwise")
    assert packed.macro.tolist() == [[0b01010101]]
    assert packed.dequantize()[0, 0].item() == 0.9375 * 2.0**128
