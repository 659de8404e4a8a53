# SPDX-License-Identifier: Apache-2.0
"""The choice of the backend that quantizes a tensor, and that the operation is the numeric contract's."""

import pytest
import torch

from hf_mxfp4 import QuantScheme, numerics
from hf_mxfp4.backends import backend_for, cpu, fake_quantize
from hf_mxfp4.numerics import fake_quantize as reference


STATIC = QuantScheme("rceil", 128, "static", 0.5)
DYNAMIC = QuantScheme("rceil", 128, "dynamic", 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_cpu_is_served_by_the_fused_functions_where_there_is_a_compiler(dtype):
    if cpu.unsupported_reason(dtype, STATIC) is not None:
        pytest.skip(cpu.unsupported_reason(dtype, STATIC))
    assert backend_for("cpu", dtype, STATIC, "auto") == ("cpu", None)
    assert backend_for("cpu", dtype, STATIC, "cpu") == ("cpu", None)
    assert backend_for("cpu", dtype, STATIC, "eager")[0] == "eager"


def test_float64_on_the_cpu_runs_eagerly():
    name, reason = backend_for("cpu", torch.float64, STATIC, "auto")
    assert name == "eager" and "float64" in reason


def test_the_cpu_functions_do_not_take_tensors_of_other_devices():
    name, reason = backend_for("cuda", torch.float32, STATIC, "cpu")
    assert name == "cpu" and reason == "the tensor is on cuda"


def test_triton_on_the_cpu_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="backend='triton' cannot quantize here.*on cpu.*backend='auto'"):
        fake_quantize(torch.ones(2, 32), STATIC, "triton")


def test_a_gpu_is_served_by_triton_where_it_covers_the_scheme():
    pytest.importorskip("triton")
    assert backend_for("cuda", torch.bfloat16, STATIC, "auto") == ("triton", None)
    assert backend_for("cuda", torch.bfloat16, STATIC, "triton") == ("triton", None)
    assert backend_for("cuda", torch.bfloat16, STATIC, "eager")[0] == "eager"


def test_macro_blocks_of_whole_rows_are_eager():
    pytest.importorskip("triton")
    name, reason = backend_for("cuda", torch.bfloat16, numerics.parse_scheme("rceil+mbsrow-dynamic"), "auto")
    assert name == "eager" and "macro_block='row' is not supported" in reason


@pytest.mark.parametrize(
    "scheme",
    [DYNAMIC, QuantScheme("mse"), QuantScheme("even", 128, "blockwise"), QuantScheme("mse", 256, block_rows=32)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_searches_and_tiles_are_no_obstacle_on_a_gpu(scheme, dtype):
    pytest.importorskip("triton")
    assert backend_for("cuda", dtype, scheme, "auto") == ("triton", None)


@pytest.mark.parametrize(
    ("scheme", "dtype", "word"),
    [
        (QuantScheme("rceil", "row", block_rows=32), torch.float32, "row"),
        (QuantScheme("rceil", None, "static", 0.5, block_rows=32, fallback_rate=0.1), torch.float32, "fallback_rate"),
        (STATIC, torch.float64, "float64"),
    ],
    ids=["row", "fallback_rate", "float64"],
)
def test_auto_falls_back_to_eager_and_says_why(scheme, dtype, word):
    pytest.importorskip("triton")
    name, reason = backend_for("cuda", dtype, scheme, "auto")
    assert name == "eager" and word in reason
    name, reason = backend_for("cuda", dtype, scheme, "triton")
    assert name == "triton" and word in reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", [STATIC, DYNAMIC, QuantScheme("floor")], ids=str)
def test_the_values_are_those_of_the_numeric_contract(scheme, dtype):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 70).to(dtype)
    expected = reference(
        x,
        scale_rule=scheme.scale_rule,
        macro_block=scheme.macro_block,
        macro_search=scheme.macro_search,
        outlier_fallback=scheme.outlier_fallback,
    )
    out = fake_quantize(x, scheme)
    assert out.dtype == dtype and torch.equal(out, expected)
    assert not torch.equal(out, x)
