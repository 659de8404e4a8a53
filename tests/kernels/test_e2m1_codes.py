# SPDX-License-Identifier: Apache-2.0
"""Codes by the instruction that makes E2M1: what the interpreter takes for it, and what is compiled for which GPU.

The instruction is that of the PTX manual: to nearest, ties to even, magnitudes above 6 to 6, NaN to 6, zeros with their
signs. No test here has run it; `hf_mxfp4/backends/self_check` does, on the GPU that has it."""

import re

import ml_dtypes
import numpy as np
import pytest
import torch
from compile_targets import TRITON, first_target
from sass import instructions, integer_instructions

from mxfp4_kernels.common.plan import has_e2m1


def test_codes_and_values_are_those_of_ml_dtypes(run_script):
    report = run_script("run_e2m1.py", interpret=True)
    y = np.array(report["bits"], np.int32).view(np.float32)
    codes = np.array(report["codes"], np.uint8)
    finite = np.isfinite(y)
    expected = y[finite].clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
    assert len(y) > 65_000 and (codes[finite] == expected).all()
    assert (codes[np.isnan(y)] == 7).all() and set(codes[np.isinf(y)]) == {7, 15}
    # Two for each byte, the lower code's in the low half.
    halves = np.array(report["values"], np.int32).view(np.uint16).reshape(256, 2)
    both = np.arange(256, dtype=np.uint8)
    of_codes = np.stack((both & 15, both >> 4), axis=1).view(ml_dtypes.float4_e2m1fn).astype(np.float16)
    assert (halves == of_codes.view(np.uint16)).all()


def test_quantized_by_it_equals_eager_bit_for_bit(run_script):
    report = run_script("run_pairs.py", "few", "converts", interpret=True)
    assert report["mismatches"] == []
    assert report["converted"] == report["launches"] == 32
    assert report["nan_blocks"] > 50


#: Instructions in all and of the integer unit, for 16 elements of a thread, on sm_100; without the instruction 172 and
#: 102, with macro blocks 253 and 139, with those and the residual 469 and 299.
MOST = {"plain": (160, 84), "macro": (210, 110), "macro fallback": (370, 195)}
INSTRUCTION = "cvt.rn.satfinite.e2m1x2.f32"


@pytest.mark.parametrize("arch", first_target("100", "103", "120"))
def test_gpus_that_have_it(run_script, arch):
    if arch == "103" and TRITON < (3, 7):
        pytest.skip("the disassembler that comes with Triton 3.6 does not know sm_103a")
    report = run_script("run_pairs_compiler.py", arch, "--converts", *MOST, interpret=False)
    for name, asm in report.items():
        ptx = asm["ptx"]
        passes = 2 if "fallback" in name else 1
        assert f".target sm_{arch}a" in ptx
        # Of two elements each.
        assert ptx.count(INSTRUCTION) == 8 * passes, name
        assert ptx.count("cvt.rn.f16x2.e2m1x2") == (8 if passes == 2 else 0)
        assert "ftz" not in ptx.replace("rcp.approx.ftz.f32", ""), name
        # Triton 3.6 has the largest of four blocks go through shared memory.
        assert TRITON < (3, 7) or asm["shared"] == 0 and "bar.sync" not in ptx, name
        assert re.search(r"STACK:0\b.*LOCAL:0\b", asm["sass"]), name
        if arch == "100":
            found = instructions(asm["sass"]).total(), integer_instructions(asm["sass"])
            spare = 1.3 if TRITON < (3, 7) else 1
            assert all(one <= spare * most for one, most in zip(found, MOST[name], strict=True)), (name, found)


def test_other_gpus_are_not_given_it(run_script, monkeypatch):
    for asm in run_script("run_pairs_compiler.py", "90", "plain", interpret=False).values():
        assert "e2m1x2" not in asm["ptx"]
    device = torch.device("cuda", 0)
    for capability, has in (((8, 0), False), ((9, 0), False), ((10, 0), True), ((10, 3), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert has_e2m1.__wrapped__(device) == has
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not has_e2m1.__wrapped__(device) and not has_e2m1.__wrapped__(torch.device("cpu"))
