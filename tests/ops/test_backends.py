# SPDX-License-Identifier: Apache-2.0
"""The choice of the backend that quantizes a tensor, and self-checks of kernels: what they find bad is not used."""

import pytest
import torch

from hf_mxfp4 import numerics
from hf_mxfp4.backends import backend_for, cpu, dispatch, fake_quantize, self_check
from hf_mxfp4.backends import triton as triton_kernels
from hf_mxfp4.numerics import QuantScheme, parse_scheme


STATIC = QuantScheme("rceil", 128, "static", 0.5)
F32, BF16 = torch.float32, torch.bfloat16
#: Device, dtype, scheme and backend that is asked for; the backend that is found, and words of why it cannot.
CHOICES = [
    ("cpu", F32, STATIC, "auto", "cpu", None),
    ("cpu", BF16, STATIC, "auto", "cpu", None),
    ("cpu", torch.float16, STATIC, "cpu", "cpu", None),
    ("cpu", F32, STATIC, "eager", "eager", None),
    ("cpu", torch.float64, STATIC, "auto", "eager", "float64"),
    ("cuda", F32, STATIC, "cpu", "cpu", "the tensor is on cuda"),
    ("cuda", BF16, STATIC, "auto", "triton", None),
    ("cuda", BF16, STATIC, "triton", "triton", None),
    ("cuda", BF16, STATIC, "eager", "eager", None),
    # Searches and tiles are no obstacle on a GPU.
    ("cuda", F32, parse_scheme("rceil+mbs128-dynamic+of0.5"), "auto", "triton", None),
    ("cuda", BF16, parse_scheme("mse"), "auto", "triton", None),
    ("cuda", torch.float16, parse_scheme("even+mbs128-blockwise"), "auto", "triton", None),
    ("cuda", F32, parse_scheme("mse+mbs256+32x32"), "auto", "triton", None),
    # These are: `auto` falls back, and says why.
    ("cuda", BF16, parse_scheme("rceil+mbsrow-dynamic"), "auto", "eager", "macro_block='row' is not supported"),
    ("cuda", F32, parse_scheme("rceil+mbsrow+32x32"), "triton", "triton", "row"),
    ("cuda", F32, parse_scheme("rceil+of0.5@0.1+32x32"), "auto", "eager", "fallback_rate"),
    ("cuda", torch.float64, STATIC, "auto", "eager", "float64"),
]


@pytest.mark.parametrize(("device", "dtype", "scheme", "asked", "name", "words"), CHOICES, ids=str)
def test_which_backend_quantizes(device, dtype, scheme, asked, name, words):
    if name == "triton":
        pytest.importorskip("triton")
    if name == "cpu" and cpu.unsupported_reason(dtype, scheme) is not None:
        pytest.skip(cpu.unsupported_reason(dtype, scheme))
    found, reason = backend_for(device, dtype, scheme, asked)
    assert found == name and (asked == "eager" or (words in reason if words else reason is None))


def test_triton_on_the_cpu_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="backend='triton' cannot quantize here.*on cpu.*backend='auto'"):
        fake_quantize(torch.ones(2, 32), STATIC, "triton")


CPU = torch.device("cpu")


@pytest.fixture
def eager_kernels(monkeypatch):
    """Functions that stand for right kernels, and nothing known about them."""

    def linear(x, weight, bias, offsets=None):
        values = weight.dequantize(torch.float32)
        if offsets is None:
            return (x.float() @ values.t()).bfloat16()
        return torch.cat([x[:3].float() @ values[0].t(), x[3:].float() @ values[1].t()]).bfloat16()

    right = {
        "fake_quantize": numerics.apply_scheme,
        "quantize": lambda x, scheme, axis: numerics.quantize(x, **vars(scheme)),
        "dequantize": lambda tensor, dtype: tensor.dequantize(dtype),
        "quantize_e4m3": numerics.quantize_e4m3,
        "dequantize_e4m3": numerics.dequantize_e4m3,
        "linear": linear,
    }
    for name, function in right.items():
        monkeypatch.setattr(triton_kernels, name, function)
    monkeypatch.setattr(self_check, "_found", {})


def test_right_kernels_are_verified(eager_kernels):
    assert all(self_check.is_verified(family, CPU) for family in self_check.FAMILIES)


@pytest.mark.parametrize(
    ("family", "name", "broken"),
    [
        ("quantize", "fake_quantize", lambda x, *_: x.clone()),
        ("quantize", "quantize", lambda x, scheme, axis: numerics.quantize(x)),
        ("quantize", "quantize_e4m3", lambda x: numerics.quantize_e4m3(x.contiguous().nan_to_num())),
        ("dequantize", "dequantize", lambda tensor, dtype: tensor.dequantize(dtype).nan_to_num()),
        ("dequantize", "dequantize_e4m3", lambda elements, byte, dtype: elements.to(dtype)),
        ("decode", "linear", lambda x, weight, *_: x.new_zeros(len(x), weight.codes.shape[-2])),
    ],
)
def test_a_broken_kernel_is_found_once(eager_kernels, monkeypatch, family, name, broken):
    monkeypatch.setattr(triton_kernels, name, broken)
    with pytest.warns(UserWarning, match=f"'{family}' Triton kernels do not work on cpu: .* differ from the eager"):
        assert not self_check.is_verified(family, CPU)
    assert not self_check.is_verified(family, CPU)  # and no second warning, which would be an error


def test_a_kernel_that_raises_is_not_used(eager_kernels, monkeypatch):
    def raises(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(triton_kernels, "fake_quantize", raises)
    with pytest.warns(UserWarning, match="RuntimeError: no memory"):
        assert not self_check.is_verified("quantize", CPU)


def test_nothing_is_checked_under_capture_or_while_code_is_traced(eager_kernels, monkeypatch):
    with monkeypatch.context() as capturing:
        capturing.setattr(self_check, "_is_capturing", lambda device: True)
        assert not self_check.is_verified("quantize", CPU)
    with monkeypatch.context() as tracing:
        tracing.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not self_check.is_verified("quantize", CPU)
    assert self_check.is_verified("quantize", CPU)


def test_checks_run_without_the_modes_of_the_caller(eager_kernels):
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert self_check.is_verified("decode", CPU)


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("problem", [None, "broken"])
def test_kernels_asked_for_by_name_are_not_checked(monkeypatch, backend, problem):
    device = torch.device("meta")
    monkeypatch.setattr(self_check, "_found", {("quantize", device): problem})
    monkeypatch.setattr(dispatch, "backend_for", lambda *_: ("triton", None))
    found = dispatch.choose_backend(torch.empty(4, 32, device=device), QuantScheme(), backend)
    assert (found == "triton") == (backend == "triton" or problem is None)
