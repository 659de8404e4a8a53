# SPDX-License-Identifier: Apache-2.0
"""Mistakes that other projects made with quantization noise: B5 to B8 and B29, one test named after each or two; B1 is
in `tests/rl/test_noise.py`.

Against what users see: options, logged numbers, weights and completions.
"""

import pytest
import torch
from grpo_runs import even_digits, logged, prompts, trainer_factory
from peft import LoraConfig
from same_bits import assert_same, weights
from tiny_models import make_model
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_mxfp4.rl import NormNoise


#: Noise in every rollout, of one size; nothing is learned.
CONSTANT = {"aqn_num_stages": 1, "aqn_sigma_start": 0.05, "aqn_sigma_end": 0.05}
STILL = {"learning_rate": 0.0, "weight_decay": 0.0}


@pytest.fixture
def run(tmp_path):
    return trainer_factory(tmp_path)


def test_b05_weights_are_bit_identical_after_many_noisy_rollouts_and_in_what_is_saved(run, tmp_path):
    trainer = run(max_steps=5, **CONSTANT, **STILL)
    before = weights(trainer.model)
    trainer.train()
    spread = logged(trainer, "aqn/measured_std").values()
    assert len(spread) == 5 and min(spread) > 0.04 and max(spread) < 0.06  # 0.05 * sqrt(5) is 0.11
    assert_same(weights(trainer.model), before)
    trainer.save_model(str(tmp_path / "saved"))
    assert_same(weights(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), before)


def test_b06_trained_norms_keep_their_updates_under_noise(run):
    """A clean copy that is taken once would bring back the norms of the first step at each rollout."""
    at_the_end_of_a_step, in_the_rollout = [], []

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
        assert torch.equal(after, trained) and not torch.equal(after, before)


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
    assert during and seen
    return during, seen


def test_b08_b29_evaluations_do_not_know_of_noise(run, tmp_path):
    noise = {"aqn_num_stages": 1, "aqn_sigma_start": 5.0, "aqn_sigma_end": 5.0}
    assert greedy_evaluation(run, tmp_path / "a", **noise) == greedy_evaluation(run, tmp_path / "b", aqn=False)


def test_b07_bfloat16_norms_feel_noise_far_below_their_resolution():
    model = make_model(hidden=512, intermediate=64, layers=1, dtype=torch.bfloat16)
    norm = model.model.norm
    nn.init.ones_(norm.weight)
    noise = NormNoise(model, seed=0)
    probe = torch.randn(4000, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        clean = norm(probe).double()
        with noise.active(1, 1e-3):
            noisy = norm(probe).double()
    # An addition to the weight would leave 97.6 % of the channels as they were; the outputs here move in all.
    assert ((noisy - clean).abs().sum(dim=0) > 0).double().mean() > 0.99
    assert noise.last_report.measured_std == pytest.approx(1e-3, rel=0.1)
