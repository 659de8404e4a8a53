# SPDX-License-Identifier: Apache-2.0
"""Codes of bfloat16 two elements an instruction: against the eager definition, and what compilers make of them."""

import re

import pytest
import torch
from compile_targets import TRITON, few_variants
from sass import counts

from mxfp4_kernels.common.plan import PLAIN, Scheme, Side, takes_pairs


def test_interpreted_pairs_equal_eager_bit_for_bit(run_script):
    report = run_script("run_pairs.py", "few", interpret=True)
    assert report["mismatches"] == []
    assert report["cases"] == 36 and report["launches"] == 32
    assert report["elements"] > 60_000 and report["nan_blocks"] > 50
    # Of axes that are whole blocks, and whole macro blocks where there are any: both at once, and columns alone.
    assert report["pairs_of_both"] == 2 * (4 + 4 + 2)
    # Of bfloat16 in whole blocks and macro blocks, by five of six schemes.
    assert (report["pairs_with_values"], report["with_values"]) == (2 * 5, 5 * 6)


@pytest.mark.large
def test_every_magnitude_as_that_of_its_block(run_script):
    report = run_script("run_pairs.py", "all", interpret=True)
    assert report["mismatches"] == []
    assert report["elements"] > 5_000_000


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"scale_rule": "floor"}, True),
        ({"scale_rule": "even", "macro_block": 256}, True),
        ({"scale_rule": "mse"}, False),
        ({"scale_rule": "floor", "macro_block": 128}, False),
        ({"macro_block": 128, "macro_search": "dynamic"}, False),
        ({"macro_block": 128, "macro_search": "blockwise"}, False),
        ({"outlier_fallback": 0.5}, True),
        ({"macro_block": 128, "outlier_fallback": 0.5}, True),
        ({"scale_rule": "floor", "macro_block": 128, "outlier_fallback": 0.5}, False),
        ({"block_rows": 32}, False),
    ],
    ids=str,
)
def test_schemes_that_are_taken(change, taken):
    scheme = Scheme(**change)
    assert takes_pairs(scheme, PLAIN, torch.bfloat16, 512) == taken
    assert not takes_pairs(scheme, PLAIN, torch.float16, 512)
    assert not takes_pairs(scheme, PLAIN, torch.bfloat16, 528)
    assert not takes_pairs(scheme, Side(rotation=16), torch.bfloat16, 512)
    assert not takes_pairs(scheme, Side(5), torch.bfloat16, 512)


#: On sm_90, for 16 elements of a thread: instructions in all, of the integer unit, and registers, with a little room.
#: By the same count the kernel of `quantization/rows.py` takes 487, 322 and 32; with macro blocks 703, 423 and 55; with
#: those and the residual 1026, 676 and 40.
MOST = {
    "plain": (185, 112, 32),
    "floor": (192, 118, 32),
    "macro": (262, 148, 32),
    "macro 32": (256, 142, 32),
    "fallback": (345, 215, 48),
    "macro fallback": (520, 285, 48),
}
#: For 32 elements along rows and 32 along columns, or the latter alone; that of `quantization/both.py` takes 3.3 times
#: the time by the model.
MOST |= {"both": (900, 535, 64), "both macro": (1220, 715, 80), "columns": (485, 320, 48)}
#: For 8 elements of a thread, whose values are written too; that of `quantization/rows.py` takes 337 with macro blocks.
MOST |= {"values": (145, 82, 32), "values macro": (208, 110, 36)}
FEW = ("plain", "macro", "macro fallback", "both", "values macro")


@pytest.mark.parametrize(("arch", "names"), few_variants(FEW, "90", "80", "100", "120"))
def test_cuda(run_script, arch, names):
    report = run_script("run_pairs_compiler.py", arch, *names, interpret=False)
    assert len(report) == (len(names) or 11)
    for name, asm in report.items():
        ptx = asm["ptx"]
        assert "fma.rn.bf16x2" in ptx and "ftz" not in ptx.replace("rcp.approx.ftz.f32", ""), name
        assert ("fma.rn.f16x2" in ptx) == ("macro" in name) and ("cvt.rn.bf16x2" in ptx) == (name == "values macro")
        if name in ("both", "both macro", "columns"):
            # Columns pass through shared memory, in their narrow type.
            assert "ld.global.v4.b32" in ptx and "st.global.v2.b32" in ptx and asm["shared"] <= 8192, name
        elif name.startswith("values"):
            # All in registers: 16 bytes in and out.
            assert len(re.findall(r"(ld|st)\.global\.v4\.b32", ptx)) == 2, name
            assert TRITON < (3, 7) or asm["shared"] == 0 and "bar.sync" not in ptx, name
        else:
            # Two loads of 16 bytes; nothing passes through shared memory, but the largest of four blocks in Triton 3.6.
            assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 2, name
            assert TRITON < (3, 7) or asm["shared"] == 0 and "bar.sync" not in ptx, name
        assert re.search(r"STACK:0\b.*LOCAL:0\b", asm["sass"]), name
        if arch == "90":
            found = counts(asm["sass"])
            spare = 1.3 if TRITON < (3, 7) else 1
            assert all(one <= spare * most for one, most in zip(found, MOST[name], strict=True)), (name, found)
