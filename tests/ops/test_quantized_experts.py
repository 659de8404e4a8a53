# SPDX-License-Identifier: Apache-2.0
"""The grouped linear of experts, against one quantized linear for each of them."""

import importlib

import pytest
import torch
from tables import CONFIGS, some

from hf_mxfp4 import MXFP4RLConfig, fake_quantize
from hf_mxfp4 import quantize as mxfp4_quantize
from hf_mxfp4.backends import dispatch as backends
from hf_mxfp4.gemm import (
    GemmSpec,
    GemmState,
    Groups,
    LayerRng,
    PackedSpec,
    group_by_expert,
    matmul,
    packed_linear,
    quantized_linear,
)
from hf_mxfp4.numerics import GemmScheme, LinearScheme, QuantScheme


COUNTS = (5, 0, 33, 2)
E, N, K = 4, 48, 40
SCHEME = QuantScheme(macro_block=32)
SCHEMES = some(CONFIGS, "w4a4g8", "w4a4g4", "paper_b", "stochastic", "random wgrad", "full")


def quantize(x, dtype):
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
        gemms = MXFP4RLConfig(macro_block=None, outlier_fallback=None, **SCHEMES[scheme]).gemms()
    rngs = [[LayerRng(0, f"experts.{e}") for e in range(matrices)] for _ in range(2)]
    of_experts = GemmState(GemmSpec(gemms, transposed=transposed), rngs[0])
    return of_experts, [GemmState(GemmSpec(gemms), [rng]) for rng in rngs[1]]


def run(x, weight, bias, grad, state=None):
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
    order, groups = group_by_expert(torch.tensor([2, 0, 2, 3, 0]), 5)
    assert order.tolist() == [1, 4, 0, 2, 3]
    assert groups.counts == (2, 0, 2, 1, 0)
    assert list(groups) == [(0, slice(0, 2)), (2, slice(2, 4)), (3, slice(4, 5))]
    assert groups.offsets(torch.device("cpu")).tolist() == [2, 2, 4, 5, 5]
    assert groups.offsets(torch.device("cpu")).dtype == torch.int32
    assert groups.per_row(torch.arange(5)).tolist() == [0, 0, 2, 2, 3]


def test_counts_are_read_back_only_when_asked_for():
    _, groups = group_by_expert(torch.tensor([2, 0, 2, 3, 0]), 5)
    assert "counts" not in vars(groups)
    groups.offsets(torch.device("cpu")), groups.per_row(torch.arange(5))
    assert "counts" not in vars(groups) and groups.counts == (2, 0, 2, 1, 0) and "counts" in vars(groups)


def test_no_rows():
    order, groups = group_by_expert(torch.empty(0, dtype=torch.long), 3)
    assert order.numel() == 0 and groups.counts == (0, 0, 0) and list(groups) == []
    x, weight = torch.empty(0, K, requires_grad=True), torch.randn(3, N, K, requires_grad=True)
    out = quantized_linear(x, weight, None, states(matrices=3)[0], groups)
    out.sum().backward()
    assert out.shape == (0, N) and x.grad.shape == (0, K) and weight.grad.abs().sum() == 0


def test_an_expert_that_does_not_exist():
    with pytest.raises(ValueError, match="a token was sent to expert 4 of 4; MXFP4 experts know no expert parallelism"):
        group_by_expert(torch.tensor([0, 4]), 4)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_each_expert_is_a_quantized_linear_of_its_own(scheme, transposed):
    mine, theirs = states(scheme, transposed)
    out, grads = run(*tensors(transposed=transposed), mine)
    wanted, wanted_grads = expected(*tensors(transposed=transposed), transposed, theirs)
    assert torch.equal(out, wanted)
    for found, want in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
    assert grads[1][1].abs().sum() == grads[2][1].abs().sum() == 0  # the expert without rows
    assert all(grads[1][e].abs().sum() > 0 for e in (0, 2, 3))
    counts = [rng.n_backward for rng in mine.rngs]
    assert counts == [state.rngs[0].n_backward for state in theirs]
    assert counts == ([1, 0, 1, 1] if mine.spec.scheme.is_random else [0] * E)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_of_pytorch_gives_what_the_loop_gives(dtype, bias, monkeypatch):
    loop = run(*tensors(bias, dtype=dtype))
    monkeypatch.setattr(importlib.import_module("hf_mxfp4.gemm.matmul"), "_runs_grouped", lambda *operands: True)
    x, weight, b, grad = (None if t is None else t.detach() for t in tensors(bias, dtype=dtype))
    values, groups = quantize(weight, dtype), Groups(COUNTS)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    out = matmul(quantize(x, dtype), values, b, groups)
    torch.testing.assert_close(out, loop[0], rtol=tolerance, atol=tolerance)
    grad_x = matmul(grad, values.transpose(1, 2), groups=groups)
    torch.testing.assert_close(grad_x, loop[1][0], rtol=tolerance, atol=10 * tolerance)


