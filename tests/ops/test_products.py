# SPDX-License-Identifier: Apache-2.0
"""Products of quantized operands with the straight-through gradient: of one weight, of experts, and as FP8 tensor cores
compute them."""

import functools
import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from factors import factors_config
from passes import passes
from tables import CONFIGS, needs_fp8_on_cpu, some
from torch import nn

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig, fake_quantize, ops
from hf_mxfp4 import quantize as mxfp4_quantize
from hf_mxfp4.numerics import FULL, GemmScheme, LinearScheme, QuantScheme
from hf_mxfp4.ops import GemmSpec, GemmState, Groups, LayerRng, PackedState, packed_linear, quantized_linear, to_fp8
from hf_mxfp4.ops import quantization as backends


def state_of(inputs) -> GemmState:
    return GemmState(GemmSpec(LinearScheme(GemmScheme(inputs, QuantScheme()))), [LayerRng(0, "layer")])


STATE, WEIGHT_ONLY = state_of(QuantScheme()), state_of(FULL)


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small integers, many of which quantization changes, and on which sums of products are exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).float()


def test_literal():
    x = torch.tensor([[2.0, 5.5]], requires_grad=True)  # 5.5 becomes 6
    weight = torch.tensor([[1.0, -6.0], [0.3, 6.0]], requires_grad=True)  # 0.3 becomes 0.5
    bias = torch.tensor([10.0, 20.0], requires_grad=True)
    y = quantized_linear(x, weight, bias, STATE)
    assert y.tolist() == [[2.0 - 36.0 + 10.0, 1.0 + 36.0 + 20.0]]
    y.backward(torch.tensor([[1.0, 2.0]]))
    assert x.grad.tolist() == [[1.0 + 1.0, -6.0 + 12.0]]
    assert weight.grad.tolist() == [[2.0, 6.0], [4.0, 12.0]]
    assert bias.grad.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_no_gradient_where_none_is_needed(frozen):
    tensors = {"x": integers(3, 6), "weight": integers(5, 6, seed=1), "bias": integers(5, seed=2)}
    for name, operand in tensors.items():
        operand.requires_grad_(name != frozen)
    quantized_linear(*tensors.values(), STATE).sum().backward()
    for name, operand in tensors.items():
        assert (operand.grad is None) == (name == frozen)


def test_backward_survives_a_weight_whose_storage_was_freed_in_between():
    x, weight = integers(3, 6).requires_grad_(), integers(5, 6, seed=1).requires_grad_()
    y = quantized_linear(x, weight, None, WEIGHT_ONLY)
    kept = weight.data
    weight.data = torch.empty(0)
    weight.data = kept
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 5) @ fake_quantize(weight.detach()))


def test_there_is_no_second_derivative():
    x, weight = integers(3, 6).requires_grad_(), integers(5, 6, seed=1).requires_grad_()
    (grad,) = torch.autograd.grad(quantized_linear(x, weight, None, STATE).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_rotated_weight_is_rotated_back_for_dgrad():
    """In float64, by the matrix of Sylvester's construction."""
    plain, rotated = (
        GemmState(GemmSpec(config.gemms(), matmul_backend="dense"), [LayerRng(0, "a")])
        for config in (MXFP4RLConfig(), MXFP4RLConfig(fprop={"rotation": "deterministic-32"}))
    )
    x, weight, grad = (torch.randn(*size, dtype=torch.float64) for size in ((6, 32), (5, 32), (6, 5)))
    quantized_linear(x.requires_grad_(), weight, None, rotated).backward(grad)
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    matrix = functools.reduce(torch.kron, [pair] * 5)
    expected = grad @ ops.weight_operand(weight @ matrix, torch.float64, plain) @ matrix.t()
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-12)


COUNTS = (5, 0, 33, 2)
E, N, K = 4, 48, 40
SCHEME = QuantScheme(macro_block=32)
SCHEMES = some(
    CONFIGS, "default", "w4a16", "w4a8", "w4a8g8", "fp8 gradients", "w4a4g4", "paper_a", "paper_b", "plain tiles",
    "fallback of weights", "block_mantissas_fp8", "full", "rotated, own wgrad", "random", "random wgrad",
)  # fmt: skip


