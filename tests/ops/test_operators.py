# SPDX-License-Identifier: Apache-2.0
"""The `torch.library` operators by themselves: schema, shapes for tracing, gradients, and the bits of the functions;
the choice of the backend that quantizes a tensor, and self-checks of kernels: what they find bad is not used."""

import copy
import gc
import pickle

import pytest
import torch
from tables import pairwise_params
from torch.library import opcheck

import mxfp4_kernels
from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig, numerics
from hf_mxfp4.numerics import QuantScheme, parse_scheme
from hf_mxfp4.ops import backend_for, cpu, packed_operators, quantization, self_check
from hf_mxfp4.ops import triton as triton_kernels
from hf_mxfp4.ops.inputs import what_is_saved
from hf_mxfp4.ops.operators import state_of
from hf_mxfp4.ops.quantization import fake_quantize


OPS = torch.ops.hf_mxfp4
SCHEMES = [
    "rceil", "mse+mbs128-dynamic+of0.5", "even+mbsrow", "even+mbs128-blockwise", "rceil+32x32",
]  # fmt: skip


def inputs(dtype=torch.float32) -> list[torch.Tensor]:
    """Odd lengths, no rows, batches, and another order in memory."""
    tensors = [torch.randn(3, 70), torch.randn(0, 33), torch.randn(2, 3, 1), torch.randn(129, 4).t()]
    return [x.to(dtype) for x in tensors]


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fake_quantize_has_the_bits_of_the_contract_and_a_straight_through_gradient(scheme, backend):
    for x in inputs():
        x.requires_grad_()
        out = OPS.fake_quantize(x, scheme, backend)
        assert torch.equal(out, numerics.apply_scheme(x, parse_scheme(scheme)))
        grad = torch.randn_like(x)
        out.backward(grad)
        assert torch.equal(x.grad, grad)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantize_and_dequantize_have_the_bits_of_the_contract(scheme):
    for x in inputs(torch.bfloat16):
        expected = numerics.quantize(x, **vars(parse_scheme(scheme)))
        found = OPS.quantize(x, scheme, "auto")
        for tensor, wanted in zip(found, expected.parts, strict=True):
            assert tensor.shape == (0,) if wanted is None else torch.equal(tensor, wanted)
        dequantized = OPS.dequantize(*expected.parts, x.shape[-1], scheme, torch.float32, "auto")
        assert torch.equal(dequantized, expected.dequantize(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("scheme", ["even+mbs128-blockwise_fp8", "rceil+mbsrow+of0.5"])
def test_operators_are_registered_as_pytorch_asks(scheme, dtype):
    for x in inputs(dtype):
        opcheck(OPS.fake_quantize.default, (x.clone().requires_grad_(), scheme, "auto"))
        opcheck(OPS.quantize.default, (x, scheme, "auto"))
        parts = numerics.quantize(x, **vars(parse_scheme(scheme))).parts
        opcheck(OPS.dequantize.default, (*parts, x.shape[-1], scheme, torch.float32, "auto"))


def test_a_scheme_that_draws_random_numbers_is_no_operator():
    with pytest.raises(ValueError, match="draws random numbers"):
        OPS.fake_quantize(torch.ones(32), "rceil+stochastic", "auto")


def test_errors_are_those_of_the_functions():
    with pytest.raises(TypeError, match="floating-point"):
        OPS.fake_quantize(torch.ones(32, dtype=torch.int32), "rceil", "auto")
    with pytest.raises(ValueError, match="did you mean 'rceil'"):
        OPS.fake_quantize(torch.ones(32), "rciel", "auto")


@pytest.mark.parametrize(
    ("preset", "shape"), pairwise_params(("w4a4", "w4a8", "w4a8g8"), ((3, 70), (0, 70), (2, 3, 70)))
)
def test_the_trainable_linear_operator(preset, shape):
    layer = MXFP4Linear(70, 40, config=MXFP4RLConfig(preset=preset))
    x = torch.randn(shape, requires_grad=True)
    spec = layer.state.spec
    layer_id = layer.state.layer_id
    kept = what_is_saved(spec, x.dtype, x.dtype)
    has_step = preset == "w4a8g8"
    arguments = None, layer_id, x.dtype, kept, 70, has_step, False, True
    opcheck(OPS.quantized_linear.default, (x, layer.weight, layer.bias, *arguments))
    out, tensors = OPS.quantized_linear(x, layer.weight, None, *arguments)
    needs = [True, True, False]
    backward = out.detach(), layer.weight.detach(), None, tensors, layer_id, kept, has_step, False, needs
    opcheck(OPS.quantized_linear_backward.default, backward)


@pytest.mark.parametrize("scheme", [{}, {"preset": "w4a4", "outlier_fallback": 0.5}], ids=str)
def test_the_packed_linear_operator(scheme, monkeypatch):
    config = MXFP4RLConfig(mode="packed", **scheme)
    layer = MXFP4PackedLinear.from_linear(torch.nn.Linear(70, 40), config)
    # The checks copy all arguments, so that the codes are no layer's.
    monkeypatch.setattr(packed_operators, "find_product", lambda codes: (layer.state, layer.packed_weight()))
    for rows in (3, 0):
        x = torch.randn(rows, 70, requires_grad=True)
        opcheck(OPS.packed_linear.default, (x, layer.weight, layer.bias, None, x.dtype))
        arguments = None, 70, x.dtype, x.dtype, [True, True]
        opcheck(OPS.packed_linear_backward.default, (torch.randn(rows, 40), layer.weight, *arguments))


def test_layers_are_found_by_their_number_for_as_long_as_they_live():
    layer = MXFP4Linear(32, 32)
    others = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), MXFP4Linear(32, 32)
    for found in (*others, layer):
        assert state_of(found.state.layer_id) is found.state
    layer_id = layer.state.layer_id
    del layer, found
    gc.collect()
    with pytest.raises(RuntimeError, match="is gone"):
        state_of(layer_id)


def test_numbers_stay_on_the_cpu_and_out_of_the_state():
    with torch.device("meta"), torch.inference_mode():
        layer = MXFP4Linear(32, 32)
    assert layer.state.layer_id.device.type == "cpu"
    assert not layer.state.layer_id.is_inference()
    assert set(layer.state_dict()) == {"weight", "bias"}
    assert layer.double().state.layer_id.dtype == torch.int64


# ---- backends -------------------------------------------------------------------------------------------------------


STATIC = QuantScheme("rceil", 128, "static", 0.5)
F32 = torch.float32
BF16 = torch.bfloat16
#: Device, dtype, scheme and backend that is asked for; the backend that is found, and words of why it cannot.
CHOICES = [
    ("cpu", F32, STATIC, "auto", "cpu", None),
    ("cpu", BF16, STATIC, "cpu", "cpu", None),
    ("cpu", F32, STATIC, "eager", "eager", None),
    ("cpu", torch.float64, STATIC, "auto", "eager", "float64"),
    ("cuda", F32, STATIC, "cpu", "cpu", "the tensor is on cuda"),
    ("cuda", BF16, STATIC, "auto", "triton", None),
    ("cuda", BF16, STATIC, "triton", "triton", None),
    # Searches and tiles are no obstacle on a GPU.
    ("cuda", torch.float16, parse_scheme("even+mbs128-blockwise_fp8"), "auto", "triton", None),
    ("cuda", F32, parse_scheme("mse+mbs256+of0.5+32x32"), "auto", "triton", None),
    # These are: `auto` falls back, and says why.
    ("cuda", BF16, parse_scheme("rceil+mbsrow-dynamic"), "auto", "eager", "macro_block='row' is not supported"),
    ("cuda", F32, parse_scheme("rceil+mbsrow+32x32"), "triton", "triton", "row"),
    ("cuda", torch.float64, STATIC, "auto", "eager", "float64"),
]


@pytest.mark.parametrize(("device", "dtype", "scheme", "asked", "name", "words"), CHOICES, ids=str)
def test_which_backend_quantizes(device, dtype, scheme, asked, name, words):
    if name == "triton":
        pytest.importorskip("triton")
    if name == "cpu" and cpu.unsupported_reason(dtype, scheme) is not None:
        pytest.skip(cpu.unsupported_reason(dtype, scheme))
    found, reason = backend_for(device, dtype, scheme, asked)
    assert found == name
    if words is not None:
        assert words in reason
    elif asked != "eager":
        assert reason is None


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
    for function in (to_fp8_rows_and_columns, transpose_fp8, gradient_to_fp8):
        monkeypatch.setattr(mxfp4_kernels, function.__name__, function)
    monkeypatch.setattr(self_check, "_found", {})


def to_fp8_rows_and_columns(x, scale_dtype=torch.float32, top=None):
    rows = x if top is None else x.reshape(1, -1)
    elements, byte = numerics.quantize_e4m3(rows)
    scale = byte.expand(len(x), 1)
    elements = elements.view(x.shape)
    return elements, elements.mT, scale if scale_dtype == torch.uint8 else numerics.decode_e8m0(scale)


def transpose_fp8(elements):
    return elements.mT


def gradient_to_fp8(grad, token_scales):
    rows, row_byte = numerics.quantize_e4m3(grad)
    columns, column_byte = numerics.quantize_e4m3((grad.float() * (token_scales / token_scales.max())[:, None]).t())
    scales = numerics.decode_e8m0(row_byte), numerics.decode_e8m0(column_byte)
    return mxfp4_kernels.FP8Gradient(rows, scales[0], columns, scales[1], token_scales.max(), None)


def test_right_kernels_are_verified(eager_kernels):
    assert all(self_check.is_verified(family, CPU) for family in self_check.FAMILIES)


@pytest.mark.parametrize(
    ("family", "name", "broken"),
    [
        ("quantize", "fake_quantize", lambda x, *_: x.clone()),
        ("quantize", "quantize", lambda x, scheme, axis: numerics.quantize(x)),
        ("fp8", "quantize_e4m3", lambda x: numerics.quantize_e4m3(x.contiguous().nan_to_num())),
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


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("to_fp8_rows_and_columns", lambda x, *_, **options: to_fp8_rows_and_columns(x.abs(), *_, **options)),
        ("transpose_fp8", lambda elements: elements.view(elements.shape[::-1])),
        ("gradient_to_fp8", lambda grad, scales: gradient_to_fp8(grad, torch.ones_like(scales))),
    ],
)
def test_a_broken_kernel_of_fp8_operands_is_found(eager_kernels, monkeypatch, name, broken):
    monkeypatch.setattr(mxfp4_kernels, name, broken)
    with pytest.warns(UserWarning, match="'fp8' Triton kernels do not work on cpu"):
        assert not self_check.is_verified("fp8", CPU)


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
    monkeypatch.setattr(quantization, "backend_for", lambda *_: ("triton", None))
    found = quantization.choose_backend(torch.empty(4, 32, device=device), QuantScheme(), backend)
    assert (found == "triton") == (backend == "triton" or problem is None)
