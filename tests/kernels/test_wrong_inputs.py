# SPDX-License-Identifier: Apache-2.0
"""What all functions of the kernel package have in common: far apart rows work, mixed devices raise."""


def test_rows_beyond_2_to_the_31_elements_and_mixed_devices(run_script):
    report = run_script("run_far_rows.py", interpret=True)
    assert report["differing"] == []
    assert len(report["cases"]) > 30
    # These read contiguous operands alone, and say so; their offsets are 64-bit by construction.
    assert report["refused"] == ["matmul_e4m3, argument 0", "matmul_e4m3, argument 2"]
    assert report["mixtures"] == []
    covered = {name.partition(",")[0] for name in report["cases"]}
    assert {"dequantize", "linear_w4a16", "grouped_matmul_packed"} <= covered
