# SPDX-License-Identifier: Apache-2.0
"""The kernels that quantize against the eager definition, interpreted, and their interface."""

import pytest
import torch

import mxfp4_kernels
from mxfp4_kernels import Packed, Scheme, Side


@pytest.mark.parametrize(
    ("what", "cases"), [("schemes", 52), ("pairs", 35), ("layouts", 28), ("sides", 29), ("fp8", 21)]
)
def test_interpreted_kernels_equal_eager_bit_for_bit(run_script, what, cases):
    report = run_script("run_quantize.py", what, interpret=True)
    assert report == {"cases": cases, "mismatches": []}


@pytest.mark.large
def test_any_shape_scheme_and_range(run_script):
    assert run_script("run_quantize.py", "property", interpret=True) == {}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"scale_rule": "ceil"}, "ceil"),
        ({"scale_rule": None}, "None"),
        ({"macro_block": "row"}, "row"),
        ({"macro_block": 96}, "96"),
        ({"macro_block": True}, "True"),
        ({"macro_search": "block_mantissas", "macro_block": 64}, "needs macro_block=128, got macro_block=64"),
        ({"block_rows": 16}, "block_rows=16"),
        ({"block_rows": True}, "block_rows=True"),
        ({"macro_search": "hybrid"}, "hybrid"),
        ({"outlier_fallback": 0}, "outlier_fallback=0"),
        ({"outlier_fallback": 1.5}, "1.5"),
        ({"outlier_fallback": float("nan")}, "nan"),
        ({"outlier_fallback": True}, "True"),
    ],
)
def test_an_unsupported_scheme_has_a_reason_and_raises(change, word):
    options = {"scale_rule": "rceil", "macro_block": 128, "macro_search": "static", "outlier_fallback": 0.5} | change
    assert word in mxfp4_kernels.unsupported_scheme(**options)
    with pytest.raises(ValueError, match=word):
        Scheme(**options)


def test_without_macro_blocks_the_search_does_not_matter():
    assert mxfp4_kernels.unsupported_scheme("rceil", None, "hybrid", None) is None


X = torch.ones(4, 40)


@pytest.mark.parametrize(
    ("side", "error", "words"),
    [
        (Side(seed=1.5), TypeError, "1.5"),
        (Side(seed=True), TypeError, "True"),
        (Side(seed=2**64), ValueError, "must be in"),
        (Side(rotation=8), ValueError, "rotation=8"),
        (Side(rotation=True), ValueError, "rotation=True"),
        (Side(signs=torch.ones(40)), ValueError, "no effect without a rotation"),
        (Side(None, 16, torch.ones(40)), ValueError, r"\[40\]; the rotated axis has 48 elements"),
        (Side(None, 16, torch.ones(48, device="meta")), ValueError, "meta.*cpu; move them"),
    ],
)
def test_wrong_sides_raise(side, error, words):
    with pytest.raises(error, match=words):
        side.checked(X, 40)


PACKED = {
    "codes": torch.zeros(3, 80, dtype=torch.uint8),
    "scale": torch.zeros(3, 5, dtype=torch.uint8),
    "macro": torch.zeros(3, 2, dtype=torch.uint8),
    "residual_codes": torch.zeros(3, 80, dtype=torch.uint8),
    "residual_scale": torch.zeros(3, 5, dtype=torch.uint8),
}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"codes": torch.zeros(3, 80)}, TypeError, "codes must be uint8"),
        ({"codes": torch.zeros(3, 81, dtype=torch.uint8)}, ValueError, r"codes has the shape \[3, 81\].*\[3, 80\]"),
        ({"scale": torch.zeros(2, 5, dtype=torch.uint8)}, ValueError, r"scale has the shape \[2, 5\].*\[3, 5\]"),
        ({"macro": None}, ValueError, "macro is missing"),
        ({"residual_scale": None}, ValueError, "residual_scale is missing"),
        ({"scale": torch.zeros(3, 5, dtype=torch.uint8, device="meta")}, ValueError, "scale is on meta"),
    ],
)
def test_packed_tensors_that_do_not_fit_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        mxfp4_kernels.dequantize(Packed(**PACKED | change), 160, Scheme("rceil", 128, "static", 0.5), torch.float32)


def test_parts_that_a_scheme_does_not_have_are_refused():
    with pytest.raises(ValueError, match="macro is given"):
        Packed(**PACKED).check(160, Scheme(outlier_fallback=0.5))
    with pytest.raises(ValueError, match="residual_codes is given"):
        Packed(**PACKED).check(160, Scheme("rceil", 128))


FUNCTIONS = ("fake_quantize", "fake_quantize_rows_and_columns", "quantize", "quantize_rows_and_columns", "to_fp8")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_inputs_raise(name):
    function = getattr(mxfp4_kernels, name)
    with pytest.raises(TypeError, match="list"):
        function([1.0])
    with pytest.raises(TypeError, match="float64 is not supported"):
        function(torch.zeros(2, 32).double())
    with pytest.raises(ValueError, match="axes, got 0"):
        function(torch.tensor(1.0))
    with pytest.raises(ValueError, match="needs a GPU tensor"):
        function(X)


def test_wrong_outputs_and_shapes_raise():
    with pytest.raises(ValueError, match="at least 2 axes, got 1"):
        mxfp4_kernels.quantize(torch.ones(32), Scheme(block_rows=32))
    with pytest.raises(TypeError, match="float64"):
        mxfp4_kernels.dequantize(Packed(*[None] * 5), 32, Scheme(), torch.float64)
    elements = torch.zeros(2, 8, dtype=torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="scales uint8"):
        mxfp4_kernels.from_fp8(elements, torch.ones(2, 1), torch.float32)
    with pytest.raises(ValueError, match="need a scale byte each row"):
        mxfp4_kernels.from_fp8(elements, torch.ones(1, 1, dtype=torch.uint8), torch.float32)
