# SPDX-License-Identifier: Apache-2.0
"""Products of quantized operands with the straight-through gradient: of one weight, of experts, and as FP8 tensor cores
compute them."""

import importlib

import pytest
import torch
import torch.nn.functional as F
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


STATE = state_of(QuantScheme())
WEIGHT_ONLY = state_of(FULL)


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
    x = integers(3, 6).requires_grad_()
    weight = integers(5, 6, seed=1).requires_grad_()
    y = quantized_linear(x, weight, None, WEIGHT_ONLY)
    kept = weight.data
    weight.data = torch.empty(0)
    weight.data = kept
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 5) @ fake_quantize(weight.detach()))


def test_there_is_no_second_derivative():
    x = integers(3, 6).requires_grad_()
    weight = integers(5, 6, seed=1).requires_grad_()
    (grad,) = torch.autograd.grad(quantized_linear(x, weight, None, STATE).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# ---- experts --------------------------------------------------------------------------------------------------------


COUNTS = (5, 0, 33, 2)
E = 4
N = 48
K = 40
SCHEMES = some(
    CONFIGS, "default", "w4a16", "w4a4", "w4a8g8", "fp8 gradients", "w4a4g4", "paper_a", "paper_b", "plain tiles",
    "full", "rotated, own wgrad", "random", "random wgrad",
)  # fmt: skip


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


def states(scheme="default", transposed=False):
    """The state of the experts, and those of linear layers of their own."""
    gemms = MXFP4RLConfig(**SCHEMES[scheme]).gemms()
    names = [f"experts.{expert}" for expert in range(E)]
    of_experts = GemmState(GemmSpec(gemms, transposed=transposed), [LayerRng(0, name) for name in names])
    return of_experts, [GemmState(GemmSpec(gemms), [LayerRng(0, name)]) for name in names]


def passes_of_experts(x, weight, bias, grad, state=None):
    out = quantized_linear(x, weight, bias, state or states()[0], Groups(COUNTS))
    out.backward(grad)
    return out.detach(), [None if t is None else t.grad for t in (x, weight, bias)]


def expected(x, weight, bias, grad, scheme="default", transposed=False):
    """Compute with one linear layer for each expert; also return their states."""
    _, linear_states = states(scheme)
    out = torch.empty(len(x), N, dtype=x.dtype)
    grad_x, grad_weight, grad_bias = (torch.zeros_like(t) for t in (x, weight, bias))
    start = 0
    for expert, (count, state) in enumerate(zip(COUNTS, linear_states, strict=True)):
        if count == 0:
            continue
        rows = slice(start, start + count)
        start += count
        matrix = weight[expert].t() if transposed else weight[expert]
        leaves = [t.detach().clone().requires_grad_() for t in (x[rows], matrix, bias[expert])]
        y = quantized_linear(*leaves, state)
        y.backward(grad[rows])
        out[rows] = y.detach()
        grad_x[rows] = leaves[0].grad
        grad_weight[expert] = leaves[1].grad.t() if transposed else leaves[1].grad
        grad_bias[expert] = leaves[2].grad
    return out, [grad_x, grad_weight, grad_bias], linear_states


def test_rows_are_grouped_by_expert_in_their_order():
    order, groups = ops.group_by_expert(torch.tensor([2, 0, 2, 3, 0]), 5)
    assert order.tolist() == [1, 4, 0, 2, 3]
    assert groups.offsets(torch.device("cpu")).tolist() == [2, 2, 4, 5, 5]
    assert groups.offsets(torch.device("cpu")).dtype == torch.int32
    assert groups.per_row(torch.arange(5)).tolist() == [0, 0, 2, 2, 3]
    assert "counts" not in vars(groups), "they are read back only when they are asked for"
    assert groups.counts == (2, 0, 2, 1, 0)
    assert list(groups) == [(0, slice(0, 2)), (2, slice(2, 4)), (3, slice(4, 5))]


def test_no_rows():
    order, groups = ops.group_by_expert(torch.empty(0, dtype=torch.long), E)
    assert order.numel() == 0
    assert list(groups) == []


@pytest.mark.parametrize("wrong", [4, -1])
def test_an_expert_that_does_not_exist(wrong):
    with pytest.raises(ValueError, match=f"sent to expert {wrong} of 4"):
        ops.group_by_expert(torch.tensor([0, wrong, 3]), 4)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_expert_is_a_quantized_linear_of_its_own(scheme, transposed):
    state, _ = states(scheme, transposed)
    out, grads = passes_of_experts(*tensors(transposed=transposed), state)

    wanted, wanted_grads, linear_states = expected(*tensors(transposed=transposed), scheme, transposed)

    # One product each, on rows that lie elsewhere in memory.
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-6, atol=2e-5)
    has_gradient = [bool(grad.any()) for grad in grads[1]]
    assert has_gradient == [count > 0 for count in COUNTS]
    n_backward = [rng.n_backward for rng in state.rngs]
    assert n_backward == [linear_state.rngs[0].n_backward for linear_state in linear_states]
    assert n_backward == ([1, 0, 1, 1] if state.spec.scheme.is_random else [0] * E)


