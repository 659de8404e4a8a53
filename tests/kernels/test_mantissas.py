# SPDX-License-Identifier: Apache-2.0
"""Block mantissas of bfloat16 two elements an instruction: against the eager definition, and what compilers make of
them."""

import re

import pytest
import torch
from compile_targets import TRITON, few_variants
from sass import counts

from mxfp4_kernels.common.plan import PLAIN, Scheme, Side, takes_mantissas, takes_pairs


DEFAULT = Scheme("even", 128, "blockwise", 1.0)
BF16 = torch.bfloat16


def check(report, launches, elements):
    assert report["mismatches"] == []
    # Codes and values, with the residual and without; nothing of what is left to the other kernel.
    assert report["launches"] == launches and report["cases"] == 2 + 3
    assert report["elements"] > elements and report["nan_blocks"] > 0
    # Each mantissa is the best one of many blocks.
    assert min(report["mantissas"]) > 200


def test_interpreted_equal_eager_bit_for_bit(run_script):
    check(run_script("run_mantissas.py", "few", interpret=True), 4, 40_000)


@pytest.mark.large
def test_every_magnitude_as_that_of_its_block(run_script):
    check(run_script("run_mantissas.py", "all", interpret=True), 4, 1_000_000)


def test_every_number_of_a_block_by_every_mantissa(run_script):
    report = run_script("run_mantissas.py", "codes", interpret=True)
    assert report["elements"] > 900_000 and report["wrong"] == report["wrong_bytes"] == 0


@pytest.mark.large
def test_numbers_of_the_smallest_blocks_by_every_mantissa(run_script):
    report = run_script("run_mantissas.py", "codes", "all", interpret=True)
    assert report["elements"] > 3_000_000 and report["wrong"] == report["wrong_bytes"] == 0


@pytest.mark.parametrize(
    ("change", "codes", "values"),
    [
        ({}, True, True),
        ({"outlier_fallback": None}, True, True),
        ({"outlier_fallback": 0.5}, True, False),
        ({"scale_rule": "rceil"}, False, False),
        ({"scale_rule": "mse"}, False, False),
        ({"macro_search": "dynamic"}, False, False),
        ({"macro_search": "static"}, False, False),
        ({"macro_block": None}, False, False),
        ({"block_rows": 32}, False, False),
    ],
    ids=str,
)
def test_schemes_that_are_taken(change, codes, values):
    scheme = DEFAULT._replace(**change)
    assert takes_mantissas(scheme, PLAIN, BF16, 512) == codes
    assert takes_mantissas(scheme, PLAIN, BF16, 512, BF16) == values
    assert not takes_mantissas(scheme, PLAIN, BF16, 512, torch.float32)
    assert not takes_mantissas(scheme, PLAIN, torch.float16, 512)
    assert not takes_mantissas(scheme, PLAIN, BF16, 544)
    assert not takes_mantissas(scheme, Side(rotation=16), BF16, 512)
    assert not takes_mantissas(scheme, Side(5), BF16, 512)
    assert not (codes and takes_pairs(scheme, PLAIN, BF16, 512))


#: On sm_90, for the 32 elements of a thread: instructions in all, of the integer unit, and registers, with a little
#: room. By the count of `benchmarks.gpu.model` the kernel of `quantization/rows.py` takes 1664 for codes, 2520 with
#: those of the residual, 1120 and 1604 for values.
MOST = {
    "codes": (770, 410, 88),
    "codes fallback": (1070, 615, 104),
    "values": (795, 415, 88),
    "values fallback": (1050, 550, 104),
}


@pytest.mark.parametrize(("arch", "names"), few_variants(("codes fallback", "values"), "90", "80", "100", "120"))
def test_cuda(run_script, arch, names):
    report = run_script("run_mantissas_compiler.py", arch, *names, interpret=False)
    assert len(report) == (len(names) or 4)
    for name, asm in report.items():
        ptx = asm["ptx"]
        assert "dp4a.u32.u32" in ptx and "dp4a.u32.s32" in ptx and "fma.rn.bf16x2" in ptx and "ftz" not in ptx, name
        # 16 bytes for a thread at a time; nothing passes through shared memory, but mantissas of blocks in Triton 3.6.
        assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 4, name
        codes = {"codes": 1, "codes fallback": 2}.get(name, 4)
        assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == codes, name
        assert TRITON < (3, 7) or asm["shared"] == 0 and "bar.sync" not in ptx, name
        assert re.search(r"STACK:0\b.*LOCAL:0\b", asm["sass"]), name
        if arch == "90":
            found = counts(asm["sass"])
            spare = 1.3 if TRITON < (3, 7) else 1
            assert all(one <= spare * most for one, most in zip(found, MOST[name], strict=True)), (name, found)
