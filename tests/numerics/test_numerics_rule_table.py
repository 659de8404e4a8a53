# SPDX-License-Identifier: Apache-2.0
"""Every bfloat16 number as a block maximum: scale bytes by the bit tricks of the contract against exact definitions."""

import math

import numpy as np
import pytest
import torch
from tables import ROUNDING_RULES, RULES

from hf_mxfp4.numerics import ScaleRule, quantize, scale_from_amax


GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
PATTERNS = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
NON_NEGATIVE = PATTERNS[: 2**15]


def exact_exponent(a: float, rule: str) -> int:
    """The rule in words. Of bfloat16 numbers, all of this arithmetic is exact in float64."""
    below = math.frexp(a)[1] - 1  # the largest power of two that is not above a
    if rule == "rceil":  # the least scale that does not clip: 6 * 2**e >= a
        exponent = below - 3
        while 6 * 2.0**exponent < a:
            exponent += 1
        return exponent
    if rule == "even":  # a rounded to one mantissa bit, half up: 1.75 and above belong to the next power of two
        halves = math.floor(a / 2.0**below * 2 + 0.5)
        return below - 2 + (halves == 4)
    return below - 2


def exact_byte(value: float, rule: str) -> int:
    if not math.isfinite(value):
        return 255
    if value == 0:
        return 0
    return min(max(exact_exponent(value, rule) + 127, 0), 254)


@pytest.fixture(scope="module")
def table():
    """Bytes of all non-negative patterns, by rule."""
    values = NON_NEGATIVE.double().tolist()
    return {rule: torch.tensor([exact_byte(value, rule) for value in values]) for rule in ROUNDING_RULES}


@pytest.mark.parametrize("rule", ROUNDING_RULES)
def test_scale_of_every_maximum(rule, table):
    byte = scale_from_amax(NON_NEGATIVE.float(), ScaleRule(rule))
    assert torch.equal(byte.long(), table[rule])


@pytest.mark.parametrize("rule", ROUNDING_RULES)
def test_scale_of_every_pattern_as_the_largest_of_a_block(rule, table):
    """Both signs and all NaN; the other elements are fractions of it."""
    x = blocks_with_maximum(PATTERNS)
    assert torch.equal(x.abs().amax(dim=1).nan_to_num(1e30), PATTERNS.abs().nan_to_num(1e30))
    byte = quantize(x, scale_rule=rule).scale.flatten().long()
    assert torch.equal(byte, table[rule].repeat(2))


def test_the_rules_differ_where_they_should(table):
    mantissa = NON_NEGATIVE.view(torch.int16).int() & 0x7F  # in 128ths above 1
    exponent = NON_NEGATIVE.view(torch.int16).int() >> 7
    usual = (exponent >= 3) & (exponent < 255)
    assert torch.equal((table["rceil"] - table["floor"] == 1)[usual], (mantissa > 64)[usual])
    assert torch.equal((table["even"] - table["floor"] == 1)[usual], (mantissa >= 96)[usual])
    assert usual.sum() == 252 * 128
    assert [table[rule].max() for rule in ROUNDING_RULES] == [255] * 3
    finite = {rule: table[rule][exponent < 255] for rule in ROUNDING_RULES}
    assert [int(finite[rule].max()) for rule in ROUNDING_RULES] == [253, 252, 253]


def blocks_with_maximum(largest: torch.Tensor) -> torch.Tensor:
    """One block of 32 bfloat16 numbers for each, with it somewhere inside. In every other block the rest is about a
    16th of it: half a step of the usual scale, worth clipping the largest for."""
    generator = torch.Generator().manual_seed(0)
    fraction = torch.rand(len(largest), 32, generator=generator) * 2 - 1
    position = torch.randint(0, 32, (len(largest), 1), generator=generator)
    fraction[::2] = fraction[::2].sign() * 0.0625 + fraction[::2] / 128
    fraction.scatter_(1, position, 1.0)
    x = (fraction.double() * largest.double().unsqueeze(1)).to(torch.bfloat16)
    return torch.where(torch.arange(32) == position, largest.unsqueeze(1), torch.where(x.isnan(), 0.0, x))


def integer_error(x: np.ndarray, amax: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """Sum of squares at scale ``2**exponent`` as the contract adds it up; ``x`` is [blocks, 32], float64."""
    scale = np.exp2(exponent.astype(np.float64))[:, None]
    error = np.full(x.shape, np.inf)
    for magnitude in GRID:
        represented = magnitude * scale
        distance = np.abs(np.abs(x) - represented)
        finite = represented <= torch.finfo(torch.float32).max
        error = np.where(finite, np.minimum(error, distance), error)
    unit = np.exp2(-np.clip(np.floor(np.log2(amax)), -127, 126))[:, None]
    scaled = (error * unit).astype(np.float32)
    assert (scaled.astype(np.float64) == error * unit).all(), "errors of bfloat16 numbers are exact"
    return ((scaled * scaled) * np.float32(2**23)).astype(np.int64).sum(axis=1)


def test_mse_is_the_best_of_three_for_every_maximum():
    largest = PATTERNS[PATTERNS.isfinite() & (PATTERNS != 0)]
    blocks = blocks_with_maximum(largest)
    byte = quantize(blocks, scale_rule="mse").scale.flatten().numpy()
    x = blocks.double().numpy()
    amax = largest.double().abs().numpy()
    first = np.frexp(amax)[1] - 1 - 2
    candidates = [np.clip(first + offset, -127, 127) for offset in (0, 1, -1)]
    errors = np.stack([integer_error(x, amax, exponent) for exponent in candidates])
    expected = np.stack(candidates)[errors.argmin(axis=0), np.arange(len(amax))] + 127
    assert (byte == expected).all()
    chosen = np.bincount(errors.argmin(axis=0), minlength=3)
    assert (chosen > 0.001 * len(amax)).all(), f"every candidate wins somewhere: {chosen}"


@pytest.mark.parametrize("rule", RULES)
def test_zeros_and_what_is_not_finite(rule):
    special = PATTERNS[~PATTERNS.isfinite() | (PATTERNS == 0)]
    assert len(special) == 2 * 128 + 2
    packed = quantize(blocks_with_maximum(special), scale_rule=rule)
    expected = torch.where(special == 0, 0, 255)
    assert torch.equal(packed.scale.flatten().long(), expected.long())
    assert (packed.codes == 0).all()
    assert torch.equal(packed.dequantize().isnan().all(dim=1), special != 0)
