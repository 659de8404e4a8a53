# SPDX-License-Identifier: Apache-2.0
"""The folding kernels against the eager definition, interpreted; what they refuse; what compilers make of them."""

import re

import pytest
import torch
from compile_targets import TRITON, few_variants
from sass import instructions, integer_instructions

import mxfp4_kernels


@pytest.mark.parametrize(("what", "cases"), [("few", 19), pytest.param("all", 22, marks=pytest.mark.large)])
def test_interpreted_folding_equals_eager_bit_for_bit(run_script, what, cases):
    report = run_script("run_fold.py", what, interpret=True)
    assert report["mismatches"] == []
    assert report["cases"] == cases and report["inexact"] > 20 and report["nan"] > 100
    assert report["sides"] == 17
    # Of each case, both orientations alone and together.
    assert report["pairs"] >= 20


@pytest.mark.parametrize(
    ("function", "x", "options", "error", "words"),
    [
        ("fold_e4m3", "x", {}, TypeError, "needs a tensor, got str"),
        ("fold_e4m3", torch.ones(2, 2, dtype=torch.float64), {}, TypeError, "float64"),
        ("fold_e4m3", torch.ones(2), {}, ValueError, "needs a matrix, got 1 axes"),
        ("fold_e4m3", torch.ones(2, 2, 2), {"axis": 0}, ValueError, "axis=0 needs a matrix, got 3"),
        ("fold_e4m3", torch.ones(2, 2), {"axis": -1}, ValueError, "axis=-1"),
        ("fold_e4m3", torch.ones(2, 2), {"group": 64}, ValueError, "group=64"),
        (
            "fold_e4m3",
            torch.ones(2, 2),
            {"group": "row", "macro_block": 128},
            ValueError,
            "not fold by group='row'",
        ),
        ("fold_e4m3", torch.ones(2, 2), {"macro_block": 64}, ValueError, "macro_block=64.*does not fold"),
        ("fold_e4m3", torch.ones(2, 2), {"macro_block": 128, "macro_search": "blockwise"}, ValueError, "blockwise"),
        ("fold_e4m3", torch.ones(2, 2), {"scale_rule": "ceil"}, ValueError, "scale_rule='ceil'"),
        ("fold_e4m3_both", torch.ones(2, 2), {"columns": "rows"}, ValueError, "columns='rows'"),
        ("fold_e4m3_both", torch.ones(2, 2), {"columns": "reused", "macro_block": 128}, ValueError, "macro_block=None"),
        ("fold_e4m3_both", torch.ones(2, 2), {"columns": "reused", "rotation": (16, None)}, ValueError, "rotation="),
        ("fold_e4m3_both", torch.ones(2, 2), {"rows": False}, ValueError, "needs columns='reused'"),
        ("fold_e4m3_both", torch.ones(2, 2), {"rotation": (None, 8)}, ValueError, "rotation=8"),
        ("fold_e4m3_both", torch.ones(2, 2), {"seed": (None, 1)}, ValueError, "seed has no effect"),
        ("fold_e4m3", torch.ones(2, 2), {"rounding": "stochastic"}, TypeError, "needs an integer"),
        ("fold_e4m3", torch.ones(2, 2), {"rounding": "up"}, ValueError, "rounding='up'"),
        ("fold_e4m3", torch.ones(2, 2), {"rotation": 16, "signs": torch.ones(8)}, ValueError, "signs has the shape"),
        ("fold_e4m3_both", torch.ones(2, 2, 2, 2, dtype=torch.int8), {}, TypeError, "int8"),
        ("quantize_e4m3", torch.ones(()), {}, ValueError, "needs a matrix, got 0"),
    ],
)
def test_what_does_not_fold_is_refused(function, x, options, error, words):
    with pytest.raises(error, match=words):
        getattr(mxfp4_kernels, function)(x, **options)


def test_rows_stay_in_registers_where_little_is_padding():
    from mxfp4_kernels.e4m3.fold import rows_plan

    def plan(length, unit=True, tiles=False):
        (tile, options) = rows_plan(1, length, unit, tiles)
        return tile["ROWS"], tile["COLS"], tile["ONE_TILE"], options["num_warps"]

    assert plan(1) == (16, 128, True, 4)
    assert plan(1024) == (2, 1024, True, 4)
    assert plan(4096) == (1, 4096, True, 8)
    assert plan(8192) == (1, 8192, True, 16)
    assert plan(5120) == plan(14336) == (1, 2048, False, 4)
    assert plan(8192, unit=False) == plan(8192, tiles=True) == (32, 128, False, 4)


#: Kernels whose rows of elements are adjacent and aligned: 16 bytes at a time, in and out.
WIDE = ("groups", "groups mbs", "rows 4096", "rows 8192", "rows 14336", "fp8", "both", "both mbs", "both reused")
WIDE += ("groups pairs", "groups pairs mbs", "both pairs", "both pairs mbs", "both reused pairs")
WIDE += ("codes and across", "codes and across pairs")


