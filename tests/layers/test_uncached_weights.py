# SPDX-License-Identifier: Apache-2.0
"""Bytes of quantized weights that are held after a forward pass, and none of them within `uncached_weights`."""

import contextlib
import functools
import gc

import pytest
import torch
from moe_models import make_moe, tokens
from tiny_models import make_model

from benchmarks.counters import LiveTensors
from hf_mxfp4 import MXFP4Experts, MXFP4Linear, MXFP4RLConfig, cached_weights, pack, uncached_weights
from hf_mxfp4.gemm.storage.packed_weight import packed_shapes
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.layers import trainable_matrices


IDS = tokens(2, 5)
#: q, k, v, o and gate, up, down of two layers.
DENSE = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48)
ATTENTION, EXPERTS = 2 * (2 * 32 * 32 + 2 * 32 * 16), 2 * 6 * 3 * 32 * 32
STOCHASTIC = {"preset": "w4a4g4", "fprop": {"weight": "rceil+stochastic", "rotation": "random-16"}}


def dense(**options):
    model = make_model("llama", hidden=32, intermediate=48)
    quantize_linears(model, MXFP4RLConfig(**options))
    return model


def moe(**options):
    model = make_moe()
    quantize_linears(model, MXFP4RLConfig(**options))
    return model


#: A model, and the elements of the copies that are kept.
MODELS = {
    "dense": (dense, {}, DENSE),
    "stochastic": (dense, STOCHASTIC, DENSE + 2 * 32 * 16),  # rotated in blocks: the way down is padded to 64
    "experts": (moe, {}, ATTENTION + EXPERTS),
    "packed": (lambda: pack(dense(backend="cpu")), {}, 0),
    "packed, eager": (lambda: pack(dense(backend="eager")), {}, DENSE),
    "packed experts": (lambda: pack(moe(backend="cpu")), {}, 0),
    "packed experts, eager": (lambda: pack(moe(backend="eager")), {}, ATTENTION),
}


class Held(LiveTensors):
    """Within this context, the bytes of tensors that live and were not there before."""

    def __init__(self, model):
        super().__init__([list(model.parameters()), list(model.buffers()), IDS])
        self._before = self.current

    def __call__(self):
        gc.collect()
        return self.current - self._before


def held_after_a_pass(model, context):
    """Bytes held after a forward pass within the context, and the logits."""
    with torch.no_grad(), context(), Held(model) as held:
        logits = model(input_ids=IDS, use_cache=False).logits
        return held() - logits.untyped_storage().nbytes(), logits


@pytest.mark.parametrize("name", MODELS)
def test_bytes_held_after_a_forward_pass(name):
    make, options, elements = MODELS[name]
    model = make(**options)
    kept, expected = held_after_a_pass(model, lambda: cached_weights("dense"))
    none, logits = held_after_a_pass(model, uncached_weights)
    assert (kept, none) == (4 * elements, 0)
    assert torch.equal(logits, expected)


def test_only_a_context_holds_copies():
    model, sizes, asked = dense(), [], functools.partial(cached_weights, "dense")
    with torch.no_grad(), Held(model) as held:
        for context in (contextlib.nullcontext, uncached_weights, asked, contextlib.nullcontext):
            with context():
                model(input_ids=IDS, use_cache=False)
                sizes.append(held())
        sizes.append(held())
    assert sizes == [0, 0, 4 * DENSE, 0, 0]


@pytest.mark.parametrize(
    ("outer", "inner", "elements"),
    [(lambda: cached_weights("dense"), uncached_weights, DENSE), (uncached_weights, cached_weights, 0)],
    ids=["cached", "uncached"],
)
def test_of_nested_contexts_the_outermost_decides(outer, inner, elements):
    model = dense()
    with torch.no_grad(), outer(), Held(model) as held:
        with inner(), inner():
            model(input_ids=IDS, use_cache=False)
        model(input_ids=IDS, use_cache=False)
        assert held() == 4 * elements


def test_an_exception_ends_it():
    model = dense()
    with pytest.raises(KeyError), uncached_weights():
        raise KeyError
    assert held_after_a_pass(model, lambda: cached_weights("dense"))[0] == 4 * DENSE


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("preset", ["w4a16", "w4a4"])
def test_packed_copies_of_trainable_weights(preset):
    model = dense(preset=preset, backend="cpu")
    kept, expected = held_after_a_pass(model, lambda: cached_weights("dense"))
    packed, logits = held_after_a_pass(model, lambda: cached_weights("packed"))
    config = next(module.config for module in model.modules() if isinstance(module, MXFP4Linear))
    linears = [module for module in model.modules() if isinstance(module, MXFP4Linear)]
    shapes = [packed_shapes(*module.weight.shape, config.weight_scheme) for module in linears]
    assert kept == 4 * DENSE
    assert packed == sum(rows * columns for each in shapes for rows, columns in each.values())
    assert torch.equal(logits, expected)
    assert held_after_a_pass(model, cached_weights)[0] == packed


def test_copies_are_dense_where_nothing_computes_on_codes():
    model = dense(preset="w4a16", backend="eager")
    forms = cached_weights, functools.partial(cached_weights, "dense"), functools.partial(cached_weights, "packed")
    (by_default, expected), (kept, _), (packed, logits) = (held_after_a_pass(model, form) for form in forms)
    assert by_default == kept > packed > 0
    assert torch.equal(logits, expected)  # the same values in the same product


def test_few_rows_times_packed_copies_are_those_times_dense_ones_up_to_float32_sums():
    model = dense(preset="w4a16", backend="cpu")
    forms = functools.partial(cached_weights, "dense"), functools.partial(cached_weights, "packed")
    expected, logits = (held_after_a_pass(model, form)[1] for form in forms)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("preset", ["w4a16", "w4a4"])
def test_packed_copies_of_trainable_experts(preset, dense_products):
    model = moe(preset=preset)
    kept, expected = held_after_a_pass(model, lambda: cached_weights("dense"))
    packed, logits = held_after_a_pass(model, lambda: cached_weights("packed"))
    assert kept == 4 * (ATTENTION + EXPERTS) and torch.equal(logits, expected)
    config = next(module.config for module in model.modules() if isinstance(module, MXFP4Experts))
    shapes = [packed_shapes(*matrix.weight().shape, config.weight_scheme) for matrix in trainable_matrices(model)]
    assert packed == sum(rows * columns for each in shapes for rows, columns in each.values())
    # All rows are of 32: codes, those of what is left, a scale of each, and one macro factor.
    assert packed == (ATTENTION + EXPERTS) // 32 * (2 * (16 + 1) + 1)


def test_packed_copies_follow_the_master_and_leave_training_alone():
    model = dense(preset="w4a16")
    linear = next(module for module in model.modules() if isinstance(module, MXFP4Linear))
    x = torch.randn(3, linear.in_features)
    with cached_weights("packed"):
        assert linear(x).requires_grad
        with torch.no_grad():
            before = linear(x)
    with torch.no_grad():
        linear.weight *= 2
        with cached_weights("packed"):
            assert torch.equal(linear(x), 2 * before)


def test_weights_that_cannot_be_packed_stay_dense():
    model = dense(**STOCHASTIC)
    assert held_after_a_pass(model, lambda: cached_weights("packed"))[0] == 4 * MODELS["stochastic"][2]


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="form='sparse' is not known; choose one of auto, dense, packed"):
        with cached_weights("sparse"):
            pass