def grouped_mm_of_cuda(a, b, *, offs):
    """`torch.nn.functional.grouped_mm`, with what CUDA's kernel asserts (`prepare_grouped_gemm_data` of PyTorch) and
    the one for CPUs does not: where groups begin within a row, they begin at multiples of 16 bytes."""
    counts = offs.diff(prepend=offs.new_zeros(1))[:-1]
    align = 16 // a.element_size()
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
    assert weight.grad is None
    assert x.grad.abs().sum() > 0
    assert bias.grad.abs().sum() > 0


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
    config = MXFP4RLConfig(mode="packed", preset="w4a8", backend=backend)
    packed = mxfp4_quantize(weight.detach(), **vars(config.weight_scheme))
    dequantized = []
    dequantize = backends.dequantize

    def noted(tensor, *args):
        expert = (tensor.codes.data_ptr() - packed.codes.data_ptr()) // packed.codes[0].numel()
        dequantized.append(expert)
        return dequantize(tensor, *args)

    monkeypatch.setattr(backends, "dequantize", noted)
    state = PackedState(GemmSpec(LinearScheme(config.gemms().fprop), backend))
    out = packed_linear(x, packed.parts, bias, state, Groups(COUNTS))
    assert dequantized == in_forward
    out.backward(grad)
    assert dequantized == [*in_forward, 0, 2, 3]

    wanted, grads, _ = expected(*tensors())
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(x.grad, grads[0], rtol=1e-6, atol=2e-5)
    assert torch.equal(bias.grad, grads[2])


# ---- FP8 tensor cores -----------------------------------------------------------------------------------------------


#: Blocks with the factors 1, 1.25 and 1.5, whose values are E4M3 numbers.
THREE_LEVELS = {"macro_search": "block_mantissas_fp8"}
#: Preset, and the products that have an FP8 form.
FP8_PRODUCTS = {
    "w4a4": ["fprop"],
    "w4a8": ["fprop"],
    "w8a8": ["fprop"],
    "w4a4g4": ["fprop", "dgrad", "wgrad"],
    "w4a8g8": ["fprop", "dgrad", "wgrad"],
}


@pytest.fixture(autouse=True)
def fresh_counts():
    ops.reset_matmul_counts()


def test_the_largest_of_a_row_lies_between_256_and_448():
    rows = torch.tensor([[6.0, -0.5, 0.0], [1.0, 3.0, 2.0], [0.0, 0.0, 0.0], [7.5, 1.0, 0.5]])
    elements, scale = to_fp8(rows)[:2]
    assert scale.flatten().tolist() == [2**-6, 2**-7, scale[2].item(), 2**-5]
    assert elements.float().tolist() == [[384, -32, 0], [128, 384, 256], [0, 0, 0], [240, 32, 16]]
    assert ops.matmul_counts()["inexact_elements"] == 0


def test_values_too_small_beside_the_largest_are_rounded_and_counted():
    rows = torch.tensor([[2.0**8, 3 * 2.0**-10, 2.0**-9, 3 * 2.0**-9, float("nan"), float("inf")]])
    elements = to_fp8(rows).elements
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
    assert int(counter) == 0
    assert counters[counter.device] is counter


@needs_fp8_on_cpu
def test_a_product_of_three_levels_is_exact_where_sums_are():
    """Products are whole multiples of 1/64 below 2**13: float32 holds their sums, so no bit may differ."""
    generator = torch.Generator().manual_seed(3)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = torch.tensor([1, 1.25, 1.5])

    def operand(rows: int) -> torch.Tensor:
        element = grid[torch.randint(8, (rows, 3, 32), generator=generator)]
        sign = torch.randint(2, element.shape, generator=generator) * 2 - 1
        level = levels[torch.randint(3, (rows, 3, 1), generator=generator)]
        return (element * sign * level).flatten(1)

    a = operand(9)
    b = operand(33)
    for x in (a, b):
        assert torch.equal(fake_quantize(x, scale_rule="even", macro_block=128, **THREE_LEVELS), x)
    found = ops.multiply_fp8(to_fp8(a), to_fp8(b), None, None, torch.float32)
    assert torch.equal(found.double(), a.double() @ b.double().t())
    assert found.unique().numel() > 100
    assert ops.matmul_counts()["inexact_elements"] == 0


@pytest.mark.parametrize("apart", range(13))
def test_blocks_eleven_binades_apart_are_exact_at_every_scale_byte(apart):
    """Of two blocks in a row, the second cut. Its 5/8, the finest of three levels, is 5 * 2**-9 of the scale at 11."""
    grid = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6])
    levels = torch.tensor([1, 1.25, 1.5])
    scale = torch.arange(6 - 127, 251 - 127).float().exp2().view(-1, 1, 1)
    blocks = (grid * levels[:, None]).flatten() * torch.stack([scale, scale * 2.0**-apart], dim=1)[..., 0, :]
    rows = torch.cat([blocks[:, 0].repeat(1, 2)[:, :32], blocks[:, 1]], dim=1)
    elements, found = to_fp8(rows)[:2]
    assert torch.equal(found.flatten(), scale.flatten() / 32)
    same = elements.double() * found.double() == rows.double()
    assert ops.matmul_counts()["inexact_elements"] == (~same).sum()
    assert same.all() == (apart <= 11)


