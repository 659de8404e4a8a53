# SPDX-License-Identifier: Apache-2.0
"""What the compiler makes of the product with packed weights, as it is launched, for GPUs that need not be there."""

import re
from collections import Counter

import pytest
from compile_targets import TRITON, assert_sums_are_there_before_the_arrival, few_variants


#: Instructions of the main loop for each weight, all of them counted, on sm_90. A GPU of 132 multiprocessors at 1.8 GHz
#: can issue 3.4 in the time in which 4.8 TB/s bring a weight of 4.25 bits.
INSTRUCTIONS = {"plain": 3.3, "macro": 3.6, "mantissas": 3.5, "fallback": 3.8, "16 tokens": 4.0}
#: Largest shared memory of a program: sm_120 has 99 KiB.
SHARED_MEMORY = 99 * 1024


def main_loop(sass: str) -> Counter:
    """Instructions of the first long loop by name."""
    code = [
        (int(address, 16), text)
        for address, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+ )?([A-Z][^;]*);", sass)
    ]
    for address, text in code:
        target = re.match(r"BRA\S* .*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            body = [line for at, line in code if int(target[1], 16) <= at <= address]
            if len(body) > 100:
                return Counter(line.split()[0].split(".")[0] for line in body)
    raise ValueError("no loop of more than 100 instructions")


#: Those that every run compiles; `make test-all` compiles all, on all targets.
FEW = ("fallback", "16 tokens", "odd")
FEW_HIP = ("macro",)


@pytest.mark.parametrize(("arch", "names"), few_variants(FEW, "90", "80", "100", "120"))
def test_cuda(run_script, arch, names):
    report = run_script("run_decode_compiler.py", "cuda", arch, *names, interpret=False)
    assert len(report) == (len(names) or 8)
    for name, asm in report.items():
        assert "LOCAL:0 " in asm["sass"] and ".local" not in asm["ptx"], name
        # Of columns in any number, masks take registers; Triton 3.8 spills two values of another kernel.
        stack = int(re.search(r"STACK:(\d+)", asm["sass"])[1])
        spills = TRITON >= (3, 8) and (arch, name) == ("100", "mantissas")
        assert name == "odd" or stack <= (8 if spills else 0), name
        assert asm["shared"] <= SHARED_MEMORY, name
        assert "fma.rn.bf16x2" in asm["ptx"], name
        assert re.search(r"wgmma|mma\.sync|tcgen05\.mma", asm["ptx"]), name
        # Sums of splits are read where other multiprocessors wrote them, after all threads wrote theirs.
        assert "atom.acq_rel.gpu.global.add" in asm["ptx"] or "atom.global.gpu.acq_rel.add" in asm["ptx"], name
        assert re.search(r"ld\.global\.cg", asm["ptx"]), name
        if name != "odd":
            assert re.search(r"cp\.async\.c[ag]\.shared\.global \[.*?0x10\b", asm["ptx"]), name
        if arch == "90" and name in INSTRUCTIONS:
            loop = main_loop(asm["sass"])
            # From Triton 3.8 on they are those of groups of warps: about as many instructions, and more registers.
            assert loop["HGMMA" if "wgmma" in asm["ptx"] else "HMMA"] > 0, name
            spare = 1.2 if TRITON < (3, 7) else 1
            assert loop.total() / asm["weights_per_thread"] <= INSTRUCTIONS[name] * spare, (name, loop)
            # The weight goes from where it is decoded to where it is multiplied in registers.
            assert loop["STS"] <= 2, name
            assert name != "16 tokens" or ("wgmma" in asm["ptx"]) == (TRITON >= (3, 8))
            most = (208 if name == "16 tokens" else 176) if "wgmma" in asm["ptx"] else 168
            assert int(re.search(r"REG:(\d+)", asm["sass"])[1]) <= most, name


@pytest.mark.parametrize(("arch", "names"), few_variants(FEW_HIP, "gfx942", "gfx950"))
def test_hip(run_script, arch, names):
    report = run_script("run_decode_compiler.py", "hip", arch, *names, interpret=False)
    assert len(report) == (len(names) or 8)
    for name, asm in report.items():
        code = asm["amdgcn"]
        assert re.search(r"\.vgpr_spill_count: +0\b", code), name
        assert re.search(r"ScratchSize: 0\b", code), name
        assert re.search(r"v_mfma_f32_\w+_?bf16", code), name
        assert asm["shared"] <= 64 * 1024, name
        assert_sums_are_there_before_the_arrival(code)
