# SPDX-License-Identifier: Apache-2.0
"""What all functions of the kernel package have in common: far apart rows work; mixed devices, and tensors on the CPU
without the interpreter, raise."""

import pytest
import torch

import mxfp4_kernels
from mxfp4_kernels.common import plan
from mxfp4_kernels.gemm import matmul


def test_rows_beyond_2_to_the_31_elements_and_mixed_devices(run_script):
    report = run_script("run_far_rows.py", interpret=True)
    assert report["differing"] == []
    assert len(report["cases"]) > 30
    # These read contiguous operands alone, and say so; their offsets are 64-bit by construction.
    assert report["refused"] == ["matmul_e4m3, argument 0", "matmul_e4m3, argument 2"]
    assert report["mixtures"] == []
    covered = {name.partition(",")[0] for name in report["cases"]}
    assert {"dequantize", "linear_w4a16", "grouped_matmul_packed"} <= covered


X, CODES, SCALE = torch.ones(4, 64), torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 4, dtype=torch.uint8)
E4M3, E4M3_SCALE = torch.zeros(4, 128, dtype=torch.float8_e4m3fn), torch.ones(4, 1)


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        ("fake_quantize", [X], "CPU"),
        ("quantize", [X], "CPU"),
        ("fake_quantize_both", [X], "CPU"),
        ("quantize_both", [X], "CPU"),
        ("dequantize", [CODES, SCALE], "CPU"),
        ("fold_e4m3", [X], "needs a GPU tensor"),
        ("fold_e4m3_both", [X], "needs a GPU tensor"),
        ("quantize_e4m3", [X], "needs a GPU tensor"),
        ("quantize_e4m3_both", [X], "needs a GPU tensor"),
        ("fake_quantize_e4m3_both", [X], "needs a GPU tensor"),
        ("matmul_e4m3", [E4M3, E4M3_SCALE] * 2, "needs GPU tensors"),
        ("matmul_mxf4", [CODES, SCALE] * 2, "needs GPU tensors"),
    ],
)
def test_compiled_kernels_refuse_cpu_tensors(function, arguments, words, monkeypatch):
    monkeypatch.setattr(plan, "INTERPRETED", False)
    monkeypatch.setattr(matmul, "INTERPRETED", False)
    options = {"length": 128, "dtype": torch.float32} if function == "dequantize" else {}
    with pytest.raises(ValueError, match=words):
        getattr(mxfp4_kernels, function)(*arguments, **options)
