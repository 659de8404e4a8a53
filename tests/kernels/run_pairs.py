# SPDX-License-Identifier: Apache-2.0
"""Compares the kernel of two elements an instruction with the eager definition, bit for bit; prints a JSON report.

TRITON_INTERPRET=1 python run_pairs.py few
TRITON_INTERPRET=1 python run_pairs.py few converts     as GPUs do that have an instruction for codes
TRITON_INTERPRET=1 python run_pairs.py all      every magnitude as the largest of its block, beside fractions of it
python run_pairs.py all cuda                    compiled, on a GPU
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator

import torch
from run_fold import data
from run_interpreted import adversarial_rows
from run_quantize import PARTS, same

import mxfp4_kernels
from hf_mxfp4 import numerics
from mxfp4_kernels.common import plan
from mxfp4_kernels.quantization import launch


WHAT, DEVICE = sys.argv[1], "cuda" if "cuda" in sys.argv else "cpu"
CONVERTS = "converts" in sys.argv
#: Scale rule, macro block, and whether the residual is quantized too.
SCHEMES = [(rule, macro, False) for rule in ("rceil", "even") for macro in (None, 32, 128, 256)]
SCHEMES += [("floor", None, False), ("floor", None, True), ("rceil", None, True), ("rceil", 32, True)]
SCHEMES += [("rceil", 128, True), ("even", None, True), ("even", 256, True)]


def magnitudes() -> torch.Tensor:
    """All finite magnitudes of bfloat16, in their order."""
    return torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def near_the_largest(largest: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Blocks with these maxima: random fractions of them, and those that lie next to a tie or on it."""
    shares = torch.rand(len(largest), 16, generator=rng) * 2 - 1
    shares = shares * 2.0 ** -torch.randint(0, 5, shares.shape, generator=rng).float()
    steps = torch.arange(1, 17).float() / 16
    signs = torch.randint(0, 2, (len(largest), 16), generator=rng) * 2 - 1
    blocks = torch.cat((shares, steps * signs), dim=1) * largest[:, None].float()
    return blocks.bfloat16()


