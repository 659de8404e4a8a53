# SPDX-License-Identifier: Apache-2.0
"""Quantizations kept over the passes of one optimizer step: of which weights, in what form, and until what changes
them."""

import threading

import pytest
import torch
import torch.nn.functional as F
from factors import factors_config
from tiny_models import make_model
from torch import nn

from hf_mxfp4 import MXFP4Linear, cached_weights, fake_quantize, quantize, uncached_weights
from hf_mxfp4.gemm.counts import weight_quantizations
from hf_mxfp4.gemm.weight_cache import StepWeights, cached_for_call
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.numerics import MXFP4Tensor


WEIGHT_ONLY = factors_config(preset="w4a16", macro_search="static")
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
FORMS = ("dense", "packed", "auto")


def make_layer(config=WEIGHT_ONLY) -> MXFP4Linear:
    torch.manual_seed(0)
    return MXFP4Linear(64, 64, config=config)


def from_scratch(layer: MXFP4Linear) -> torch.Tensor:
    weight = fake_quantize(layer.weight.detach(), macro_block=128, macro_search="static", outlier_fallback=0.5)
    return F.linear(X, weight, layer.bias)


class Counted:
    """How many matrices were quantized since it was made, or since it was last asked."""

    def __init__(self):
        self._seen = weight_quantizations()

    def __call__(self, gemm="fprop"):
        before, self._seen = self._seen, weight_quantizations()
        return self._seen[gemm] - before[gemm]


@pytest.fixture
def count():
    return Counted()


def step_of_passes(layer):
    """A rollout, a score, and two micro-batches, the second one checkpointed: all outputs and gradients."""
    x, found = X.clone().requires_grad_(), []
    with torch.no_grad():
        with cached_weights():
            found += [layer(X), layer(X)]
        found.append(layer(X))
    for call in (layer, lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)):
        out = call(x)
        out.square().sum().backward()
        found.append(out.detach())
    return [*found, x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("preset", ["w4a16", "w4a4", "paper_a"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_quantizes_each_weight_once_and_changes_no_bit(form, preset, dtype, count):
    expected = step_of_passes(make_layer(factors_config(preset=preset)))
    assert count() == 1 + 1 + 1 + 2  # rollout, score, a pass, a checkpointed one
    layer, weights = make_layer(factors_config(preset=preset)), StepWeights(form)
    with weights.active():
        found = step_of_passes(layer)
    assert count() == 1 and weights.is_open
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    with weights.active(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32), torch.no_grad():
        out = layer(X)
    # Codes stand for operands of all dtypes.
    has_codes = form == "packed" or layer.rollout_form(X, "auto") == "packed"
    assert count() == (0 if has_codes or dtype == torch.float32 else 1)
    weights.end()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32), torch.no_grad():
        assert torch.equal(layer(X), out)


@pytest.mark.parametrize(("form", "kept"), [("dense", torch.Tensor), ("packed", MXFP4Tensor), ("auto", torch.Tensor)])
def test_what_is_kept_and_for_how_long(form, kept):
    layer, weights = make_layer(), StepWeights(form)
    with weights.active():
        layer(X)
        assert isinstance(layer.state.cache.value, kept)
    assert layer.state.cache.value is not None and layer.state.values.value is None
    weights.end()
    assert layer.state.cache.value is None and not weights.is_open


def test_rollouts_say_what_they_compute_with(count):
    for form, asked in (("dense", "packed"), ("packed", "dense")):
        layer, weights = make_layer(), StepWeights(form)
        with weights.active():
            with cached_weights(asked), torch.no_grad():
                layer(X)
                assert isinstance(layer.state.cache.value, MXFP4Tensor)
                assert (layer.state.values.value is None) == (asked == "packed")
            for _ in range(2):
                layer(X)
            # Dense values of the rollout's codes, kept by the step; or those of the rollout, which are gone.
            assert (layer.state.values.value is None) == (form == "packed")
            with cached_weights(asked), torch.no_grad():
                layer(X)
        assert count() == 1, form
        weights.end()
        assert layer.state.cache.value is None and layer.state.values.value is None


def sgd(layer):
    layer(X).square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


def fused(layer):
    layer(X).square().sum().backward()
    torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True).step()


def load(layer):
    layer.load_state_dict({name: torch.randn_like(value) for name, value in layer.state_dict().items()})


def write(layer):
    with torch.no_grad():
        layer.weight[0, 0] = 50.0


def replace_parameter(layer):
    layer.weight = nn.Parameter(torch.randn(64, 64))


def replace_data(layer):
    layer.weight.data = torch.randn(64, 64)


#: What is seen without [`StepWeights.end`], also within [`StepWeights.active`].
SEEN = {"sgd": sgd, "fused": fused, "load": load, "write": write, "replaced": replace_parameter, "data": replace_data}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", SEEN.values(), ids=SEEN)
def test_changes_that_are_seen_without_being_told(change, form):
    for inside in (True, False):
        layer, weights = make_layer(), StepWeights(form)
        with weights.active():
            before = layer(X)
            assert torch.equal(layer(X), before)
            if inside:
                change(layer)
                after = layer(X)
        if not inside:
            change(layer)
            with weights.active():
                after = layer(X)
        weights.end()
        assert torch.equal(after, from_scratch(layer)) and not torch.equal(after, before)


@pytest.mark.parametrize("form", FORMS)
def test_an_end_makes_every_change_seen(form):
    layer, weights = make_layer(), StepWeights(form)
    with weights.active():
        before = layer(X)
    layer.weight.data.mul_(2.0)
    weights.end()
    with weights.active():
        after = layer(X)
    assert torch.equal(after, from_scratch(layer)) and not torch.equal(after, before)


def test_an_optimizer_ends_it_before_it_writes():
    layer, weights, seen = make_layer(), StepWeights(), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(layer.state.cache.value))
    with weights.active():
        layer(X).sum().backward()
        assert layer.state.cache.value is not None
        optimizer.step()
        layer(X)
        assert layer.state.cache.value is None and not weights.is_open
    assert seen == [None]
    optimizer.step()  # the hook stays, and finds nothing
    with weights.active():
        layer(X)
        assert layer.state.cache.value is not None


