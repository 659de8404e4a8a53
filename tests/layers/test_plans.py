# SPDX-License-Identifier: Apache-2.0
"""What layers find once: the bits of a layer that found it just now, and made anew when anything is another."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from factors import factors_config
from torch import nn

from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, cached_weights, fake_quantize
from hf_mxfp4.gemm import linear as linear_module
from hf_mxfp4.gemm import plan as plan_module
from hf_mxfp4.gemm.storage import packed as packed_module


pytestmark = pytest.mark.usefixtures("dense_products")

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
#: A kind of layer -> its class and options of its config.
KINDS = {
    "qat w4a16": (MXFP4Linear, {"preset": "w4a16"}),
    "qat w4a4": (MXFP4Linear, {}),
    "packed w4a16": (MXFP4PackedLinear, {"mode": "packed", "preset": "w4a16"}),
    "packed w4a4": (MXFP4PackedLinear, {"mode": "packed", "preset": "w4a4"}),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
SCHEME = {"macro_block": 128, "macro_search": "static", "outlier_fallback": 0.5}


def make_layer(kind: str, dtype=torch.float32, seed=0, name="block.layer"):
    layer_class, options = KINDS[kind]
    torch.manual_seed(seed)
    linear = nn.Linear(64, 48, dtype=dtype)
    return layer_class.from_linear(linear, factors_config(macro_search="static", outlier_fallback=0.5, **options), name)


def expected(kind: str, dtype=torch.float32, seed=0, x=X) -> torch.Tensor:
    """What a layer of [`make_layer`] gives, by public functions on tensors."""
    torch.manual_seed(seed)
    linear = nn.Linear(64, 48, dtype=dtype)
    x = x.to(dtype)
    x = fake_quantize(x, **SCHEME) if kind.endswith("w4a4") else x
    return F.linear(x, fake_quantize(linear.weight.detach(), **SCHEME), linear.bias).detach()


@pytest.fixture
def plans(monkeypatch):
    """The plans made so far."""
    made, init = [], plan_module.InputPlan.__init__

    def counted(self, *args):
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(plan_module.InputPlan, "__init__", counted)
    return made


@EVERY_KIND
def test_one_plan_serves_all_calls_whatever_their_rows_and_context(kind, plans):
    layer = make_layer(kind)
    for x in (X, X[:1], X[0], X.view(1, 3, 64), X.t().contiguous().t()):
        with torch.no_grad():
            assert torch.equal(layer(x), expected(kind, x=x))
        assert torch.equal(layer(x.clone().requires_grad_()), expected(kind, x=x))
    with torch.no_grad(), cached_weights():
        assert all(torch.equal(layer(X), expected(kind)) for _ in range(3))
    assert len(plans) == 1


@EVERY_KIND
def test_without_a_gradient_no_function_of_autograd_runs_and_with_one_it_must(kind, monkeypatch):
    layer = make_layer(kind)
    for function in (linear_module._QuantizedLinear, packed_module._PackedLinear):
        monkeypatch.setattr(function, "apply", None)
    with torch.no_grad():
        assert torch.equal(layer(X), expected(kind))
    layer.requires_grad_(False)
    assert torch.equal(layer(X), expected(kind))  # with gradients on, none of which is asked for
    with pytest.raises(TypeError):
        layer(X.clone().requires_grad_())


@EVERY_KIND
def test_forward_mode_gradients_are_refused_as_ever(kind):
    layer = make_layer(kind)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        with pytest.raises((NotImplementedError, RuntimeError), match="jvp|forward"):
            layer(dual)


@EVERY_KIND
def test_another_dtype_of_the_layer_or_of_autocast_is_noticed(kind, plans):
    layer = make_layer(kind)
    with torch.no_grad():
        layer(X)
        with torch.autocast("cpu", torch.bfloat16):
            under_autocast = layer(X)
        assert under_autocast.dtype == torch.bfloat16
        assert torch.equal(layer(X), expected(kind))
        assert len(plans) == 3
        layer.bfloat16()
        with pytest.raises(TypeError, match=r"convert one of them"):
            layer(X)
        assert torch.equal(layer(X.bfloat16()), make_and_move(kind)(X.bfloat16()))


def make_and_move(kind):
    return make_layer(kind).bfloat16()


@EVERY_KIND
def test_inputs_are_checked_as_before_the_first_call(kind):
    layer = make_layer(kind)
    with torch.no_grad():
        layer(X)
        with pytest.raises(ValueError, match="in_features=64"):
            layer(X[:, :32])
        with pytest.raises(ValueError, match="in_features=64"):
            layer(torch.tensor(1.0))
        with pytest.raises(TypeError, match="convert one of them"):
            layer(X.double())
        with pytest.raises(TypeError, match="convert one of them"):
            layer(X.long())


@EVERY_KIND
def test_copies_of_a_layer_find_their_own(kind):
    layer = make_layer(kind)
    with torch.no_grad():
        layer(X)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert twin.state.plan is None and torch.equal(twin(X), expected(kind))
            assert twin.state.plan is not layer.state.plan


def test_an_exchanged_spec_is_noticed(plans):
    layer, other = make_layer("qat w4a16"), make_layer("qat w4a4")
    with torch.no_grad():
        layer(X)
        layer.state.spec = other.state.spec
        assert torch.equal(layer(X), expected("qat w4a4")) and len(plans) == 2


# ---- packed parameters ----------------------------------------------------------------------------------------------


def test_packed_tensors_that_a_parameter_is_given_are_used_at_once(plans):
    layer, other = make_layer("packed w4a4"), make_layer("packed w4a4", seed=1)
    with torch.no_grad():
        layer(X)
        for name, parameter in layer.named_parameters():
            parameter.data = getattr(other, name).data.clone()
        assert torch.equal(layer(X), expected("packed w4a4", seed=1))
    assert len(plans) == 1  # the parameters are the same objects


@pytest.mark.parametrize("name", ["weight", "weight_scale", "weight_macro", "weight_residual", "weight_residual_scale"])
def test_each_packed_parameter_that_is_replaced_is_noticed(name):
    layer, other = make_layer("packed w4a16"), make_layer("packed w4a16", seed=1)
    with torch.no_grad():
        layer(X)
        setattr(layer, name, getattr(other, name))
        weight = layer.quantized_tensor().dequantize(torch.float32)
        assert torch.equal(layer(X), F.linear(X, weight, layer.bias))


def test_a_weight_that_is_no_longer_packed_is_refused_after_good_calls():
    layer = make_layer("packed w4a16")
    with torch.no_grad():
        layer(X)
        layer.weight = nn.Parameter(torch.zeros(48, 64), requires_grad=False)
        with pytest.raises(TypeError, match="was replaced by one of torch.float32"):
            layer(X)


@EVERY_KIND
def test_a_weight_moved_to_another_device_is_not_read_where_it_was(kind):
    layer = make_layer(kind)
    with torch.no_grad():
        layer(X)
        layer.to("meta")
        with pytest.raises((RuntimeError, NotImplementedError)):
            layer(X)
