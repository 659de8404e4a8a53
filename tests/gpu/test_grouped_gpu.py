# SPDX-License-Identifier: Apache-2.0
"""The compiled grouped products on real hardware, also in the sizes of Qwen3-30B-A3B: `pytest tests/gpu`."""

import pytest
import torch
from compiled import report_of


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
HAS_E4M3 = torch.cuda.is_available() and (torch.version.hip is not None or torch.cuda.get_device_capability() >= (8, 9))


@pytest.mark.parametrize(
    "what", ["dense", "packed", pytest.param("e4m3", marks=pytest.mark.skipif(not HAS_E4M3, reason="no E4M3"))]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_compiled_products_are_those_of_each_expert(what, dtype):
    report = report_of("kernels/run_grouped.py", what, dtype, "cuda")
    assert {label: value for label, value in report.items() if not value <= 1} == {}
    assert len(report) > 16


def case(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of bfloat16, weights of 8 experts, and ids of the rows' experts."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    x, weight = (
        torch.randn(*size, device="cuda", generator=generator).bfloat16() for size in ((tokens, 256), (8, 384, 256))
    )
    return x, weight, torch.randint(8, (tokens,), device="cuda", generator=generator)


def test_nothing_waits_for_the_gpu():
    import mxfp4_kernels
    from hf_mxfp4.gemm import group_by_expert, quantized_linear

    x, weight, ids = case(100)
    packed = mxfp4_kernels.quantize(weight)
    leaf = weight.clone().requires_grad_()

    def step():
        order, groups = group_by_expert(ids, 8)
        offsets = groups.offsets(x.device)
        out = mxfp4_kernels.grouped_matmul_packed(x[order], packed.codes, packed.scale, offsets, length=256)
        trained = quantized_linear(x[order], leaf, None, groups=groups)
        trained.sum().backward()
        return out

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_graph_serves_every_routing():
    import mxfp4_kernels
    from hf_mxfp4.gemm import group_by_expert

    x, weight, ids = case(64)
    packed = mxfp4_kernels.quantize(weight)

    def step():
        order, groups = group_by_expert(ids, 8)
        offsets = groups.offsets(x.device)
        dense = mxfp4_kernels.grouped_matmul(x[order], weight, offsets)
        return (
            order,
            dense,
            mxfp4_kernels.grouped_matmul_packed(x[order], packed.codes, packed.scale, offsets, length=256),
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for routing in (ids.flip(0), torch.zeros_like(ids), torch.arange(64, device="cuda") % 3 + 5):
        ids.copy_(routing)
        graph.replay()
        torch.cuda.synchronize()
        for found, wanted in zip(captured, step(), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.skipif(not HAS_E4M3, reason="no E4M3")
def test_the_automatic_engine_trains_experts_like_the_dense_one():
    report = report_of("ops/run_fast_experts.py", "cuda")
    for label, layer in report["experts"].items():
        # FP8 tensor cores of sm_90 keep about 14 bits of sums, which those of folded MXFP4 fit into.
        exact = 2.0**-12 if layer["fp8 operands"] else 1e-5
        bound = exact if label.endswith("float32") else 2.0**-6
        assert max(layer["distance"].values()) <= bound, (label, layer)
        if label.startswith("w4a4g4"):
            assert layer["engines"] == ["fp8"] * 3
    assert report["folds"] == [2, 4] and report["no rows"]
