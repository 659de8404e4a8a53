# SPDX-License-Identifier: Apache-2.0
"""`study: {share_prompts: true}`: the prompt of a group is computed once."""

import pytest
import torch
from datasets import Dataset
from grpo_runs import logged, rollout, trainer_factory
from tiny_models import make_model

from hf_mxfp4 import MXFP4GRPOTrainer
from hf_mxfp4.recipes.evaluation.generate import end_with_line
from hf_mxfp4.recipes.post_training.shared_prompts import SharedPromptTrainer
from hf_mxfp4.recipes.tasks.tiny_model import build_char_tokenizer, build_qwen2


def rows(*prompts):
    return Dataset.from_list([{"prompt": prompt} for prompt in prompts])


#: Prompts of different lengths, so that some are padded.
PROMPTS = rows("1+2=", "10+25=", "3=", "12+12=")
#: Prompts that start with a solved example.
SOLVED = rows("2+2=4+1+2=", "2+2=4+4+1=")
FULL_PRECISION = {"allow_full_precision": True, "aqn": False}


@pytest.fixture
def build(tmp_path):
    return trainer_factory(tmp_path)


@pytest.fixture(params=[PROMPTS, SOLVED], ids=["padded", "solved example"])
def shared(build, request):
    policy = make_model(hidden=32, intermediate=48)
    return build(kind=SharedPromptTrainer, policy=policy, dataset=request.param, **FULL_PRECISION)


def scored(trainer, kind, batch):
    """Log-probabilities of the completions of a batch, entropies, and gradients of their sum by parameter."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    width = batch["completion_ids"].size(1)
    log_probs, entropies, _ = kind._get_per_token_logps_and_entropies(
        trainer, trainer.model, ids, mask, width, compute_entropy=True
    )
    is_completion = batch["completion_mask"].bool()
    gradients = torch.autograd.grad(log_probs[is_completion].sum(), list(trainer.model.parameters()))
    return log_probs[is_completion].detach(), entropies[is_completion].detach(), *gradients


def test_log_probs_and_gradients_are_those_of_whole_sequences(shared):
    batch = rollout(shared)
    assert batch["prompt_mask"].all() == (len(shared.train_dataset) == len(SOLVED))  # others have a padded prompt
    expected = scored(shared, MXFP4GRPOTrainer, batch)
    torch.testing.assert_close(scored(shared, SharedPromptTrainer, batch), expected, rtol=1e-3, atol=1e-4)


def test_completions_are_sampled_from_the_same_distribution(shared):
    batch = rollout(shared)
    log_probs, *_ = scored(shared, MXFP4GRPOTrainer, batch)
    sampled = batch["sampling_per_token_logps"][batch["completion_mask"].bool()]
    torch.testing.assert_close(sampled, log_probs, rtol=1e-4, atol=1e-4)


def test_what_prompts_start_with_is_computed_once(build, monkeypatch):
    policy = make_model(hidden=32, intermediate=48)
    trainer = build(kind=SharedPromptTrainer, policy=policy, dataset=SOLVED, **FULL_PRECISION)
    batch = rollout(trainer)
    computed = []
    forward = trainer.model.forward
    monkeypatch.setattr(
        trainer.model,
        "forward",
        lambda input_ids, **options: computed.append(tuple(input_ids.shape)) or forward(input_ids, **options),
    )
    scored(trainer, SharedPromptTrainer, batch)
    # "2+2=4+", the rest of both prompts but its last token, and that token with four completions of each.
    assert computed == [(1, 6), (2, 3), (8, 5)]
    assert trainer._metrics["train"]["prompts/common"][-1] == 6


def test_greedy_completions_are_those_of_the_model_alone(shared):
    inputs = shared.processing_class(
        list(shared.train_dataset["prompt"]), return_tensors="pt", padding=True, padding_side="left"
    )
    inputs.pop("token_type_ids", None)
    options = {"do_sample": False, "max_new_tokens": 6}
    expected = type(shared.model).generate(shared.model, **inputs, **options)
    assert shared.model.generate(**inputs, **options).tolist() == expected.tolist()


def test_the_default_scheme_trains_and_logs_how_many_completions_share_a_prompt(build):
    trainer = build(kind=SharedPromptTrainer, dataset=PROMPTS, aqn=False, max_steps=2)
    trainer.train()
    assert logged(trainer, "prompts/shared") == {1: 4.0, 2: 4.0}
    assert max(logged(trainer, "sampling/kl").values()) < 1e-3


def test_rollouts_end_with_their_line(build):
    tokenizer = build_char_tokenizer("0123456789+=\n")
    line_break = tokenizer.convert_tokens_to_ids("\n")
    policy = build_qwen2(tokenizer, hidden_size=32, num_layers=1)
    bias = torch.zeros(len(tokenizer))
    bias[line_break] = 50.0  # it writes nothing else
    policy.lm_head.bias = torch.nn.Parameter(bias)
    end_with_line(policy, tokenizer)
    trainer = build(kind=SharedPromptTrainer, policy=policy, tokenizer=tokenizer, dataset=PROMPTS, **FULL_PRECISION)
    batch = rollout(trainer)
    assert batch["completion_ids"].tolist() == [[line_break]] * 8
    assert batch["completion_mask"].tolist() == [[1]] * 8
    assert trainer._metrics["train"]["completions/clipped_ratio"] == [0.0]


@pytest.mark.parametrize("option", ["use_transformers_continuous_batching", "gradient_checkpointing"])
def test_what_has_no_cache_to_share_is_refused(build, option):
    with pytest.raises(ValueError, match=f"share_prompts does not work with {option}"):
        build(kind=SharedPromptTrainer, **{option: True})
