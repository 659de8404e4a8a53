# SPDX-License-Identifier: Apache-2.0
"""Router replay of what a colocated vLLM returns, with stand-ins for vLLM; tests/vllm_integration runs the real one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trl.generation.vllm_generation as generation
from grpo_runs import TOKENIZER, logged, trainer_factory, vllm_llm
from moe_models import make_moe
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4RLConfig
from hf_mxfp4.moe import RouterReplayError, find_routers, recorded_choices
from hf_mxfp4.rl.rollout import vllm_engine
from hf_mxfp4.rl.rollout.replay import RouterReplay, ServedChoices
from hf_mxfp4.rl.rollout.vllm_engine import vllm_in_scheme


COMPLETION = [5, 7, 9]
LAYERS, EXPERTS, K = 2, 6, 2


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


class Generation:
    """What the trainer uses of TRL's `VLLMGeneration`."""

    def __init__(self, model):
        self.llm, self.model = Served(), model

    def _iter_named_params(self):
        yield from self.model.named_parameters()

    def sync_weights(self):
        """Nothing is served of what is pushed."""
        list(self._iter_named_params())

    def generate(self, prompts, **kwargs):
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts])
        completions = [output.outputs[0].token_ids for output in outputs]
        return None, completions, [[[-3.0]] * len(COMPLETION) for _ in prompts], None


@pytest.fixture
def build(tmp_path):
    factory = trainer_factory(tmp_path)

    def make(**options):
        make_moe("qwen3_moe").save_pretrained(tmp_path / "moe")
        TOKENIZER.save_pretrained(tmp_path / "moe")
        policy = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", quantization_config=MXFP4RLConfig())
        trainer = factory(policy=policy, **{"router_replay": True, "max_steps": 2, "aqn": False, **options})
        trainer.use_vllm = trainer.args.use_vllm = True
        trainer.vllm_generation, trainer._last_loaded_step = Generation(trainer.model), -1
        by_trl = trainer.vllm_importance_sampling_correction
        llm = trainer.vllm_generation.llm
        trainer.routing = RouterReplay(trainer.model, trainer.accelerator, trainer._record, llm, by_trl)
        trainer._push_rollout_policy_to_vllm()
        return trainer

    return make


@pytest.mark.parametrize("correction", [True, False])
def test_what_vllm_chose_is_replayed_wherever_the_policy_computes_log_probabilities(build, correction):
    """Under the correction TRL scores each rollout first, and compares it with what vLLM sampled."""
    trainer = build(rollout_correction=correction, num_iterations=2, learning_rate=1e-2)
    compute, calls = trainer._get_per_token_logps_and_entropies, []

    def watched(*args, **kwargs):
        with recorded_choices(find_routers(trainer.model)) as choices:
            result = compute(*args, **kwargs)
        calls.append((torch.stack([torch.cat(passes) for passes in choices.values()], dim=1), args[2].bool()))
        return result

    trainer._get_per_token_logps_and_entropies = watched
    trainer.train()
    returned = trainer.vllm_generation.llm.returned
    wanted = sorted(rows.tolist() for rows in returned)
    # Scored once and trained on twice; without the correction TRL's own pass is free, and is made again.
    replayed = calls if correction else calls[1:]
    assert len(wanted) == 8 and len(replayed) == 3
    for routed, mask in replayed:
        routed = routed.view(*mask.shape, LAYERS, K)
        rows = [row[keep][:-1].tolist() for row, keep in zip(routed, mask, strict=True)]
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


def without_experts(answer):
    answer.routed_experts = None


def of_one_layer(answer):
    answer.routed_experts = answer.routed_experts[:, :1]


def unrecorded(answer):
    answer.routed_experts = np.zeros_like(answer.routed_experts)


def too_short(answer):
    answer.routed_experts = answer.routed_experts[1:]


def other_tokens(answer):
    answer.token_ids = [*COMPLETION[:-1], 1]


@pytest.mark.parametrize(
    "change, reason",
    [
        (without_experts, r"experts None of sequence 1.*enable_return_routed_experts"),
        (of_one_layer, r"experts \(4, 1, 2\) of sequence 1"),
        (too_short, r"experts \(3, 2, 2\) of sequence 1, which is not \[4 tokens, layers up to 1"),
        (unrecorded, "the same expert twice for one token of sequence 1: it has not recorded"),
        (other_tokens, "sequence 1 came back with other tokens than vLLM generated"),
    ],
)
def test_what_does_not_belong_to_the_rollout_is_an_error(change, reason):
    choices = recorder()
    generate = choices._llm.generate

    def changed(prompts):
        outputs = generate(prompts)
        change(outputs[1].outputs[0])
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
    with pytest.raises(ValueError, match="encoder.gate do not tell; set use_vllm=False or router_replay=False"):
        recorder(**{"encoder.gate": None})


def test_trl_makes_a_vllm_that_returns_experts(build, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(generation, "LLM", lambda **options: made.append(options), raising=False)
    monkeypatch.setattr(vllm_engine, "_check_returns_experts", lambda: None)
    monkeypatch.setattr(generation.VLLMGeneration, "_init_vllm", lambda self: generation.LLM(model="policy"))
    args = MXFP4GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, router_replay=True)
    engine = object.__new__(generation.VLLMGeneration)
    engine.model = build().model
    with vllm_in_scheme(args):
        engine._init_vllm()
    assert made[0]["model"] == "policy" and made[0]["enable_return_routed_experts"] is True
