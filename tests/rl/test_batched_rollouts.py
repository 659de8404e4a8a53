# SPDX-License-Identifier: Apache-2.0
"""Rollouts by transformers' continuous batching: of the policy as it is, recorded, by one manager, which goes away."""

import threading

import pytest
import torch
from grpo_runs import NOISY, SAMPLED, everything, log_probs, logged, prompts, rollout
from peft import LoraConfig
from recorded_graphs import RecordedGraph, record_graphs
from transformers import TopKLogitsWarper
from transformers.generation import ContinuousBatchingManager

from hf_mxfp4 import MXFP4RLConfig


#: Pages of four tokens, so that prompts fill some, whose keys and values requests share.
BATCHED = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": {"page_size": 4}}
#: Activations as they are: those in E4M3 may be rounded otherwise where sums are added up in another order.
EXACT = MXFP4RLConfig(preset="w4a16")
PACKED = MXFP4RLConfig(mode="packed")
LORA = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)


@pytest.fixture
def sample(build):
    """`sample(**options)`: a trainer and its first rollout."""
    trainers = []

    def make(**options):
        trainer = build(**{"scheme": EXACT, "aqn": False, **BATCHED, **options})
        trainers.append(trainer)
        return trainer, rollout(trainer)

    yield make
    for trainer in trainers:
        trainer.batched_rollouts.close()


@pytest.fixture
def managers(monkeypatch):
    """The managers that are made in a test."""
    made = []
    original = ContinuousBatchingManager.__init__

    def record(manager, *args, **kwargs):
        made.append(manager)
        original(manager, *args, **kwargs)

    monkeypatch.setattr(ContinuousBatchingManager, "__init__", record)
    return made


def assert_recorded(trainer, batch, expected=None):
    """The recorded log-probabilities are those of the policy, up to the order of sums."""
    real = batch["completion_mask"].bool()
    expected = log_probs(trainer, batch) if expected is None else expected
    torch.testing.assert_close(batch[SAMPLED][real], expected[real], rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"scheme": PACKED, "peft_config": LORA}], ids=["trainable", "adapters"])
def test_tokens_are_recorded_with_the_log_probabilities_of_the_policy(options, sample):
    trainer, batch = sample(temperature=0.7, **options)
    assert trainer.model.training
    assert_recorded(trainer, batch)


def test_adapters_take_part(sample):
    trainer, _ = sample(scheme=PACKED, peft_config=LORA)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    batch = rollout(trainer, step=2)
    assert_recorded(trainer, batch)


def test_log_probabilities_are_those_after_top_k(sample):
    trainer, batch = sample(top_k=3)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, batch["prompt_ids"].shape[1] - 1 : -1]
    kept = TopKLogitsWarper(3)(None, logits).log_softmax(-1)
    assert_recorded(trainer, batch, kept.gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1))


def test_noise_is_on_in_rollouts_alone(sample):
    trainer, batch = sample(**NOISY, aqn=True)
    with trainer.noise.active(1, 0.3):
        noisy = log_probs(trainer, batch)
    assert_recorded(trainer, batch, noisy)
    assert not torch.allclose(log_probs(trainer, batch), noisy, atol=1e-2)


def test_the_next_rollout_is_of_the_weights_of_then(sample, managers):
    """Keys and values of the same prompts are not those of the weights before."""
    trainer, old = sample()
    with torch.no_grad():
        for layer in trainer.model.model.layers:
            layer.self_attn.v_proj.weight.mul_(-3.0)
            layer.mlp.down_proj.weight.mul_(-3.0)
    new = rollout(trainer, step=2)
    assert_recorded(trainer, new)
    assert not torch.allclose(log_probs(trainer, old), old[SAMPLED], atol=1e-2)
    assert len(managers) == 1


def test_masters_stay_as_they_are_under_autocast(build):
    trainer = build(scheme=EXACT, aqn=False, bf16=True, **BATCHED)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    dtypes = set()
    trainer.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *of: dtypes.add(of[-1].dtype))
    batch = rollout(trainer)
    trainer.batched_rollouts.close()
    assert dtypes == {torch.bfloat16}
    after = trainer.model.state_dict()
    assert all(tensor.dtype == torch.float32 for tensor in after.values())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    with torch.autocast("cpu", torch.bfloat16):
        expected = log_probs(trainer, batch).float()
    real = batch["completion_mask"].bool()
    torch.testing.assert_close(batch[SAMPLED][real], expected[real], rtol=0, atol=0.05)


def test_a_run_has_one_manager_and_leaves_nothing_behind(build, managers):
    trainer = build(
        **BATCHED, gradient_checkpointing=True, eval_dataset=prompts(2), eval_strategy="steps", eval_steps=2
    )
    trainer.train()
    assert len(managers) == 1
    assert trainer.model.config._attn_implementation == "sdpa"
    assert not hasattr(trainer.model, "_cached_continuous_batching_manager")
    assert managers[0].batch_processor is None
    assert not managers[0].is_running()
    assert logged(trainer, "quantization/weights_per_step") == {1: 14, 2: 14, 3: 14, 4: 14}
    assert logged(trainer, "aqn/n_modules") == {1: 0, 2: 5, 3: 5, 4: 5}


