# SPDX-License-Identifier: Apache-2.0
"""Router replay in `MXFP4GRPOTrainer`: what is trained on was routed in the rollout."""

import pytest
import torch
from accelerate import Accelerator
from grpo_runs import TOKENIZER, logged, prompts, trainer_factory
from moe_models import make_moe
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.moe import RouterReplayError, find_routers, recorded_choices
from hf_mxfp4.rl.rollout.replay import BATCH_KEY, RouterReplay, routed_tokens


SCHEME = MXFP4RLConfig()


@pytest.fixture
def build(tmp_path):
    factory = trainer_factory(tmp_path)

    def make(family="qwen3_moe", scheme=SCHEME, **options):
        folder = tmp_path / family
        if not folder.exists():
            make_moe(family).save_pretrained(folder)
            TOKENIZER.save_pretrained(folder)
        policy = AutoModelForCausalLM.from_pretrained(folder, quantization_config=scheme)
        return factory(policy=policy, **{"router_replay": True, "max_steps": 3, **options})

    return make


def watch(trainer, method):
    """Calls of a method that computes log-probabilities: what each routed ``[B, L, layers, k]``, and its arguments."""
    calls, original = [], getattr(trainer, method)

    def watched(*args, **kwargs):
        with recorded_choices(find_routers(trainer.model)) as choices:
            result = original(*args, **kwargs)
        layers = [torch.cat(passes) for passes in choices.values()]
        calls.append((torch.stack(layers, dim=1), args))
        return result

    setattr(trainer, method, watched)
    return calls


OPTIONS = {
    "checkpointing, masked": {"gradient_checkpointing": True, "mask_truncated_completions": True},
    "reused": {"num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 4},
    "accumulated": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_steps": 2},
    "clean": {"aqn": False, "num_iterations": 2, "max_steps": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_training_routes_as_the_rollout_did(build, name):
    trainer = build(learning_rate=1e-2, **OPTIONS[name])
    calls = watch(trainer, "_compute_loss")
    trainer.train()
    assert len(calls) == trainer.args.max_steps * (2 if name == "accumulated" else 1)
    covered = 0
    for routed, (_, inputs) in calls:
        recorded = inputs[BATCH_KEY].long()
        routed, known = routed.view_as(recorded), recorded >= 0
        assert torch.equal(routed[known], recorded[known])
        assert not (routed_tokens(inputs["prompt_mask"], inputs["completion_mask"]) & ~known.flatten(2).all(-1)).any()
        covered += int(known[..., 0, 0].sum())
    assert covered > 40
    assert set(logged(trainer, "router_replay/coverage").values()) == {1.0}
    changed = list(logged(trainer, "router_replay/changed").values())
    assert all(0 <= value < 1 for value in changed)
    if name in ("reused", "clean"):  # the first step on a rollout changes the routers, the next one sees it
        assert changed[0] == 0 and changed[1] > 0.02


def test_old_log_probabilities_are_those_of_the_recorded_routing(build):
    trainer = build(learning_rate=1e-2, **OPTIONS["reused"], aqn_num_stages=1, max_steps=2)
    calls = watch(trainer, "_replayed_log_probs")
    batches, keep = [], trainer.routing.padded
    trainer.routing.padded = lambda *args: batches.append(keep(*args)) or batches[-1]
    trainer.train()
    assert len(calls) == 1
    for routed, _ in calls:
        recorded = batches[0].long()
        known = recorded >= 0
        assert torch.equal(routed.view_as(recorded)[known], recorded[known])


def test_where_routing_does_not_change_training_is_bit_identical_to_without(build):
    """On-policy and without noise the replayed choices are those that would have been made."""
    weights = []
    for replay in (False, True):
        trainer = build(router_replay=replay, aqn=False, max_steps=2)
        trainer.train()
        weights.append(trainer.model.state_dict())
    assert list(logged(trainer, "router_replay/changed").values()) == [0.0] * 2
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_routers_are_trained_through_replay_and_evaluation_has_none(build):
    trainer = build(router_aux_loss_coef=0.0, max_steps=2)
    before = {name: router.weight.detach().clone() for name, router in find_routers(trainer.model).items()}
    trainer.train()
    for name, router in find_routers(trainer.model).items():
        assert not torch.equal(router.weight, before[name]), name
        assert "forward" not in router.__dict__
    metrics = trainer.evaluate(prompts(4))
    assert metrics["eval_reward"] >= 0
    assert not any("router_replay" in name for name in metrics)


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_a_token_without_a_recording_is_an_error(build):
    trainer = build()
    padded = trainer.routing.padded

    def holes(*args):
        batch = padded(*args)
        batch[0, 3] = -1  # the last token of a prompt
        return batch

    trainer.routing.padded = holes
    with pytest.raises(RouterReplayError, match=r"covers \d+ of \d+ tokens \(9\d.\d%\): in 1 of 8 sequences"):
        trainer.train()


def test_a_batch_without_a_recording_is_an_error(build):
    trainer = build()
    prepare = trainer._prepare_inputs
    trainer._prepare_inputs = lambda batch: {k: v for k, v in prepare(batch).items() if k != BATCH_KEY}
    with pytest.raises(RouterReplayError, match=r"covers 0 of \d+ tokens: the training batch has no recording"):
        trainer.train()


def test_a_dense_policy_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has no router"):
        trainer_factory(tmp_path)(router_replay=True)


def test_a_recording_of_another_batch_is_refused():
    routing = RouterReplay(make_moe(), Accelerator(cpu=True), record=None)
    with pytest.raises(RouterReplayError, match="recordings of 0 sequences for a batch of 2"):
        routing.padded(torch.ones(2, 3), torch.ones(2, 4))


def test_which_tokens_are_routed_in_generation():
    prompt = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1]])
    completion = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])  # the last one masked as truncated
    expected = [[0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0]]
    assert routed_tokens(prompt, completion).int().tolist() == expected