def test_an_exception_ends_it():
    layer, weights = make_layer(), StepWeights()
    with pytest.raises(KeyError), weights.active():
        layer(X)
        raise KeyError
    assert layer.state.cache.value is None and not weights.is_open


def test_freed_memory_is_not_taken_for_the_weight_that_was_there():
    """As of weights with an adapter's part, which are computed in each pass, and may lie where another one did."""
    layer, weights = make_layer(), StepWeights("dense")
    memory = bytearray(4 * 64 * 64)
    with weights.active(), torch.no_grad():
        for value in (1.0, 2.0):
            weight = torch.frombuffer(memory, dtype=torch.float32).view(64, 64)
            weight.numpy().fill(value)
            assert float(layer.quantized_weight(weight, torch.float32)[0, 0]) == value
            del weight
    with weights.active():
        kept = layer.state.cache.value
        layer.quantized_weight(layer.weight * 2, torch.float32)  # a part of a graph
        assert layer.state.cache.value is kept
    weights.end()


def test_of_contexts_around_it_the_outer_one_decides(count):
    layer = make_layer()
    for outer, times in ((uncached_weights, 2), (cached_weights, 1), (cached_for_call, 1)):
        weights = StepWeights()
        with outer(), weights.active():
            layer(X), layer(X)
        assert count() == times and not weights.is_open and layer.state.cache.value is None


def test_within_uncached_weights_nothing_that_is_kept_is_used(count):
    layer, weights = make_layer(), StepWeights()
    with weights.active():
        layer(X)
        with uncached_weights():
            layer(X), layer(X)
        layer(X)
    assert count() == 3
    weights.end()


def test_a_call_of_generate_keeps_nothing_of_its_own(count):
    model = make_model(layers=2)
    quantize_linears(model, WEIGHT_ONLY)
    ids, weights = torch.arange(2, 8)[None], StepWeights()
    with weights.active():
        model.generate(ids, max_new_tokens=4, do_sample=False)
        model(ids, labels=ids).loss.backward()
    assert count() == 14
    weights.end()


def test_random_numbers_of_another_step_are_other_weights(count):
    config = factors_config(preset="w4a4", fprop={"weight": "rceil+stochastic"})
    layer, weights = make_layer(config), StepWeights("packed")
    with weights.active():
        first = layer(X)
        assert torch.equal(layer(X), first) and count() == 1
        layer.set_step(1)
        second = layer(X)
        assert count() == 1 and not torch.equal(second, first)
    weights.end()
    layer.set_step(0)
    assert torch.equal(layer(X), first)


def test_a_weight_that_dgrad_quantizes_otherwise_is_counted_apart(count):
    layer, weights, seen = make_layer(factors_config(preset="w4a4g4")), StepWeights(), weight_quantizations()["dgrad"]
    with weights.active():
        for _ in range(2):
            layer(X.clone().requires_grad_()).sum().backward()
    weights.end()
    assert count() == 1 and weight_quantizations()["dgrad"] - seen == 2


def test_the_packed_copy_of_a_step_has_the_bytes_of_its_codes():
    layer, weights = make_layer(), StepWeights("packed")
    with weights.active():
        layer(X)
    found = layer.state.cache.value
    expected = quantize(layer.weight.detach(), macro_block=128, macro_search="static", outlier_fallback=0.5)
    for part in ("codes", "scale", "macro", "residual_codes", "residual_scale"):
        assert torch.equal(getattr(found, part), getattr(expected, part)), part
    weights.end()


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="form='none' is not known"):
        StepWeights("none")


def test_other_threads_take_what_is_kept(count):
    """As those that run backward passes on GPUs."""
    layer, weights, found = make_layer(), StepWeights(), []
    with weights.active():
        layer(X)
        worker = threading.Thread(target=lambda: found.append(layer(X)))
        worker.start()
        worker.join()
    assert count() == 1 and torch.equal(found[0], from_scratch(layer))
    weights.end()
