# SPDX-License-Identifier: Apache-2.0
"""The fused kernel against the eager definition, and the interface around it."""

import itertools
import os
import subprocess
import sys

import pytest
import torch

import mxfp4_kernels
from mxfp4_kernels.common.checks import check_scheme


DEFAULT = {"scale_rule": "rceil", "macro_block": 128, "macro_search": "static", "outlier_fallback": 0.5}


@pytest.mark.parametrize(
    ("amount", "cases", "elements"),
    [(("few",), 56, 250_000), pytest.param((), 252, 400_000, marks=pytest.mark.large)],
    ids=["few", "all"],
)
def test_interpreted_kernel_equals_eager_bit_for_bit(run_script, amount, cases, elements):
    reports = run_script("run_interpreted.py", "float32,bfloat16,float16", *amount, interpret=True)
    assert len(reports) == 3
    for report in reports:
        assert report["mismatches"] == []
        # 3 rules x (5 macro blocks x 2 fallbacks + 2), of all times 7 shapes, and the named cases.
        assert report["cases"] > cases
        assert report["elements"] > elements
        assert report["nan"] > 1000 and report["zeros"] > 1000
        assert "three axes, permuted" in report["labels"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_supports_what_is_compared(dtype):
    for rule, macro, search, alpha in itertools.product(
        ("rceil", "floor", "even", "mse"), (None, 32, 64, 128, 256), ("static", "dynamic"), (None, 0.5, 1, 0.3)
    ):
        options = {"scale_rule": rule, "macro_block": macro, "macro_search": search, "outlier_fallback": alpha}
        assert mxfp4_kernels.supports(dtype, **options) is None


def test_search_is_irrelevant_without_macro_blocks():
    assert mxfp4_kernels.supports(torch.float32, **DEFAULT | {"macro_block": None, "macro_search": "dynamic"}) is None


def test_supports_takes_the_scale_rule_enum():
    from hf_mxfp4.numerics import ScaleRule

    assert mxfp4_kernels.supports(torch.float32, **DEFAULT | {"scale_rule": ScaleRule.EVEN}) is None
    assert mxfp4_kernels.supports(torch.float32, **DEFAULT | {"scale_rule": ScaleRule.MSE}) is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"scale_rule": "ceil"}, "ceil"),
        ({"scale_rule": None}, "None"),
        ({"macro_block": "row", "block_rows": 32}, "'row' with block_rows=32"),
        ({"macro_block": "rows"}, "rows"),
        ({"macro_block": 96}, "96"),
        ({"macro_block": True}, "True"),
        ({"macro_search": "blockwise", "macro_block": 64}, "needs macro_block=128, got macro_block=64"),
        ({"block_rows": 16}, "block_rows=16"),
        ({"macro_search": "hybrid"}, "hybrid"),
        ({"outlier_fallback": 0}, "outlier_fallback=0"),
        ({"outlier_fallback": 1.5}, "1.5"),
        ({"outlier_fallback": float("nan")}, "nan"),
        ({"outlier_fallback": True}, "True"),
    ],
)
def test_unsupported_scheme_has_a_reason_and_raises(change, word):
    options = DEFAULT | change
    assert word in mxfp4_kernels.supports(torch.float32, **options)
    with pytest.raises(ValueError, match=word):
        mxfp4_kernels.fake_quantize(torch.ones(32), **options)


def test_what_was_checked_before_says_nothing_about_its_likes():
    x = torch.ones(4, 32, device="meta")
    for _ in range(2):
        with pytest.raises(ValueError, match="block_rows=True"):
            mxfp4_kernels.fake_quantize(x, block_rows=True)
        with pytest.raises(ValueError, match=r"macro_block=\[128\]"):
            mxfp4_kernels.fake_quantize(x, macro_block=[128])
        with pytest.raises(ValueError, match="outlier_fallback=True"):
            mxfp4_kernels.fake_quantize(x, outlier_fallback=True)
        assert mxfp4_kernels.supports(x.dtype, **DEFAULT | {"block_rows": 1, "outlier_fallback": 1}) is None
        check_scheme("rceil", 128, "static", 1, 1, "nearest")


def test_supports_both_roundings():
    assert mxfp4_kernels.supports(torch.float32, **DEFAULT, rounding="stochastic") is None
    row = DEFAULT | {"macro_block": "row", "macro_search": "static"}
    assert mxfp4_kernels.supports(torch.float32, **row, length=32768) is None
    assert "up to 32768 elements" in mxfp4_kernels.supports(torch.float32, **row, length=32769)
    assert "up to 16384" in mxfp4_kernels.supports(torch.float32, **row | {"scale_rule": "mse"}, length=32768)
    assert "upwards" in mxfp4_kernels.supports(torch.float32, **DEFAULT, rounding="upwards")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_other_dtypes_have_a_reason_and_raise(dtype):
    assert str(dtype) in mxfp4_kernels.supports(dtype, **DEFAULT)
    with pytest.raises(TypeError, match=str(dtype)):
        mxfp4_kernels.fake_quantize(torch.zeros(2, 32).to(dtype))


def test_wrong_inputs_raise():
    with pytest.raises(TypeError, match="list"):
        mxfp4_kernels.fake_quantize([1.0])
    with pytest.raises(ValueError, match="scalar"):
        mxfp4_kernels.fake_quantize(torch.tensor(1.0))
    with pytest.raises(ValueError, match="two axes"):
        mxfp4_kernels.quantize(torch.ones(32), block_rows=32)


def test_import_is_light():
    code = "import sys, mxfp4_kernels; print([m for m in ('torch', 'triton', 'numpy', 'hf_mxfp4') if m in sys.modules])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"


def test_plan_flattens_only_gapless_whole_macro_blocks():
    from mxfp4_kernels.common.plan import plan

    assert plan(10, 256, 256, 128) == (1, 2560, 2560, 1, 2048)
    assert plan(10, 192, 192, 128)[:3] == (10, 192, 192)
    assert plan(10, 192, 192, 32)[:2] == (1, 1920)
    assert plan(10, 256, 300, 128)[:3] == (10, 256, 300)
    assert plan(1, 256, 999, 128)[:2] == (1, 256)
    assert plan(2**17, 2**15, 2**15, 128)[1] == 2**32
