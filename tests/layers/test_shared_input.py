# SPDX-License-Identifier: Apache-2.0
"""One quantization of an input that several layers take: counted, of the same bits, never stale, and let go."""

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from factors import factors_config
from tiny_models import make_model
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, fake_quantize
from hf_mxfp4.gemm import shared_input as module
from hf_mxfp4.gemm.shared_input import shared_input_counts
from hf_mxfp4.integrations.transformers.swap import quantize_linears


IDS = torch.arange(2, 14).view(2, 6)
STATIC = {"macro_search": "static", "outlier_fallback": 0.5}


@pytest.fixture
def counted():
    """`counted()`: how often an input was quantized and how often shared since the last call."""
    before = shared_input_counts()

    def since() -> tuple[int, int]:
        nonlocal before
        now = shared_input_counts()
        found = now["quantized"] - before["quantized"], now["shared"] - before["shared"]
        before = now
        return found

    return since


def make_x(*shape, **options) -> torch.Tensor:
    return torch.randn(*(shape or (3, 64)), generator=torch.Generator().manual_seed(0), **options)


def make_layers(*names: str, mode="qat", **options) -> list[nn.Linear]:
    """Layers of these names, of different weights."""
    layer_class = MXFP4Linear if mode == "qat" else MXFP4PackedLinear
    torch.manual_seed(0)
    config = factors_config(**{"mode": mode, "preset": "w4a4", **STATIC, **options})
    return [layer_class.from_linear(nn.Linear(64, 48, bias=False), config, name) for name in names]


