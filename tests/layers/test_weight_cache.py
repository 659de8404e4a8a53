# SPDX-License-Identifier: Apache-2.0
"""Kept quantized weights: never stale, counted, and let go."""

import contextlib
import copy
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from factors import factors_config
from tiny_models import make_model
from torch import nn

from hf_mxfp4 import MXFP4Linear, cached_weights, fake_quantize, uncached_weights
from hf_mxfp4.gemm import operands
from hf_mxfp4.gemm.storage import copies
from hf_mxfp4.integrations.transformers.swap import quantize_linears


WEIGHT_ONLY = factors_config(preset="w4a16", macro_search="static")
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def make_layer(seed=0, bias=True) -> MXFP4Linear:
    torch.manual_seed(seed)
    return MXFP4Linear(64, 48, bias, config=WEIGHT_ONLY)


def quantized(weight: torch.Tensor) -> torch.Tensor:
    return fake_quantize(weight.detach(), macro_block=128, macro_search="static", outlier_fallback=0.5)


def from_scratch(layer: MXFP4Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, quantized(layer.weight), layer.bias)


@pytest.fixture
def quantizations(monkeypatch):
    """The list of weights quantized so far (the weight-only preset quantizes nothing else)."""
    calls = []

    def counted(quantize):
        return lambda weight, *args: calls.append(weight) or quantize(weight, *args)

    monkeypatch.setattr(operands, "weight_operand", counted(operands.weight_operand))
    monkeypatch.setattr(copies, "quantize_weight", counted(copies.quantize_weight))
    return calls


@pytest.fixture
def two_processes(monkeypatch):
    """What the layers see in a job of two processes."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)


def step(layer, optimizer_class, **options):
    optimizer = optimizer_class(layer.parameters(), lr=0.1, **options)
    layer(X).square().sum().backward()
    optimizer.step()


def replace_data(layer):
    layer.weight.data = torch.randn(48, 64)


def replace_parameter(layer):
    layer.weight = nn.Parameter(torch.randn(48, 64))


def load(layer, **options):
    layer.load_state_dict(make_layer(seed=5).state_dict(), **options)


def refill_storage(layer):
    """Free the weight's storage and fill a new one, as sharded engines do."""
    values, storage = torch.randn(48, 64), layer.weight.untyped_storage()
    size = storage.size()
    storage.resize_(0)
    storage.resize_(size)
    layer.weight.data.copy_(values)


def transfer_there_and_back(layer):
    layer.to("meta")
    layer.to_empty(device="cpu")
    load(layer)


def no_grad_reorder(layer):
    """The same numbers in other places: no checksum of a sum can tell."""
    with torch.no_grad():
        layer.weight.copy_(layer.weight.flip(0))


def replace_reordered(layer):
    layer.weight.data = layer.weight.data.flip(0)


def swap_in_a_block_pair(layer):
    """The same sums of rows and columns of the weight as before."""
    a, b = layer.weight.data[0, 0].clone(), layer.weight.data[0, 63].clone()
    layer.weight.data[0, 0], layer.weight.data[0, 63] = b, a


def no_grad_write(layer):
    with torch.no_grad():
        layer.weight[0, 0] = 50.0


def inference_write(layer):
    with torch.inference_mode():
        layer.weight[0, 0] = 50.0


