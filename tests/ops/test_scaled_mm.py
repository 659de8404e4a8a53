# SPDX-License-Identifier: Apache-2.0
"""PyTorch's product of FP8 with scales of 128 elements: what it is given, where it is taken, and the way back."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from stubbed_scaled_mm import scaled_mm as stub

import mxfp4_kernels
from hf_mxfp4 import numerics
from hf_mxfp4.backends import scaled_mm, self_check
from hf_mxfp4.gemm.tensor_cores import fast
from hf_mxfp4.numerics import QuantScheme, fold


CPU = torch.device("cpu")


@pytest.fixture
def on_hopper(monkeypatch):
    """A machine whose PyTorch has the product, checked; yields what was called."""
    calls = []

    def torchs(*arguments, **options):
        calls.append("torch")
        return stub(*arguments, **options)

    def tritons(a, a_scale, b, b_scale, *, out_dtype, bias):
        calls.append("triton")
        return torch.full((a.shape[0], b.shape[0]), 7.0, dtype=out_dtype)

    monkeypatch.setattr(scaled_mm, "exists", lambda device: True)
    monkeypatch.setattr(scaled_mm, "_refused", set())
    monkeypatch.setattr(self_check.verdicts, "_found", {("fp8 products of torch", CPU): None})
    monkeypatch.setattr(F, "scaled_mm", torchs)
    monkeypatch.setattr(mxfp4_kernels, "matmul_e4m3", tritons)
    return calls


def folded(rows: int, length: int, macro: int | None = 128, group: int | str = 128, seed: int = 0):
    x = torch.randn(rows, length, generator=torch.Generator().manual_seed(seed))
    return fold(numerics.quantize(x, **vars(QuantScheme("rceil", macro))), group)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), [(4, 16, 100), (8, 32, 300), (12, 16, 512)])
def test_products_are_those_of_the_folded_values(on_hopper, m, n, k, dtype):
    left, right = folded(m, k), folded(n, k, seed=1)
    found = fast.multiply("fp8", left, right, dtype)
    values = left.dequantize(torch.float64), right.dequantize(torch.float64)
    assert on_hopper == ["torch"]
    assert torch.equal(found, (values[0] @ values[1].t()).to(dtype))


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (5, 1), (4, 7)])
def test_scales_lie_along_rows_to_the_letter(shape):
    scale = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    for given in (scale, scale.t().contiguous().t(), scale.expand(2, *shape)[1]):
        found = scaled_mm._along_rows(given, shape[1])
        assert torch.equal(found, scale) and found.stride() == (1, shape[0])
    along = torch.empty(3, 4).t()
    assert scaled_mm._along_rows(along, 3).data_ptr() == along.data_ptr()  # no copy
    of_rows = scaled_mm._along_rows(torch.tensor([[1.0], [2.0]]), 3)
    assert of_rows.tolist() == [[1, 1, 1], [2, 2, 2]] and of_rows.stride() == (1, 2)


def test_scales_of_rows_meet_scales_of_groups(on_hopper):
    left, right = folded(8, 256, None, "row"), folded(16, 256, seed=1)
    found = fast.multiply("fp8", left, right, torch.float32)
    values = left.dequantize(torch.float64), right.dequantize(torch.float64)
    assert on_hopper == ["torch"]
    torch.testing.assert_close(found, (values[0] @ values[1].t()).float())


@pytest.mark.parametrize(
    ("m", "n", "k", "group", "dtype", "biased"),
    [
        (6, 16, 128, 128, torch.bfloat16, False),
        (8, 24, 128, 128, torch.bfloat16, False),
        (8, 16, 256, "row", torch.bfloat16, False),
        (8, 16, 128, 128, torch.float16, False),
        (8, 16, 128, 128, torch.bfloat16, True),
    ],
)
def test_other_products_are_for_the_kernel(on_hopper, m, n, k, group, dtype, biased):
    left, right = folded(m, k, None, group), folded(n, k, None, group)
    found = fast.multiply("fp8", left, right, dtype, torch.ones(n) if biased else None)
    assert on_hopper == ["triton"] and found.eq(7).all()


@pytest.mark.parametrize("error", [ValueError("no such layout"), NotImplementedError("needs cublasLt >= 12.9")])
def test_what_torch_refuses_is_for_the_kernel_and_said_once(on_hopper, monkeypatch, caplog, error):
    def refuses(*arguments, **options):
        on_hopper.append("torch")
        raise error

    monkeypatch.setattr(F, "scaled_mm", refuses)
    for _ in range(2):
        assert fast.multiply("fp8", folded(8, 256), folded(16, 256), torch.bfloat16).eq(7).all()
    assert on_hopper == ["torch", "triton", "triton"]
    assert [record.getMessage() for record in caplog.records if str(error) in record.getMessage()] == [
        f"PyTorch's product with scales of 128 elements refuses 8 x 16 x 256 ({error}); the Triton kernel replaces it"
    ]


def test_memory_that_runs_out_is_no_refusal(on_hopper, monkeypatch):
    def runs_out(*arguments, **options):
        raise torch.OutOfMemoryError("8 GiB")

    monkeypatch.setattr(F, "scaled_mm", runs_out)
    with pytest.raises(torch.OutOfMemoryError, match="8 GiB"):
        fast.multiply("fp8", folded(8, 256), folded(16, 256), torch.bfloat16)
    assert not scaled_mm._refused


def test_a_failed_check_leaves_products_to_the_kernel(on_hopper, monkeypatch):
    monkeypatch.setattr(self_check.verdicts, "_found", {("fp8 products of torch", CPU): "is off by 1"})
    fast.multiply("fp8", folded(8, 256), folded(16, 256), torch.bfloat16)
    assert on_hopper == ["triton"]


@pytest.mark.parametrize(
    ("capability", "cuda", "scales", "expected"),
    [
        ((9, 0), "12.9", True, True),
        ((9, 0), "13.0", True, True),
        ((9, 0), "12.8", True, False),
        ((9, 0), None, True, False),
        ((9, 0), "13.0", False, False),
        ((10, 0), "13.0", True, False),
        ((8, 9), "13.0", True, False),
    ],
)
def test_where_torch_has_it(monkeypatch, capability, cuda, scales, expected):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(F, "ScalingType", SimpleNamespace(**({"BlockWise1x128": 4} if scales else {})), raising=False)
    assert scaled_mm.exists.__wrapped__(torch.device("cuda", 0)) is expected
    assert not scaled_mm.exists.__wrapped__(CPU)