def alone(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What a layer gives by public functions on tensors."""
    weight = layer.to_linear().weight
    return F.linear(fake_quantize(x, macro_block=128, **STATIC), weight).detach()


# ---- shared ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["qat", "packed"])
@pytest.mark.parametrize("grad", [False, True])
def test_layers_of_one_parent_quantize_an_input_once(counted, mode, grad, dense_products):
    q, k, v = make_layers("a.q", "a.k", "a.v", mode=mode)
    x = make_x(requires_grad=grad)
    with torch.set_grad_enabled(grad):
        found = [layer(x) for layer in (q, k, v)]
    assert counted() == (1, 2)
    assert all(torch.equal(y, alone(layer, x)) for y, layer in zip(found, (q, k, v), strict=True))


@pytest.mark.parametrize(
    ("preset", "saved"), [("w4a4", "full"), ("w4a4", "fp8"), ("w4a4", "mxfp4"), ("w4a4g4", "full"), ("w4a4g4", "fp8")]
)
def test_gradients_are_those_of_layers_that_share_nothing(counted, preset, saved):
    gradients, names = [], [("a.q", "a.k"), ("a.q", "b.k")]
    for pair in names:
        layers, x = make_layers(*pair, preset=preset, saved_activations=saved), make_x(requires_grad=True)
        for layer in layers:  # the random numbers of a layer are those of its name
            layer.state.rngs[0].layer = "one"
        sum(layer(x).square().sum() for layer in layers).backward()
        gradients.append([x.grad, *(layer.weight.grad for layer in layers)])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert counted() == (3, 1)


@pytest.mark.parametrize(("saved", "each"), [("full", 1), ("fp8", 2), ("mxfp4", 5)])
def test_what_is_saved_is_saved_once(saved, each):
    kept, layers, x = [], make_layers("a.q", "a.k", "a.v", saved_activations=saved), make_x(requires_grad=True)
    weights = {layer.weight.data_ptr() for layer in layers}
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        outputs = [layer(x) for layer in layers]
    pointers = {tensor.data_ptr() for tensor in kept} - weights
    assert len(outputs) == 3 and len(pointers) == each


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_decoder_layer_quantizes_four_inputs_for_seven_layers(counted, family):
    model = make_model(family, layers=2)
    plain = make_model(family, layers=2)
    quantize_linears(model, factors_config(preset="w4a4", **STATIC))
    quantize_linears(plain, factors_config(preset="w4a4", **STATIC))
    for layer in plain.modules():
        if isinstance(layer, MXFP4Linear):
            layer.name = ""
    with torch.no_grad():
        logits = model(IDS).logits
        assert counted() == (8, 6)
        assert torch.equal(logits, plain(IDS).logits)
        assert counted() == (0, 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_computes_again_what_it_shares(counted, reentrant):
    q, k = make_layers("a.q", "a.k")
    gradients = []
    for function in (lambda run, x: run(x), lambda run, x: checkpoint(run, x, use_reentrant=reentrant)):
        x = make_x(requires_grad=True)
        function(lambda x: q(x) + k(x), x).square().sum().backward()
        gradients.append([x.grad, q.weight.grad, k.weight.grad])
        q.weight.grad = k.weight.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert counted() == (3, 3)


# ---- not shared -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("a.q", "b.k"), {}),
        (("", ""), {}),
        (("a.q", "a.k"), {"fprop": {"x": "rceil+stochastic"}}),
        (("a.q", "a.k"), {"fprop": {"rotation": "random-32"}}),
        (("a.q", "a.k"), {"preset": "w4a16"}),
    ],
)
def test_what_may_differ_is_not_shared(counted, names, options):
    first, second = make_layers(*names, **options)
    x = make_x()
    with torch.no_grad():
        first(x), second(x)
    assert counted()[1] == 0


def test_another_scheme_or_dtype_of_products_is_not_shared(counted):
    (q,), (k,) = make_layers("a.q"), make_layers("a.k", macro_block=None)
    x = make_x()
    with torch.no_grad():
        q(x), k(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert q(x).dtype == torch.bfloat16
    assert counted() == (3, 0)


def write(x):
    x.mul_(2)


def write_data(x):
    x.data.mul_(2)


def write_as_numpy(x):
    x.numpy()[:] *= 2


def exchange_data(x):
    x.data = 2 * x.data


@pytest.mark.parametrize("change", [write, write_data, write_as_numpy, exchange_data])
def test_an_input_that_is_written_between_two_passes_is_quantized_again(counted, change):
    """As a buffer that inputs are copied into."""
    q, k = make_layers("a.q", "a.k")
    x = make_x()
    with torch.no_grad():
        q(x), k(x)
        change(x)
        found = q(x), k(x)
        assert counted() == (2, 2)
        assert all(torch.equal(y, alone(layer, 2 * make_x())) for y, layer in zip(found, (q, k), strict=True))


@pytest.mark.parametrize("change", [write, exchange_data])
def test_an_input_that_is_written_between_two_layers_is_quantized_again(counted, change):
    q, k = make_layers("a.q", "a.k")
    x = make_x()
    with torch.no_grad():
        q(x)
        change(x)
        assert torch.equal(k(x), alone(k, 2 * make_x()))
    assert counted() == (2, 0)


def test_an_equal_input_that_is_another_tensor_is_quantized_again(counted):
    q, k = make_layers("a.q", "a.k")
    x = make_x()
    with torch.no_grad():
        q(x), k(x.view(3, 64))
    assert counted() == (2, 0)


def test_tensors_without_versions_are_not_shared(counted):
    q, k = make_layers("a.q", "a.k")
    with torch.inference_mode():
        x = make_x()
        q(x), k(x)
    assert counted() == (2, 0)


def test_threads_share_nothing(counted):
    q, k = make_layers("a.q", "a.k")
    x, found = make_x(), []
    with torch.no_grad():
        q(x)
    thread = threading.Thread(target=lambda: found.append(k(x).detach()))
    thread.start()
    thread.join()
    assert counted() == (2, 0) and torch.equal(found[0], alone(k, x))


def test_compiled_code_shares_nothing(counted):
    q, k = make_layers("a.q", "a.k")
    x = make_x()
    compiled = torch.compile(lambda x: q(x) + k(x), backend="eager")
    with torch.no_grad():
        expected = alone(q, x) + alone(k, x)
        assert torch.equal(compiled(x), expected)
    assert counted() == (0, 0)


# ---- let go ---------------------------------------------------------------------------------------------------------


def test_values_go_with_their_input():
    x, made = make_x(), []

    def quantize(x):
        values = x + 1
        made.append(weakref.ref(values))
        return values

    key, user = module.key_of("a.q", "test"), object()
    value = module.shared_input(x, key, user, quantize)
    assert torch.equal(value, x + 1)
    del value
    gc.collect()
    assert made[0]() is not None  # for the other layers of the parent
    del x
    assert made[0]() is None


def test_values_go_when_another_input_is_quantized():
    first, second, made = make_x(), make_x(), []
    key = module.key_of("a.q", "test")
    for x in (first, second):
        value = module.shared_input(x, key, object(), torch.clone)
        made.append(weakref.ref(value))
        del value
    assert made[0]() is None and made[1]() is not None


def test_an_input_lives_as_long_as_its_owner_keeps_it():
    q, k = make_layers("a.q", "a.k")
    x = make_x()
    reference = weakref.ref(x)
    with torch.no_grad():
        q(x), k(x)
    del x
    assert reference() is None
