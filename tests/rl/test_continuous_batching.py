# SPDX-License-Identifier: Apache-2.0
"""Rollouts by TRL's continuous batching: the greedy tokens of `generate`, with noise, evaluation and failures."""

from types import SimpleNamespace

import pytest
import torch
from grpo_runs import trainer_factory
from peft import LoraConfig
from transformers import GenerationMixin

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.layers import QUANTIZED


PROMPTS = ["1+1=", "22+22=", "3+=", "4+4="]
#: By default its cache takes nearly all memory that is free.
SMALL = {"num_blocks": 16, "max_batch_tokens": 64}
SETUPS = {
    "qat": (MXFP4RLConfig(preset="w4a4"), {"rollout_weights": "dense"}),
    "qat-packed-copies": (MXFP4RLConfig(preset="w4a4"), {"rollout_weights": "packed"}),
    "qat-no-copies": (MXFP4RLConfig(preset="w4a16"), {"cache_rollout_weights": False}),
    "packed-lora": (MXFP4RLConfig(mode="packed"), {}),
    "packed-lora-eager": (MXFP4RLConfig(mode="packed", backend="eager"), {}),  # whose layers keep dense copies
}


@pytest.fixture
def build(tmp_path):
    factory = trainer_factory(tmp_path)

    def build(setup="qat", batching=SMALL, **options):
        scheme, settings = SETUPS[setup]
        if scheme.mode == "packed":
            settings = {"peft_config": LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")}
        noise = {"aqn_num_stages": 4, "aqn_sigma_start": 0.5, "aqn_sigma_end": 0.4}
        if batching is not None:
            batching = {"transformers_continuous_batching_config": batching}
            batching["use_transformers_continuous_batching"] = True
        settings = {**settings, **noise, **(batching or {}), "generation_kwargs": {"do_sample": False}, **options}
        trainer = factory(scheme=scheme, **settings)
        trainer.model.train()
        trainer.state.max_steps = 4
        return trainer

    return build


def tokens(trainer, step):
    trainer.state.global_step = step
    return trainer._generate(PROMPTS)[1]


def margin(trainer, step, prompt, shared, a, b):
    """How far apart the logits of two tokens are after the tokens that both rollouts have."""
    ids = torch.tensor([prompt + shared])
    with torch.no_grad(), trainer.noise.active(step, trainer._sigma()):
        logits = trainer.model(input_ids=ids).logits[0, -1]
    return abs(logits[a] - logits[b]).item()


def assert_same_tokens(plain, batched, step):
    expected, found = tokens(plain, step), tokens(batched, step)
    prompts = plain._tokenize_prompts(PROMPTS)[0]
    assert len(found) == len(expected)
    for prompt, a, b in zip(prompts, expected, found, strict=True):
        ties = [n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
        if ties:  # attention sums in another order
            n = ties[0]
            assert margin(plain, step, prompt, a[:n], a[n], b[n]) < 1e-4, (a, b)
        else:
            assert len(a) == len(b)
    return expected


@pytest.mark.parametrize(
    "setup",
    [name if name in ("qat", "packed-lora") else pytest.param(name, marks=pytest.mark.large) for name in SETUPS],
)
def test_tokens_are_those_of_generate(build, setup):
    plain, batched = build(setup, batching=None), build(setup)
    seen = [assert_same_tokens(plain, batched, step) for step in (0, 1, 3)]
    assert len({str(rows) for rows in seen}) == 3  # no noise, noise, and other noise
    assert batched.noise.last_report == plain.noise.last_report and plain.noise.last_report.modules == 5


@pytest.mark.large
def test_compiled_batches_follow_noise_and_weights(build):
    torch._dynamo.reset()
    compiling = {"varlen_compile_config": {"backend": "aot_eager", "mode": None}}
    plain, batched = build(batching=None), build(batching=SMALL | compiling)
    assert batched.noise.compiled and not plain.noise.compiled
    seen = [assert_same_tokens(plain, batched, step) for step in (0, 1, 3, 0)]
    for trainer in (plain, batched):
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    seen.append(assert_same_tokens(plain, batched, 0))
    assert len({str(rows) for rows in seen}) == 4
    torch._dynamo.reset()


def test_training(build):
    trainer = build(max_steps=2, generation_kwargs=None)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert all(not torch.equal(a, b) for a, b in zip(trainer.model.parameters(), before, strict=True))
    logs = [entry for entry in trainer.state.log_history if "aqn/n_modules" in entry]
    assert [entry["aqn/n_modules"] for entry in logs] == [0, 5]
    assert logs[0]["sampling/sampling_logp_difference/max"] < 1e-5  # no noise at the first step
    assert logs[1]["sampling/importance_sampling_ratio/max"] > 1.0001


def test_evaluation_stays_evaluation(build):
    trainer = build()
    trainer.model.eval()
    assert tokens(trainer, step=1) == tokens(trainer, step=0)
    assert not any(module.training for module in trainer.model.modules())


def test_sequences_that_failed_are_an_error(build, monkeypatch):
    trainer, calls = build(), []
    layer = trainer.model.model.layers[1].mlp
    forward = layer.forward

    def fail(x):
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("out of memory")
        return forward(x)

    monkeypatch.setattr(layer, "forward", fail)
    with pytest.raises(RuntimeError, match="continuous batching finished 0 of 4 sequences: .*out of memory"):
        tokens(trainer, step=0)
    assert trainer.model.training and "generate_batch" not in vars(trainer.model)


def test_missing_sequences_are_an_error(build, monkeypatch):
    trainer = build()

    def lose(self, inputs, **options):
        return {"a": SimpleNamespace(generated_tokens=[3], logprobs=[0.0], error=None)}

    monkeypatch.setattr(GenerationMixin, "generate_batch", lose)
    with pytest.raises(RuntimeError, match="finished 1 of 4 sequences; transformers has logged why"):
        tokens(trainer, step=0)


@pytest.mark.parametrize(
    "setup", ["qat", "packed-lora-eager", pytest.param("qat-packed-copies", marks=pytest.mark.large)]
)
def test_copies_of_weights_come_before_the_cache(build, monkeypatch, setup):
    """The cache takes the memory that is free when it is made."""
    trainer, kept = build(setup), []

    def look(self, inputs, **options):
        kept.extend(module.state.cache.value is not None for module in self.modules() if isinstance(module, QUANTIZED))
        return {}

    monkeypatch.setattr(GenerationMixin, "generate_batch", look)
    with pytest.raises(RuntimeError):
        tokens(trainer, step=0)
    assert kept == [True] * 14
