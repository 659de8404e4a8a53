# SPDX-License-Identifier: Apache-2.0
"""Kept quantized weights: never stale, counted, of one model, in the form asked for, and let go."""

import contextlib
import copy
import gc
import itertools
import threading
import weakref

import pytest
import torch
from moe_models import make_moe, tokens
from passes import passes
from same_bits import assert_same
from tiny_models import make_model
from torch import nn

from benchmarks.counters import LiveTensors
from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig, cached_weights, pack, quantize, uncached_weights
from hf_mxfp4.integrations.transformers import quantize_linears
from hf_mxfp4.layers import trainable_matrices
from hf_mxfp4.numerics import apply_scheme, parse_scheme
from hf_mxfp4.ops import WeightCache, weight_codes, weight_operand, weight_quantizations


#: What the default does to a weight.
SCHEME = parse_scheme("even+mbs128-blockwise_fp8")
STOCHASTIC = {"preset": "w4a4g4", "fprop": {"weight": "rceil+stochastic", "rotation": "random-16"}}
FORMS = ("dense", "packed", "auto")
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def make_layer(seed: int = 0, **options) -> MXFP4Linear:
    torch.manual_seed(seed)
    return MXFP4Linear(64, 48, config=MXFP4RLConfig(**options))


def make_new(layer: MXFP4Linear) -> MXFP4Linear:
    """Return a layer with copies of the parameters that was never used."""
    plain = nn.Linear(64, 48, dtype=layer.weight.dtype)
    plain.load_state_dict(layer.state_dict())
    return MXFP4Linear.from_linear(plain, layer.config)


def from_scratch(layer: MXFP4Linear) -> torch.Tensor:
    return make_new(layer)(X.to(layer.weight.dtype))


def quantized(weight: torch.Tensor) -> torch.Tensor:
    return apply_scheme(weight.detach(), SCHEME)


def step(layer, optimizer_class, **options):
    optimizer = optimizer_class(layer.parameters(), lr=0.1, **options)
    layer(X).square().sum().backward()
    optimizer.step()


def load(layer, **options):
    layer.load_state_dict(make_layer(seed=5).state_dict(), **options)


def refill_storage(layer):
    """Free the weight's storage and fill a new one, as sharded engines do."""
    values = torch.randn(48, 64)
    storage = layer.weight.untyped_storage()
    size = storage.size()
    storage.resize_(0)
    storage.resize_(size)
    layer.weight.data.copy_(values)


def set_spec(layer):
    layer.config = MXFP4RLConfig(preset="w4a4g4")
    layer.state.spec = make_layer(preset="w4a4g4").state.spec


def there_and_back(layer):
    layer.to("meta")
    layer.to_empty(device="cpu")
    load(layer)


def no_grad_write(layer):
    with torch.no_grad():
        layer.weight[0, 0] = 50.0


#: What is noticed within a cache that is open, too.
NOTICED = {
    "sgd": lambda layer: step(layer, torch.optim.SGD),
    "adamw-foreach": lambda layer: step(layer, torch.optim.AdamW, foreach=True),
    "data-replaced": lambda layer: setattr(layer.weight, "data", torch.randn(48, 64)),
    "parameter-replaced": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(48, 64))),
    "parameter-replaced-in-the-dictionary": lambda layer: layer._parameters.update(weight=make_layer(seed=5).weight),
    "load-state-dict": load,
    "load-state-dict-assign": lambda layer: load(layer, assign=True),
    "no-grad-write": no_grad_write,
    "dtype": lambda layer: layer.to(torch.bfloat16),
}
UNNOTICED = {
    "spec": set_spec,
    "adamw-fused": lambda layer: step(layer, torch.optim.AdamW, fused=True),
    "data-mul": lambda layer: layer.weight.data.mul_(1.5),
    "data-rows-reordered": lambda layer: layer.weight.data.copy_(layer.weight.data.flip(0)),
    "storage-refilled": refill_storage,
    "there-and-back": there_and_back,
    "numpy-view": lambda layer: layer.weight.detach().numpy().__setitem__((3, 7), 9.0),
}


