# SPDX-License-Identifier: Apache-2.0
"""Mistakes that other projects made with fake quantization and with quantization noise, tested against what users see:
options, logged numbers, weights and completions."""

import multiprocessing
import threading
from functools import partial

import pytest
import torch
from grpo_runs import even_digits, logged, prompts, quantized, trainer_factory
from peft import LoraConfig
from same_bits import IDS, assert_same, logits, weights
from tiny_models import make_model
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.rl import NormNoise


@pytest.fixture
def run(tmp_path):
    return trainer_factory(tmp_path)


def failing(model):
    model.lm_head.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(IDS)


def generating(model):
    model.generate(IDS[:, :4], max_new_tokens=3, do_sample=False)


def checkpointed_backward(model, reentrant=False):
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    "use",
    [logits, generating, failing, partial(checkpointed_backward, reentrant=True), checkpointed_backward],
    ids=["no_grad", "generate", "exception", "reentrant checkpointing", "checkpointing"],
)
def test_masters_are_bit_identical_after(use):
    model = quantized()
    before = weights(model)
    use(model)
    assert_same(weights(model), before)


#: Noise in every rollout, of one size; nothing is learned.
CONSTANT = {"aqn_num_stages": 1, "aqn_sigma_start": 0.05, "aqn_sigma_end": 0.05}
STILL = {"learning_rate": 0.0, "weight_decay": 0.0}


def test_weights_are_bit_identical_after_many_noisy_rollouts_and_in_what_is_saved(run, tmp_path):
    trainer = run(max_steps=5, **CONSTANT, **STILL)
    before = weights(trainer.model)
    trainer.train()
    spread = list(logged(trainer, "aqn/measured_std").values())
    assert spread == pytest.approx([0.05] * 5, abs=0.01)  # noise that adds up would have 0.05 * sqrt(5)
    assert_same(weights(trainer.model), before)
    trainer.save_model(str(tmp_path / "saved"))
    assert_same(weights(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), before)


def test_trained_norms_keep_their_updates_under_noise(run):
    """A clean copy that is taken once would bring back the norms of the first step at each rollout."""
    at_the_end_of_a_step = []
    in_the_rollout = []

    def norms():
        return torch.stack([p.detach().clone() for n, p in trainer.model.named_parameters() if "modules_to_save" in n])

    class AfterStep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            at_the_end_of_a_step.append(norms())

    def reward(completions, **kwargs):
        in_the_rollout.append(norms())
        return even_digits(completions)

    lora = LoraConfig(target_modules="all-linear", r=2, modules_to_save=["input_layernorm", "post_attention_layernorm"])
    trainer = run(reward, peft_config=lora, max_steps=3, callbacks=[AfterStep()], **CONSTANT)
    trainer.train()
    assert logged(trainer, "aqn/n_modules") == {1: 5, 2: 5, 3: 5}
    assert len(in_the_rollout[0]) == 4
    for before, after, trained in zip(in_the_rollout, in_the_rollout[1:], at_the_end_of_a_step, strict=False):
        assert torch.equal(after, trained)
        assert not torch.equal(after, before)


def greedy_evaluation(run, folder, **options):
    """Completions that an evaluation in the middle of a run and one after it gave to the reward function."""
    seen = []

    def reward(completions, answer, **kwargs):
        seen.extend(completions if answer[0] == "evaluated" else [])
        return even_digits(completions)

    rows = prompts(4).map(lambda row: {"prompt": f"9{row['prompt']}", "answer": "evaluated"})
    trainer = run(
        reward, eval_dataset=rows, output_dir=str(folder), max_steps=2, eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=4, generation_kwargs={"do_sample": False}, **STILL, **options,
    )  # fmt: skip
    trainer.train()
    during = list(seen)
    seen.clear()
    trainer.evaluate()
    assert during
    assert seen
    return during, seen


def test_evaluations_do_not_know_of_noise(run, tmp_path):
    noise = {"aqn_num_stages": 1, "aqn_sigma_start": 5.0, "aqn_sigma_end": 5.0}
    assert greedy_evaluation(run, tmp_path / "a", **noise) == greedy_evaluation(run, tmp_path / "b", aqn=False)


def test_what_touched_nothing_is_an_error_and_not_a_result():
    """Here the counts come from where the work is done: layers that ran, norms that ran."""
    with pytest.raises(ValueError, match="matches no layer"):
        quantize_linears(nn.Sequential(nn.ReLU()), MXFP4RLConfig())
    noise = NormNoise(make_model(), seed=0)
    with pytest.raises(RuntimeError, match="reached none of 5 norms"), noise.active(0, 0.1):
        make_model()(torch.tensor([[2, 3]]))  # another copy of the model, as in another process


def test_a_run_without_a_tracker_ends_and_leaves_nothing_running(run):
    before = set(threading.enumerate())
    trainer = run(even_digits, max_steps=1, report_to="none", logging_strategy="no")
    trainer.train()
    assert trainer.state.global_step == 1
    assert not multiprocessing.active_children()
    assert not [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