CHANGES = {
    "sgd": lambda layer: step(layer, torch.optim.SGD),
    "adamw": lambda layer: step(layer, torch.optim.AdamW),
    "adamw-foreach": lambda layer: step(layer, torch.optim.AdamW, foreach=True),
    "adamw-fused": lambda layer: step(layer, torch.optim.AdamW, fused=True),
    "data-add": lambda layer: layer.weight.data.add_(0.1),
    "data-mul": lambda layer: layer.weight.data.mul_(1.5),
    "data-negated": lambda layer: layer.weight.data.neg_(),
    "data-swapped": swap_in_a_block_pair,
    "data-rows-reordered": lambda layer: layer.weight.data.copy_(layer.weight.data.flip(0)),
    "data-one-element": lambda layer: layer.weight.data[3, 7].fill_(9.0),
    "data-copy": lambda layer: layer.weight.data.copy_(torch.randn(48, 64)),
    "data-replaced": replace_data,
    "parameter-replaced": replace_parameter,
    "load-state-dict": load,
    "load-state-dict-assign": lambda layer: load(layer, assign=True),
    "no-grad-write": no_grad_write,
    "no-grad-reordered": no_grad_reorder,
    "data-replaced-reordered": replace_reordered,
    "inference-write": inference_write,
    "storage-refilled": refill_storage,
    "there-and-back": transfer_there_and_back,
    "numpy-view": lambda layer: layer.weight.detach().numpy().__setitem__((3, 7), 9.0),
    "vector-to-parameters": lambda layer: nn.utils.vector_to_parameters(
        torch.randn(48 * 65), [layer.weight, layer.bias]
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_no_change_of_the_weight_goes_unseen(change):
    contexts = {"plain": contextlib.nullcontext, "cached": cached_weights}
    for used, used_again in itertools.product(contexts, repeat=2):
        layer = make_layer()
        with contexts[used]():
            before = layer(X).detach()
        if used_again == "plain":
            for _ in range(2):
                assert torch.equal(layer(X), before)
        change(layer)
        with contexts[used_again]():
            after = layer(X)
        assert torch.equal(after, from_scratch(layer, X)), (used, used_again)
        assert not torch.equal(after, before), (used, used_again)
        with cached_weights():
            assert torch.equal(layer(X), after), (used, used_again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_change_of_dtype_is_seen(dtype):
    layer = make_layer()
    layer(X)
    layer.to(dtype)
    assert torch.equal(layer(X.to(dtype)), from_scratch(layer, X.to(dtype)))
    layer.to(torch.float32)
    assert torch.equal(layer(X), from_scratch(layer, X))


def test_the_backward_pass_takes_the_operand_of_its_forward_pass():
    layer, x = make_layer(bias=False), X.clone().requires_grad_()
    weight = quantized(layer.weight)
    y, other = layer(x), layer(x)
    layer.weight.data.mul_(3.0)
    y.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, 64))
    with torch.no_grad():
        layer.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward()


@pytest.mark.parametrize("why", ["two processes", "uncached_weights"])
def test_where_nothing_is_kept_the_backward_pass_sees_the_weight_as_it_is_then(why, request):
    if why == "two processes":
        request.getfixturevalue("two_processes")
    with uncached_weights() if why == "uncached_weights" else contextlib.nullcontext():
        check_the_weight_as_it_is_then()


def check_the_weight_as_it_is_then():
    layer, x = make_layer(bias=False), X.clone().requires_grad_()
    y = layer(x)
    layer.weight.data.mul_(3.0)
    y.sum().backward()
    weight = quantized(layer.weight)
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, 64))


def test_a_training_pass_quantizes_its_weight_once(quantizations):
    layer, x = make_layer(), X.clone().requires_grad_()
    for passes in (1, 2, 3):
        layer(x).sum().backward()
        assert len(quantizations) == passes
    y = layer(x).sum()
    y.backward(retain_graph=True)
    assert len(quantizations) == 4
    first = x.grad.clone()
    y.backward()  # a second one makes the operand again, the same
    assert len(quantizations) == 5
    torch.testing.assert_close(x.grad - first, first / 4)


def test_gradient_checkpointing_quantizes_once_more(quantizations):
    layer, x = make_layer(), X.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert len(quantizations) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_where_nothing_is_kept_checkpointing_quantizes_twice(quantizations, two_processes, reentrant):
    """The repeated forward pass hands its operand to the gradient of the input, which comes next."""
    layers = nn.Sequential(make_layer(), nn.Linear(48, 64), make_layer(seed=1))
    gradients = {}
    for name, call in (
        ("plain", layers),
        ("checkpointed", lambda x: torch.utils.checkpoint.checkpoint(layers, x, use_reentrant=reentrant)),
    ):
        x = X.clone().requires_grad_()
        quantizations.clear()
        call(x).square().sum().backward()
        gradients[name] = [x.grad, *(p.grad.clone() for p in layers.parameters())]
        layers.zero_grad()
        assert len(quantizations) == 2 * 2  # forward and backward, or forward and forward
        assert all(layers[i].state.take_over() is None for i in (0, 2))
    assert all(torch.equal(*pair) for pair in zip(gradients["plain"], gradients["checkpointed"], strict=True))
    quantizations.clear()
    with uncached_weights():
        torch.utils.checkpoint.checkpoint(layers, x, use_reentrant=reentrant).sum().backward()
    assert len(quantizations) == 2 * 3


