# SPDX-License-Identifier: Apache-2.0
"""`model.generate_batch()`, transformers' continuous batching, on quantized models."""

import threading
from types import SimpleNamespace

import pytest
import torch
from grpo_runs import with_adapters
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.continuous_batching import prepare_manager
from hf_mxfp4.ops import WeightCache, gemm_states


PROMPTS = [[2, 3, 4], [5], [6, 7, 8, 9, 10, 11], [12, 13]]
SAMPLING = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
LINEARS = 14


def load(checkpoint, family="qwen2", **options):
    config = MXFP4RLConfig(**options)
    return AutoModelForCausalLM.from_pretrained(checkpoint(family), quantization_config=config).eval()


def batched(model, **options):
    sizes = ContinuousBatchingConfig(page_size=4, num_blocks=32, max_batch_tokens=32, return_logprobs=True)
    outputs = model.generate_batch(PROMPTS, SAMPLING, sizes, **options)
    return list(outputs.values())


def one_by_one(model):
    """What `generate` answers to each prompt alone."""
    tokens = [model.generate(torch.tensor([prompt]), generation_config=SAMPLING)[0] for prompt in PROMPTS]
    return [row[len(prompt) :].tolist() for row, prompt in zip(tokens, PROMPTS, strict=True)]


@pytest.mark.parametrize("kind", ["trainable", "packed", "adapters", "experts"])
def test_tokens_are_those_of_generate(kind, checkpoint):
    mode = "qat" if kind == "trainable" else "packed"
    family = "qwen3_moe" if kind == "experts" else "qwen2"
    model = load(checkpoint, family, mode=mode)
    if kind == "adapters":
        model = with_adapters(model)
    assert [output.generated_tokens for output in batched(model)] == one_by_one(model)


@pytest.mark.parametrize(("family", "expected"), [("qwen2", (True, True)), ("qwen3_moe", (False, False))])
def test_experts_are_kept_out_of_graphs(family, expected, checkpoint):
    """Their products may wait for the device, which a CUDA graph that is captured cannot."""
    model = load(checkpoint, family)
    manager = SimpleNamespace(model=model, continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=True))
    prepare_manager(manager)
    assert manager.continuous_batching_config.cuda_graph_booleans == expected


def test_each_weight_is_quantized_once_per_call(checkpoint, count):
    model = load(checkpoint)
    count()
    batched(model)
    assert count() == LINEARS
    batched(model)
    assert count() == LINEARS
    assert all(state.cache is None for state in gemm_states(model))


def test_a_change_between_two_calls_is_seen(checkpoint):
    model = load(checkpoint)
    old = batched(model)[0].logprobs
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.neg_()
    assert batched(model)[0].logprobs != old


@pytest.mark.parametrize(("options", "expected"), [({}, 1), ({"persistent_manager": True}, 0)], ids=str)
def test_graphs_read_kept_weights_unless_they_outlive_the_call(options, expected, checkpoint, monkeypatch):
    served = []
    original = WeightCache.serving_graphs
    monkeypatch.setattr(WeightCache, "serving_graphs", lambda cache: served.append(cache) or original(cache))
    model = load(checkpoint)
    batched(model, **options)
    model.destroy_cached_continuous_batching_manager()
    assert len(served) == expected


def test_the_thread_computes_under_the_autocast_of_the_caller(checkpoint):
    model = load(checkpoint)
    seen = set()

    def look(module, inputs, output):
        seen.add((threading.current_thread() is threading.main_thread(), output.dtype))

    model.model.layers[1].mlp.up_proj.register_forward_hook(look)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = batched(model)
        prompt = PROMPTS[2]
        ids = torch.tensor([prompt + outputs[2].generated_tokens])
        seen_in_thread = set(seen)
        scores = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    assert seen_in_thread == {(False, torch.bfloat16)}
    expected = scores.gather(1, ids[0, len(prompt) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(outputs[2].logprobs), expected, rtol=0, atol=0.05)


class Product(nn.Linear):
    """A model that is called as the manager calls one."""

    device = torch.device("cpu")

    def forward(self, cache):
        return super().forward(torch.ones(1, 2))


def test_casts_that_autocast_has_kept_are_not_read():
    """A CUDA graph would go on reading them when the weights have changed."""
    model = Product(2, 1, bias=False)
    nn.init.ones_(model.weight)
    cache = SimpleNamespace(update=None)
    with torch.autocast("cpu", torch.bfloat16):
        manager = SimpleNamespace(model=model, continuous_batching_config=ContinuousBatchingConfig())
        prepare_manager(manager)
        assert model(cache).item() == 2.0
        with torch.no_grad():
            model.weight.mul_(3.0)
        assert manager.model(cache=cache).item() == 6.0
        with torch.no_grad():
            model.weight.mul_(3.0)
        assert model(cache).item() == 18.0


def test_a_persistent_manager_is_found_again_under_autocast(checkpoint):
    model = load(checkpoint)
    with torch.autocast("cpu", torch.bfloat16):
        batched(model, persistent_manager=True)
        manager = model._cached_continuous_batching_manager
        again = batched(model, persistent_manager=True)
    assert model._cached_continuous_batching_manager is manager
    assert len(again) == len(PROMPTS)
    model.destroy_cached_continuous_batching_manager()
    assert not hasattr(model, "_cached_continuous_batching_manager")
