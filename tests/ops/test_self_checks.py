# SPDX-License-Identifier: Apache-2.0
"""Self-checks of kernels find what is broken, once, and what they find bad is not used."""

import pytest
import torch

from hf_mxfp4 import numerics
from hf_mxfp4.backends import dispatch, self_check
from hf_mxfp4.backends import triton as triton_kernels
from hf_mxfp4.numerics import QuantScheme


CPU = torch.device("cpu")


@pytest.fixture
def eager_kernels(monkeypatch):
    """Functions that stand for right kernels, and nothing known about them."""

    def linear(x, weight, bias, offsets=None):
        values = weight.dequantize(torch.float32)
        if offsets is None:
            return (x.float() @ values.t()).bfloat16()
        return torch.cat([x[:3].float() @ values[0].t(), x[3:].float() @ values[1].t()]).bfloat16()

    monkeypatch.setattr(triton_kernels, "fake_quantize", numerics.apply_scheme)
    monkeypatch.setattr(triton_kernels, "quantize", lambda x, scheme, axis: numerics.quantize(x, **vars(scheme)))
    monkeypatch.setattr(triton_kernels, "dequantize", lambda tensor, dtype: tensor.dequantize(dtype))
    monkeypatch.setattr(triton_kernels, "quantize_e4m3", numerics.quantize_e4m3)
    monkeypatch.setattr(triton_kernels, "dequantize_e4m3", numerics.dequantize_e4m3)
    monkeypatch.setattr(triton_kernels, "linear", linear)
    monkeypatch.setattr(self_check, "_found", {})


def test_right_kernels_are_verified(eager_kernels):
    assert set(self_check.states(CPU).values()) == {"not checked yet"}
    assert all(self_check.is_verified(family, CPU) for family in self_check.FAMILIES)
    assert set(self_check.states(CPU).values()) == {"checked"}


def test_interpreted_kernels_are_verified(run_script):
    found = run_script("run_self_checks.py", interpret=True)
    assert found == dict.fromkeys(self_check.FAMILIES, "checked")


def off_by_a_bit(x: torch.Tensor, *_) -> torch.Tensor:
    return x.clone()


@pytest.mark.parametrize(
    ("family", "name", "broken"),
    [
        ("quantize", "fake_quantize", off_by_a_bit),
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
