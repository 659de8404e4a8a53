# SPDX-License-Identifier: Apache-2.0
"""The `torch.library` operators by themselves: schema, shapes for tracing, gradients, and the bits of the functions."""

import copy
import gc
import pickle

import pytest
import torch
from tables import pairwise_params
from torch.library import opcheck

from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig, numerics
from hf_mxfp4.gemm import PACKED_FIELDS
from hf_mxfp4.gemm.compile import state_of, what_is_saved
from hf_mxfp4.numerics import parse_scheme


PARTS = tuple(PACKED_FIELDS.values())
OPS = torch.ops.hf_mxfp4
SCHEMES = [
    "rceil",
    "mse+mbs128-dynamic+of0.5",
    "even+mbsrow",
    "even+mbs128-blockwise",
    "rceil+32x32",
    "rceil+of0.5@0.1",
]


def inputs(dtype=torch.float32) -> list[torch.Tensor]:
    """Odd lengths, no rows, batches, and another order in memory."""
    torch.manual_seed(0)
    shapes = torch.randn(3, 70), torch.randn(0, 33), torch.randn(2, 3, 1), torch.randn(129, 4).t()
    return [x.to(dtype) for x in shapes]


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize(("place", "scheme"), list(enumerate(SCHEMES)))
def test_fake_quantize_has_the_bits_of_the_contract_and_a_straight_through_gradient(place, scheme, backend):
    if backend == "auto":
        opcheck(OPS.fake_quantize.default, (inputs()[place % 4].requires_grad_(), scheme, backend))
    for x in inputs():
        x.requires_grad_()
        out = OPS.fake_quantize(x, scheme, backend)
        assert torch.equal(out, numerics.apply_scheme(x, parse_scheme(scheme)))
        grad = torch.randn_like(x)
        out.backward(grad)
        assert torch.equal(x.grad, grad)


def test_all_dtypes():
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.float64)):
        opcheck(OPS.fake_quantize.default, (inputs(dtype)[number], "rceil+mbs128", "auto"))


@pytest.mark.parametrize(("place", "scheme"), list(enumerate(SCHEMES)))
def test_quantize_and_dequantize(place, scheme):
    for number, x in enumerate(inputs(torch.bfloat16)):
        if number == place % 4:
            opcheck(OPS.quantize.default, (x, scheme, "auto"))
        expected = numerics.quantize(x, **vars(parse_scheme(scheme)))
        found = OPS.quantize(x, scheme, "auto")
        for part, tensor in zip(PARTS, found, strict=True):
            wanted = getattr(expected, part)
            assert tensor.shape == (0,) if wanted is None else torch.equal(tensor, wanted)
        parts = [None if getattr(expected, p) is None else t for p, t in zip(PARTS, found, strict=True)]
        arguments = *parts, x.shape[-1], scheme, torch.float32, "auto"
        if number == place % 4:
            opcheck(OPS.dequantize.default, arguments)
        assert torch.equal(OPS.dequantize(*arguments), expected.dequantize(torch.float32))


def test_what_draws_random_numbers_is_no_function_of_its_arguments():
    with pytest.raises(ValueError, match="rceil.stochastic.* draws random numbers"):
        OPS.fake_quantize(torch.ones(32), "rceil+stochastic", "auto")


def test_errors_are_those_of_the_functions():
    with pytest.raises(TypeError, match="floating-point"):
        OPS.fake_quantize(torch.ones(32, dtype=torch.int32), "rceil", "auto")
    with pytest.raises(ValueError, match="did you mean 'rceil'"):
        OPS.fake_quantize(torch.ones(32), "rciel", "auto")


@pytest.mark.parametrize(
    ("preset", "saved", "shape"),
    pairwise_params(("w4a4", "w4a4g8"), ("full", "mxfp4", "fp8"), ((3, 70), (0, 70), (2, 3, 70))),
)
def test_the_trainable_linear_operator(preset, saved, shape):
    layer = MXFP4Linear(70, 40, config=MXFP4RLConfig(preset=preset, saved_activations=saved))
    x = torch.randn(shape, requires_grad=True)
    spec, layer_id = layer.state.spec, layer.state.layer_id
    kept, has_step = what_is_saved(spec, x.dtype, x.dtype), preset == "w4a4g8"
    arguments = None, layer_id, x.dtype, kept, 70, str(spec.input_scheme), has_step, False, True
    opcheck(OPS.quantized_linear.default, (x, layer.weight, layer.bias, *arguments))
    out, tensors = OPS.quantized_linear(x, layer.weight, None, *arguments)
    needs, tail = [True, True, False], (x.dtype, kept, has_step, False, x.dtype, None)
    backward = out.detach(), layer.weight.detach(), None, tensors, layer_id, *tail, needs
    opcheck(OPS.quantized_linear_backward.default, backward)


@pytest.mark.parametrize("scheme", [{}, {"preset": "w4a4", "outlier_fallback": 0.5}], ids=str)
def test_the_packed_linear_operator(scheme):
    config = MXFP4RLConfig(mode="packed", **scheme)
    layer = MXFP4PackedLinear.from_linear(torch.nn.Linear(70, 40), config)
    for rows in (3, 0):
        x = torch.randn(rows, 70, requires_grad=True)
        spec = layer.state.spec
        weights, inputs = str(spec.weights), "" if spec.inputs is None else str(spec.inputs)
        options = x.dtype, weights, inputs, 0, spec.backend
        opcheck(OPS.packed_linear.default, (x, *layer.packed_weight(), layer.bias, None, *options))
        arguments = None, 70, x.dtype, x.dtype, weights, 0, spec.backend, [True, True]
        opcheck(OPS.packed_linear_backward.default, (torch.randn(rows, 40), *layer.packed_weight(), *arguments))


def test_layers_are_found_by_their_number_for_as_long_as_they_live():
    layer = MXFP4Linear(32, 32)
    others = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), MXFP4Linear(32, 32)
    for each in (layer, *others):
        assert state_of(each.state.layer_id) is each.state
    layer_id = layer.state.layer_id
    del layer, each
    gc.collect()
    with pytest.raises(RuntimeError, match="is gone"):
        state_of(layer_id)


def test_numbers_stay_on_the_cpu_and_out_of_the_state():
    with torch.device("meta"), torch.inference_mode():
        layer = MXFP4Linear(32, 32)
    assert layer.state.layer_id.device.type == "cpu" and not layer.state.layer_id.is_inference()
    assert set(layer.state_dict()) == {"weight", "bias"}
    assert layer.double().state.layer_id.dtype == torch.int64
