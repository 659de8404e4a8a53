# SPDX-License-Identifier: Apache-2.0
"""The contract once more, block by block in numpy, with tiles, selective fallback, importance and every search.

Squared errors are added up as the integers that the contract prescribes, so searches and selections must agree exactly.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
import torch
from tables import RULES

from hf_mxfp4.numerics import fake_quantize, quantize, unpack_codes


GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MIDDLES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
TIE_GOES_UP = np.array([False, True, False, True, False, True, False])  # to the even code


def exponent_of(a: float) -> int:
    return math.frexp(a)[1] - 1


def candidates(amax: float, rule: str) -> list[int]:
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
    return [exponent - 2 + step for step in steps]


def codes_at(z: np.ndarray, exponent: int) -> np.ndarray:
    y = np.abs(z.astype(np.float64))[:, None] / 2.0**exponent
    code = ((y > MIDDLES) | (y == MIDDLES) & TIE_GOES_UP).sum(axis=1)
    return np.where((z < 0) & (code > 0), code + 8, code)


def value_of(codes: np.ndarray, exponent: int) -> np.ndarray:
    return (np.where(codes & 8, -1.0, 1.0) * GRID[codes & 7] * 2.0**exponent).astype(np.float32)


def squares(error: np.ndarray, amax: float, weight: np.ndarray) -> int:
    """Exact integer: in units of 2**-23 of the power of two below ``amax``."""
    assert error.dtype == np.float32
    scaled = error * np.float32(2.0 ** -(exponent_of(amax) if amax else 0))
    return int((scaled * scaled * weight * np.float32(2**23)).astype(np.int64).sum())


def one_pass(z: np.ndarray, rule: str, weight: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    amax = float(np.abs(z).max())
    outcomes = []
    for exponent in candidates(amax, rule):
        codes = codes_at(z, exponent)
        outcomes.append((exponent + 127, codes, value_of(codes, exponent)))
    return min(outcomes, key=lambda outcome: squares(outcome[2] - z, amax, weight))


@dataclass
class Block:
    """Elements of one block or tile; ``where`` indexes the matrix."""

    where: tuple
    x: np.ndarray
    weight: np.ndarray
    divide: np.float32 = np.float32(1)
    multiply: np.float32 = np.float32(1)
    byte: int = 0
    residual_byte: int = 0
    outputs: dict = field(default_factory=dict)

    def scaled(self, divide=1.0, multiply=1.0) -> np.ndarray:
        return self.x * np.float32(divide) / np.float32(multiply)

    def error(self, rule: str, divide=1.0, multiply=1.0) -> np.ndarray:
        _, _, value = one_pass(self.scaled(divide, multiply), rule, self.weight)
        return value / np.float32(divide) * np.float32(multiply) - self.x

    @property
    def amax(self) -> float:
        return float(np.abs(self.x).max())


class Reference:
    def __init__(self, x, rule, macro_block, search, alpha, block_rows, rate, threshold, importance):
        n, k = x.shape
        self.rule, self.alpha = rule, alpha
        weight = np.ones(k, np.float32) if importance is None else (importance / importance.max()).astype(np.float32)
        self.blocks, self.macros = [], np.zeros((n, -(-k // (macro_block or 32))), np.int64)
        for top in range(0, n, block_rows):
            band = []
            for left in range(0, k, 32):
                rows = np.arange(top, min(top + block_rows, n))
                columns = np.arange(left, min(left + 32, k))
                where = np.ix_(rows, columns)
                row_weights = np.broadcast_to(weight[columns], (len(rows), len(columns)))
                band.append(Block(where, x[where].ravel(), row_weights.ravel()))
            self.blocks += band
            if macro_block:
                for i in range(0, len(band), macro_block // 32):
                    group = band[i : i + macro_block // 32]
                    self.macros[top : top + block_rows, i * 32 // macro_block] = self.scale_group(group, search)
        for block in self.blocks:
            self.quantize(block)
        if alpha is not None:
            self.fall_back(rate, threshold)

    def scale_group(self, group: list[Block], search: str) -> int:
        if search == "blockwise":
            byte = 0
            for j, block in enumerate(group):
                errors = [squares(block.error(self.rule, 1, 1 + m / 4), block.amax, block.weight) for m in range(4)]
                best = errors.index(min(errors))
                block.multiply = np.float32(1 + best / 4)
                byte += best << (2 * j)
            return byte
        amax = max(block.amax for block in group)
        if search == "static":
            m8 = (int((np.float32(6) / np.float32(amax)).view(np.uint32)) >> 15) & 0xFF if amax else 0
        else:
            errors = [
                sum(squares(block.error(self.rule, 1 + j / 16), amax, block.weight) for block in group)
                for j in range(16)
            ]
            m8 = 16 * errors.index(min(errors))
        for block in group:
            block.divide = np.float32(1 + m8 / 256)
        return m8

    def quantize(self, block: Block) -> None:
        z = block.scaled(block.divide, block.multiply)
        block.byte, block.outputs["codes"], value = one_pass(z, self.rule, block.weight)
        block.outputs["residual"] = z - value
        block.outputs["value"] = value
        count = squares(z - value, float(np.abs(z).max()), np.ones_like(z))
        factor = np.float32(float(block.divide) ** 2)
        in_x = np.float32(count) / np.float32(2**23) / factor * np.float32(float(block.multiply) ** 2)
        block.outputs["error"] = float(in_x) * 4.0 ** exponent_of(float(np.abs(z).max()) or 1.0)

    def fall_back(self, rate: float | None, threshold: float | None) -> None:
        errors = [block.outputs["error"] for block in self.blocks]
        if rate is None:
            chosen = set(range(len(errors)))
        elif threshold is not None:
            chosen = {i for i, error in enumerate(errors) if error > threshold}
        else:
            count = math.ceil(Fraction(str(rate)) * len(errors))
            order = sorted(range(len(errors)), key=lambda i: (-errors[i], i))
            chosen = {i for i in order[:count] if errors[i] > 0}
        for i, block in enumerate(self.blocks):
            codes, value = np.zeros(block.x.size, np.int64), np.zeros(block.x.size, np.float32)
            if i in chosen:
                residual = block.outputs["residual"]
                block.residual_byte, codes, value = one_pass(residual, self.rule, block.weight)
            block.outputs["residual_codes"] = codes
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


def check(
    x: torch.Tensor,
    rule="rceil",
    macro_block=None,
    search="static",
    alpha=None,
    block_rows=1,
    rate=None,
    threshold=None,
    importance=None,
):
    scheme = dict(
        scale_rule=rule,
        macro_block=macro_block,
        macro_search=search,
        outlier_fallback=alpha,
        block_rows=block_rows,
        fallback_rate=rate,
        fallback_threshold=threshold,
        importance=importance,
    )
    packed, values = quantize(x, **scheme), fake_quantize(x, **scheme)
    n, k = x.shape
    weights = None if importance is None else importance.double().numpy()
    expected = Reference(x.float().numpy(), rule, macro_block, search, alpha, block_rows, rate, threshold, weights)
    assert packed.scale.tolist() == expected.bytes_per_row((n, k), "byte").tolist()
    if macro_block:
        assert packed.macro.tolist() == expected.macros.tolist()
    assert unpack_codes(packed.codes, k).tolist() == expected.gather((n, k), "codes", np.int64).tolist()
    if alpha is not None:
        assert packed.residual_scale.tolist() == expected.bytes_per_row((n, k), "residual_byte").tolist()
        residual_codes = expected.gather((n, k), "residual_codes", np.int64)
        assert unpack_codes(packed.residual_codes, k).tolist() == residual_codes.tolist()
    assert torch.equal(values, torch.from_numpy(expected.values((n, k))).to(x.dtype))
    assert torch.equal(packed.dequantize(), values)


def data(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Gaussian, with a few blocks of other sizes, a zero row and a zero block."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-6, 7, (rows, 1), generator=generator).float())
    x[0, : columns // 2] *= 100
    x[rows // 2] = 0
    x[:, 32:64] *= torch.arange(rows).remainder(2).unsqueeze(1)
    return x


SEARCHES = [(None, "static"), (64, "static"), (64, "dynamic"), (128, "blockwise")]
SEARCH_IDS = ["plain", "static", "dynamic", "blockwise"]


@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("macro", SEARCHES, ids=SEARCH_IDS)
@pytest.mark.parametrize("rule", RULES)
def test_tiles(rule, macro, alpha):
    check(data(37, 70, 1), rule, *macro, alpha, block_rows=32)


@pytest.mark.parametrize("block_rows", [1, 32])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("macro", SEARCHES, ids=SEARCH_IDS)
@pytest.mark.parametrize("rule", ["rceil", "mse"])
def test_exact_share_of_fallback(rule, macro, rate, block_rows):
    rows = 40 if block_rows == 32 else 5
    check(data(rows, 150, 2), rule, *macro, 0.5, block_rows, rate)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0, 50.0, math.inf])
@pytest.mark.parametrize("macro", SEARCHES, ids=SEARCH_IDS)
def test_threshold_of_fallback(macro, threshold):
    check(data(6, 150, 3), "even", *macro, 1.0, 1, 0.3, threshold)


@pytest.mark.parametrize("block_rows", [1, 32])
@pytest.mark.parametrize(
    ("rule", "macro"),
    [("mse", SEARCHES[0]), ("mse", SEARCHES[1])] + [(rule, macro) for rule in RULES for macro in SEARCHES[2:]],
)
def test_importance(rule, macro, block_rows):
    importance = torch.rand(70, generator=torch.Generator().manual_seed(5)) ** 4 * 1e3
    importance[3] = 0
    check(data(34 if block_rows == 32 else 4, 70, 4), rule, *macro, 0.5, block_rows, importance=importance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("macro", SEARCHES, ids=SEARCH_IDS)
def test_narrow_dtypes(dtype, macro):
    x = data(33, 65, 6).clamp(-60, 60).to(dtype)
    check(x, "rceil", *macro, 0.3, 32, 0.4)
