# SPDX-License-Identifier: Apache-2.0
"""Products of quantized operands against float64, interpreted; what they refuse; the instructions they compile to."""

import re

import pytest
import torch
from compile_targets import TRITON

import mxfp4_kernels


def test_interpreted_products_stay_within_the_bound_of_float32_sums(run_script):
    report = run_script("run_matmul.py", interpret=True)
    assert set(report["excess"]) == {"row", "row bf16", "128", "mixed", "macro", "mxf4", "mxf4 macro"}
    for name, excess in report["excess"].items():
        assert 0 < excess <= 1, name
    assert report["nan"] and report["extremes"] and report["biases"]


E4M3 = torch.zeros(4, 128, dtype=torch.float8_e4m3fn)
ROW, GROUP = torch.ones(4, 1), torch.ones(4, 1)
BYTES = torch.zeros(4, 64, dtype=torch.uint8)
SCALE = torch.zeros(4, 4, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((E4M3.float(), ROW, E4M3, ROW), {}, TypeError, "a must be float8_e4m3fn"),
        ((E4M3, ROW, E4M3, ROW.double()), {}, TypeError, "b must be.*float64"),
        ((E4M3[:, :64], ROW, E4M3, ROW), {}, ValueError, "a must be a contiguous matrix.*128"),
        ((E4M3, ROW, torch.zeros(128, 128).to(torch.float8_e4m3fn).t(), ROW), {}, ValueError, "b must be a"),
        ((E4M3, torch.ones(4, 2), E4M3, ROW), {}, ValueError, r"a_scale must be.*got \[4, 2\]"),
        ((E4M3, ROW, torch.zeros(4, 256).to(torch.float8_e4m3fn), ROW), {}, ValueError, "rows of 128.*of 256"),
        ((E4M3, ROW, E4M3, ROW), {"out_dtype": torch.float64}, TypeError, "out_dtype=torch.float64"),
        ((E4M3, ROW, E4M3, ROW), {"bias": torch.ones(3)}, ValueError, "bias must be.*4 elements"),
        ((E4M3, ROW.to("meta"), E4M3, ROW), {}, ValueError, "one device, got"),
    ],
)
def test_matmul_e4m3_refuses_what_does_not_fit(arguments, options, error, words):
    with pytest.raises(error, match=words):
        mxfp4_kernels.matmul_e4m3(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((BYTES.int(), SCALE, BYTES, SCALE), {}, TypeError, "a_codes must be uint8"),
        ((BYTES, SCALE[:, :3], BYTES, SCALE), {}, ValueError, r"a_scale must have the shape \[4, 4\]"),
        ((BYTES, SCALE, BYTES[:, :32], SCALE), {}, ValueError, r"b_codes must have the shape \[4, 64\]"),
        ((BYTES, SCALE, BYTES, SCALE[:3]), {}, ValueError, r"b_scale must have the shape \[4, 4\]"),
        ((BYTES, SCALE, BYTES, SCALE), {"a_macro": SCALE[:, :1]}, ValueError, "both be given"),
        (
            (BYTES, SCALE, BYTES, SCALE),
            {"a_macro": SCALE, "b_macro": SCALE},
            ValueError,
            r"a_macro must have.*\[4, 1\]",
        ),
    ],
)
def test_matmul_mxf4_refuses_what_does_not_fit(arguments, options, error, words):
    with pytest.raises(error, match=words):
        mxfp4_kernels.matmul_mxf4(*arguments, **options)


@pytest.mark.parametrize("shared_memory", [64, 99, 163, 227])
@pytest.mark.parametrize("n_rows", [1, 16, 33, 64, 100, 5000])
def test_there_is_a_config_for_every_gpu_and_height(n_rows, shared_memory):
    from mxfp4_kernels.gemm.matmul import Tiles, mxf4_tiles, usual_configs

    for tiles in (Tiles(), *(mxf4_tiles(*which, False) for which in ((False, True), (True, False), (True, True)))):
        configs = usual_configs(n_rows, tiles, shared_memory * 1024)
        assert configs
        for config in configs:
            needed = (config["BM"] + config["BN"]) * tiles.row_bytes * config["num_stages"]
            assert needed <= shared_memory << 10
        assert configs[0]["BM"] <= max(16, 2 * n_rows)


#: What the usual config of a product with many rows compiles to.
INSTRUCTIONS = {
    ("cuda", "80"): {"mxf4": r"mma\.sync\S*bf16"},
    ("cuda", "90"): {"e4m3": r"wgmma\.mma_async\S*e4m3\.e4m3", "mxf4": r"wgmma\.mma_async\S*bf16"},
    ("cuda", "100"): {"e4m3": r"tcgen05\.mma\S*kind::f8f6f4", "mxf4": r"tcgen05\.mma\S*kind::mxf4\b"},
    ("cuda", "120"): {"e4m3": r"mma\.sync\S*e4m3\.e4m3", "mxf4": r"mma\.sync\S*kind::mxf4nvf4"},
    ("hip", "gfx942"): {"mxf4": r"v_mfma_f32_\w+_bf16"},
    ("hip", "gfx950"): {"e4m3": r"v_mfma_f32_\w+_f8f6f4", "mxf4": r"v_mfma_scale_f32_\w+_f8f6f4"},
}


@pytest.mark.parametrize(
    ("backend", "arch", "rows"),
    [("cuda", "90", ("4096",)), *(pytest.param(*t, ("16", "4096"), marks=pytest.mark.large) for t in INSTRUCTIONS)],
)
def test_instructions_and_resources(run_script, backend, arch, rows):
    report = run_script("run_matmul_compiler.py", backend, arch, *rows, interpret=False)
    found = INSTRUCTIONS[backend, arch]
    assert len(report) == 2 * len(rows) * len(found)
    for name, asm in report.items():
        code = asm["ptx"] if backend == "cuda" else asm["amdgcn"]
        assert asm["shared"] <= asm["limit"], name
        if name.endswith("4096"):
            assert re.search(found[name[:4]], code), name
        # Triton 3.8 spills two values of one.
        stack = "[08]" if TRITON >= (3, 8) and (arch, name) == ("80", "mxf4 plain 4096") else "0"
        spill = rf"STACK:{stack}\b.*LOCAL:0\b" if backend == "cuda" else r"\.vgpr_spill_count: +0\b"
        assert re.search(spill, asm["sass"] if backend == "cuda" else code), name
        if backend == "cuda":
            assert "cp.async" in code, name
    if arch == "90":
        assert_totals_leave_the_tensor_cores_every_128_products(report)


def assert_totals_leave_the_tensor_cores_every_128_products(report: dict):
    """Hopper's tensor cores keep 14 bits of E4M3 sums: each of 64 totals of a thread gets an addition in float32."""
    for name in ("e4m3 row 4096", "e4m3 group 4096"):
        sass = report[name]["sass"]
        assert len(re.findall(r"\bQGMMA\.64x\d+x32\S*E4M3\.E4M3", sass)) == 4, name
        assert len(re.findall(r"\bFADD\b|\bFFMA\b", sass)) >= 64, name
