# SPDX-License-Identifier: Apache-2.0
"""Folding, products and engines on real hardware, against the eager definition and float64."""

import pytest
import torch
from compiled import report_of

import mxfp4_kernels
from hf_mxfp4 import numerics


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def has_fp8() -> bool:
    return torch.cuda.is_available() and mxfp4_kernels.has_fp8(torch.device("cuda", torch.cuda.current_device()))


def test_folding_equals_eager_bit_for_bit():
    report = report_of("kernels/run_fold.py", "cuda")
    assert report["mismatches"] == [] and report["cases"] == 30


@pytest.mark.skipif("not has_fp8()", reason="no FP8 products")
def test_products_stay_within_the_bound_of_float32_sums():
    report = report_of("kernels/run_matmul.py", "cuda")
    assert max(report["excess"].values()) <= 1, report["excess"]
    assert report["nan"] and report["extremes"] and report["biases"]


@pytest.mark.skipif("not has_fp8()", reason="no FP8 products")
def test_the_automatic_engine_trains_like_the_dense_one():
    report = report_of("ops/run_engines.py", "cuda")
    for label, layer in report["layers"].items():
        # FP8 tensor cores of sm_90 keep about 14 bits of sums, which those of folded MXFP4 fit into.
        exact = 2.0**-12 if layer["fp8 operands"] else 1e-5
        bound = exact if label.endswith("float32") else 2.0**-6
        assert max(layer["distance"].values()) <= bound, (label, layer)
    fast = report["layers"]["w4a4g4, auto, bfloat16"]["engines"]
    assert "dense" not in fast


@pytest.mark.skipif("not has_fp8()", reason="no FP8 products")
def test_products_of_more_than_2_to_the_31_elements():
    rows = 2**16 + 40
    a = torch.randn(rows, 128, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(2**15 + 16, 128, device="cuda", dtype=torch.bfloat16)
    left, right = mxfp4_kernels.fold_e4m3(a, macro_block=128), mxfp4_kernels.fold_e4m3(b, macro_block=128)
    out = mxfp4_kernels.matmul_e4m3(left.elements, left.scale, right.elements, right.scale)
    for part in (slice(0, 40), slice(rows - 40, rows)):
        operands = [numerics.fake_quantize(x.float().cpu(), macro_block=128) for x in (a[part], b[-64:])]
        torch.testing.assert_close(out[part, -64:].float().cpu(), operands[0] @ operands[1].T, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif("not has_fp8()", reason="no FP8 products")
def test_folding_and_products_can_be_captured_in_a_graph():
    x, w = (torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16) for rows in (64, 256))
    counter = torch.zeros((), dtype=torch.int32, device="cuda")

    def product() -> torch.Tensor:
        left, right = (mxfp4_kernels.fold_e4m3(side, counter=counter) for side in (x, w))
        return mxfp4_kernels.matmul_e4m3(left.elements, left.scale, right.elements, right.scale)

    expected = product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product()
    graph.replay()
    assert torch.equal(captured, expected)