def test_a_frozen_weight_keeps_no_input_and_gets_no_gradient():
    x, weight, bias, grad = tensors()
    weight.requires_grad_(False)
    out = quantized_linear(x, weight, bias, states()[0], Groups(COUNTS))
    assert x.shape not in [tensor.shape for tensor in out.grad_fn.saved_tensors]
    out.backward(grad)
    assert weight.grad is None and x.grad.abs().sum() > 0 and bias.grad.abs().sum() > 0


def test_a_step_that_changes_between_the_passes_is_refused():
    mine = states("w4a4g4")[0]
    x, weight, bias, grad = tensors()
    out = quantized_linear(x, weight, bias, mine, Groups(COUNTS))
    mine.set_step(3)
    with pytest.raises(RuntimeError, match="quantization step of experts.0 went from 0 to 3 between"):
        out.backward(grad)


def test_autocast_computes_in_its_dtype_and_gradients_have_the_masters():
    x, weight, bias, grad = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = quantized_linear(x, weight, bias, states()[0], Groups(COUNTS))
    assert out.dtype == torch.bfloat16
    out.backward(grad.bfloat16())
    assert {t.grad.dtype for t in (x, weight, bias)} == {torch.float32}
    exact = run(*tensors())
    torch.testing.assert_close(out.float(), exact[0], rtol=0.05, atol=0.3)
    torch.testing.assert_close(weight.grad, exact[1][1], rtol=0.05, atol=0.3)


def test_packed_weights_are_dequantized_for_experts_with_rows_alone(monkeypatch):
    x, weight, bias, grad = tensors()
    packed, seen, dequantize = mxfp4_quantize(weight.detach(), macro_block=32), [], backends.dequantize
    state = GemmState(PackedSpec(SCHEME, SCHEME, K, "eager"))

    def noted(tensor, *args):
        seen.append((tensor.codes.data_ptr() - packed.codes.data_ptr()) // packed.codes[0].numel())
        return dequantize(tensor, *args)

    monkeypatch.setattr(backends, "dequantize", noted)
    parts = packed.codes, packed.scale, packed.macro, None, None
    out = packed_linear(x, parts, bias, state, Groups(COUNTS))
    assert seen == [0, 2, 3]
    out.backward(grad)
    assert seen == [0, 2, 3] * 2
    wanted, grads = expected(*tensors())
    assert torch.equal(out, wanted) and torch.equal(x.grad, grads[0]) and torch.equal(bias.grad, grads[2])


def test_packed_weights_of_experts_with_few_rows_are_read_as_codes(monkeypatch):
    x, weight, bias, grad = tensors()
    packed, seen, dequantize = mxfp4_quantize(weight.detach(), macro_block=32), [], backends.dequantize
    monkeypatch.setattr(backends, "dequantize", lambda *args: seen.append(1) or dequantize(*args))
    parts = packed.codes, packed.scale, packed.macro, None, None
    out = packed_linear(x, parts, bias, GemmState(PackedSpec(SCHEME, SCHEME, K, "cpu")), Groups(COUNTS))
    assert not seen
    out.backward(grad)
    assert len(seen) == 3
    wanted, grads = expected(*tensors())
    # Sums of 41 terms in float32, in another order.
    size = quantize(x, torch.float64).abs() @ quantize(weight, torch.float64).abs().amax(dim=(0, 1)) + bias.abs().max()
    assert ((out - wanted).abs() <= 2 * 42 * 2**-24 * size[:, None]).all()
    assert torch.equal(x.grad, grads[0]) and torch.equal(bias.grad, grads[2])
