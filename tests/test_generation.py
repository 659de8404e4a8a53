# SPDX-License-Identifier: Apache-2.0
"""`model.generate()` keeps quantized weights while it runs, never longer, and never stale ones."""

import contextlib
import copy
import threading

import accelerate
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
)

from hf_mxfp4 import MXFP4RLConfig, cached_weights, uncached_weights
from hf_mxfp4.gemm import gemm_states, weight_quantizations


pytestmark = pytest.mark.usefixtures("dense_products")

IDS = torch.arange(2, 8)[None]
TOKENS = 5
LINEARS = 14


def load(checkpoint, family="qwen2", **options):
    config = MXFP4RLConfig(**options)
    return AutoModelForCausalLM.from_pretrained(checkpoint(family), quantization_config=config).eval()


def generate(model, **options):
    return model.generate(input_ids=IDS, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, **options)


def logits(model):
    """Of the generated tokens."""
    return torch.stack(generate(model, output_logits=True, return_dict_in_generate=True).logits)


@pytest.fixture
def count():
    """Gives how many weight matrices were quantized since it was last asked."""
    seen = [weight_quantizations()["fprop"]]

    def ask() -> int:
        before, seen[0] = seen[0], weight_quantizations()["fprop"]
        return seen[0] - before

    return ask


def nothing_is_open(model):
    return all(state.cache is None for state in gemm_states(model))


def test_each_weight_is_quantized_once_per_call(checkpoint, count):
    model = load(checkpoint)
    count()
    with uncached_weights(model):
        expected = logits(model)
    assert count() == LINEARS * TOKENS  # what it costs without
    for _ in range(2):
        assert torch.equal(logits(model), expected)
        assert count() == LINEARS and nothing_is_open(model)
    with cached_weights(model):
        assert torch.equal(logits(model), expected) and torch.equal(logits(model), expected)
    assert count() == LINEARS


CHANGES = {
    "data": lambda weight, _: weight.data.mul_(-1.5),
    "no-grad": lambda weight, _: weight.detach().neg_(),
    "numpy": lambda weight, _: weight.detach().numpy().__imul__(-1.5),
    "replaced-data": lambda weight, _: setattr(weight, "data", weight.data * -1.5),
    "reordered": lambda weight, _: weight.data.copy_(weight.data.flip(0)),
    "load-state-dict": lambda _, model: model.load_state_dict({k: v.flip(0) for k, v in model.state_dict().items()}),
    "there-and-back": lambda weight, model: (weight.data.mul_(-1.5), model.to(torch.bfloat16).to(torch.float32)),
    "adamw-fused": lambda _, model: step(model, torch.optim.AdamW, fused=True),
    "adamw-foreach": lambda _, model: step(model, torch.optim.AdamW, foreach=True),
    "sgd-fused": lambda _, model: step(model, torch.optim.SGD, fused=True),
    "vector-to-parameters": lambda _, model: torch.nn.utils.vector_to_parameters(
        -1.5 * torch.nn.utils.parameters_to_vector(model.parameters()).detach(), model.parameters()
    ),
}


def step(model, optimizer, **options):
    model(IDS, labels=IDS).loss.backward()
    optimizer(model.parameters(), lr=0.3, **options).step()


@pytest.mark.parametrize("before", [lambda _: contextlib.nullcontext(), cached_weights], ids=["plain", "cached"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_calls_is_seen(change, before, checkpoint):
    model = load(checkpoint)
    with before(model):
        old = logits(model)
    CHANGES[change](model.model.layers[0].mlp.down_proj.weight, model)
    new = logits(model)
    with uncached_weights(model):
        assert torch.equal(logits(model), new)
    assert not torch.equal(new, old)


def test_copies_of_a_model_generate_with_their_own_weights(checkpoint, count):
    model = load(checkpoint)
    expected = logits(model)
    other = copy.deepcopy(model)
    torch.testing.assert_close(logits(other), expected)  # a mapped file is aligned otherwise: an ulp on some CPUs
    other.model.layers[1].mlp.up_proj.weight.data.neg_()
    count()
    assert not torch.allclose(logits(other), expected)
    assert count() == LINEARS
    assert torch.equal(logits(model), expected)


def test_outer_contexts_decide(checkpoint, count):
    model = load(checkpoint)
    count()
    with uncached_weights(model):
        generate(model)
        assert count() == LINEARS * TOKENS
    count()
    with cached_weights(model):
        old = logits(model)
        model.model.layers[0].mlp.down_proj.weight.data.neg_()
        assert torch.equal(logits(model), old)  # the context's promise was broken
        assert count() == LINEARS
    assert not torch.equal(logits(model), old)


def test_the_call_ends_with_an_exception(checkpoint):
    model = load(checkpoint)

    def fail(ids, scores):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, logits_processor=[fail])
    assert nothing_is_open(model)
    old = logits(model)
    model.model.layers[0].mlp.down_proj.weight.data.neg_()
    assert not torch.equal(logits(model), old)


def test_another_thread_trains_meanwhile(checkpoint):
    """A call trusts the weights of its own model alone."""
    sampler, policy = load(checkpoint), load(checkpoint, "llama")
    inside, go_on, failed = threading.Event(), threading.Event(), []

    def wait(ids, scores):
        inside.set()
        if not go_on.wait(60):
            failed.append("nobody let it go on")
        return scores

    thread = threading.Thread(target=generate, args=(sampler,), kwargs={"logits_processor": [wait]})
    thread.start()
    try:
        assert inside.wait(60)
        seen = []
        for _ in range(2):
            with torch.no_grad():
                seen += [policy(IDS).logits, logits(policy)]
            policy.model.layers[0].mlp.down_proj.weight.data.mul_(-1.5)
    finally:
        go_on.set()
        thread.join()
    assert not failed
    assert not torch.equal(seen[0], seen[2]) and not torch.equal(seen[1], seen[3])


def test_models_that_are_offloaded_keep_no_copies(checkpoint, count):
    """Their weights come to the device one layer at a time, since they do not fit there together."""
    model = load(checkpoint)
    expected = generate(model)
    accelerate.cpu_offload(model, torch.device("cpu"))
    count()
    assert torch.equal(generate(model), expected)
    assert count() == LINEARS * TOKENS
