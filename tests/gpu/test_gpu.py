# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels on real hardware: bits of the eager definition, sums, determinism, CUDA graphs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import make_model

import hf_mxfp4
from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig, lab, numerics
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.numerics import MXFP4Tensor, QuantScheme
from hf_mxfp4.ops import (
    GemmSpec,
    GemmState,
    Groups,
    LayerRng,
    backend_for,
    group_by_expert,
    hardware_of,
    matmul_counts,
    quantized_linear,
    reset_matmul_counts,
    select_matmul,
)
from hf_mxfp4.ops import triton as triton_kernels
from mxfp4_kernels import Packed, Scheme, Side, fake_quantize_rows_and_columns, linear_w4a16


TESTS = Path(__file__).resolve().parents[1]


def report_of(script: str, *arguments: str, timeout: float = 550):
    """What a script of ``tests`` prints, parsed as JSON; in a process of its own, whose kernels are compiled."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", str(TESTS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("preset", ["w4a16", "w4a8", "w4a8g8", "w4a4", "w4a4g4"])
def test_experts_with_any_number_of_tokens_have_the_outputs_and_gradients_of_the_cpu(preset):
    torch.manual_seed(0)
    counts = (5, 0, 33, 2)
    scheme = MXFP4RLConfig(preset=preset).gemms()
    sizes = (sum(counts), 256), (len(counts), 128, 256), (len(counts), 128), (sum(counts), 128)
    x, weight, bias, grad = (torch.randn(*size).bfloat16() for size in sizes)
    results = {}
    for device in ("cuda", "cpu"):
        state = GemmState(GemmSpec(scheme, matmul_backend="auto"), [LayerRng(0, str(e)) for e in range(len(counts))])
        leaves = [tensor.to(device).requires_grad_() for tensor in (x, weight, bias)]
        out = quantized_linear(*leaves, state, Groups(counts))
        out.backward(grad.to(device))
        results[device] = [tensor.cpu().float() for tensor in (out.detach(), *(leaf.grad for leaf in leaves))]
    for found, expected in zip(*results.values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("what", ["schemes", "layouts", "sides", "fp8", "property"])
def test_compiled_kernels_equal_eager_bit_for_bit(what):
    report = report_of("kernels/run_quantize.py", what, "cuda", timeout=900)
    assert report.get("mismatches", []) == []


def test_doctor_finds_nothing():
    checks = list(lab.check_kernels("cuda"))
    assert [check for check in checks if check.problem] == []
    assert len(checks) >= 8


def test_the_automatic_backend_on_a_gpu_is_triton_and_gives_the_logits_of_eager():
    config = MXFP4RLConfig(preset="w4a4")
    assert backend_for("cuda", torch.float32, config.activation_scheme, "auto") == ("triton", None)
    ids = torch.arange(16, device="cuda").reshape(1, 16)
    logits = []
    for backend in ("triton", "eager"):
        model = make_model()
        quantize_linears(model, MXFP4RLConfig(preset="w4a4", backend=backend))
        with torch.no_grad():
            logits.append(model.cuda()(ids).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("preset", ["w4a4", "w4a8"])
def test_masters_on_the_cpu_are_dithered_to_the_places_that_the_cpu_finds(monkeypatch, preset):
    places = []
    for there_is_a_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=there_is_a_gpu: found)
        torch.manual_seed(0)
        model = make_model().bfloat16().float()
        quantize_linears(model, MXFP4RLConfig(preset=preset))
        assert hf_mxfp4.dither_masters(model).n_weights > 0
        places.append(model.state_dict())
    assert all(torch.equal(found, places[1][name]) for name, found in places[0].items())


@pytest.mark.parametrize("mantissas", [{"macro_block": 128, "macro_search": "block_mantissas"}, {"macro_block": None}])
def test_fp4_products_are_those_of_the_values(mantissas):
    torch.manual_seed(0)
    x = torch.randn(520, 256).bfloat16().cuda()
    linear = torch.nn.Linear(256, 80).bfloat16().cuda()
    config = MXFP4RLConfig(preset="w4a4", outlier_fallback=None, **mantissas)
    if select_matmul("fprop", config.gemms(), hardware_of(x.device)).name != "fp4":
        pytest.skip("no FP4 tensor cores")
    reset_matmul_counts()
    found = MXFP4Linear.from_linear(linear, config)(x)
    expected = MXFP4Linear.from_linear(linear, replace(config, matmul_backend="dense"))(x)
    assert matmul_counts()["fprop"] == {"fp4": 1}
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)


def test_more_than_2_to_the_31_elements():
    x = torch.randn(2**16 + 1, 2**15, device="cuda", dtype=torch.bfloat16)
    packed = hf_mxfp4.quantize(x, macro_block=128, outlier_fallback=0.5, backend="triton")
    values = packed.dequantize()
    for row in (0, 2**15, 2**16):
        expected = numerics.quantize(x[row].cpu(), macro_block=128, outlier_fallback=0.5)
        assert torch.equal(packed.codes[row].cpu(), expected.codes)
        assert torch.equal(packed.macro[row].cpu(), expected.macro)
        assert torch.equal(values[row].cpu(), expected.dequantize())


def test_more_than_2_to_the_31_elements_in_both_directions():
    rows = 2**16 + 32
    cols = 2**15
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    values, transposed = fake_quantize_rows_and_columns(x, Scheme(), Side(7), Side(None, 16))
    blocks = x[-32:].cpu()
    nearest = numerics.fake_quantize(blocks)
    assert (values[-32:].cpu().float() - nearest.float()).abs().max() <= blocks.float().abs().max() / 2
    for column in (0, 2**14, cols - 1):
        rotated = numerics.rotate(x[:, column].cpu().float(), 16)
        assert torch.equal(transposed[column].cpu(), numerics.fake_quantize(rotated).bfloat16())


SCHEMES = [{}, {"macro_block": 128, "outlier_fallback": 0.5}, {"macro_block": 128, "macro_search": "block_mantissas"}]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def packed_weight(*shape: int, **options):
    return hf_mxfp4.quantize(torch.randn(*shape, device="cuda") * 0.02, backend="triton", **options)


@pytest.mark.timeout(1600)
def test_products_with_packed_weights():
    report = report_of("kernels/run_decode.py", "all", "cuda", timeout=1500)
    assert {name: wrong for name, wrong in report.items() if wrong is not None} == {}


@pytest.mark.parametrize("options", SCHEMES, ids=str)
@pytest.mark.parametrize("n_tokens", [1, 8, 16, 64, 200])
@pytest.mark.parametrize(("n_rows", "n_cols"), [(4096, 4096), (100, 14336)])
def test_large_layers(n_tokens, n_rows, n_cols, options):
    weight = packed_weight(n_rows, n_cols, **options)
    x = normal(n_tokens, n_cols)
    y = triton_kernels.linear(x, weight, None)
    values = weight.dequantize(torch.float32).double()
    exact = x.double() @ values.T
    magnitude = x.double().abs() @ values.abs().T
    assert ((y.double() - exact).abs() <= 2.0**-8 * exact.abs() + n_cols * 2.0**-23 * magnitude).all()
    # The order of sums does not depend on which program arrives last.
    assert all(torch.equal(y, triton_kernels.linear(x, weight, None)) for _ in range(20))


def captured(step) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of a step that ran before, and its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def test_graphs_replay_beside_other_launches():
    packed = [packed_weight(4096, 4096) for _ in range(3)]
    x = normal(2, 4096)

    def step() -> torch.Tensor:
        y = x
        for weight in packed:
            y = triton_kernels.linear(y, weight, None)
        return y

    graphs, outputs = zip(captured(step), captured(step), strict=True)
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        for stream, graph in zip(streams, graphs, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.replay()
        expected = step()
        torch.cuda.synchronize()
        assert all(torch.equal(output, expected) for output in outputs)


def test_a_graph_that_was_captured_with_cached_weights_outlives_them():
    torch.manual_seed(0)
    layer = MXFP4Linear(1024, 512, device="cuda", dtype=torch.bfloat16, config=MXFP4RLConfig(preset="w4a16"))
    x = normal(4, 1024)
    with torch.no_grad():
        with hf_mxfp4.cached_weights(layer):
            expected = layer(x)
            graph, found = captured(lambda: layer(x))
            assert torch.equal(layer(x), expected)  # nothing was kept that is filled by a replay
        overwritten = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(8)]
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            with hf_mxfp4.cached_weights(layer):
                assert torch.equal(found, layer(x))
                assert overwritten
            layer.weight.mul_(-2)


def test_one_graph_serves_every_routing_and_nothing_waits_for_the_gpu():
    weight = packed_weight(8, 384, 256)
    x = normal(64, 256)
    ids = torch.randint(8, (64,), device="cuda")

    def step() -> torch.Tensor:
        order, groups = group_by_expert(ids, 8)
        return triton_kernels.linear(x[order], weight, None, groups.offsets(x.device))

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, found = captured(step)
    for routing in (ids.flip(0), torch.zeros_like(ids), torch.arange(64, device="cuda") % 3 + 5):
        ids.copy_(routing)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, step())


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.mark.parametrize("n_cols", [4096, 14336])
def test_inductors_graphs_hold_products_in_parts(monkeypatch, compiler, n_cols):
    """Counters that a first launch allocates must not lie in the memory of the graph that is warmed up around it."""
    from mxfp4_kernels.decode import counters

    captured = []
    zeros = counters.Counters.zeros

    def noted(self, count, device):
        captured.append(torch.cuda.is_current_stream_capturing())
        return zeros(self, count, device)

    monkeypatch.setattr(counters.Counters, "zeros", noted)
    torch.manual_seed(0)
    linear = torch.nn.Linear(n_cols, 256, device="cuda", dtype=torch.bfloat16)
    layer = MXFP4PackedLinear.from_linear(linear, MXFP4RLConfig(mode="packed", preset="w4a16"))
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    inputs = [normal(2, n_cols) for _ in range(5)]
    with torch.no_grad():
        found = [compiled(x).clone() for x in inputs]  # warm-up, recording, replays
        assert any(captured), "no product in parts was recorded"
        assert all(torch.equal(y, layer(x)) for x, y in zip(inputs, found, strict=True))
    assert compiler["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_packed_layers_give_the_results_of_eager(dtype):
    torch.manual_seed(0)
    linear = torch.nn.Linear(1024, 512, device="cuda", dtype=dtype)
    x = normal(5, 1024).to(dtype)
    results = []
    for backend in ("auto", "eager"):
        layer = MXFP4PackedLinear.from_linear(linear, MXFP4RLConfig(mode="packed", backend=backend))
        given = x.clone().requires_grad_()
        y = layer(given)
        y.sum().backward()
        results.append((y.detach().float(), given.grad.float()))
    (y, grad), (expected, expected_grad) = results
    tolerance = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-5
    assert (y - expected).abs().max() <= tolerance * expected.abs().max()
    assert torch.equal(grad, expected_grad)


def test_more_than_2_to_the_31_codes():
    n_rows = 2**17 + 64
    n_cols = 2**15
    codes = torch.randint(256, (n_rows, n_cols // 2), device="cuda", dtype=torch.uint8)
    scale = torch.full((n_rows, n_cols // 32), 120, device="cuda", dtype=torch.uint8)
    x = normal(1, n_cols)
    y = linear_w4a16(x, Packed(codes, scale), n_cols, Scheme())
    last = MXFP4Tensor(codes[-64:].cpu(), scale[-64:].cpu(), None, None, None, n_cols, 1, QuantScheme(), torch.float64)
    expected = x.cpu().double() @ last.dequantize().T
    assert (y[:, -64:].cpu().double() - expected).abs().max() <= 2.0**-8 * expected.abs().max()
