# SPDX-License-Identifier: Apache-2.0
"""Rollouts of several turns: tools, environments and functions that roll out. Every turn is sampled under noise, its
tokens are weighted, and what tools answer is not."""

import pytest
import torch
from grpo_runs import NOISY, SAMPLED, agent, log_probs, logged, questions, rollout, seen_by_loss
from grpo_runs import double as tool
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.rl import RewardError


def length(completions, **kwargs):
    return [float(len(str(messages)) % 7) for messages in completions]


class Doubling:
    """An environment: its observation ends the prompt, its tool is `double`, and its reward the number of calls."""

    def reset(self, **row):
        self.calls = 0
        return "2"

    def double(self, x: str) -> str:
        self.calls += 1
        return tool(x)

    double.__doc__ = tool.__doc__

    def get_reward(self):
        return float(self.calls)


class Broken(Doubling):
    def get_reward(self):
        raise KeyError("answer")


def two_turns(prompts, trainer):
    """Continue each completion after "3=", which is not the policy's."""
    ids, _, fields = trainer._tokenize_prompts(prompts)
    first, first_logps = trainer._generate_single_turn(ids, None, fields, trainer.num_generations)
    between = [5, 6]
    seen = [prompt + own + between for prompt, own in zip(ids, first, strict=True)]
    second, second_logps = trainer._generate_single_turn(seen, None, fields, 1)
    turns = list(zip(first, second, first_logps, second_logps, strict=True))
    return {
        "prompt_ids": ids,
        "completion_ids": [own + between + more for own, more, *_ in turns],
        "env_mask": [[1] * len(own) + [0, 0] + [1] * len(more) for own, more, *_ in turns],
        "logprobs": [own + [0.0, 0.0] + more for *_, own, more in turns],
    }


WAYS = {
    "tools": {"tools": [tool]},
    "environment_factory": {"environment_factory": Doubling},
    "rollout_func": {"rollout_func": two_turns},
}


@pytest.fixture
def converse(build, tmp_path):
    def make(given, **options):
        tokenizer = agent(tmp_path / "agent")
        policy = AutoModelForCausalLM.from_pretrained(tmp_path / "agent", quantization_config=MXFP4RLConfig())
        options = {"max_completion_length": 20, "max_tool_calling_iterations": 2, **options}
        return build(length, policy=policy, tokenizer=tokenizer, dataset=questions(), given=given, **options)

    return make


@pytest.mark.parametrize("way", ["one turn", *WAYS])
def test_all_turns_are_sampled_under_noise_and_weighted_and_answers_are_not(converse, way):
    trainer = converse(WAYS.get(way), **NOISY, rollout_correction_cap=1.02)
    batch = rollout(trainer)
    real = batch["completion_mask"].bool()
    own = real & batch.get("tool_mask", real).bool()
    later = own & ((real & ~own).cumsum(dim=1) > 0)
    assert later.sum() >= 5 or way == "one turn"
    clean = log_probs(trainer, batch)
    with trainer.noise.active(1, 0.3):
        noisy = log_probs(trainer, batch)
    for turn in (own & ~later, later):
        assert torch.allclose(batch[SAMPLED][turn], noisy[turn], atol=1e-4)
    ratio = torch.where(own, (clean - noisy).exp(), 1.0)
    assert (ratio > 1.02).any()
    assert (ratio < 1.0).any()
    assert (ratio[later] != 1.0).all()
    weighted = seen_by_loss(trainer, batch)["advantages"]
    expected = batch["advantages"].unsqueeze(1) * ratio.clamp(max=1.02)
    assert batch["advantages"].abs().max() > 0
    assert torch.allclose(weighted[real], expected[real], atol=1e-3)
    (divergence,) = trainer._metrics["train"]["sampling/kl"]
    assert divergence == pytest.approx((ratio - 1 - ratio.log())[own].mean().item(), rel=0.02)


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_quantized_once_for_all_turns_of_a_step(converse, way):
    trainer = converse(WAYS[way], max_steps=2)
    trainer.train()
    assert logged(trainer, "quantization/weights_per_step") == {1: 14, 2: 14}
    assert logged(trainer, "aqn/n_modules") == {1: 0, 2: 5}
    called = logged(trainer, "tools/call_frequency")
    assert not called if way == "rollout_func" else min(called[1], called[2]) > 0
    if way == "environment_factory":
        assert logged(trainer, "rewards/Doubling/mean") == pytest.approx(called)


def test_an_environment_whose_reward_fails_is_named_and_before_the_first_step_nothing_saved(converse, tmp_path, capsys):
    with pytest.raises(RewardError, match="reward function 'Broken' raised KeyError: 'answer'") as caught:
        converse({"environment_factory": Broken}, max_steps=1).train()
    assert isinstance(caught.value.__cause__, KeyError)
    assert "nothing was trained yet" in capsys.readouterr().err
    assert not list(tmp_path.rglob("checkpoint-*"))


@pytest.mark.parametrize("way", WAYS)
def test_replay_of_experts_is_refused(converse, way):
    with pytest.raises(ValueError, match="does not work with tools, environment_factory or rollout_func"):
        converse(WAYS[way], router_replay=True)


def test_tools_are_refused_where_processes_shard_weights(converse, monkeypatch):
    """Tried with two processes: the one that calls no tool leaves the other alone in gathering weights."""
    trainer = converse(WAYS["tools"])
    trainer.quantization.is_sharded = True
    trainer._check_turns()  # alone
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(ValueError, match="can only generate together: use DDP, ZeRO-2 or use_vllm=True"):
        trainer._check_turns()
    trainer.use_vllm = True
    trainer._check_turns()
