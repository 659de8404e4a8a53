# SPDX-License-Identifier: Apache-2.0
"""Compares the kernels for block mantissas, of two elements an instruction, with the eager definition, bit for bit;
prints a JSON report.

TRITON_INTERPRET=1 python run_mantissas.py few
TRITON_INTERPRET=1 python run_mantissas.py all      every magnitude as the largest of its block, more ties among factors
TRITON_INTERPRET=1 python run_mantissas.py codes [all]      with mantissas that are given, all numbers below the largest
python run_mantissas.py all cuda                    compiled, on a GPU
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from run_interpreted import adversarial_rows
from run_pairs import magnitudes, near_the_largest
from run_quantize import PARTS, same

import mxfp4_kernels
from hf_mxfp4 import numerics
from hf_mxfp4.numerics.blocks import _over_scale
from hf_mxfp4.numerics.formats import e2m1
from hf_mxfp4.numerics.formats.e8m0 import E8M0_NAN, ScaleRule, scale_from_amax
from hf_mxfp4.numerics.macro import unpack_mantissas
from mxfp4_kernels.common import plan
from mxfp4_kernels.quantization import launch
from mxfp4_kernels.quantization.mantissa_rounding import (
    codes_of_rounded,
    largest_of_blocks,
    load,
    magnitudes_of_blocks,
    numbers,
    over_power_of_two,
    rounded,
    scales,
)


WHAT, DEVICE = sys.argv[1], "cuda" if "cuda" in sys.argv else "cpu"
SCHEME = {"scale_rule": "even", "macro_block": 128, "macro_search": "blockwise"}
BF16 = torch.bfloat16


def of_bits(bits: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Rows of one macro block of numbers with the given bits of their magnitudes, and random signs."""
    signs = torch.randint(0, 2, bits.shape, generator=rng) << 15
    bits = bits | signs
    return (bits - ((bits >> 15) << 16)).to(torch.int16).view(BF16).view(-1, 128)


def few_digits(n_blocks: int, digits: int, share: float, rng: torch.Generator) -> torch.Tensor:
    """Blocks of zeros and of a ``share`` of numbers with few digits next to each other: errors of several factors are
    alike, and many numbers are halfway between neighbours."""
    exponents = torch.randint(8, 255, (n_blocks, 1), generator=rng) - torch.randint(0, 6, (n_blocks, 32), generator=rng)
    bits = (exponents << 7) | (torch.randint(0, 1 << digits, (n_blocks, 32), generator=rng) << (7 - digits))
    return of_bits(torch.where(torch.rand(bits.shape, generator=rng) < share, bits, 0), rng)


def between(least: int, most: int, n_blocks: int, rng: torch.Generator) -> torch.Tensor:
    """Magnitudes with bits in a range, a third of them anywhere below."""
    bits = torch.randint(least, most, (n_blocks, 32), generator=rng)
    return of_bits(torch.where(torch.rand(bits.shape, generator=rng) < 1 / 3, bits % (least + 1), bits), rng)