def cases() -> Iterator[tuple[str, torch.Tensor, tuple]]:
    rng = torch.Generator().manual_seed(17)
    maxima = magnitudes()
    for number, scheme in enumerate(SCHEMES):
        # Whole macro blocks, and no whole tile.
        some = maxima if WHAT == "all" else maxima[torch.randperm(len(maxima), generator=rng)[:200]].sort().values
        blocks = near_the_largest(some[: len(some) // 8 * 8], rng)
        yield "maxima", blocks.view(-1, 256), scheme
        yield "kinds", adversarial_rows((10, 512), torch.bfloat16, number, rng), scheme
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    yield "every number", every.view(-1, 1024)[:: 1 if WHAT == "all" else 8].contiguous(), SCHEMES[0]
    yield "zeros, and one", -torch.eye(3, 64).bfloat16(), SCHEMES[1]
    # Those below are left to the other kernel.
    wide = adversarial_rows((6, 512), torch.bfloat16, 3, rng)
    yield "a row stride", wide[:, :256], SCHEMES[0]
    yield "parts of blocks", wide[:3, :250].contiguous(), SCHEMES[0]
    yield "parts of macro blocks", wide[:3, :192].contiguous(), SCHEMES[2]
    yield "from the middle of a word", wide.view(-1)[1:65], SCHEMES[0]


def compare() -> dict:
    report = Counter(cases=0, elements=0, nan_blocks=0, launches=0, converted=0)
    mismatches, run = [], launch._launch_pairs

    def counted(*arguments):
        report.update(launches=1, converted=arguments[-1])
        run(*arguments)

    launch._launch_pairs = counted
    if CONVERTS and DEVICE == "cpu":
        launch.has_e2m1 = lambda device: True
    if DEVICE == "cpu":
        # Fewer, larger programs are faster to interpret.
        launch.PAIRS_TILE = plan.PAIRS_TILE * 16
    for label, x, (rule, macro, residual) in cases():
        options = {"scale_rule": rule, "macro_block": macro, "outlier_fallback": 0.5 if residual else None}
        expected = numerics.quantize(x, **options)
        found = mxfp4_kernels.quantize(x.to(DEVICE), **options, converts=CONVERTS)
        wrong = [part for part in PARTS if not same(getattr(found, part), getattr(expected, part))]
        mismatches += [f"{label}, {options}: {part}" for part in wrong]
        report.update(cases=1, elements=x.numel(), nan_blocks=int((expected.scale == 255).sum()))
    found, beside = both(launch), with_values(launch)
    mismatches += found.pop("mismatches") + beside.pop("mismatches")
    return {"mismatches": mismatches, **report, **found, **beside}


def with_values(launch) -> dict:
    """Codes and the values of these, by this kernel and by the one that takes any tensor."""
    report, rng = {"mismatches": [], "pairs_with_values": 0, "with_values": 0}, torch.Generator().manual_seed(5)
    run = launch._launch_pairs_values

    def counted(*arguments):
        report["pairs_with_values"] += 1
        run(*arguments)

    launch._launch_pairs_values = counted
    maxima = magnitudes()
    some = maxima if WHAT == "all" else maxima[torch.randperm(len(maxima), generator=rng)[:64]]
    inputs = [near_the_largest(some[: len(some) // 8 * 8], rng).view(-1, 256)]
    inputs += [adversarial_rows((5, 256), torch.bfloat16, 7, rng), adversarial_rows((3, 72), torch.float32, 8, rng)]
    inputs += [adversarial_rows((3, 150), torch.bfloat16, 9, rng), inputs[1].float().half().t()[:64]]
    schemes = [("rceil", None), ("floor", None), ("even", 32), ("rceil", 128), ("even", 256), ("mse", None)]
    for x, (rule, macro) in itertools.product(inputs, schemes):
        options = {
            "scale_rule": rule,
            "macro_block": macro,
            "macro_search": "dynamic" if x.shape[1] == 72 else "static",
        }
        packed, values = mxfp4_kernels.quantize_with_values(x.to(DEVICE), **options)
        expected = numerics.quantize(x, **options)
        wrong = [part for part in PARTS if not same(getattr(packed, part), getattr(expected, part))]
        wrong += ["values"] * (not same(values, numerics.fake_quantize(x, **options)))
        report["mismatches"] += [f"with values, {list(x.shape)} {x.dtype} {options}: {part}" for part in wrong]
        report["with_values"] += 1
    return report


def both(launch) -> dict:
    """Rows and columns of a matrix, and columns alone."""
    report = {"mismatches": [], "pairs_of_both": 0}
    run = launch._launch_pairs_both

    def counted(*arguments):
        report["pairs_of_both"] += 1
        run(*arguments)

    launch._launch_pairs_both = counted
    schemes = [("rceil", None), ("floor", None), ("rceil", 128), ("even", 128)]
    shapes = [(128, 128), (256, 384), (32, 160), (40, 128)]
    for number, (shape, (rule, macro)) in enumerate(itertools.product(shapes, schemes)):
        x = data(shape, torch.bfloat16, number)
        options = {"scale_rule": rule, "macro_block": macro}
        rows, columns = (numerics.quantize(side.contiguous(), **options) for side in (x, x.t()))
        pairs = zip(mxfp4_kernels.quantize_both(x.to(DEVICE), **options), (rows, columns), strict=True)
        alone = mxfp4_kernels.quantize(x.to(DEVICE).t(), **options), columns
        for name, (found, expected) in zip(("rows", "columns", "columns alone"), (*pairs, alone), strict=True):
            wrong = [part for part in PARTS if not same(getattr(found, part), getattr(expected, part))]
            report["mismatches"] += [f"{name} of {shape}, {rule}, {macro}: {part}" for part in wrong]
    return report


if __name__ == "__main__":
    print(json.dumps(compare()))
