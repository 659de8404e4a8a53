# SPDX-License-Identifier: Apache-2.0
"""The kernels on every scheme against the eager definition, interpreted, and the interface of the packing ones."""

import pytest
import torch

import mxfp4_kernels


@pytest.mark.parametrize(
    ("what", "cases"),
    [("few_schemes", 34), ("layouts", 32), pytest.param("schemes", 62, marks=pytest.mark.large)],
)
def test_interpreted_kernels_equal_eager_bit_for_bit(run_script, what, cases):
    report = run_script("run_quantize.py", what, interpret=True)
    assert report["mismatches"] == []
    assert report["cases"] == cases


def test_any_shape_scheme_and_range(run_script):
    assert run_script("run_quantize.py", "property", interpret=True) == {}


def test_the_package_runs_on_the_kernels_where_triton_is_named(run_script):
    report = run_script("run_quantize.py", "package", interpret=True)
    assert {name: found["equal"] for name, found in report.items()} == dict.fromkeys(
        ("functions", "selective", "trained", "gradients", "packed"), True
    )
    launches = {name: found["launches"] for name, found in report.items()}
    assert launches["functions"] == {"quantize": 1, "fake_quantize": 1, "dequantize": 1}
    assert launches["selective"] == {"quantize": 6, "dequantize": 3}
    assert launches["trained"]["quantize"] == 1 and launches["trained"]["fake_quantize"] > 0
    # Of the output gradient, along its rows and along the tokens.
    assert launches["gradients"]["fake_quantize_e4m3_both"] == 1
    assert "fake_quantize_e4m3" not in launches["gradients"]
    # Rows of 70 elements are no whole words of codes, so that the product needs the values.
    assert launches["packed"] == {"quantize": 1, "dequantize": 1}


PACKED = {
    "codes": torch.zeros(3, 80, dtype=torch.uint8),
    "scale": torch.zeros(3, 5, dtype=torch.uint8),
    "macro": torch.zeros(3, 2, dtype=torch.uint8),
    "residual_codes": torch.zeros(3, 80, dtype=torch.uint8),
    "residual_scale": torch.zeros(3, 5, dtype=torch.uint8),
    "length": 160,
    "macro_block": 128,
    "outlier_fallback": 0.5,
    "dtype": torch.float32,
}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"dtype": torch.float64}, TypeError, "float64"),
        ({"codes": torch.zeros(3, 80)}, TypeError, "codes must be uint8"),
        ({"codes": torch.zeros(3, 81, dtype=torch.uint8)}, ValueError, r"codes has the shape \[3, 81\].*\[3, 80\]"),
        ({"scale": torch.zeros(2, 5, dtype=torch.uint8)}, ValueError, r"scale has the shape \[2, 5\].*\[3, 5\]"),
        ({"macro": torch.zeros(3, 1, dtype=torch.uint8)}, ValueError, r"macro has the shape \[3, 1\].*\[3, 2\]"),
        ({"macro": None}, ValueError, "macro is missing for macro_block=128"),
        ({"macro_block": None}, ValueError, "macro is given for macro_block=None"),
        ({"residual_scale": None}, ValueError, "residual_scale is missing"),
        ({"outlier_fallback": None}, ValueError, "residual_codes is given"),
        ({"macro_block": "row"}, ValueError, r"macro has the shape \[3, 2\].*\[3, 1\]"),
        ({"macro_search": "hybrid"}, ValueError, "hybrid"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_dequantize_refuses_what_does_not_fit(change, error, words):
    with pytest.raises(error, match=words):
        mxfp4_kernels.dequantize(**PACKED | change)


def test_tiles_are_never_flattened():
    from mxfp4_kernels.common.plan import plan

    assert plan(64, 256, 256, 32, 32) == (64, 256, 256, 32, 128)
    assert plan(64, 256, 256, 256, 32) == (64, 256, 256, 32, 256)
