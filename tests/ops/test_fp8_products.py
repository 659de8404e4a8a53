# SPDX-License-Identifier: Apache-2.0
"""Products of quantized values as FP8 tensor cores compute them, here by PyTorch's CPU product of E4M3."""

import pytest
import torch
from torch import nn

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig, fake_quantize
from hf_mxfp4.gemm import matmul, matmul_counts, reset_matmul_counts, select_matmul, to_fp8


PLAIN = {"macro_block": None, "outlier_fallback": None, "scale_rule": "rceil"}
#: Preset, and the products that have an FP8 form.
SCHEMES = {"w4a4": ("fprop",), "w4a4g8": ("fprop", "dgrad", "wgrad"), "w4a4g4": ("fprop", "dgrad", "wgrad")}


@pytest.fixture(autouse=True)
def fresh_counts():
    reset_matmul_counts()


def test_the_largest_of_a_row_lies_between_256_and_448():
    rows = torch.tensor([[6.0, -0.5, 0.0], [1.0, 3.0, 2.0], [0.0, 0.0, 0.0], [7.5, 1.0, 0.5]])
    elements, scale = to_fp8(rows)
    assert scale.flatten().tolist() == [2**-6, 2**-7, scale[2].item(), 2**-5]
    assert elements.float().tolist() == [[384, -32, 0], [128, 384, 256], [0, 0, 0], [240, 32, 16]]
    assert matmul_counts()["inexact_elements"] == 0


def test_values_too_small_beside_the_largest_are_rounded_and_counted():
    rows = torch.tensor([[2.0**8, 3 * 2.0**-10, 2.0**-9, 3 * 2.0**-9, float("nan"), float("inf")]])
    elements, _ = to_fp8(rows)
    assert elements[:, :4].float().tolist() == [[256, 2**-8, 2**-9, 3 * 2**-9]]
    assert elements[:, 4:].float().isnan().all()
    assert matmul_counts()["inexact_elements"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("axis", [0, 1])
def test_quantized_values_are_exact_along_both_axes(dtype, axis):
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    values = fake_quantize(x)
    values = values if axis else values.t()
    elements, scale = to_fp8(values)
    assert torch.equal(elements.float() * scale, values.float())
    assert matmul_counts()["inexact_elements"] == 0


def test_a_product_of_elements_is_that_of_the_values():
    generator = torch.Generator().manual_seed(1)
    a, b = (fake_quantize(torch.randn(n, 70, generator=generator)) for n in (9, 33))
    bias = torch.randn(33, generator=generator)
    found = matmul(to_fp8(a), to_fp8(b), bias, dtype=torch.float32)
    torch.testing.assert_close(found, a @ b.t() + bias, rtol=1e-5, atol=1e-5)


def passes(engine: str, preset: str, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(0)
    config = MXFP4RLConfig(preset=preset, matmul_backend=engine, **PLAIN)
    layer, x = MXFP4Linear.from_linear(nn.Linear(96, 48), config), x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize("preset", SCHEMES)
def test_a_layer_computes_as_with_dense_products(preset):
    generator = torch.Generator().manual_seed(2)
    x, grad = torch.randn(2, 5, 96, generator=generator), torch.randn(2, 5, 48, generator=generator)
    expected = passes("dense", preset, x, grad)
    reset_matmul_counts()
    found = passes("fp8", preset, x, grad)
    for mine, dense in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, dense, rtol=1e-5, atol=1e-5)
    counts = matmul_counts()
    assert {gemm: counts[gemm] for gemm in ("fprop", "dgrad", "wgrad")} == {
        gemm: {"fp8" if gemm in SCHEMES[preset] else "dense": 1} for gemm in ("fprop", "dgrad", "wgrad")
    }


@pytest.mark.parametrize(
    ("options", "hardware", "experts", "reason"),
    [
        ({}, "sm_90", False, "the values are E4M3 numbers"),
        ({}, "sm_80", False, "sm_80 has no FP8 products"),
        ({}, "cpu", False, "on the CPU there is nothing faster"),
        ({}, "sm_90", True, "experts are multiplied in 16 bits"),
        ({"macro_block": 128, "macro_search": "static"}, "sm_90", False, "macro factors of x"),
        ({"outlier_fallback": 0.5}, "sm_90", False, "residuals of x"),
        ({"preset": "w4a16"}, "sm_90", False, "x is in full precision"),
    ],
    ids=str,
)
def test_why_a_product_is_dense(options, hardware, experts, reason):
    scheme = MXFP4RLConfig(**{"preset": "w4a4", **PLAIN, **options}).gemms()
    found = select_matmul("fprop", scheme, hardware, experts=experts)
    assert reason in found.reason and (found.name == "fp8") == found.reason.startswith("the values")