@pytest.mark.parametrize("change", [*NOTICED, *UNNOTICED])
def test_no_change_between_two_uses_goes_unseen(change):
    contexts = {"plain": lambda _: contextlib.nullcontext(), "cached": cached_weights}
    for used, used_again in itertools.product(contexts, repeat=2):
        layer = make_layer()
        with contexts[used](layer):
            before = layer(X).detach()
            assert torch.equal(layer(X), before)
        passes(layer, X)

        (NOTICED | UNNOTICED)[change](layer)
        x = X.to(layer.weight.dtype)
        with contexts[used_again](layer):
            after = passes(layer, x)
            with torch.no_grad():
                generated = layer(x)

        assert_same(after, passes(make_new(layer), x))
        torch.testing.assert_close(generated, after[0])
        assert not torch.equal(after[0].float(), before)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", [*NOTICED, *UNNOTICED])
def test_changes_within_a_cache_are_noticed_or_seen_after_a_clear(change, form):
    layer = make_layer()
    cache = WeightCache(layer, form=form)
    with cache.open():
        before = layer(X)
        assert torch.equal(layer(X), before)
        (NOTICED | UNNOTICED)[change](layer)
        if change in UNNOTICED:
            cache.clear()
        after = layer(X.to(layer.weight.dtype))
    assert torch.equal(after, from_scratch(layer))
    assert not torch.equal(after.float(), before)


def test_freed_memory_is_not_taken_for_the_weight_that_was_there():
    """As of weights with an adapter's part, which are computed in each pass, and may lie where another one did."""
    layer = make_layer()
    memory = bytearray(4 * 48 * 64)
    with cached_weights(layer, "dense"), torch.no_grad():
        for value in (1.0, 2.0):
            weight = torch.frombuffer(memory, dtype=torch.float32).view(48, 64)
            weight.numpy().fill(value)
            assert float(layer.quantized_weight(weight, torch.float32)[0, 0]) == value
            del weight