def quantized_as(x, dtype):
    return fake_quantize(x.detach(), macro_block=32).to(dtype)


def tensors(bias=True, transposed=False, dtype=torch.float32, seed=0):
    """Input, weight, bias and output gradient; the numbers of the weight do not depend on its layout."""
    generator = torch.Generator().manual_seed(seed)
    x, weight, b, grad = (
        torch.randn(*size, generator=generator).to(dtype)
        for size in ((sum(COUNTS), K), (E, N, K), (E, N), (sum(COUNTS), N))
    )
    weight = weight.transpose(1, 2).contiguous() if transposed else weight
    leaves = [t.requires_grad_() for t in (x, weight, b)]
    return leaves[0], leaves[1], leaves[2] if bias else None, grad


def states(scheme=None, transposed=False, matrices=E):
    """Of the experts, and of linear layers of their own. ``None``: what gradients reuse is all that is quantized."""
    gemms = LinearScheme(GemmScheme(SCHEME, SCHEME))
    if scheme is not None:
        gemms = factors_config(**SCHEMES[scheme]).gemms()
    rngs = [[LayerRng(0, f"experts.{e}") for e in range(matrices)] for _ in range(2)]
    of_experts = GemmState(GemmSpec(gemms, transposed=transposed), rngs[0])
    return of_experts, [GemmState(GemmSpec(gemms), [rng]) for rng in rngs[1]]


def passes_of_experts(x, weight, bias, grad, state=None):
    out = quantized_linear(x, weight, bias, state or states()[0], Groups(COUNTS))
    out.backward(grad)
    return out.detach(), [None if t is None else t.grad for t in (x, weight, bias)]


def expected(x, weight, bias, grad, transposed=False, own_states=None):
    """One linear layer for each expert."""
    out, grads = torch.empty(len(x), N, dtype=x.dtype), [torch.zeros_like(t) for t in (x, weight, bias)]
    start = 0
    for e, count in enumerate(COUNTS):
        rows = slice(start, start := start + count)
        if not count:
            continue
        own = (x[rows], weight[e].t() if transposed else weight[e], bias[e])
        own = [t.detach().clone().requires_grad_() for t in own]
        y = quantized_linear(*own, (own_states or states()[1])[e])
        y.backward(grad[rows])
        out[rows] = y.detach()
        grads[0][rows], grads[2][e] = own[0].grad, own[2].grad
        grads[1][e] = own[1].grad.t() if transposed else own[1].grad
    return out, grads


def test_rows_are_grouped_by_expert_in_their_order():
    order, groups = ops.group_by_expert(torch.tensor([2, 0, 2, 3, 0]), 5)
    assert order.tolist() == [1, 4, 0, 2, 3]
    assert groups.offsets(torch.device("cpu")).tolist() == [2, 2, 4, 5, 5]
    assert groups.offsets(torch.device("cpu")).dtype == torch.int32
    assert groups.per_row(torch.arange(5)).tolist() == [0, 0, 2, 2, 3]
    assert "counts" not in vars(groups)  # which are read back only when they are asked for
    assert groups.counts == (2, 0, 2, 1, 0) and "counts" in vars(groups)
    assert list(groups) == [(0, slice(0, 2)), (2, slice(2, 4)), (3, slice(4, 5))]


def test_no_rows():
    order, groups = ops.group_by_expert(torch.empty(0, dtype=torch.long), 3)
    assert order.numel() == 0 and groups.counts == (0, 0, 0) and list(groups) == []
    x, weight = torch.empty(0, K, requires_grad=True), torch.randn(3, N, K, requires_grad=True)
    out = quantized_linear(x, weight, None, states(matrices=3)[0], groups)
    out.sum().backward()
    assert out.shape == (0, N) and x.grad.shape == (0, K) and weight.grad.abs().sum() == 0