@pytest.mark.parametrize(("options", "kept"), [({}, 1), ({"preset": "w4a4g4"}, 0)], ids=["reused", "another-operand"])
def test_what_a_pass_holds_for_its_gradient_goes_with_it(options, kept, monkeypatch):
    layer, made = MXFP4Linear(64, 64, config=factors_config(**options)), []
    compute = operands.weight_operand
    monkeypatch.setattr(operands, "weight_operand", lambda *args: made.append(weakref.ref(v := compute(*args))) or v)

    def alive():
        return sum(reference() is not None for reference in made)

    layer(X)  # no gradient of the input is asked for
    assert (len(made), alive()) == (1, 0)
    y = layer(X.clone().requires_grad_()).sum()
    assert alive() == kept
    y.backward()
    assert (len(made), alive()) == (2, 0)  # though the graph is still there


def test_outside_of_contexts_nothing_is_kept(quantizations):
    layer = make_layer()
    for uses in (1, 2):
        layer(X)
        assert len(quantizations) == uses
    for contexts in (1, 2):
        with cached_weights(), torch.no_grad():
            outputs = [layer(X) for _ in range(3)]
        assert len(quantizations) == 2 + contexts and torch.equal(outputs[0], outputs[2])
        assert layer.state.cache.value is None


@pytest.mark.parametrize("form", ["dense", "packed"])
def test_one_quantization_per_layer_of_a_model_that_generates(form, quantizations):
    model = make_model(layers=2)
    quantize_linears(model, WEIGHT_ONLY)
    ids = torch.arange(2, 8)[None]
    with cached_weights(form):
        expected = model.generate(ids, max_new_tokens=4, do_sample=False)
        assert len(quantizations) == 14
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
        assert len(quantizations) == 14
        model(ids, labels=ids).loss.backward()
        assert len(quantizations) == 14


def test_a_distributed_job_keeps_weights_inside_the_context_only(quantizations, two_processes):
    layer, x = make_layer(), X.clone().requires_grad_()
    for _ in range(2):
        layer(x).sum().backward()
    assert len(quantizations) == 4  # a sharded engine may have freed the weight meanwhile
    with cached_weights():
        for _ in range(3):
            layer(x).sum().backward()
        assert len(quantizations) == 5
    layer(x)
    assert len(quantizations) == 6


def kept(layer: MXFP4Linear) -> weakref.ref:
    """A weak reference to the copy that the layer keeps."""
    with torch.no_grad():
        return weakref.ref(layer.quantized_weight(layer.weight, torch.float32))


def test_copies_live_as_long_as_the_outermost_context():
    layer = make_layer()
    assert kept(layer)() is None
    with cached_weights():
        copy_ = kept(layer)
        with cached_weights():
            assert kept(layer)() is copy_()
        assert copy_() is not None
    assert copy_() is None
    with pytest.raises(KeyError), cached_weights():
        copy_ = kept(layer)
        raise KeyError
    assert copy_() is None


def test_a_layer_that_goes_away_takes_its_copy_along():
    layer = make_layer()
    with cached_weights():
        copy_ = kept(layer)
        del layer
        assert copy_() is None


def test_contexts_nest(quantizations):
    layer = make_layer()
    with cached_weights():
        layer(X)
        with cached_weights():
            layer(X)
        layer(X)
        assert len(quantizations) == 1
        # Still the outer context: a change is not looked for.
        old = layer(X)
        layer.weight.data.mul_(2.0)
        assert torch.equal(layer(X), old)
    assert torch.equal(layer(X), from_scratch(layer, X))


def test_the_context_ends_with_an_exception():
    layer = make_layer()
    with pytest.raises(KeyError), cached_weights():
        with contextlib.suppress(ValueError), cached_weights():
            raise ValueError
        before = layer(X)
        raise KeyError
    layer.weight.data.mul_(2.0)
    assert torch.equal(layer(X), from_scratch(layer, X)) and not torch.equal(layer(X), before)


def test_copies_of_a_layer_do_not_share_what_is_kept():
    layer = make_layer()
    with cached_weights():
        layer(X)
        other = copy.deepcopy(layer)
        other.weight.data.mul_(2.0)
        assert torch.equal(other(X), from_scratch(other, X))
        assert torch.equal(layer(X), from_scratch(layer, X))


def test_the_context_is_a_decorator_too(quantizations):
    layer = make_layer()

    @cached_weights()
    def rollout():
        return [layer(X) for _ in range(3)]

    rollout()
    assert len(quantizations) == 1
    layer.weight.data.mul_(2.0)
    assert torch.equal(rollout()[2], from_scratch(layer, X))
    assert len(quantizations) == 2
