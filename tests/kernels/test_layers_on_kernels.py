# SPDX-License-Identifier: Apache-2.0
"""Layers compute on the kernels what they compute on the eager functions."""


def test_layers_on_the_kernels_are_those_on_the_eager_functions(run_script):
    report = run_script("run_layers.py", interpret=True)
    for name, found in report.items():
        # Quantized values are the same bits. Products on codes round once where those of values round twice.
        bound = 0.02 if name in ("packed", "packed, rotated", "experts") else 0
        assert max(found["differences"]) <= bound, (name, found)
    launches = {name: set(found["launches"]) for name, found in report.items()}
    assert report["experts"]["launches"]["linear_w4a16"] == 2 and "dequantize" not in launches["experts"]
    assert "linear_w4a16" in launches["packed"] and "fake_quantize_rows_and_columns" in launches["w4a4g4"]
    assert {"to_fp8", "from_fp8"} <= launches["w4a4g8"]
    assert all("fake_quantize" in launches[name] for name in ("w4a4", "paper_a", "paper_b"))
