# SPDX-License-Identifier: Apache-2.0
"""The whole numeric contract once more, as plainly as Python can say it, against ``fake_quantize`` and ``quantize``.

Scales, grid rounding and squared errors are exact fractions. Float32 arithmetic (`numpy.float32`) appears only where
the contract has it: the factor, the product with it, the weighted sum of the two passes and the division.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch
from tables import RULES

from hf_mxfp4.numerics import fake_quantize, quantize, unpack_codes


GRID = [Fraction(0), Fraction(1, 2), Fraction(1), Fraction(3, 2), Fraction(2), Fraction(3), Fraction(4), Fraction(6)]
OVERFLOW = Fraction(2) ** 128


def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def exponent_of(a: Fraction) -> int:
    """floor(log2(a)), exactly."""
    exponent = a.numerator.bit_length() - a.denominator.bit_length()
    return exponent if a >= power(exponent) else exponent - 1


def candidate_exponents(amax: Fraction, rule: str) -> list[int]:
    if amax == 0:
        return [-127]
    exponent = exponent_of(amax)
    mantissa = amax / power(exponent)
    candidates = {
        "rceil": [exponent - 2 + (mantissa > Fraction(3, 2))],
        "floor": [exponent - 2],
        "even": [exponent - 2 + (mantissa >= Fraction(7, 4))],
        "mse": [exponent - 2, exponent - 1, exponent - 3],
    }[rule]
    return [min(max(candidate, -127), 127) for candidate in candidates]


def nearest_code(value: Fraction, exponent: int) -> int:
    """Code of the nearest grid value that is finite in float32 at this scale; a tie goes to the even code."""
    scale = power(exponent)
    allowed = [code for code in range(8) if GRID[code] * scale < OVERFLOW]
    code = min(allowed, key=lambda code: (abs(GRID[code] * scale - abs(value)), code % 2))
    return code + 8 if value < 0 and code else code


def decode(code: int, exponent: int) -> Fraction:
    magnitude = GRID[code & 7] * power(exponent)
    return -magnitude if code & 8 else magnitude


def least(errors: list[Fraction], hint: int | None) -> int:
    """Index of the least error, the first one on a tie. Candidates that are equal to within the rounding of a float32
    sum may be ordered either way: there, ``hint`` is followed."""
    best = min(range(len(errors)), key=lambda i: errors[i])
    if hint is not None and errors[hint] != errors[best] and errors[hint] <= errors[best] * (1 + Fraction(1, 2**18)):
        return hint
    return best


def one_pass(z: list[Fraction], rule: str, byte_hint: int | None = None) -> tuple[int, list[int], list[Fraction]]:
    """Scale byte, codes and values of one block."""
    exponents = candidate_exponents(max(abs(value) for value in z), rule)
    outcomes = []
    for exponent in exponents:
        codes = [nearest_code(value, exponent) for value in z]
        values = [decode(code, exponent) for code in codes]
        outcomes.append((exponent + 127, codes, values))
    errors = [sum((v - x) ** 2 for v, x in zip(values, z, strict=True)) for _, _, values in outcomes]
    bytes_ = [byte for byte, _, _ in outcomes]
    return outcomes[least(errors, bytes_.index(byte_hint) if byte_hint in bytes_ else None)]


def macro_candidates(amax: np.float32, search: str) -> list[int]:
    if not amax < np.float32(2.0**127):
        return [0]
    if search == "dynamic":
        return [16 * candidate for candidate in range(16)]
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(6) / amax
    return [(int(inverse.view(np.uint32)) >> 15) & 0xFF]


class Reference:
    """Codes, bytes and float32 values of one row."""

    def __init__(self, row, seen, *, scale_rule, macro_block=None, macro_search="static", outlier_fallback=None):
        self.rule, self.search, self.alpha, self.seen = scale_rule, macro_search, outlier_fallback, seen
        self.codes, self.scale, self.macro, self.values = [], [], [], []
        self.residual_codes, self.residual_scale = [], []
        size = {None: 32, "row": len(row)}.get(macro_block, macro_block)
        for start in range(0, len(row), size):
            self.add_macro_block([np.float32(x) for x in row[start : start + size]], macro_block is not None)

    def add_macro_block(self, x: list[np.float32], scaled: bool) -> None:
        m8 = None
        if scaled:
            candidates = macro_candidates(max(abs(value) for value in x), self.search)
            errors = [self.search_error(x, m8) for m8 in candidates] if len(candidates) > 1 else [Fraction()]
            hint = self.seen["macro"][len(self.macro)]
            m8 = candidates[least(errors, candidates.index(hint) if hint in candidates else None)]
            self.macro.append(m8)
        for start in range(0, len(x), 32):
            self.add_block(x[start : start + 32], m8)

    def search_error(self, x: list[np.float32], m8: int) -> Fraction:
        factor = np.float32(1 + m8 / 256)
        total = Fraction()
        for start in range(0, len(x), 32):
            block = x[start : start + 32]
            _, _, values = one_pass([Fraction(float(factor * value)) for value in block], self.rule)
            for value, original in zip(values, block, strict=True):
                total += (Fraction(float(np.float32(float(value)) / factor)) - Fraction(float(original))) ** 2
        return total

    def add_block(self, x: list[np.float32], m8: int | None) -> None:
        factor = np.float32(1 if m8 is None else 1 + m8 / 256)
        z = [Fraction(float(factor * value)) for value in x]
        byte, codes, values = one_pass(z, self.rule, self.seen["scale"][len(self.scale)])
        self.scale.append(byte)
        self.codes += codes
        out = [np.float32(float(value)) for value in values]
        if self.alpha is not None:
            residual = [a - b for a, b in zip(z, values, strict=True)]
            assert all(Fraction(float(np.float32(float(r)))) == r for r in residual), "residuals are float32 numbers"
            byte, codes, values = one_pass(residual, self.rule, self.seen["residual_scale"][len(self.residual_scale)])
            self.residual_scale.append(byte)
            self.residual_codes += codes
            out = [a + np.float32(self.alpha) * np.float32(float(b)) for a, b in zip(out, values, strict=True)]
        self.values += [value / factor for value in out] if m8 is not None else out


def check_against_reference(x: torch.Tensor, **scheme) -> None:
    """``x`` is [rows, K]."""
    packed = quantize(x, **scheme)
    values = fake_quantize(x, **scheme)
    largest = torch.finfo(x.dtype).max

    def bytes_of(tensor, row):
        return None if tensor is None else tensor[row].tolist()

    for row in range(x.shape[0]):
        seen = {name: bytes_of(getattr(packed, name), row) for name in ("scale", "macro", "residual_scale")}
        reference = Reference(x[row].float().tolist(), seen, **scheme)
        assert reference.scale == seen["scale"]
        assert reference.codes == unpack_codes(packed.codes[row], x.shape[1]).tolist()
        if packed.macro is not None:
            assert reference.macro == seen["macro"]
        if packed.residual_codes is not None:
            assert reference.residual_scale == seen["residual_scale"]
            assert reference.residual_codes == unpack_codes(packed.residual_codes[row], x.shape[1]).tolist()
        expected = torch.tensor(np.array(reference.values, np.float32)).clamp(-largest, largest).to(x.dtype)
        assert torch.equal(values[row], expected)


def gaussian(rows: int, columns: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


def wide(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-20, 20, (rows, columns), generator=generator).float()
    return torch.randn(rows, columns, generator=generator) * torch.exp2(exponent)


def ties(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-31, 32, (rows, columns), generator=generator) / 4


MACROS = [
    pytest.param({}, id="plain"),
    pytest.param({"macro_block": 32}, id="mbs32"),
    pytest.param({"macro_block": 64}, id="mbs64"),
    pytest.param({"macro_block": "row"}, id="mbs-row"),
]
FALLBACKS = [pytest.param(alpha, id=f"alpha-{alpha}") for alpha in (None, 0.5, 1.0, 0.3)]


@pytest.mark.parametrize("alpha", FALLBACKS)
@pytest.mark.parametrize("macro", MACROS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("data", [gaussian, wide, ties], ids=lambda function: function.__name__)
def test_static(data, rule, macro, alpha):
    check_against_reference(data(1, 75, 3), scale_rule=rule, outlier_fallback=alpha, **macro)


@pytest.mark.parametrize("alpha", FALLBACKS[:2])
@pytest.mark.parametrize("macro_block", [32, 64, "row"], ids=lambda size: f"mbs{size}")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("data", [gaussian, wide], ids=lambda function: function.__name__)
def test_dynamic(data, rule, macro_block, alpha):
    scheme = {"macro_block": macro_block, "macro_search": "dynamic", "outlier_fallback": alpha}
    check_against_reference(data(1, 70, 5), scale_rule=rule, **scheme)


@pytest.mark.parametrize("macro_block", [64, 128, 256], ids=lambda size: f"mbs{size}")
@pytest.mark.parametrize("rule", RULES)
def test_static_over_several_macro_blocks(rule, macro_block):
    check_against_reference(gaussian(1, 300, 8), scale_rule=rule, macro_block=macro_block, outlier_fallback=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_dynamic_over_several_macro_blocks(rule):
    check_against_reference(gaussian(1, 300, 8), scale_rule=rule, macro_block=128, macro_search="dynamic")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("alpha", FALLBACKS[:3])
@pytest.mark.parametrize("macro_block", [None, 128], ids=lambda size: f"mbs{size}")
@pytest.mark.parametrize("rule", RULES)
def test_narrow_dtypes_are_computed_on_in_float32_and_rounded_once(dtype, rule, macro_block, alpha):
    x = gaussian(2, 70, 11).to(dtype)
    check_against_reference(x, scale_rule=rule, macro_block=macro_block, outlier_fallback=alpha)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("alpha", FALLBACKS[:3])
@pytest.mark.parametrize("macro_block", [None, 128], ids=lambda size: f"mbs{size}")
@pytest.mark.parametrize("rule", RULES)
def test_top_of_the_range(dtype, rule, macro_block, alpha):
    fraction = torch.rand(4, 40, generator=torch.Generator().manual_seed(13)) * 2 - 1
    fraction[1:, 0] = torch.tensor([1.0, 0.9, 0.6])
    x = (fraction.double() * torch.finfo(dtype).max).to(dtype)
    with np.errstate(over="ignore"):
        check_against_reference(x, scale_rule=rule, macro_block=macro_block, outlier_fallback=alpha)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("macro_block", [None, 32], ids=lambda size: f"mbs{size}")
@pytest.mark.parametrize("steps", [1, 3, 40, 1000], ids=lambda steps: f"up-to-{steps}-smallest")
def test_bottom_of_the_range(dtype, rule, macro_block, steps):
    """Multiples of the smallest subnormal number."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    multiple = torch.randint(-steps, steps + 1, (2, 40), generator=torch.Generator().manual_seed(17))
    x = (multiple.double() * smallest).to(dtype)
    assert x.any()
    check_against_reference(x, scale_rule=rule, macro_block=macro_block)
