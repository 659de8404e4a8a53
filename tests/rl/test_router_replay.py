# SPDX-License-Identifier: Apache-2.0
"""Router replay in `MXFP4GRPOTrainer`: what is trained on was routed in the rollout, of `generate` or vLLM."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from grpo_runs import logged, mixture, prompts, trainer_factory, vllm_llm, with_simulated_vllm
from moe_models import make_moe

from hf_mxfp4.model.routers import RouterReplayError, find_routers, recorded_choices
from hf_mxfp4.rl.router_replay import BATCH_KEY, RouterReplay, ServedChoices, routed_tokens


@pytest.fixture
def build(tmp_path):
    factory = trainer_factory(tmp_path)

    def make(**options):
        return factory(policy=mixture(tmp_path / "moe"), **{"router_replay": True, "max_steps": 3, **options})

    return make


def watch(trainer, method):
    """Calls of a method that computes log-probabilities: what each routed ``[B, L, layers, k]``, and its arguments."""
    calls = []
    original = getattr(trainer, method)

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
        routed = routed.view_as(recorded)
        known = recorded >= 0
        assert torch.equal(routed[known], recorded[known])
        assert not (routed_tokens(inputs["prompt_mask"], inputs["completion_mask"]) & ~known.flatten(2).all(-1)).any()
        covered += int(known[..., 0, 0].sum())
    assert covered > 40
    assert set(logged(trainer, "router_replay/coverage").values()) == {1.0}
    changed = list(logged(trainer, "router_replay/changed").values())
    assert all(0 <= value < 1 for value in changed)
    if name in ("reused", "clean"):  # the first step on a rollout changes the routers, the next one sees it
        assert changed[0] == 0
        assert changed[1] > 0.02


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


COMPLETION = [5, 7, 9]
LAYERS = 2
EXPERTS = 6
K = 2


class Served:
    """Generates the same tokens always, by experts that no router would choose: they are drawn."""

    def __init__(self, seed=0):
        self.random, self.llm_engine = np.random.default_rng(seed), vllm_llm().llm_engine
        self.returned = []

    def generate(self, prompts, sampling_params=None, use_tqdm=False):
        outputs = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            order = self.random.random((len(ids) + len(COMPLETION) - 1, LAYERS, EXPERTS)).argsort(axis=-1)
            answer = SimpleNamespace(token_ids=COMPLETION, routed_experts=order[..., :K].astype(np.uint8))
            self.returned.append(torch.from_numpy(answer.routed_experts.astype("int64")))
            outputs.append(SimpleNamespace(prompt_token_ids=ids, outputs=[answer]))
        return outputs

    def by_trl(self, prompts, **kwargs):
        """What TRL's `VLLMGeneration` returns of that."""
        outputs = self.generate([{"prompt_token_ids": ids} for ids in prompts])
        completions = [output.outputs[0].token_ids for output in outputs]
        return None, completions, [[[-3.0]] * len(COMPLETION) for _ in prompts], None


@pytest.fixture
def serve(build):
    def make(**options):
        trainer = build(**{"max_steps": 2, "aqn": False, **options})
        with_simulated_vllm(trainer)
        by_trl = trainer.vllm_importance_sampling_correction
        llm = Served()
        trainer.vllm_generation.llm = llm
        trainer.vllm_generation.generate = llm.by_trl
        trainer.routing = RouterReplay(trainer.model, trainer.accelerator, trainer._record, llm, by_trl)
        return trainer

    return make


@pytest.mark.parametrize("correction", ["token_truncate", "none"])
def test_what_vllm_chose_is_replayed_wherever_the_policy_computes_log_probabilities(serve, correction):
    """Under the correction TRL scores each rollout first, and compares it with what vLLM sampled."""
    trainer = serve(rollout_correction=correction, num_iterations=2, learning_rate=1e-2)
    calls = watch(trainer, "_get_per_token_logps_and_entropies")
    trainer.train()
    returned = trainer.vllm_generation.llm.returned
    wanted = sorted(rows.tolist() for rows in returned)
    # Scored once and trained on twice; without the correction TRL's own pass is free, and is made again.
    replayed = calls if correction != "none" else calls[1:]
    assert len(wanted) == 8
    assert len(replayed) == 3
    for routed, (_, _, mask, *_) in replayed:
        routed = routed.view(*mask.shape, LAYERS, K)
        rows = [row[keep][:-1].tolist() for row, keep in zip(routed, mask.bool(), strict=True)]
        assert sorted(rows) == wanted
    assert set(logged(trainer, "router_replay/coverage").values()) == {1.0}
    assert min(logged(trainer, "router_replay/changed").values()) > 0.3


def recorder(**routers):
    return ServedChoices(Served(), routers or {"model.layers.0.mlp.gate": None, "model.layers.1.mlp.gate": None})


def test_only_layers_with_routers_count():
    choices = recorder(**{"base_model.model.model.layers.1.mlp.gate": None})
    with choices.recording():
        choices._llm.generate([{"prompt_token_ids": [3, 4]}])
    (row,) = choices.rows([[3, 4]], [COMPLETION])
    assert row.dtype == torch.int16
    assert torch.equal(row.long(), choices._llm.returned[0][:, 1:])
    assert "generate" not in vars(choices._llm)


@pytest.mark.parametrize(
    "part, change, reason",
    [
        ("routed_experts", lambda e: None, r"experts None of sequence 1.*enable_return_routed_experts"),
        ("routed_experts", lambda e: e[:, :1], r"experts \(4, 1, 2\) of sequence 1"),
        ("routed_experts", lambda e: e[1:], r"experts \(3, 2, 2\) of sequence 1"),
        ("routed_experts", np.zeros_like, "the same expert twice for one token of sequence 1"),
        ("token_ids", lambda ids: [*ids[:-1], 1], "sequence 1 came back with other tokens"),
    ],
)
def test_what_does_not_belong_to_the_rollout_is_an_error(part, change, reason):
    choices = recorder()
    generate = choices._llm.generate

    def changed(prompts):
        outputs = generate(prompts)
        answer = outputs[1].outputs[0]
        setattr(answer, part, change(getattr(answer, part)))
        return outputs

    choices._llm.generate = changed
    with choices.recording():
        choices._llm.generate([{"prompt_token_ids": [3, 4]}] * 2)
    assert choices._llm.generate is changed
    with pytest.raises(RouterReplayError, match=reason):
        choices.rows([[3, 4]] * 2, [COMPLETION] * 2)


def test_another_number_of_generations_or_sequences_is_an_error():
    choices = recorder()
    with pytest.raises(RuntimeError, match="vLLM ran 0"):
        with choices.recording():
            pass
    with choices.recording():
        choices._llm.generate([{"prompt_token_ids": [3, 4]}])
    with pytest.raises(RouterReplayError, match="vLLM generated 1 sequences of 2"):
        choices.rows([[3, 4]] * 2, [COMPLETION] * 2)


def test_routers_without_the_number_of_their_layer_are_refused():
    with pytest.raises(ValueError, match="encoder.gate do not tell"):
        recorder(**{"encoder.gate": None})
