# SPDX-License-Identifier: Apache-2.0
"""What the compiler makes of the kernels for GPUs that need not be there."""

import re

import pytest
from compile_targets import TRITON, few_variants
from sass import instructions


#: Of one target of each maker, those that every run compiles; the long one compiles all, for all targets.
FEW = ("plain", "macro", "fallback", "default", "quantize stochastic", "dequantize", "both odd huge")
FEW_HIP = ("quantize odd huge", "rotated far")


#: Fused multiply-adds written out in the kernel, per element: two for each rounding to the grid.
FMA_PER_PASS = 2
ELEMENTS_PER_THREAD = 16
VARIANTS = 31
#: Those that divide nothing.
NO_DIVISION = (
    "plain",
    "fallback",
    "tiles",
    "quantize plain",
    "dequantize odd huge",
    "stochastic",
    "rotated",
    "rotated far",
    "quantize rotated",
    "columns",
    "quantize columns",
    "both",
    "both odd huge",
)
#: And those that divide for static factors of bfloat16, or for the bytes of them, which takes no exact division; AMD's
#: are all exact.
NO_EXACT_DIVISION = (
    *NO_DIVISION,
    "macro",
    "quantize",
    "quantize stochastic",
    "quantize both",
    "quantize whole rows",
    "by bytes",
    "quantize with values",
)
#: Those whose sizes promise nothing about alignment.
ODD = ("float16 odd huge", "quantize odd huge", "dequantize odd huge", "both odd huge")
#: Bytes of shared memory that a program may have without keeping others from its multiprocessor: per warp, 4 KiB.
SHARED_MEMORY = 16384
SHARED_MEMORY_OF_BOTH = 32768
#: Bytes of registers that do not fit: where an axis has more than 2**31 elements, most in Triton 3.8, in a search
#: within a search, and in Triton 3.6 on sm_100 one more.
STACK = {"both odd huge": 64 if TRITON < (3, 8) else 112, "dynamic mse": 8, "both": 8 if TRITON < (3, 7) else 0}
# An arithmetic instruction that the optimizer may contract, reassociate, approximate or flush.
FAST_MATH = re.compile(r"\bf(?:add|sub|mul|div|neg) (?:[a-z]+ )*?(?:fast|contract|reassoc|arcp|afn|nsz)\b")


def assert_exact_arithmetic(llir: str):
    assert re.search(r"\bfmul (?:float|<)", llir)
    assert not FAST_MATH.search(llir)
    assert "!fpmath" not in llir


def of_both(name: str) -> bool:
    return "both" in name or "columns" in name


def assert_no_contraction_on_the_way_to_machine_code(report: dict):
    for name, passes in (("plain", 1), ("fallback", 2)):
        expected = passes * FMA_PER_PASS * ELEMENTS_PER_THREAD
        assert len(re.findall(r"\bfma\.rn\.f32", report[name]["ptx"])) == expected
        assert len(re.findall(r"\bFFMA\b", report[name]["sass"])) == expected


@pytest.mark.parametrize(("arch", "names"), few_variants(FEW, "90", "80", "100", "120"))
def test_cuda(run_script, arch, names):
    report = run_script("run_compiler.py", "cuda", arch, *names, interpret=False)
    assert len(report) == (len(names) or VARIANTS)
    for name, asm in report.items():
        assert_exact_arithmetic(asm["llir"])
        ptx = asm["ptx"]
        assert ".ftz" not in ptx, name
        assert ".approx" not in ptx, name
        assert ".local" not in ptx, name
        assert ("div.rn.f32" in ptx) == (name not in NO_EXACT_DIVISION), name
        stack, local = re.search(r"STACK:(\d+).*LOCAL:(\d+)", asm["sass"]).groups()
        assert int(stack) <= STACK.get(name, 0) and local == "0", name
        assert asm["shared"] <= (SHARED_MEMORY_OF_BOTH if of_both(name) else SHARED_MEMORY), name
        if name not in ODD:
            # Values move 16 bytes at a time, codes 8.
            packs, reads = name.startswith("quantize"), name.startswith("dequantize")
            assert ("ld.global.v2.b32" if reads else "ld.global.v4.b32") in ptx, name
            assert ("st.global.v2.b32" if packs else "st.global.v4.b32") in ptx, name
            assert not re.search(r"\b(ld|st)\.global\.b(16|32)\b", ptx), name
    for name in ("plain", "fallback", "default"):
        assert "cvt.rn.bf16x2.f32" in report[name]["ptx"]
    # Only the final reduction over scalars goes through shared memory, in Triton 3.6 that of macro blocks too; tiles
    # never do.
    for name in ("plain", "fallback") if TRITON < (3, 7) else ("plain", "macro", "fallback"):
        assert "bar.sync" not in report[name]["ptx"]
    if arch == "90":
        # Of 16 elements of a thread, with a little room; 799 where each is divided.
        assert instructions(report["plain"]["sass"]).total() <= 290
        assert instructions(report["macro"]["sass"]).total() <= 370
        assert_no_contraction_on_the_way_to_machine_code(report)


@pytest.mark.parametrize(("arch", "names"), few_variants(FEW_HIP, "gfx950", "gfx942"))
def test_hip(run_script, arch, names):
    report = run_script("run_compiler.py", "hip", arch, *names, interpret=False)
    assert len(report) == (len(names) or VARIANTS)
    for name, asm in report.items():
        assert_exact_arithmetic(asm["llir"])
        code = asm["amdgcn"]
        # Mode 3: subnormals are read and written as they are.
        assert re.search(r"\.amdhsa_float_denorm_mode_32 3\b", code), name
        assert re.search(r"\.vgpr_spill_count: +0\b", code), name
        assert re.search(r"ScratchSize: 0\b", code), name
        assert ("v_div_fixup_f32" in code) == (name not in NO_DIVISION), name
        assert asm["shared"] <= (SHARED_MEMORY_OF_BOTH if of_both(name) else SHARED_MEMORY), name
        if name not in ODD:
            packs, reads = name.startswith("quantize"), name.startswith("dequantize")
            assert re.search(r"\b(global|buffer)_load_dword%s\b" % ("" if reads else "x4"), code), name
            assert re.search(r"\b(global|buffer)_store_dword%s\b" % ("" if packs else "x4"), code), name