#: By how much more the instructions and registers of Triton 3.6 are.
SPARE = 1.2 if TRITON < (3, 7) else 1
#: On sm_90, registers of a thread and instructions of the kernel, with a little room: more of either cost bandwidth.
MOST_REGISTERS = {
    "groups": (48, 420),
    "rows 4096": (48, 380),
    "rows values": (64, 560),
    "fp8": (40, 180),
    "both": (104, 1750),
    "groups pairs": (40, 370),
    "groups pairs mbs": (40, 430),
    "columns pairs": (40, 545),
    "both pairs": (88, 1160),
    "both pairs mbs": (96, 1400),
    "both reused pairs": (104, 1165),
    "across pairs": (104, 860),
    "codes and across pairs": (104, 1090),
    "codes and across": (122, 1800),
}
#: And those of the integer unit, where two elements are computed at once: without it "groups" has 213, "both" 935.
MOST_INTEGERS = {
    "groups pairs": 175,
    "groups pairs mbs": 205,
    "columns pairs": 280,
    "both pairs": 650,
    "both pairs mbs": 800,
    "both reused pairs": 660,
    "across pairs": 500,
    "codes and across pairs": 665,
}


#: Those with correctly rounded divisions, of scales by macro factors.
DIVIDING = ("groups mbs", "groups mbs values", "groups mse dynamic", "columns odd huge", "both mbs")

#: Those that every run compiles; `make test-all` compiles all, for all targets.
FEW = ("groups mbs", "rows values", "both pairs mbs", "codes and across pairs")


@pytest.mark.parametrize(("arch", "names"), few_variants(FEW, "90", "80", "120"))
def test_cuda(run_script, arch, names):
    report = run_script("run_fold_compiler.py", "cuda", arch, *names, interpret=False)
    assert len(report) == (len(names) or 27)
    for name, asm in report.items():
        # One reciprocal, which is corrected or need not be exact.
        ptx = asm["ptx"].replace("rcp.approx.ftz.f32", "")
        assert ".ftz" not in ptx and ".approx" not in ptx, name
        # Without the conversion in hardware, integers hold more in registers.
        if arch != "80" or "both" not in name:
            stack, local = re.search(r"STACK:(\d+).*LOCAL:(\d+)", asm["sass"]).groups()
            assert int(stack) <= (8 if TRITON >= (3, 8) else 0) and local == "0", name
        assert asm["shared"] <= 16384, name
        assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (arch != "80" and "pairs" not in name), name
        assert ("fma.rn.bf16x2" in ptx) == ("pairs" in name), name
        if name in WIDE:
            assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx, name
        if arch == "90" and name in MOST_REGISTERS:
            registers = int(re.search(r"REG:(\d+)", asm["sass"])[1])
            instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/(?!\s+NOP)", asm["sass"], re.MULTILINE))
            most, longest = MOST_REGISTERS[name]
            assert registers <= most * SPARE and instructions <= longest * SPARE, name
        if arch == "90" and name in MOST_INTEGERS:
            assert integer_instructions(asm["sass"]) <= MOST_INTEGERS[name] * SPARE, name
        assert ("div.rn.f32" in ptx) == (name in DIVIDING), name


#: Of those of FP8 with a power of two per row, on sm_90: registers of a thread, and instructions.
MOST_OF_FP8 = {
    "rows": (40, 290),
    "long rows": (40, 390),
    "maxima": (80, 410),
    "values of columns": (96, 1120),
    "columns": (72, 690),
    "bytes": (80, 510),
    "both": (112, 750),
    "values of both": (112, 1250 if TRITON >= (3, 8) else 1230),
    "expert bytes": (96, 650),
    "expert elements": (112, 940),
    "expert values": (80, 910),
    "fold of experts": (120, 1270),
    "fold of experts, pairs": (104, 930),
    "values of rows": (40, 320),
}


@pytest.mark.parametrize(
    ("arch", "names"),
    few_variants(("rows", "bytes", "both", "expert elements", "values of rows"), "90", "80", "100", "120"),
)
def test_fp8_cuda(run_script, arch, names):
    report = run_script("run_fp8_compiler.py", "cuda", arch, *names, interpret=False)
    assert len(report) == (len(names) or 14)
    for name, asm in report.items():
        assert ".ftz" not in asm["ptx"] and ".approx" not in asm["ptx"] and "div.rn" not in asm["ptx"], name
        # Triton 3.8 spills two values of one.
        stack = "[08]" if TRITON >= (3, 8) and (arch, name) == ("100", "fold of experts") else "0"
        assert re.search(rf"STACK:{stack}\b.*LOCAL:0\b", asm["sass"]), name
        assert "ld.global.v4.b32" in asm["ptx"], name
        assert name in ("maxima", "bytes", "expert bytes") or "st.global.v4.b32" in asm["ptx"], name
        if arch == "90":
            registers = int(re.search(r"REG:(\d+)", asm["sass"])[1])
            found = registers, instructions(asm["sass"]).total()
            assert all(one <= most * SPARE for one, most in zip(found, MOST_OF_FP8[name], strict=True)), (name, found)


@pytest.mark.large
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_fp8_hip(run_script, arch):
    for name, asm in run_script("run_fp8_compiler.py", "hip", arch, interpret=False).items():
        code = asm["amdgcn"]
        assert re.search(r"\.vgpr_spill_count: +0\b", code) and re.search(r"ScratchSize: 0\b", code), name


@pytest.mark.large
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_hip(run_script, arch):
    report = run_script("run_fold_compiler.py", "hip", arch, interpret=False)
    for name, asm in report.items():
        code = asm["amdgcn"]
        assert re.search(r"\.vgpr_spill_count: +0\b", code) and re.search(r"ScratchSize: 0\b", code), name
        assert ("v_cvt_scalef32_pk_fp8_f32" in code or "v_cvt_pk_fp8_f32" in code) == (arch == "gfx950"), name
        assert asm["shared"] <= 64 * 1024, name
