# SPDX-License-Identifier: Apache-2.0
"""The whole numeric contract once more, block by block in numpy, against ``fake_quantize`` and ``quantize``.

Blocks and tiles, every search, fallback, and both ends of the range. Elements are rounded in
float64, where the quotients by powers of two are exact; float32 appears only where the contract has it. Squared errors
are added up as the integers that the contract prescribes, so searches must agree exactly.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
import torch
from tables import MACROS, RULES, pairwise_params

from hf_mxfp4.numerics import QuantScheme, fake_quantize, quantize, unpack_codes


GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MIDDLES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
TIE_GOES_UP = np.array([False, True, False, True, False, True, False])  # to the even code


def exponent_of(a: float) -> int:
    """floor(log2(a)), exactly."""
    return math.frexp(a)[1] - 1


def candidates(amax: float, rule: str) -> list[int]:
    """Exponents of the scales that a rule chooses from."""
    if amax == 0:
        return [-127]
    exponent = exponent_of(amax)
    mantissa = Fraction(amax) / Fraction(2) ** exponent
    steps = {
        "rceil": [mantissa > Fraction(3, 2)],
        "floor": [0],
        "even": [mantissa >= Fraction(7, 4)],
        "mse": [0, 1, -1],
    }[rule]
    return [min(max(exponent - 2 + step, -127), 127) for step in steps]


def codes_at(z: np.ndarray, exponent: int) -> np.ndarray:
    """Codes of the nearest grid values that are finite in float32 at this scale; a tie goes to the even code."""
    y = np.abs(z.astype(np.float64))[:, None] / 2.0**exponent
    code = ((y > MIDDLES) | (y == MIDDLES) & TIE_GOES_UP).sum(axis=1)
    code = np.minimum(code, (GRID * 2.0**exponent < 2.0**128).sum() - 1)
    return np.where((z < 0) & (code > 0), code + 8, code)


def value_of(codes: np.ndarray, exponent: int) -> np.ndarray:
    return (np.where(codes & 8, -1.0, 1.0) * GRID[codes & 7] * 2.0**exponent).astype(np.float32)


def squares(error: np.ndarray, amax: float) -> int:
    """Exact integer: in units of 2**-23 of the power of two below ``amax``."""
    assert error.dtype == np.float32
    scaled = error * np.float32(2.0 ** -min(max(exponent_of(amax), -127), 126))
    return int((scaled * scaled * np.float32(2**23)).astype(np.int64).sum())


def one_pass(z: np.ndarray, rule: str) -> tuple[int, np.ndarray, np.ndarray]:
    """Scale byte, codes and values of one block."""
    amax = float(np.abs(z).max())
    outcomes = []
    for exponent in candidates(amax, rule):
        codes = codes_at(z, exponent)
        outcomes.append((exponent + 127, codes, value_of(codes, exponent)))
    return min(outcomes, key=lambda outcome: squares(outcome[2] - z, amax))


@dataclass
class Block:
    """Elements of one block or tile; ``where`` indexes the matrix."""

    where: tuple
    x: np.ndarray
    divide: np.float32 = np.float32(1)
    multiply: np.float32 = np.float32(1)
    byte: int = 0
    residual_byte: int = 0
    outputs: dict = field(default_factory=dict)

    def scaled(self, divide=1.0, multiply=1.0) -> np.ndarray:
        return self.x * np.float32(divide) / np.float32(multiply)

    def error(self, rule: str, divide=1.0, multiply=1.0) -> np.ndarray:
        _, _, value = one_pass(self.scaled(divide, multiply), rule)
        with np.errstate(over="ignore"):
            restored = value / np.float32(divide) * np.float32(multiply)
        return restored.clip(-np.finfo(np.float32).max, np.finfo(np.float32).max) - self.x

    @property
    def amax(self) -> float:
        return float(np.abs(self.x).max())


class Reference:
    """Bytes, codes and values of a matrix of float32 numbers."""

    def __init__(self, x, rule, macro_block, search, alpha, block_rows):
        n, k = x.shape
        self.rule = rule
        self.alpha = alpha
        per_factor = {None: 1, "row": -(-k // 32)}.get(macro_block) or macro_block // 32
        self.blocks, self.macros = [], np.zeros((n, -(-k // (32 * per_factor))), np.int64)
        for top in range(0, n, block_rows):
            band = []
            for left in range(0, k, 32):
                rows = np.arange(top, min(top + block_rows, n))
                columns = np.arange(left, min(left + 32, k))
                where = np.ix_(rows, columns)
                band.append(Block(where, x[where].ravel()))
            self.blocks += band
            if macro_block:
                for i in range(0, len(band), per_factor):
                    byte = self.scale_group(band[i : i + per_factor], search)
                    self.macros[top : top + block_rows, i // per_factor] = byte
        for block in self.blocks:
            self.quantize(block)
        if alpha is not None:
            self.fall_back()

    def scale_group(self, group: list[Block], search: str) -> int:
        if levels := {"block_mantissas": 4, "block_mantissas_fp8": 3}.get(search):
            byte = 0
            for j, block in enumerate(group):
                errors = [squares(block.error(self.rule, 1, 1 + m / 4), block.amax) for m in range(levels)]
                best = errors.index(min(errors))
                block.multiply = np.float32(1 + best / 4)
                byte += best << (2 * j)
            return byte
        amax = max(block.amax for block in group)
        if not amax < 2.0**127:
            m8 = 0
        elif search == "static":
            with np.errstate(divide="ignore", over="ignore"):
                m8 = (int((np.float32(6) / np.float32(amax)).view(np.uint32)) >> 15) & 0xFF
        else:
            errors = [sum(squares(block.error(self.rule, 1 + j / 16), amax) for block in group) for j in range(16)]
            m8 = 16 * errors.index(min(errors))
        for block in group:
            block.divide = np.float32(1 + m8 / 256)
        return m8

    def quantize(self, block: Block) -> None:
        z = block.scaled(block.divide, block.multiply)
        block.byte, block.outputs["codes"], value = one_pass(z, self.rule)
        block.outputs["residual"] = z - value
        assert (block.outputs["residual"] == z.astype(np.float64) - value).all(), "residuals are float32 numbers"
        block.outputs["value"] = value

    def fall_back(self) -> None:
        for block in self.blocks:
            block.residual_byte, codes, value = one_pass(block.outputs["residual"], self.rule)
            block.outputs["residual_codes"] = codes
            with np.errstate(over="ignore"):
                block.outputs["value"] = block.outputs["value"] + np.float32(self.alpha) * value

    def gather(self, shape, name: str, dtype) -> np.ndarray:
        out = np.zeros(shape, dtype)
        for block in self.blocks:
            out[block.where] = block.outputs[name].reshape(out[block.where].shape)
        return out

    def values(self, shape) -> np.ndarray:
        for block in self.blocks:
            block.outputs["out"] = block.outputs["value"] / block.divide * block.multiply
        return self.gather(shape, "out", np.float32)

    def bytes_per_row(self, shape, name: str) -> np.ndarray:
        out = np.zeros((shape[0], -(-shape[1] // 32)), np.int64)
        for block in self.blocks:
            rows, columns = block.where
            out[rows.ravel(), columns.ravel()[0] // 32] = getattr(block, name)
        return out


def check(x, rule, macro=(None, "static"), alpha=None, block_rows=1):
    """``x`` is [rows, K]."""
    scheme = vars(QuantScheme(rule, *macro, alpha, "nearest", block_rows))
    packed = quantize(x, **scheme)
    values = fake_quantize(x, **scheme)
    n, k = x.shape
    expected = Reference(x.float().numpy(), rule, *macro, alpha, block_rows)
    assert packed.scale.tolist() == expected.bytes_per_row((n, k), "byte").tolist()
    if macro[0]:
        assert packed.macro.tolist() == expected.macros.tolist()
    assert unpack_codes(packed.codes, k).tolist() == expected.gather((n, k), "codes", np.int64).tolist()
    if alpha is not None:
        assert packed.residual_scale.tolist() == expected.bytes_per_row((n, k), "residual_byte").tolist()
        residual_codes = expected.gather((n, k), "residual_codes", np.int64)
        assert unpack_codes(packed.residual_codes, k).tolist() == residual_codes.tolist()
    largest = torch.finfo(x.dtype).max
    assert torch.equal(values, torch.from_numpy(expected.values((n, k))).clamp(-largest, largest).to(x.dtype))
    assert torch.equal(packed.dequantize(), values)


def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Gaussian rows of several sizes, one row full of ties, one over forty octaves, one of zeros, and a few blocks that
    are larger or zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-6, 7, (rows, 1), generator=generator).float())
    x[0, : columns // 2] *= 100
    x[1] = torch.randint(-31, 32, (columns,), generator=generator) / 4
    x[:, 32:64] *= torch.arange(rows).remainder(2).unsqueeze(1)
    x[2] *= torch.exp2(torch.randint(-20, 20, (columns,), generator=generator).float())
    x[rows // 2 + 1] = 0
    return x


def rows_of(block_rows: int) -> int:
    return 4 if block_rows == 1 else 37


SEARCHES = [(None, "static"), (64, "static"), (64, "dynamic"), (128, "block_mantissas"), (128, "block_mantissas_fp8")]
ALPHAS = [None, 0.5, 1.0, 0.3]


@pytest.mark.parametrize(("rule", "macro", "alpha", "block_rows"), pairwise_params(RULES, MACROS, ALPHAS, (1, 32)))
def test_schemes(rule, macro, alpha, block_rows):
    check(matrix(rows_of(block_rows), 70, 1), rule, macro, alpha, block_rows)


def test_rows_of_any_length():
    for macro in ((128, "static"), (256, "static"), (128, "dynamic"), (128, "block_mantissas")):
        for length in (1, 2, 31, 33, 300):
            check(matrix(3, 300, 8)[:1, :length], "even", macro, 0.5)


@pytest.mark.parametrize(
    ("dtype", "rule", "macro", "alpha"), pairwise_params([torch.bfloat16, torch.float16], RULES, SEARCHES, ALPHAS)
)
def test_narrow_dtypes_are_computed_on_in_float32_and_rounded_once(dtype, rule, macro, alpha):
    x = matrix(33, 65, 6).clamp(-60, 60).to(dtype)
    check(x, rule, macro, alpha, 32)
    check(x[:5], rule, macro, alpha)


@pytest.mark.parametrize(
    ("dtype", "rule", "macro", "alpha"),
    pairwise_params([torch.float32, torch.bfloat16, torch.float16], RULES, MACROS, ALPHAS[:3]),
)
def test_ends_of_the_range(dtype, rule, macro, alpha):
    """Rows up to the largest number, and rows of a few, dozens or hundreds of the smallest subnormal number."""
    generator = torch.Generator().manual_seed(13)
    fraction = torch.rand(4, 40, generator=generator).double() * 2 - 1
    fraction[1:, 0] = torch.tensor([1.0, 0.9, 0.6])
    limits = torch.finfo(dtype)
    multiples = [torch.randint(-steps, steps + 1, (2, 40), generator=generator) for steps in (1, 3, 40, 1000)]
    smallest = torch.cat(multiples).double() * limits.smallest_normal * limits.eps
    x = torch.cat((fraction * limits.max, smallest)).to(dtype)
    assert x.any(dim=1).all()
    check(x, rule, macro, alpha)