@pytest.mark.parametrize("wrong", [4, -1])
def test_an_expert_that_does_not_exist(wrong):
    with pytest.raises(ValueError, match=f"sent to expert {wrong} of 4; MXFP4 experts know no expert parallelism"):
        ops.group_by_expert(torch.tensor([0, wrong, 3]), 4)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_each_expert_is_a_quantized_linear_of_its_own(scheme, transposed):
    mine, theirs = states(scheme, transposed)
    out, grads = passes_of_experts(*tensors(transposed=transposed), mine)
    wanted, wanted_grads = expected(*tensors(transposed=transposed), transposed, theirs)
    # One product each, on rows that lie elsewhere in memory.
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-6, atol=2e-5)
    assert grads[1][1].abs().sum() == grads[2][1].abs().sum() == 0  # the expert without rows
    assert all(grads[1][e].abs().sum() > 0 for e in (0, 2, 3))
    counts = [rng.n_backward for rng in mine.rngs]
    assert counts == [state.rngs[0].n_backward for state in theirs]
    assert counts == ([1, 0, 1, 1] if mine.spec.scheme.is_random else [0] * E)


def grouped_mm_of_cuda(a, b, *, offs):
    """`torch.nn.functional.grouped_mm`, with what CUDA's kernel asserts (`prepare_grouped_gemm_data` of PyTorch) and
    the one for CPUs does not: where groups begin within a row, they begin at multiples of 16 bytes."""
    counts, align = offs.diff(prepend=offs.new_zeros(1))[:-1], 16 // a.element_size()
    for operand, tokens in ((a, 1), (b, 0)) if b.dim() == 2 else ((a, 0),):
        assert operand.stride(tokens) != 1 or not (counts % align).any()
    return torch._grouped_mm(a, b, offs=offs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_of_pytorch_gives_what_the_loop_gives(dtype, bias, monkeypatch):
    out, grads = passes_of_experts(*tensors(bias, dtype=dtype))
    monkeypatch.setattr(importlib.import_module("hf_mxfp4.ops.values"), "_runs_grouped", lambda *operands: True)
    monkeypatch.setattr(F, "grouped_mm", grouped_mm_of_cuda)
    found, found_grads = passes_of_experts(*tensors(bias, dtype=dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, out, rtol=tolerance, atol=tolerance)
    for grad, expected_grad in zip(found_grads, grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=tolerance, atol=10 * tolerance)


def test_a_frozen_weight_keeps_no_input_and_gets_no_gradient():
    x, weight, bias, grad = tensors()
    weight.requires_grad_(False)
    out = quantized_linear(x, weight, bias, states()[0], Groups(COUNTS))
    assert x.shape not in [tensor.shape for tensor in out.grad_fn.saved_tensors]
    out.backward(grad)
    assert weight.grad is None and x.grad.abs().sum() > 0 and bias.grad.abs().sum() > 0


def test_autocast_computes_in_its_dtype_and_gradients_have_the_masters():
    x, weight, bias, grad = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = quantized_linear(x, weight, bias, states()[0], Groups(COUNTS))
    assert out.dtype == torch.bfloat16
    out.backward(grad.bfloat16())
    assert {t.grad.dtype for t in (x, weight, bias)} == {torch.float32}
    exact = passes_of_experts(*tensors())
    torch.testing.assert_close(out.float(), exact[0], rtol=0.05, atol=0.3)
    torch.testing.assert_close(weight.grad, exact[1][1], rtol=0.05, atol=0.3)


@pytest.mark.parametrize(("backend", "in_forward"), [("eager", [0, 2, 3]), ("cpu", [])])
def test_packed_weights_are_dequantized_for_experts_with_rows_alone_or_read_as_codes(backend, in_forward, monkeypatch):
    x, weight, bias, grad = tensors()
    packed, seen, dequantize = mxfp4_quantize(weight.detach(), macro_block=32), [], backends.dequantize

    def noted(tensor, *args):
        seen.append((tensor.codes.data_ptr() - packed.codes.data_ptr()) // packed.codes[0].numel())
        return dequantize(tensor, *args)

    monkeypatch.setattr(backends, "dequantize", noted)
    state = PackedState(GemmSpec(LinearScheme(GemmScheme(SCHEME, SCHEME)), backend))
    out = packed_linear(x, packed.parts, bias, state, Groups(COUNTS))
    assert seen == in_forward
    out.backward(grad)
    assert seen == [*in_forward, 0, 2, 3]
    wanted, grads = expected(*tensors())
    # On codes, sums of 41 terms in float32, in another order.
    values = quantized_as(x, torch.float64).abs(), quantized_as(weight, torch.float64).abs().amax(dim=(0, 1))
    size = (values[0] @ values[1] + bias.abs().max()) * (backend == "cpu")
    assert ((out - wanted).abs() <= 2 * 42 * 2**-24 * size[:, None]).all()
    torch.testing.assert_close(x.grad, grads[0], rtol=1e-6, atol=2e-5)
    assert torch.equal(bias.grad, grads[2])


PLAIN = {"macro_block": None, "outlier_fallback": None, "scale_rule": "rceil"}
THREE_LEVELS = {**PLAIN, "scale_rule": "even", "macro_block": 128, "macro_search": "block_mantissas_fp8"}
#: Preset, and the products that have an FP8 form.
FP8_PRODUCTS = {
    **dict.fromkeys(("w4a4", "w4a8", "w8a8"), ("fprop",)),
    **dict.fromkeys(("w4a4g4", "w4a8g8"), ("fprop", "dgrad", "wgrad")),
}


@pytest.fixture(autouse=True)
def fresh_counts():
    ops.reset_matmul_counts()


def test_the_largest_of_a_row_lies_between_256_and_448():
    rows = torch.tensor([[6.0, -0.5, 0.0], [1.0, 3.0, 2.0], [0.0, 0.0, 0.0], [7.5, 1.0, 0.5]])
    elements, scale = to_fp8(rows)
    assert scale.flatten().tolist() == [2**-6, 2**-7, scale[2].item(), 2**-5]
    assert elements.float().tolist() == [[384, -32, 0], [128, 384, 256], [0, 0, 0], [240, 32, 16]]
    assert ops.matmul_counts()["inexact_elements"] == 0


def test_values_too_small_beside_the_largest_are_rounded_and_counted():
    rows = torch.tensor([[2.0**8, 3 * 2.0**-10, 2.0**-9, 3 * 2.0**-9, float("nan"), float("inf")]])
    elements, _ = to_fp8(rows)
    assert elements[:, :4].float().tolist() == [[256, 2**-8, 2**-9, 3 * 2**-9]]
    assert elements[:, 4:].float().isnan().all()
    assert ops.matmul_counts()["inexact_elements"] == 1


def test_rounded_values_are_counted_in_memory_that_stays(monkeypatch):
    """CUDA graphs add to it when they are replayed, and what is allocated while one is captured is theirs."""
    counters = importlib.import_module("hf_mxfp4.ops.fp8").inexact
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    rows = torch.tensor([[2.0**8, 3 * 2.0**-10]])
    for is_capturing, expected in ((True, 0), (False, 1), (True, 2)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda found=is_capturing: found)
        if not expected:
            counters.clear()
        to_fp8(rows)
        assert ops.matmul_counts()["inexact_elements"] == expected
    (counter,) = counters.values()
    ops.reset_matmul_counts()
    assert int(counter) == 0 and counters[counter.device] is counter


@needs_fp8_on_cpu
def test_a_product_of_three_levels_is_exact_where_sums_are():
    """Products are whole multiples of 1/64 below 2**13: float32 holds their sums, so no bit may differ."""
    generator = torch.Generator().manual_seed(3)
    grid, levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]), torch.tensor([1, 1.25, 1.5])

    def operand(rows: int) -> torch.Tensor:
        element = grid[torch.randint(8, (rows, 3, 32), generator=generator)]
        sign = torch.randint(2, element.shape, generator=generator) * 2 - 1
        level = levels[torch.randint(3, (rows, 3, 1), generator=generator)]
        return (element * sign * level).flatten(1)

    a, b = operand(9), operand(33)
    for x in (a, b):
        assert torch.equal(fake_quantize(x, **THREE_LEVELS), x)
    found = ops.multiply_fp8(to_fp8(a), to_fp8(b), None, None, torch.float32)
    assert torch.equal(found.double(), a.double() @ b.double().t()) and found.unique().numel() > 100
    assert ops.matmul_counts()["inexact_elements"] == 0


@pytest.mark.parametrize("apart", range(13))
def test_blocks_eleven_binades_apart_are_exact_at_every_scale_byte(apart):
    """Of two blocks in a row, the second cut. Its 5/8, the finest of three levels, is 5 * 2**-9 of the scale at 11."""
    grid, levels = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6]), torch.tensor([1, 1.25, 1.5])
    scale = torch.arange(6 - 127, 251 - 127).float().exp2().view(-1, 1, 1)
    blocks = (grid * levels[:, None]).flatten() * torch.stack([scale, scale * 2.0**-apart], dim=1)[..., 0, :]
    rows = torch.cat([blocks[:, 0].repeat(1, 2)[:, :32], blocks[:, 1]], dim=1)
    elements, found = to_fp8(rows)
    assert rows.shape == (245, 53) and torch.equal(found.flatten(), scale.flatten() / 32)
    same = elements.double() * found.double() == rows.double()
    assert ops.matmul_counts()["inexact_elements"] == (~same).sum()
    assert same.all() == (apart <= 11)