def cases() -> Iterator[tuple[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(29)
    whole, n = WHAT == "all", 1024 if WHAT == "all" else 64
    some = magnitudes()
    if not whole:
        some = some[torch.randperm(len(some), generator=rng)[:400]].sort().values
    yield "maxima", near_the_largest(some[: len(some) // 4 * 4], rng).view(-1, 128)
    for number in range(10 if whole else 2):
        yield f"kinds {number}", adversarial_rows((10, 512), BF16, number, rng)
    for digits in (1, 2, 3, 4, 7):
        yield f"{digits} digits", few_digits(n, digits, 0.15, rng)
    yield "subnormal numbers", between(0, 0x0300, n, rng)
    # Where the definition cuts values.
    yield "the largest", between(0x7E00, 0x7F80, n, rng)
    yield "the very largest", between(0x7F50, 0x7F80, n, rng)
    for largest in (0x7F60, 0x7F70, 0x7F71):
        bits = torch.randint(0x7C00, largest, (n, 32), generator=rng)
        bits = torch.where(torch.rand(bits.shape, generator=rng) < 0.1, bits, 0)
        bits[:, 5] = largest
        yield f"the largest is {largest:x}", of_bits(bits, rng)
    yield "zeros, and one", -torch.eye(3, 128).bfloat16()


def left_to_the_other() -> Iterator[tuple[str, torch.Tensor, dict]]:
    """What the generic kernel has."""
    rng = torch.Generator().manual_seed(31)
    wide = adversarial_rows((3, 512), BF16, 0, rng)
    yield "a row stride", wide[:, :256], SCHEME
    yield "parts of macro blocks", wide[:, :192].contiguous(), SCHEME
    yield "from the middle of a word", wide.view(-1)[1:129], SCHEME


def compare() -> dict:
    report, mismatches, run = Counter(cases=0, elements=0, nan_blocks=0, launches=0), [], launch._launch_of_mantissas

    def counted(*arguments):
        report["launches"] += 1
        run(*arguments)

    launch._launch_of_mantissas = counted
    if DEVICE == "cpu":
        # Fewer, larger programs are faster to interpret; not one for all.
        launch.MANTISSAS_TILE = plan.MANTISSAS_TILE * (64 if WHAT == "all" else 8)
    found = [(label, x.view(-1, 128)) for label, x in cases()]
    labels, x = [label for label, rows in found for _ in rows], torch.cat([rows for _, rows in found])
    jobs = [("all", x, SCHEME | {"outlier_fallback": 1.0}), ("some", x[::7].contiguous(), SCHEME)]
    jobs += [(label, some, scheme) for label, some, scheme in left_to_the_other()]
    for label, some, options in jobs:
        expected = numerics.quantize(some, **options)
        packed = mxfp4_kernels.quantize(some.to(DEVICE), **options)
        pairs = {part: (getattr(packed, part), getattr(expected, part)) for part in PARTS}
        values, pairs["values"] = None, (None, None)
        if label in ("all", "some"):
            values = mxfp4_kernels.fake_quantize(some.to(DEVICE), **options)
            pairs["values"] = values, numerics.fake_quantize(some, **options)
        wrong = [part for part, (one, other) in pairs.items() if not same(one, other)]
        mismatches += [f"{label}: {part}" for part in wrong]
        if label == "all":
            rows = (values.cpu().float() != pairs["values"][1].float()) & ~values.cpu().isnan()
            mismatches += sorted({labels[row] for row in rows.any(dim=1).nonzero().flatten().tolist()})
            mantissas = unpack_mantissas(expected.macro).flatten().bincount(minlength=4).tolist()
        report.update(cases=1, elements=some.numel(), nan_blocks=int((expected.scale == E8M0_NAN).sum()))
    # Half of the residual has more digits, and values of it are left to the other kernel.
    some, launched, half = x[:8], report["launches"], SCHEME | {"outlier_fallback": 0.5}
    values, expected = mxfp4_kernels.fake_quantize(some.to(DEVICE), **half), numerics.fake_quantize(some, **half)
    mismatches += [] if same(values, expected) and report["launches"] == launched else ["half of the residual"]
    return {"mismatches": mismatches, **report, "mantissas": mantissas}


@triton.jit
def codes_kernel(x_ptr, codes_ptr, byte_ptr, mantissa, n_blocks, MACROS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Codes without signs and scale bytes by a mantissa that is given."""
    m = magnitudes_of_blocks(load(x_ptr, n_blocks, MACROS), INTERPRETED)
    bits = largest_of_blocks(m, INTERPRETED)
    byte, inverse = scales(bits, bits * 0 + mantissa)
    t = rounded(over_power_of_two(m, bits, INTERPRETED), inverse, byte, INTERPRETED)
    blocks = numbers(MACROS)
    mask = blocks < n_blocks
    tl.store(byte_ptr + blocks, byte, mask=mask)
    tl.store(codes_ptr + blocks * 4, codes_of_rounded(t[0], INTERPRETED), mask=mask)
    tl.store(codes_ptr + blocks * 4 + 1, codes_of_rounded(t[1], INTERPRETED), mask=mask)
    tl.store(codes_ptr + blocks * 4 + 2, codes_of_rounded(t[2], INTERPRETED), mask=mask)
    tl.store(codes_ptr + blocks * 4 + 3, codes_of_rounded(t[3], INTERPRETED), mask=mask)


def all_below(exponent: int) -> torch.Tensor:
    """Blocks with each largest magnitude of an exponent field, and with it each number of the 7 octaves below."""
    largest = torch.arange(128)[:, None] + (exponent << 7)
    others = (largest - torch.arange(1, 29 * 31 + 1)).clamp(min=0).view(128, 29, 31)
    bits = torch.cat((largest[:, None].expand(128, 29, 1), others), dim=2)
    return bits.to(torch.int16).view(BF16).view(-1, 32)


def codes() -> dict:
    """Every number that can stand in a block, by each mantissa: one exponent is like another but for the ends."""
    report = Counter(elements=0, wrong=0, wrong_bytes=0)
    for exponent in (127, 254, 4, 3, 2, 1, 0) if "all" in sys.argv else (127, 254):
        x = all_below(exponent)
        for mantissa in range(4):
            factor = 1 + mantissa / 4
            z = x.float() / factor
            scale = scale_from_amax(z.abs().amax(dim=-1), ScaleRule.EVEN)
            expected = e2m1.pack_codes(e2m1.encode_e2m1(e2m1.round_nearest(_over_scale(z, scale))))
            found = torch.zeros(len(x), 4, dtype=torch.int32, device=DEVICE)
            byte = torch.zeros(len(x), dtype=torch.int32, device=DEVICE)
            words, macros = x.to(DEVICE).view(-1).view(torch.int32), triton.next_power_of_2(len(x) // 4)
            macros = macros if DEVICE == "cpu" else 32
            for start in range(0, len(x), 4 * macros):
                part = slice(start, start + 4 * macros)
                n = len(x[part])
                codes_kernel[(1,)](
                    words[16 * start :],
                    found[part],
                    byte[part],
                    mantissa,
                    n,
                    MACROS=macros,
                    INTERPRETED=DEVICE == "cpu",
                )
            report["elements"] += x.numel()
            report["wrong"] += int((found.cpu().view(torch.uint8) != expected).sum())
            report["wrong_bytes"] += int((byte.cpu() != scale).sum())
    return report


if __name__ == "__main__":
    print(json.dumps(codes() if WHAT == "codes" else compare()))