def test_a_captured_graph_neither_takes_what_is_kept_nor_leaves_anything(monkeypatch):
    """It is replayed when that is gone, and what it makes has no values before."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    cache = WeightCache()
    made = []

    def make(_):
        made.append(torch.tensor(len(made) + 1))
        return made[-1]

    def get(key, is_capturing):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
        return int(cache.get(weight, key, make))

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor is weight))
    assert [get("before", False), get("before", True), get("before", False)] == [1, 2, 1]
    assert [get("first", True), get("first", False), get("first", False)] == [3, 4, 4]


@pytest.fixture
def graphs(monkeypatch):
    """A cache, and `capture(key)`: what a CUDA graph that is captured reads of a weight that counts how often it was
    made."""
    cache = WeightCache()
    weight = torch.nn.Parameter(torch.ones(2, 2))
    made = itertools.count(1)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor is weight))

    def make(out):
        value = torch.empty(()) if out is None else out
        return value.fill_(next(made))

    def get(is_capturing, make=make, step=None):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
        value = cache.get(weight, "values", make, step)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        return value

    return cache, get


def test_served_graphs_read_what_is_kept_and_is_made_again_in_its_place(graphs):
    cache, get = graphs
    with cache.serving_graphs():
        kept = get(is_capturing=False)
        assert get(is_capturing=True) is kept
    cache.clear()  # the optimizer steps
    assert cache.refresh()
    assert int(kept) == 2
    assert get(is_capturing=False) is kept
    assert int(kept) == 2


def test_a_captured_product_quantizes_no_weight_and_reads_that_of_the_next_step(monkeypatch, count):
    layer = make_layer()
    cache = WeightCache(layer)
    capturing = [False]
    monkeypatch.setattr("hf_mxfp4.ops.cache.is_captured", lambda weight: capturing[0])
    with cache.open(), cache.serving_graphs(), torch.no_grad():
        weight_operand(layer.weight, torch.float32, layer.state)
        count()
        capturing[0] = True
        read = weight_operand(layer.weight, torch.float32, layer.state)
        capturing[0] = False
        assert count() == 0
        layer.weight.mul_(-1.5)
        assert cache.refresh()
    assert_same(read, quantized(layer.weight))


def test_graphs_whose_values_have_moved_must_not_be_replayed(graphs):
    cache, get = graphs
    with cache.serving_graphs():
        get(is_capturing=False)
        get(is_capturing=True, make=lambda _: torch.zeros(3))  # later of another shape, as of a weight that is replaced
    cache.clear()
    assert not cache.refresh()
    assert cache.refresh()  # nothing is captured any more


def test_graphs_are_not_served_what_each_step_draws_again(graphs):
    cache, get = graphs
    with cache.serving_graphs():
        kept = get(is_capturing=False, step=3)
        assert get(is_capturing=True, step=3) is not kept


def test_random_numbers_of_another_step_are_other_weights():
    layer = make_layer(fprop={"weight": "rceil+stochastic"})
    with cached_weights(layer, "packed"), cached_weights(layer, "dense"):
        first = layer(X)
        layer.set_step(1)
        second = layer(X)
    assert not torch.equal(second, first)
    layer.set_step(0)
    assert torch.equal(layer(X), first)


def test_copies_of_a_layer_do_not_share_what_is_kept():
    layer = make_layer()
    with cached_weights(layer):
        layer(X)
        other = copy.deepcopy(layer)
        other.weight.data.mul_(2.0)
        assert torch.equal(other(X), from_scratch(other))
        assert torch.equal(layer(X), from_scratch(layer))


def test_outside_of_a_cache_and_in_that_of_another_model_each_use_quantizes(count):
    layer = make_layer()
    other = make_layer()
    for _ in range(2):
        layer(X)
    assert count() == 2
    with cached_weights(layer):
        for used in (layer, other, layer, other):
            used(X)
    assert count() == 1 + 2


def test_each_cache_quantizes_once(count):
    layer = make_layer()
    for _ in range(2):
        with cached_weights(layer), torch.no_grad():
            outputs = [layer(X) for _ in range(3)]
        assert count() == 1
        assert torch.equal(outputs[0], outputs[2])


def test_a_training_pass_on_a_cpu_quantizes_its_weight_once(count):
    layer = make_layer()
    x = X.clone().requires_grad_()
    layer(x).sum().backward()
    assert count() == 1
    torch.testing.assert_close(x.grad, quantized(layer.weight).sum(0).expand(4, 64))

    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert count() == 2  # the forward pass is repeated


def test_a_write_between_forward_and_backward_pass_is_refused():
    layer = make_layer()
    y = layer(X)
    no_grad_write(layer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("form", FORMS)
def test_one_quantization_per_matrix_of_a_model(form, count):
    model = make_model(layers=2)
    quantize_linears(model, MXFP4RLConfig())
    ids = torch.arange(2, 8)[None]
    cache = WeightCache(model, form=form)
    with cache.open():
        expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    with cache.open():
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
        model(ids, labels=ids).loss.backward()
    assert count() == 14


def test_a_weight_that_dgrad_quantizes_otherwise_is_counted_apart(count):
    layer = make_layer(preset="w4a4g4")
    seen = weight_quantizations()["dgrad"]
    with cached_weights(layer):
        for _ in range(2):
            layer(X.clone().requires_grad_()).sum().backward()
    assert count() == 1
    assert weight_quantizations()["dgrad"] - seen == 2


def test_the_outermost_context_decides(count):
    layer = make_layer()
    for outer, inner, times in ((uncached_weights, cached_weights, 3), (cached_weights, uncached_weights, 1)):
        with outer(layer):
            layer(X)
            with inner(layer):
                layer(X)
            layer(X)
        assert count() == times


def test_an_exception_clears_and_closes_it():
    layer = make_layer()
    cache = WeightCache(layer)
    with pytest.raises(KeyError), cache.open():
        layer(X)
        raise KeyError
    layer.weight.data.mul_(2.0)
    assert torch.equal(layer(X), from_scratch(layer))


def test_other_threads_take_what_is_kept(count):
    """As those that run backward passes on GPUs."""
    layer = make_layer()
    found = []
    with cached_weights(layer):
        layer(X)
        worker = threading.Thread(target=lambda: found.append(layer(X)))
        worker.start()
        worker.join()
    assert count() == 1
    assert torch.equal(found[0], from_scratch(layer))


def kept_tensors(layer: MXFP4Linear, form: str) -> list[torch.Tensor]:
    """What a cache of this form keeps of the weight."""
    if form == "dense":
        return [weight_operand(layer.weight, layer.weight.dtype, layer.state)]
    return [part for part in weight_codes(layer.weight, layer.state).parts if part is not None]


@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("form", ["dense", "packed"])
def test_quantized_weights_keep_their_address_from_step_to_step(form, backend):
    layer = make_layer(backend=backend)
    cache, kept = WeightCache(layer, form=form), []  # no other tensor gets the address of one that is alive
    for _ in range(3):
        with cache.open():
            found = layer(X).detach()
            kept.append(kept_tensors(layer, form))
        assert torch.equal(found, from_scratch(layer))
        cache.clear()
        layer.weight.data.mul_(1.5)
    addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in kept]
    assert addresses[0] == addresses[1] == addresses[2]


def test_a_cache_gives_its_memory_back_when_it_is_released():
    layer = make_layer()
    cache = WeightCache(layer, form="dense")
    with cache.open():
        layer(X)
        kept = weakref.ref(kept_tensors(layer, "dense")[0])
    cache.clear()
    assert kept() is not None
    cache.release()
    assert kept() is None


def test_a_backward_pass_after_a_refresh_takes_the_weight_as_it_is():
    """Not half of it: what the forward pass used was written over."""
    layer = make_layer()
    x = X.clone().requires_grad_()
    cache = WeightCache(layer, form="dense")
    with cache.open():
        y = layer(x)
        layer.weight.data.mul_(2.0)
        cache.clear()
        layer(X)
        y.sum().backward()
    torch.testing.assert_close(x.grad, quantized(layer.weight).sum(0).expand(4, 64))


def test_what_cannot_be_asked_for():
    with pytest.raises(ValueError, match="form='sparse' is not known"):
        WeightCache(make_layer(), form="sparse")
    with pytest.raises(TypeError, match="takes the model .*, not str"):
        with cached_weights("packed"):
            pass


def test_codes_of_a_cache_are_those_of_the_weight():
    layer = make_layer()
    with cached_weights(layer, "packed"):
        layer(X)
        found = weight_codes(layer.weight, layer.state)
    assert_same(found.parts, quantize(layer.weight.detach(), **vars(SCHEME)).parts)


IDS = tokens(2, 5)
#: Elements: q, k, v, o and gate, up, down of two layers; the same with experts.
DENSE = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48)
ATTENTION = 2 * (2 * 32 * 32 + 2 * 32 * 16)
EXPERTS = 2 * 6 * 3 * 32 * 32


def quantize_model(model, **options):
    quantize_linears(model, MXFP4RLConfig(**options))
    return model


def dense(**options):
    return quantize_model(make_model("llama", hidden=32, intermediate=48), **options)


def moe(**options):
    return quantize_model(make_moe(), **options)


#: A model, its options, and the elements of the dense copies that are kept.
MODELS = {
    "dense": (dense, {}, DENSE),
    "stochastic": (dense, STOCHASTIC, DENSE + 2 * 32 * 16),  # rotated in blocks: the way down is padded to 64
    "experts": (moe, {}, ATTENTION + EXPERTS),
    "packed": (lambda: pack(dense(backend="cpu")), {}, 0),
    "packed, eager": (lambda: pack(dense(backend="eager")), {}, DENSE),
    "packed experts": (lambda: pack(moe(backend="cpu")), {}, 0),
}


def held_after_a_pass(model, form):
    """Bytes held after a forward pass with a cache of this form, and the logits."""
    live = LiveTensors([list(model.parameters()), list(model.buffers()), IDS])
    with torch.no_grad(), cached_weights(model, form), live:
        before = live.current
        logits = model(input_ids=IDS, use_cache=False).logits
        gc.collect()
        return live.current - before - logits.untyped_storage().nbytes(), logits


def packed_bytes(model):
    found = [matrix.packed_values(getattr(matrix.layer, matrix.parameter)) for matrix in trainable_matrices(model)]
    return sum(part.numel() // (len(part) if part.dim() == 3 else 1) for parts in found for part in parts.values())


@pytest.mark.parametrize("name", MODELS)
def test_bytes_held_after_a_forward_pass(name):
    make, options, elements = MODELS[name]
    model = make(**options)
    kept, expected = held_after_a_pass(model, "dense")
    none, logits = held_after_a_pass(model, "none")
    assert (kept, none) == (4 * elements, 0)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("make", [dense, moe])
@pytest.mark.parametrize("preset", ["w4a16", "w4a8", "w4a4"])
def test_packed_copies_of_trainable_weights(make, preset, dense_products):
    model = make(preset=preset, backend="cpu")
    _, expected = held_after_a_pass(model, "dense")
    for form in ("packed", "auto"):
        held, logits = held_after_a_pass(model, form)
        assert held == packed_bytes(model) and torch.equal(logits, expected), form


def test_copies_are_dense_where_nothing_computes_on_codes():
    model = dense(preset="w4a16", backend="eager")
    (by_default, expected), (kept, _), (packed, logits) = (
        held_after_a_pass(model, form) for form in ("auto", "dense", "packed")
    )
    assert by_default == kept > packed > 0
    assert torch.equal(logits, expected)  # the same values in the same product
    # Nor can weights that a product draws anew be packed.
    assert held_after_a_pass(dense(**STOCHASTIC), "auto")[0] == 4 * MODELS["stochastic"][2]