@needs_fp8_on_cpu
@pytest.mark.parametrize(
    ("preset", "options"),
    [*itertools.product([preset for preset in FP8_PRODUCTS if preset != "w8a8"], [PLAIN, THREE_LEVELS]), ("w8a8", {})],
    ids=str,
)
def test_a_layer_computes_as_with_dense_products(preset, options):
    plain, x, found = nn.Linear(96, 48), torch.randn(2, 5, 96), []
    for engine in ("dense", "fp8"):
        ops.reset_matmul_counts()
        config = MXFP4RLConfig(preset=preset, matmul_backend=engine, **options)
        found.append(passes(MXFP4Linear.from_linear(plain, config), x))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    by = {gemm: {"fp8" if gemm in FP8_PRODUCTS[preset] else "dense": 1} for gemm in ("fprop", "dgrad", "wgrad")}
    assert ops.matmul_counts() == {**by, "inexact_elements": 0}


@pytest.mark.parametrize(
    ("options", "hardware", "experts", "reason"),
    [
        ({}, "sm_90", False, "the values are E4M3 numbers"),
        ({}, "sm_80", False, "sm_80 has no FP8 products"),
        ({}, "cpu", False, "on the CPU there is nothing faster"),
        ({}, "sm_90", True, "the values are E4M3 numbers"),
        ({}, "sm_100", True, "experts are multiplied in 16 bits: sm_100 has no grouped FP8 products"),
        ({"macro_block": 128, "macro_search": "static"}, "sm_90", False, "macro factors of x"),
        (THREE_LEVELS, "sm_90", False, "the values are E4M3 numbers"),
        ({**THREE_LEVELS, "macro_search": "block_mantissas"}, "sm_90", False, "block mantissas up to 1.75 of x"),
        ({**THREE_LEVELS, "fprop": {"weight": "even+mbs128-blockwise"}}, "sm_90", False, "1.75 of weight"),
        ({**THREE_LEVELS, "outlier_fallback": 1.0}, "sm_90", False, "residuals of x"),
        ({"outlier_fallback": 0.5}, "sm_90", False, "residuals of x"),
        ({"preset": "w4a16"}, "sm_90", False, "x is in full precision"),
    ],
    ids=str,
)
def test_why_a_product_is_dense(options, hardware, experts, reason):
    scheme = MXFP4RLConfig(**{"preset": "w4a4", **PLAIN, **options}).gemms()
    found = ops.select_matmul("fprop", scheme, hardware, experts=experts)
    assert reason in found.reason and (found.name == "fp8") == found.reason.startswith("the values")
