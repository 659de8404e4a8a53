# SPDX-License-Identifier: Apache-2.0
"""Gradients of the three products against central differences of ``<dY, X_q W_q^T>`` in float64. The loss is linear in
each dequantized operand, so the differences have rounding errors alone."""

import functools

import pytest
import torch
from tables import CONFIGS, needs_fp8_on_cpu, some

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.gemm import (
    GemmSpec,
    GemmState,
    Groups,
    LayerRng,
    matmul_counts,
    quantize_input,
    quantized_linear,
    reset_matmul_counts,
    weight_operand,
)


M, N, K = 6, 5, 36
PRESETS = some(CONFIGS, "default", "w4a8", "w4a8g8", "w8a8", "blockwise_fp8")


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def differences(loss, operand: torch.Tensor) -> torch.Tensor:
    steps = 0.5 * torch.eye(operand.numel(), dtype=torch.float64).view(-1, *operand.shape)
    return torch.stack([loss(operand + step) - loss(operand - step) for step in steps]).view(operand.shape)


@pytest.mark.parametrize("counts", [None, (4, 0, 2)], ids=["linear", "experts"])
@pytest.mark.parametrize("backend", ["dense", pytest.param("fp8", marks=needs_fp8_on_cpu)])
@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_are_central_differences_in_the_dequantized_operands(preset, backend, counts):
    dtype = torch.float64 if backend == "dense" else torch.float32  # FP8 products of CPUs have outputs in float32
    gemms = MXFP4RLConfig(**PRESETS[preset]).gemms()
    experts = 1 if counts is None else len(counts)
    rngs = [LayerRng(0, f"experts.{expert}") for expert in range(experts)]
    state = GemmState(GemmSpec(gemms, matmul_backend=backend), rngs)
    x = (numbers(M, K, seed=0) * torch.tensor([[1.0], [2**-6], [4.0], [2**-3], [1.0], [8.0]])).to(dtype)
    weight, grad = numbers(experts, N, K, seed=1).to(dtype), numbers(M, N, seed=2).to(dtype)
    if preset == "w4a8g8":  # gradients become E4M3, which holds whole numbers up to 15 times the scales of tokens
        grad = (grad * 4).round().clamp(-15, 15)
    leaves = [leaf.requires_grad_() for leaf in (x, weight if counts else weight[0].clone())]
    reset_matmul_counts()
    y = quantized_linear(*leaves, None, state, counts and Groups(counts))
    y.backward(grad)

    x_q = quantize_input(x.detach(), dtype, gemms.fprop.left).double()
    w_q = weight_operand(leaves[1], dtype, state).double().view(experts, N, K)
    of_row = torch.arange(experts).repeat_interleave(torch.tensor(counts or [M]))

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.einsum("mk,mnk->mn", left, right[of_row])

    expected = (
        product(x_q, w_q),
        differences(lambda left: (product(left, w_q) * grad).sum(), x_q),
        differences(lambda right: (product(x_q, right) * grad).sum(), w_q).view_as(leaves[1]),
    )
    rounding = 1e-12 if backend == "dense" else 1e-6
    for found, wanted in zip((y.detach(), *(leaf.grad for leaf in leaves)), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=rounding, atol=rounding * float(wanted.abs().max()))
    if backend == "fp8" and counts is None:
        on_fp8 = {"default": (), "w4a8g8": ("fprop", "dgrad", "wgrad")}.get(preset, ("fprop",))
        assert [gemm for gemm, found in matmul_counts().items() if found == {"fp8": 1}] == list(on_fp8)


def test_a_rotated_weight_is_rotated_back_for_dgrad():
    """In float64, by the matrix of Sylvester's construction."""
    plain, rotated = (
        GemmState(GemmSpec(config.gemms(), matmul_backend="dense"), [LayerRng(0, "a")])
        for config in (MXFP4RLConfig(), MXFP4RLConfig(fprop={"rotation": "deterministic-32"}))
    )
    x, weight, grad = numbers(M, 32, seed=0).requires_grad_(), numbers(N, 32, seed=1), numbers(M, N, seed=2)
    quantized_linear(x, weight, None, rotated).backward(grad)
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    matrix = functools.reduce(torch.kron, [pair] * 5)
    expected = grad @ weight_operand(weight @ matrix, torch.float64, plain) @ matrix.t()
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-12)
