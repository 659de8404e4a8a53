# SPDX-License-Identifier: Apache-2.0
"""The packed layer: its tensors, the bits it computes, its gradients, and what may be done to it as a module."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from passes import assert_product, passes
from same_bits import assert_same
from tables import CONFIGS, PLAIN, some
from torch import nn

from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig, cached_weights, numerics
from hf_mxfp4.ops import PACKED_FIELDS
from hf_mxfp4.ops import quantization as backends


SCHEMES = some(
    CONFIGS, "w4a16", "w4a8", "w4a4", "w4a16 plain", "fallback 0.5", "fallback of weights", "tiles", "block_mantissas",
    "mse row", "32 static", "eager",
)  # fmt: skip


def all_schemes():
    return pytest.mark.parametrize("options", SCHEMES.values(), ids=SCHEMES)


def packed_config(**options) -> MXFP4RLConfig:
    return MXFP4RLConfig(mode="packed", **options)


def linear(n=40, k=72, bias=True, dtype=torch.float32, seed=0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(k, n, bias, dtype=dtype)


def packed(n=40, k=72, bias=True, dtype=torch.float32, **options) -> MXFP4PackedLinear:
    return MXFP4PackedLinear.from_linear(linear(n, k, bias, dtype), packed_config(**options), "a.layer")


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, {"weight_macro": (40, 1)}),
        ({"macro_block": None}, {}),
        ({"macro_block": 64, "macro_search": "static"}, {"weight_macro": (40, 2)}),
        ({**PLAIN, "outlier_fallback": 0.5}, {"weight_residual": (40, 36), "weight_residual_scale": (40, 3)}),
    ],
    ids=["default", "plain", "macro-64", "residuals"],
)
def test_the_parameters_are_those_of_the_format(options, more):
    layer = packed(n=40, k=72, **options)
    expected = {"weight": (40, 36), "weight_scale": (40, 3), **more}
    weights = {name: p for name, p in layer.named_parameters() if name != "bias"}
    assert {name: tuple(p.shape) for name, p in weights.items()} == expected
    assert layer.shapes() == expected
    assert {p.dtype for p in weights.values()} == {torch.uint8}
    assert not any(p.requires_grad for p in weights.values())
    assert list(layer.state_dict()) == [*expected, "bias"]


def test_the_layer_is_a_linear_one_with_a_bias_that_trains():
    layer = packed(n=40, k=72)
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features) == (72, 40)
    assert layer.bias.dtype == torch.float32
    assert layer.bias.requires_grad


def test_a_placeholder_keeps_the_bias_and_freezes_the_weight():
    source = nn.Linear(64, 8, device="meta")
    layer = MXFP4PackedLinear.placeholder(source, packed_config())
    assert layer.bias is source.bias
    assert not layer.weight.requires_grad
    assert layer.weight.shape == (8, 64)


def test_literal_bytes():
    source = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        source.weight.copy_(torch.tensor([[0.5, 1.0, -6.0, 3.0]]))
    layer = MXFP4PackedLinear.from_linear(source, packed_config(macro_block=None))
    assert layer.weight.tolist() == [[0x21, 0x5F]]
    assert layer.weight_scale.tolist() == [[127]]
    assert layer(torch.eye(4)).flatten().tolist() == [0.5, 1.0, -6.0, 3.0]


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(33, 300), (5, 31)], ids=str)
@all_schemes()
def test_same_bits_as_the_trainable_layer(options, size, dtype):
    n, k = size
    config = MXFP4RLConfig(**options)
    trainable = MXFP4Linear(k, n, dtype=dtype, config=config)
    layer = MXFP4PackedLinear.from_linear(trainable, config.packed())
    x = torch.randn(2, 3, k).to(dtype)
    y, grad_x, _, grad_bias = passes(trainable, x)
    assert y.dtype == dtype
    assert_same(passes(layer, x), [y, grad_x, grad_bias])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@all_schemes()
def test_few_rows_are_the_exact_product_up_to_float32_sums(options, dtype):
    layer = packed(40, 300, dtype=dtype, **options)
    x = torch.randn(2, 3, 300).to(dtype)
    # The eager backend rounds the dequantized weight to the dtype.
    weight = layer.dequantized_weight(dtype if layer.config.backend == "eager" else torch.float32)
    assert_product(layer(x), layer.quantized_input(x, dtype), weight, layer.bias)


@all_schemes()
def test_dequantized_weight_against_the_eager_reference(options):
    source = linear(64, 160)
    layer = MXFP4PackedLinear.from_linear(source, packed_config(**options))
    reference = numerics.quantize(source.weight.detach(), **vars(layer.config.weight_scheme))
    for part, field in PACKED_FIELDS.items():
        stored = getattr(layer, part)
        of_reference = getattr(reference, field)
        assert stored is of_reference is None or torch.equal(stored, of_reference), part
    expected = reference.dequantize()
    assert torch.equal(layer.dequantized_weight(), expected)
    assert torch.equal(layer.dequantized_weight(torch.bfloat16), expected.bfloat16())
    assert layer.quantized_tensor().codes.data_ptr() == layer.weight.data_ptr()
    assert layer.bias is source.bias


def test_a_weight_that_is_quantized_in_portions(monkeypatch):
    source = linear(100, 64)
    config = packed_config(fprop={"weight": "rceil+mbs128-dynamic+32x32"})
    whole = MXFP4PackedLinear.from_linear(source, config)
    monkeypatch.setattr("hf_mxfp4.ops.packed_weight.PORTION", 32 * 64)
    parts = MXFP4PackedLinear.from_linear(source, config)
    assert_same(dict(parts.state_dict()), dict(whole.state_dict()))


def test_to_linear_holds_the_dequantized_values():
    layer = packed(dtype=torch.bfloat16).eval()
    plain = layer.to_linear()
    assert type(plain) is nn.Linear
    assert not plain.training
    assert plain.weight.dtype == torch.bfloat16
    assert plain.weight.requires_grad
    assert torch.equal(plain.weight, layer.dequantized_weight())
    assert torch.equal(plain.bias, layer.bias)
    assert plain.bias.data_ptr() != layer.bias.data_ptr()
    assert layer.to_linear(torch.float32).bias.dtype == torch.float32


def test_other_modes_and_packed_weights_are_refused():
    with pytest.raises(ValueError, match="needs a config of mode='packed', not 'qat'"):
        MXFP4PackedLinear(64, 32, config=MXFP4RLConfig())
    with pytest.raises(TypeError, match="nothing to quantize"):
        MXFP4PackedLinear.from_linear(packed(), packed_config())


def test_packed_weights_do_not_train():
    layer = packed()
    with pytest.raises(TypeError, match="packed and frozen"):
        layer.reset_parameters()
    with pytest.raises(RuntimeError):
        layer.requires_grad_(True)


def test_a_weight_that_was_replaced_by_floats_is_refused():
    layer = packed()
    layer.weight = nn.Parameter(torch.zeros(40, 72))
    with pytest.raises(TypeError, match="a.layer: its weight was replaced by one of torch.float32"):
        layer(torch.zeros(2, 72))


def test_a_missing_tensor_is_named():
    layer = packed()
    layer.weight_scale = None
    with pytest.raises(ValueError, match=r"a.layer.weight_scale is missing; expected uint8 \[40, 3\]"):
        layer.check()


def test_a_layer_that_is_made_empty_loads_a_state():
    layer = packed(n=40, k=72)
    x = torch.randn(3, 72)
    empty = MXFP4PackedLinear(72, 40, config=layer.config)
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(x), layer(x))


@pytest.mark.parametrize("name", ["weight", "weight_scale", "weight_macro"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_loading_other_dtypes_into_packed_tensors_is_refused(name, dtype):
    layer = packed()
    state = packed().state_dict()
    with pytest.raises(RuntimeError, match=f"{name} is {dtype}, but the packed layer needs the uint8"):
        layer.load_state_dict({**state, name: state[name].to(dtype)})


def test_loading_another_shape_is_refused():
    layer = packed()
    state = packed().state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        layer.load_state_dict({**state, "weight": state["weight"][:, :5]})


@pytest.mark.parametrize(
    ("convert", "dtype"),
    [
        (lambda m: m.to(torch.float32), torch.float32),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.double(), torch.float64),
        (lambda m: m.to("cpu"), torch.bfloat16),
    ],
    ids=["to", "half", "double", "device"],
)
def test_conversions_leave_packed_tensors_alone(convert, dtype):
    layer = packed(dtype=torch.bfloat16)
    before = {name: p.clone() for name, p in layer.state_dict().items() if name != "bias"}

    convert(nn.Sequential(layer))

    after = {name: p for name, p in layer.state_dict().items() if name != "bias"}
    assert_same(after, before)
    assert layer.bias.dtype == dtype
    assert layer.compute_dtype == dtype
    assert layer.to_linear().weight.dtype == dtype
    assert layer(torch.randn(2, 72).to(dtype)).dtype == dtype


@pytest.mark.usefixtures("dense_products")
def test_autocast_runs_the_product_in_its_dtype():
    layer = packed()
    x = torch.randn(3, 72)
    y, *grads = passes(layer, x, autocast=True)
    expected = F.linear(x.bfloat16(), layer.dequantized_weight(torch.bfloat16), layer.bias.bfloat16())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    layer = packed()
    x = torch.randn(3, 72)
    expected = layer(x)
    with mode():
        y = layer(x)
        with cached_weights(layer):
            assert torch.equal(layer(x), expected)
    assert torch.equal(y, expected)
    assert not y.requires_grad
    assert layer(x).requires_grad


def test_only_packed_tensors_are_kept_for_the_backward_pass():
    layer = packed(outlier_fallback=0.5)
    kept = []

    def note(tensor):
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(torch.randn(3, 72, requires_grad=True))
    assert kept == [part.data_ptr() for part in layer.packed_weight()]


def test_a_write_between_forward_and_backward_pass_is_refused():
    layer = packed()
    y = layer(torch.randn(3, 72, requires_grad=True))
    layer.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.fixture
def made(monkeypatch) -> list[weakref.ref]:
    """References to the dequantized weights made so far."""
    references = []
    original = backends.dequantize

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
    layer = packed(backend="cpu")
    x = torch.randn(rows, 72)
    with torch.no_grad(), cached_weights(layer, "dense"):
        assert torch.equal(layer(x), layer(x))
        assert not made
        layer.weight.zero_()
        assert torch.equal(layer(x), layer.bias.expand(rows, -1))  # nor a copy of anything else


def test_generation_dequantizes_once_and_frees_at_the_end(made):
    layer = packed(backend="eager")
    x = torch.randn(3, 72)
    with torch.no_grad():
        expected = layer(x)
        with cached_weights(layer, "dense"):
            for _ in range(3):
                assert torch.equal(layer(x), expected)
        gc.collect()
        assert len(made) == 2
        assert made[1]() is None
        layer.weight.zero_()
        with cached_weights(layer, "dense"):
            assert not torch.equal(layer(x), expected)


def test_a_backend_that_cannot_is_named():
    with pytest.raises(ValueError, match="backend='cpu' cannot quantize here.*float64"):
        packed(bias=False, backend="cpu")(torch.zeros(2, 72, dtype=torch.float64))


def test_it_says_what_it_is():
    scheme = "w4a16 [weights mxfp4+even+mbs128-blockwise_fp8, activations full precision]"
    text = f"MXFP4PackedLinear(in_features=72, out_features=40, bias=True, {scheme})"
    assert repr(packed()) == text
