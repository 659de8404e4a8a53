# SPDX-License-Identifier: Apache-2.0
"""What compilers make of the kernels, as they are launched, for GPUs that need not be there."""

import re

import pytest


#: Variants that every run compiles; the long one compiles all, for all targets.
FEW = ("values", "values half", "codes mantissas", "decode static")
FEW_HIP = ("decode mantissas",)
#: Variants that divide nothing.
NO_DIVISION = (
    "values", "values half", "values with residual", "values tiles", "values stochastic rotated", "values columns",
    "values mantissas", "codes mantissas", "codes three mantissas", "codes both",
)  # fmt: skip
#: Bytes of registers that do not fit, at most.
MOST_STACK = 24
#: Bytes of shared memory that one program may have.
SHARED = {"80": 166912, "90": 232448, "100": 232448, "120": 101376, "gfx942": 65536, "gfx950": 163840}
# An arithmetic instruction that the optimizer may contract, reassociate, approximate or flush.
FAST_MATH = re.compile(r"\bf(?:add|sub|mul|div|neg) (?:[a-z]+ )*?(?:fast|contract|reassoc|arcp|afn|nsz)\b")


def assert_exact_arithmetic(name: str, llir: str):
    """Of quantization: no product of which a bit counts is contracted into an fma."""
    assert "!fpmath" not in llir and not FAST_MATH.search(llir), name


@pytest.mark.parametrize(
    ("arch", "names"),
    [("90", FEW), *(pytest.param(arch, (), marks=pytest.mark.large) for arch in ("80", "90", "100", "120"))],
)
def test_cuda(run_script, arch, names):
    report = run_script("run_compiler.py", "cuda", arch, *names, interpret=False)
    assert len(report) == (len(names) or 29)
    for name, asm in report.items():
        ptx = asm["ptx"]
        stack, local = re.search(r"STACK:(\d+).*LOCAL:(\d+)", asm["sass"]).groups()
        assert int(stack) <= MOST_STACK and local == "0" and ".local" not in ptx, name
        assert asm["shared"] <= SHARED[arch], name
        if name.startswith("decode"):
            assert "fma.rn.bf16x2" in ptx and re.search(r"wgmma|mma\.sync|tcgen05\.mma", ptx), name
            # Sums of splits are read where other multiprocessors wrote them, after all threads wrote theirs.
            assert "atom.acq_rel.gpu.global.add" in ptx or "atom.global.gpu.acq_rel.add" in ptx, name
            assert re.search(r"ld\.global\.cg", ptx), name
            continue
        assert_exact_arithmetic(name, asm["llir"])
        assert ".ftz" not in ptx and ".approx" not in ptx, name
        if name.startswith(("values", "codes")):
            assert ("div.rn.f32" in ptx) == (name not in NO_DIVISION), name
    if "values" in report:
        # Of each of 16 words: over the power of two, to the grid, to values, with signs; and one product by float16.
        ptx = report["values"]["ptx"]
        assert [len(re.findall(rf"\bfma\.rn\.{kind}\b", ptx)) for kind in ("bf16x2", "f16x2", "f32")] == [64, 16, 0]
        # 16 bytes at a time.
        assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
        # Two fused multiply-adds for each of 32 elements, those written out in the kernel.
        assert len(re.findall(r"\bfma\.rn\.f32", report["values half"]["ptx"])) == 64


@pytest.mark.parametrize(
    ("arch", "names"),
    [("gfx942", FEW_HIP), *(pytest.param(arch, (), marks=pytest.mark.large) for arch in ("gfx942", "gfx950"))],
)
def test_hip(run_script, arch, names):
    report = run_script("run_compiler.py", "hip", arch, *names, interpret=False)
    for name, asm in report.items():
        code = asm["amdgcn"]
        # Mode 3: subnormals are read and written as they are.
        assert re.search(r"\.amdhsa_float_denorm_mode_32 3\b", code), name
        assert re.search(r"\.vgpr_spill_count: +0\b", code) and re.search(r"ScratchSize: 0\b", code), name
        assert asm["shared"] <= SHARED[arch], name
        if name.startswith("decode"):
            assert re.search(r"v_mfma_f32_\w+_?bf16", code), name
            assert_sums_are_there_before_the_arrival(code)
        else:
            assert_exact_arithmetic(name, asm["llir"])


def assert_sums_are_there_before_the_arrival(code: str) -> None:
    """Every wave waits for its own stores before the barrier after which one of them counts the program as arrived;
    without that, another program may read sums that are still on their way."""
    arrival = code.index("global_atomic_add")
    stores, barrier = code.rindex("global_store", 0, arrival), code.rindex("s_barrier", 0, arrival)
    assert stores < barrier
    wait = code.rindex("s_waitcnt vmcnt(0)", 0, barrier)
    # On every way to the barrier: nothing is stored, and no way joins or leaves, in between.
    assert stores < wait and not re.search(r"^\.LBB\w+:|s_c?branch|global_store", code[wait:barrier], re.MULTILINE)