@needs_fp8_on_cpu
@pytest.mark.parametrize("preset", FP8_PRODUCTS)
def test_a_layer_computes_as_with_dense_products(preset):
    options = {"preset": preset} if preset == "w8a8" else {"preset": preset, **THREE_LEVELS}
    plain = nn.Linear(96, 48)
    x = torch.randn(2, 5, 96)
    dense = MXFP4Linear.from_linear(plain, MXFP4RLConfig(matmul_backend="dense", **options))
    fp8 = MXFP4Linear.from_linear(plain, MXFP4RLConfig(matmul_backend="fp8", **options))
    expected = passes(dense, x)
    ops.reset_matmul_counts()

    torch.testing.assert_close(passes(fp8, x), expected, rtol=1e-5, atol=1e-5)

    counts = ops.matmul_counts()
    for product in ("fprop", "dgrad", "wgrad"):
        assert counts[product] == {"fp8" if product in FP8_PRODUCTS[preset] else "dense": 1}
    assert counts["inexact_elements"] == 0


@pytest.mark.parametrize("preset", ["w4a8", "w8a8", "w4a8g8"])
def test_which_products_are_in_fp8(preset):
    scheme = MXFP4RLConfig(preset=preset).gemms()
    for product in ("fprop", "dgrad", "wgrad"):
        is_fp8 = ops.select_matmul(product, scheme, "sm_90").name == "fp8"
        assert is_fp8 == (product in FP8_PRODUCTS[preset])


IN_FP8 = "the values are E4M3 numbers"
ANOTHER_AXIS = "lie on the axis that is summed over"


@pytest.mark.parametrize(
    ("product", "options", "hardware", "reason"),
    [
        ("fprop", {}, "sm_90", IN_FP8),
        ("fprop", {"preset": "w4a4", **THREE_LEVELS}, "sm_90", IN_FP8),
        ("fprop", {}, "sm_80", "sm_80 has no FP8 products"),
        ("fprop", {}, "cpu", "on the CPU there is nothing faster"),
        ("fprop", {"preset": "w4a16"}, "sm_90", "x is in full precision"),
        ("fprop", {"preset": "w4a4"}, "sm_90", "block mantissas up to 1.75 of x"),
        ("fprop", {"fprop": {"weight": "even+mbs128-blockwise"}}, "sm_90", "1.75 of weight"),
        ("fprop", {"preset": "w4a4", "macro_search": "static"}, "sm_90", "macro factors of x"),
        ("fprop", {"preset": "w4a4", "macro_block": None, "outlier_fallback": 0.5}, "sm_90", "residuals of x"),
        ("fprop", {"fprop": {"x": "mxfp8"}}, "sm_90", "the scales of x change from block to block"),
        ("fprop", {"fprop": {"x": "nvfp4", "weight": "nvfp4"}}, "sm_90", "NVFP4 scales of x have more digits"),
        (
            "dgrad",
            {"preset": "w8a8", "dgrad": {"grad": "fp8"}},
            "sm_90",
            f"the scales of the reused weight {ANOTHER_AXIS}",
        ),
        ("wgrad", {"wgrad": {"grad": "rceil"}}, "sm_90", f"the scales of the reused x {ANOTHER_AXIS}"),
    ],
    ids=str,
)
def test_why_a_product_is_dense(product, options, hardware, reason):
    found = ops.select_matmul(product, MXFP4RLConfig(**options).gemms(), hardware)
    assert reason in found.reason
    assert (found.name == "fp8") == (reason == IN_FP8)


def test_experts_are_multiplied_in_fp8_where_all_can_be_at_once():
    scheme = MXFP4RLConfig().gemms()
    assert ops.select_matmul("fprop", scheme, "sm_90", experts=True).name == "fp8"
    assert "no grouped FP8 products" in ops.select_matmul("fprop", scheme, "sm_100", experts=True).reason


def test_fp8_products_have_outputs_in_bfloat16():
    found = ops.select_matmul("fprop", MXFP4RLConfig().gemms(), "sm_90", torch.float64)
    assert (found.name, found.reason) == ("dense", "FP8 products on sm_90 have no output in torch.float64")


def test_an_fp8_product_that_this_pytorch_lacks_is_dense(monkeypatch):
    monkeypatch.setattr(importlib.import_module("hf_mxfp4.ops.choice"), "HAS_FP8_ON_CPU", False)
    scheme = MXFP4RLConfig().gemms()
    found = ops.select_matmul.__wrapped__("fprop", scheme, "cpu", torch.float32, requested="fp8")
    assert (found.name, found.reason) == ("dense", "cpu has no FP8 products")
