# SPDX-License-Identifier: Apache-2.0
"""The packed layer: its tensors, the bits it computes, its gradients, and what may be done to it as a module."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from factors import factors_config
from passes import passes
from same_bits import assert_same
from tables import CONFIGS, PLAIN, some
from torch import nn

from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig, cached_weights, numerics
from hf_mxfp4.ops import PACKED_FIELDS
from hf_mxfp4.ops import quantization as backends


SCHEMES = some(
    CONFIGS, "default", "no macro", "w4a16", "w4a4", "fallback 0.5", "fallback of weights",
    "tiles", "block_mantissas", "mse row", "32 static", "eager",
)  # fmt: skip


def all_schemes():
    return pytest.mark.parametrize("options", SCHEMES.values(), ids=SCHEMES)


def packed_config(**options) -> MXFP4RLConfig:
    return factors_config(mode="packed", **options)


def linear(n=40, k=72, bias=True, dtype=torch.float32, seed=0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(k, n, bias, dtype=dtype)


def packed(n=40, k=72, bias=True, dtype=torch.float32, **options) -> MXFP4PackedLinear:
    return MXFP4PackedLinear.from_linear(linear(n, k, bias, dtype), packed_config(**options), "a.layer")


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"macro_block": None}, {}),
        ({}, {"weight_macro": (40, 1)}),
        ({"macro_block": 64}, {"weight_macro": (40, 2)}),
        ({"macro_block": "row"}, {"weight_macro": (40, 1)}),
        ({**PLAIN, "outlier_fallback": 0.5}, {"weight_residual": (40, 36), "weight_residual_scale": (40, 3)}),
    ],
    ids=["plain", "macro", "macro-64", "row", "fallback"],
)
def test_the_parameters_are_those_of_the_format(options, more):
    layer, expected = packed(k=72, **options), {"weight": (40, 36), "weight_scale": (40, 3), **more}
    found = {name: tuple(p.shape) for name, p in layer.named_parameters() if name != "bias"}
    assert found == expected == layer.shapes()
    assert all(p.dtype == torch.uint8 and not p.requires_grad for n, p in layer.named_parameters() if n != "bias")
    assert layer.bias.dtype == torch.float32 and layer.bias.requires_grad
    assert not list(layer.buffers()) and list(layer.state_dict()) == [*expected, "bias"]
    assert (layer.in_features, layer.out_features) == (72, 40) and isinstance(layer, nn.Linear)


def test_a_placeholder_keeps_the_bias_and_freezes_the_weight():
    source = nn.Linear(64, 8, device="meta")
    layer = MXFP4PackedLinear.placeholder(source, packed_config())
    assert layer.bias is source.bias and not layer.weight.requires_grad and layer.weight.shape == (8, 64)


def test_literal_bytes():
    source = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        source.weight.copy_(torch.tensor([[0.5, 1.0, -6.0, 3.0]]))
    layer = MXFP4PackedLinear.from_linear(source, packed_config(macro_block=None))
    assert layer.weight.tolist() == [[0x21, 0x5F]] and layer.weight_scale.tolist() == [[127]]
    assert layer(torch.eye(4)).flatten().tolist() == [0.5, 1.0, -6.0, 3.0]


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(40, 72), (33, 300), (5, 31)], ids=str)
@all_schemes()
def test_same_bits_as_the_trainable_layer(options, size, dtype):
    n, k = size
    config = factors_config(**{"preset": "w4a16", "outlier_fallback": None, **options})
    trainable = MXFP4Linear(k, n, dtype=dtype, config=config)
    layer = MXFP4PackedLinear.from_linear(trainable, config.packed())
    assert layer.config == packed_config(**options)
    x = torch.randn(2, 3, k).to(dtype)
    y, grad_x, _, grad_bias = passes(trainable, x)
    assert y.dtype == dtype
    assert_same(passes(layer, x), [y, grad_x, grad_bias])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@all_schemes()
def test_few_rows_are_the_exact_product_up_to_float32_sums(options, dtype):
    layer = packed(40, 300, dtype=dtype, **{"outlier_fallback": None, **options})
    x = torch.randn(2, 3, 300).to(dtype)
    inputs, weight = layer.quantized_input(x, dtype).double(), layer.dequantized_weight(torch.float32).double()
    exact, bias = inputs @ weight.t(), layer.bias.detach().double()
    # Sums of 301 terms, each rounded in any order; and one rounding of what comes out. Values that are dequantized to
    # the dtype (by the eager backend) are rounded once more.
    size = inputs.abs() @ weight.abs().t() + bias.abs()
    terms = 302 * 2**-24 + (torch.finfo(dtype).eps / 2 if layer.config.backend == "eager" else 0)
    bound = size * terms + (exact + bias).abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).tiny
    assert ((layer(x).double() - exact - bias).abs() <= bound).all()


@all_schemes()
def test_dequantized_weight_against_the_eager_reference(options):
    source = linear(64, 160)
    layer = MXFP4PackedLinear.from_linear(source, packed_config(**options))
    reference = numerics.quantize(source.weight.detach(), **vars(layer.config.weight_scheme))
    for part, field in PACKED_FIELDS.items():
        stored, of_reference = getattr(layer, part), getattr(reference, field)
        assert stored is of_reference is None or torch.equal(stored, of_reference), part
    expected = reference.dequantize()
    assert layer.bias is source.bias and torch.equal(layer.dequantized_weight(), expected)
    tensor = layer.quantized_tensor()
    assert tensor.codes.data_ptr() == layer.weight.data_ptr() and tensor.length == 160
    assert torch.equal(numerics.MXFP4Tensor.dequantize(tensor, torch.float32), expected)
    assert torch.equal(layer.dequantized_weight(torch.bfloat16), expected.bfloat16())


def test_a_weight_that_is_quantized_in_portions(monkeypatch):
    source, config = linear(100, 64), packed_config(fprop={"weight": "rceil+mbs128-dynamic+32x32"})
    whole = MXFP4PackedLinear.from_linear(source, config)
    monkeypatch.setattr("hf_mxfp4.ops.packed_weight.PORTION", 32 * 64)
    parts = MXFP4PackedLinear.from_linear(source, config)
    assert all(torch.equal(a, b) for a, b in zip(whole.packed_weight()[:3], parts.packed_weight()[:3], strict=True))


def test_to_linear_holds_the_dequantized_values():
    layer = packed(dtype=torch.bfloat16).eval()
    plain = layer.to_linear()
    assert type(plain) is nn.Linear and not plain.training and plain.weight.dtype == torch.bfloat16
    assert torch.equal(plain.weight, layer.dequantized_weight()) and torch.equal(plain.bias, layer.bias)
    assert plain.bias.data_ptr() != layer.bias.data_ptr() and plain.weight.requires_grad
    assert layer.to_linear(torch.float32).bias.dtype == torch.float32


def test_what_packed_layers_refuse():
    layer = packed()
    with pytest.raises(ValueError, match="needs a config of mode='packed', not 'qat'"):
        MXFP4PackedLinear(64, 32, config=factors_config())
    with pytest.raises(TypeError, match="torch.uint8; nothing to quantize"):
        MXFP4PackedLinear.from_linear(layer, packed_config())
    with pytest.raises(TypeError, match="packed and frozen"):
        layer.reset_parameters()
    with pytest.raises(RuntimeError):
        layer.requires_grad_(True)
    layer.weight = nn.Parameter(torch.zeros(40, 72))
    with pytest.raises(TypeError, match="a.layer: its weight was replaced by one of torch.float32, which"):
        layer(torch.zeros(2, 72))
    layer = packed()
    layer.weight_scale = None
    with pytest.raises(ValueError, match=r"a.layer.weight_scale is missing; expected uint8 \[40, 3\]"):
        layer.check()


def test_loading_floats_into_packed_tensors_is_refused():
    layer, state = packed(), packed().state_dict()
    for name in ("weight", "weight_scale", "weight_macro"):
        for value in (state[name].float(), state[name].to(torch.int8)):
            with pytest.raises(RuntimeError, match=f"{name} is {value.dtype}, but the packed layer needs the uint8"):
                layer.load_state_dict({**state, name: value})
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        layer.load_state_dict({**state, "weight": state["weight"][:, :5]})


def test_copies_are_independent_and_states_are_read():
    layer, x, file = packed(outlier_fallback=0.5), torch.randn(3, 72), io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = MXFP4PackedLinear(72, 40, config=layer.config)
    other.load_state_dict(torch.load(file, weights_only=True))
    with cached_weights(layer):
        expected = layer(x)
        for copied in (other, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
            assert torch.equal(copied(x), expected)
            copied.weight.zero_()
            assert torch.equal(layer(x), expected) and not torch.equal(copied(x), expected)


@pytest.mark.parametrize(
    ("convert", "dtype"),
    [
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.double(), torch.float64),
        (lambda m: m.to("cpu"), torch.bfloat16),
        (lambda m: m.to("meta").to_empty(device="cpu").float(), torch.float32),
    ],
    ids=["to", "half", "double", "device", "meta"],
)
def test_conversions_leave_packed_tensors_alone(convert, dtype):
    layer = packed(dtype=torch.bfloat16)
    before = {name: p.clone() for name, p in layer.state_dict().items() if name != "bias"}
    convert(nn.Sequential(layer))
    for name, value in before.items():
        assert getattr(layer, name).dtype == torch.uint8
        assert torch.equal(getattr(layer, name), value) or dtype == torch.float32  # emptied
    assert layer.bias.dtype == layer.compute_dtype == layer.to_linear().weight.dtype == dtype
    x = torch.randn(2, 72).to(dtype)
    assert layer(x).dtype == dtype


@pytest.mark.usefixtures("dense_products")
def test_autocast_runs_the_product_in_its_dtype():
    layer, x = packed(), torch.randn(3, 72)
    y, *grads = passes(layer, x, autocast=True)
    expected = F.linear(x.bfloat16(), layer.dequantized_weight(torch.bfloat16), layer.bias.bfloat16())
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    layer, x = packed(), torch.randn(3, 72)
    expected = layer(x)
    with mode():
        y = layer(x)
        with cached_weights(layer):
            assert torch.equal(layer(x), expected)
    assert torch.equal(y, expected) and not y.requires_grad
    assert layer(x).requires_grad


def test_only_packed_tensors_are_kept_for_the_backward_pass():
    layer = packed(outlier_fallback=0.5)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = layer(torch.randn(3, 72, requires_grad=True))
    assert [t.data_ptr() for t in kept] == [p.data_ptr() for p in layer.packed_weight()]
    y = layer(torch.randn(3, 72, requires_grad=True))
    layer.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.fixture
def made(monkeypatch) -> list[weakref.ref]:
    """References to the dequantized weights made so far."""
    references, original = [], backends.dequantize

    def spy(*args):
        value = original(*args)
        references.append(weakref.ref(value))
        return value

    monkeypatch.setattr(backends, "dequantize", spy)
    return references


@pytest.mark.parametrize(("backend", "forward"), [("cpu", 0), ("eager", 1)])
def test_no_dequantized_copy_outlives_the_product(backend, forward, made):
    layer = packed(backend=backend)
    y = layer(torch.randn(3, 72, requires_grad=True))
    gc.collect()
    assert [reference() for reference in made] == [None] * forward
    y.sum().backward()
    gc.collect()
    assert [reference() for reference in made] == [None] * (forward + 1)


@pytest.mark.parametrize("rows", [3, 100])
def test_generation_on_the_codes_dequantizes_and_keeps_nothing(rows, made):
    layer, x = packed(backend="cpu"), torch.randn(rows, 72)
    with torch.no_grad(), cached_weights(layer, "dense"):
        assert torch.equal(layer(x), layer(x))
        assert not made
        layer.weight.zero_()
        assert torch.equal(layer(x), layer.bias.expand(rows, -1))  # nor a copy of anything else


def test_generation_dequantizes_once_and_frees_at_the_end(made):
    layer, x = packed(backend="eager"), torch.randn(3, 72)
    with torch.no_grad():
        expected = layer(x)
        with cached_weights(layer, "dense"):
            for _ in range(3):
                assert torch.equal(layer(x), expected)
        gc.collect()
        assert len(made) == 2 and made[1]() is None
        layer.weight.zero_()
        with cached_weights(layer, "dense"):
            assert not torch.equal(layer(x), expected)


def test_a_backend_that_cannot_is_named():
    with pytest.raises(ValueError, match="backend='cpu' cannot quantize here.*float64"):
        packed(bias=False, backend="cpu")(torch.zeros(2, 72, dtype=torch.float64))


def test_it_says_what_it_is():
    scheme = "w4a16 [weights mxfp4+rceil+mbs128-dynamic+of0.5, activations full precision]"
    text = f"MXFP4PackedLinear(in_features=72, out_features=40, bias=True, {scheme})"
    assert repr(packed(outlier_fallback=0.5)) == text