def test_an_evaluation_alone_closes_its_manager(build, managers):
    trainer = build(**BATCHED, eval_dataset=prompts(2))
    trainer.evaluate()
    assert [manager.batch_processor for manager in managers] == [None]


def test_a_resumed_run_repeats_the_one_that_went_on(build, tmp_path):
    """Also where it makes another manager, which seeds the random generators, than the whole run did."""
    whole = build(**BATCHED, save_strategy="steps", save_steps=2)
    whole.train()
    expected = everything(whole)
    resumed = build(**BATCHED, save_strategy="steps", save_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    found = everything(resumed)
    assert torch.equal(found["random"], expected["random"])
    for name, tensor in expected["weights"].items():
        assert torch.equal(found["weights"][name], tensor), name


def test_an_error_in_the_thread_ends_the_rollout(sample, managers, monkeypatch):
    trainer, _ = sample()
    threads = set(threading.enumerate())

    def fail(*args, **kwargs):
        raise RuntimeError("a layer is broken")

    monkeypatch.setattr(trainer.model.model.layers[1].mlp, "forward", fail)
    with pytest.raises(RuntimeError, match="completed 0 of 8 prompts: a layer is broken"):
        rollout(trainer, step=2)
    assert set(threading.enumerate()) <= threads
    assert managers[0].batch_processor is None
    monkeypatch.undo()
    assert_recorded(trainer, rollout(trainer, step=3))


def test_what_the_manager_would_leave_out_is_refused(build):
    with pytest.raises(ValueError, match="does not support MinPLogitsWarper: sample with temperature"):
        build(**BATCHED, min_p=0.1)


def test_sharded_weights_are_refused(build):
    trainer = build(**BATCHED)
    trainer.quantization.is_sharded = True
    with pytest.raises(ValueError, match="use DDP"):
        trainer._check_batched_rollouts()


GRAPHS = {"page_size": 4, "use_cuda_graph": True, "use_async_batching": False}


@pytest.fixture
def captured(build, monkeypatch):
    """A trainer whose rollouts replay graphs, which are recorded operators here."""
    trainers = []

    def make(**options):
        record_graphs(monkeypatch)
        options = {
            "scheme": EXACT,
            "step_weights": "dense",
            "learning_rate": 0.03,
            "max_completion_length": 8,
            **options,
        }
        trainer = build(**BATCHED | {"transformers_continuous_batching_config": GRAPHS}, **options)
        trainer.model.set_attn_implementation("eager")
        trainers.append(trainer)
        return trainer

    yield make
    for trainer in trainers:
        trainer.batched_rollouts.close()


@pytest.mark.parametrize(
    ("options", "rounding"),
    [({}, 1e-4), ({"bf16": True}, 0.05), ({"peft_config": LORA}, 1e-4)],
    ids=["float32", "autocast", "adapters"],
)
def test_graphs_read_the_weights_of_each_step(options, rounding, captured, managers):
    trainer = captured(aqn=False, **options)
    trainer.train()
    assert RecordedGraph.replays > 8
    assert len(managers) == 1
    assert max(logged(trainer, "sampling/sampling_logp_difference/max").values()) < rounding


def test_graphs_quantize_no_weight(captured):
    trainer = captured(aqn=False, max_steps=2)
    trainer.train()
    assert logged(trainer, "quantization/weights_per_step") == {1: 14, 2: 14}


def test_graphs_read_the_noise_of_each_rollout(captured, managers):
    trainer = captured(**NOISY)
    for step in (1, 2):
        with trainer.quantization.micro_batch(step):
            batch = rollout(trainer, step)
            with trainer.noise.active(step, 0.3):
                assert_recorded(trainer, batch, log_probs(trainer, batch))
    assert RecordedGraph.replays > 8
    assert len(managers) == 1


def test_graphs_are_captured_again_when_noise_sets_in(captured, managers):
    trainer = captured(aqn_num_stages=2, aqn_sigma_start=0.3, aqn_sigma_end=0.3)
    trainer.train()
    assert len(managers) == 2
    assert logged(trainer, "aqn/n_modules") == {1: 0, 2: 0, 3: 5, 4: 5}


def test_graphs_are_captured_again_when_weights_have_moved(captured, managers):
    trainer = captured(aqn=False)
    for step in (1, 2):
        with trainer.quantization.micro_batch(step):
            batch = rollout(trainer, step)
            assert_recorded(trainer, batch)
        projection = trainer.model.model.layers[0].mlp.down_proj
        projection.weight.data = 2 * projection.weight.data
    assert len(managers) == 2
