# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights on real hardware: sums, determinism, CUDA graphs, and layers on top."""

import pytest
import torch
from compiled import report_of
from tiny_models import make_model

import hf_mxfp4
from hf_mxfp4 import MXFP4PackedLinear, MXFP4RLConfig, cached_weights, numerics
from hf_mxfp4.integrations.transformers.swap import quantize_linears


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SCHEMES = [{}, {"macro_block": 128}, {"macro_block": 128, "macro_search": "static", "outlier_fallback": 0.5}]


def linear_w4a16(x, packed, **options):
    import mxfp4_kernels

    scheme = packed.scheme
    return mxfp4_kernels.linear_w4a16(
        x,
        packed.codes,
        packed.scale,
        length=packed.length,
        macro=packed.macro,
        macro_block=scheme.macro_block,
        macro_search=scheme.macro_search,
        residual_codes=packed.residual_codes,
        residual_scale=packed.residual_scale,
        outlier_fallback=scheme.outlier_fallback,
        **options,
    )


@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    ("what", "cases"), [("few", 12), *((f"matrix-{dtype}", 180) for dtype in ("bfloat16", "float16", "float32"))]
)
def test_products_with_packed_weights(what, cases):
    report = report_of("kernels/run_linear_w4a16.py", what, "cuda", timeout=1500)
    assert report["wrong"] == [] and report["cases"] == cases


@pytest.mark.parametrize("options", SCHEMES, ids=str)
@pytest.mark.parametrize("n_tokens", [1, 2, 8, 16, 64, 200])
@pytest.mark.parametrize(("n_rows", "n_cols"), [(4096, 4096), (2560, 9728), (100, 14336)])
def test_large_layers(n_tokens, n_rows, n_cols, options):
    weight = torch.randn(n_rows, n_cols, device="cuda") * 0.02
    packed = hf_mxfp4.quantize(weight, backend="triton", **options)
    x = torch.randn(n_tokens, n_cols, device="cuda", dtype=torch.bfloat16)
    y = linear_w4a16(x, packed)
    exact = x.double() @ packed.dequantize(torch.float32).double().T
    magnitude = x.double().abs() @ packed.dequantize(torch.float32).double().abs().T
    assert ((y.double() - exact).abs() <= 2.0**-9 * exact.abs() + n_cols * 2.0**-23 * magnitude).all()
    # The order of sums does not depend on which program arrives last.
    assert all(torch.equal(y, linear_w4a16(x, packed)) for _ in range(20))


def test_graphs_replay_beside_other_launches():
    packed = [hf_mxfp4.quantize(torch.randn(4096, 4096, device="cuda"), backend="triton") for _ in range(3)]
    x = torch.randn(2, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        y = x
        for weight in packed:
            y = linear_w4a16(y, weight) / 64
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graphs, outputs = [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outputs.append(step())
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


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.mark.parametrize("n_cols", [4096, 14336])
def test_inductors_graphs_hold_products_in_parts(monkeypatch, compiler, n_cols):
    """Counters that a first launch allocates must not lie in the memory of the graph that is warmed up around it."""
    from mxfp4_kernels.common import counters as _counters

    # As in a fresh process: the first launch of all is that of the warm-up.
    monkeypatch.setattr(_counters, "_of_stream", {})
    monkeypatch.setattr(_counters, "_for_graphs", {})
    torch.manual_seed(0)
    linear = torch.nn.Linear(n_cols, 256, device="cuda", dtype=torch.bfloat16)
    layer = MXFP4PackedLinear.from_linear(linear, MXFP4RLConfig(mode="packed", preset="w4a16"))
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    inputs = [torch.randn(2, n_cols, device="cuda", dtype=torch.bfloat16) for _ in range(5)]
    with torch.no_grad():
        found = [compiled(x).clone() for x in inputs]  # warm-up, recording, replays
        ((_, used),) = _counters._for_graphs.values()
        assert used > 0, "no product in parts was recorded"
        assert all(torch.equal(y, layer(x)) for x, y in zip(inputs, found, strict=True))
    assert compiler["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("preset", ["w4a16", "w4a4"])
def test_inductors_graphs_hold_packed_layers_without_kernels(compiler, preset):
    torch.manual_seed(0)
    linear = torch.nn.Linear(520, 96, device="cuda", dtype=torch.bfloat16)
    config = MXFP4RLConfig(mode="packed", preset=preset, macro_search="static", backend="eager")
    layer = MXFP4PackedLinear.from_linear(linear, config)
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(4):  # warm-up, recording, replays
            x = torch.randn(3, 520, device="cuda", dtype=torch.bfloat16)
            assert torch.equal(compiled(x), layer(x))
    assert compiler["inductor"]["cudagraph_skips"] == 0


def test_nothing_waits_for_the_gpu():
    packed = hf_mxfp4.quantize(torch.randn(1024, 4096, device="cuda"), backend="triton", macro_block=128)
    x = torch.randn(3, 4096, device="cuda", dtype=torch.bfloat16)
    linear_w4a16(x, packed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_w4a16(x, packed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_packed_layers_compute_on_the_codes_by_default(dtype):
    torch.manual_seed(0)
    linear = torch.nn.Linear(1024, 512, device="cuda", dtype=dtype)
    x = torch.randn(5, 1024, device="cuda", dtype=dtype)
    results = []
    for backend in ("auto", "eager"):
        layer = MXFP4PackedLinear.from_linear(linear, MXFP4RLConfig(mode="packed", backend=backend))
        taken = x.clone().requires_grad_()
        y = layer(taken)
        y.sum().backward()
        results.append((y.detach().float(), taken.grad.float()))
    (y, grad), (expected, expected_grad) = results
    tolerance = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-5
    assert (y - expected).abs().max() <= tolerance * expected.abs().max()
    assert torch.equal(grad, expected_grad)


def test_rollouts_of_a_trained_model_keep_packed_weights():
    config = MXFP4RLConfig(preset="w4a16", macro_block=None)
    model = make_model()
    quantize_linears(model, config)
    model = model.cuda()
    ids = torch.arange(16, device="cuda").reshape(1, 16)
    logits = {}
    for form in ("auto", "dense", "packed"):
        with torch.no_grad(), cached_weights(form):
            logits[form] = model(ids).logits
    assert torch.equal(logits["auto"], logits["packed"])
    assert (logits["packed"] - logits["dense"]).abs().max() <= 1e-3 * logits["dense"].abs().max()


def test_more_than_2_to_the_31_codes():
    n_rows, n_cols = 2**17 + 64, 2**15
    codes = torch.randint(256, (n_rows, n_cols // 2), device="cuda", dtype=torch.uint8)
    scale = torch.full((n_rows, n_cols // 32), 120, device="cuda", dtype=torch.uint8)
    x = torch.randn(1, n_cols, device="cuda", dtype=torch.bfloat16)
    import mxfp4_kernels

    y = mxfp4_kernels.linear_w4a16(x, codes, scale, length=n_cols)
    last = numerics.dequantize(codes[-64:].cpu(), scale[-64:].cpu(), length=n_cols).double()
    expected = x.cpu().double() @ last.T
    assert (y[:, -64:].cpu().double() - expected).abs().max() <= 2.0**-8 * expected.abs().max()
