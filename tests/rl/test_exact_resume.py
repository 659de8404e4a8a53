# SPDX-License-Identifier: Apache-2.0
"""A resumed run has the bits of one that was never stopped."""

import json
import shutil

import pytest
import torch
from grpo_runs import MEASURED, RANDOM, even_digits, everything, prompts, quantized, trainer_factory
from grpo_runs import mixture as make_mixture
from peft import LoraConfig
from same_bits import assert_same, weights
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.rl import ExactResumeMixin


#: Eight steps are two epochs of four.
RUN = {"max_steps": 8, "save_strategy": "steps", "lr_scheduler_type": "linear", "learning_rate": 3e-3, "error_every": 2}
SCHEMES = {
    "default": MXFP4RLConfig(),
    "random": MXFP4RLConfig(**RANDOM),
    "lora": MXFP4RLConfig(mode="packed", preset="w4a4"),
}

#: A checkpoint in the middle of a rollout's steps, with accumulated gradients.
REUSED = {"num_iterations": 2, "steps_per_generation": 4}
REUSED |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
#: Mixtures of quantized experts: what was trained, noised, corrected and replayed.
MIXTURE = {"mixture": True, "router_replay": True, "aqn_num_stages": 3}
#: Scheme, step of the checkpoint, options.
CASES = {
    "in the second epoch and between two logs": ("default", 7, {"logging_steps": 2}),
    "packed weights and LoRA": ("lora", 2, {"max_steps": 4}),
    "inside a rollout's steps": ("random", 3, {**MIXTURE, **REUSED, "max_steps": 5}),
    "between rollouts": ("random", 3, {**MIXTURE, "max_steps": 6}),
    "checkpointing": ("default", 2, {**MIXTURE, "gradient_checkpointing": True, "max_steps": 4}),
}
LARGE = ("between rollouts", "checkpointing")


class StreamTrainer(ExactResumeMixin, Trainer):
    """A Trainer with exact resume."""


def builder(folder):
    """`make(scheme, **options)` makes a trainer that writes below ``folder``, of a mixture of experts if wanted."""
    factory = trainer_factory(folder)

    def make(scheme="default", mixture=False, **options):
        options = {**RUN, **options}
        if scheme == "lora":
            options["peft_config"] = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)
        if mixture:
            options["policy"] = make_mixture(folder / "moe", SCHEMES[scheme], num_hidden_layers=1)
        return factory(scheme=SCHEMES[scheme], **options)

    return make


@pytest.fixture
def build(tmp_path):
    return builder(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The end of a run that was never stopped, and its folder, with a checkpoint every 2 steps."""
    root = tmp_path_factory.mktemp("whole")
    trainer = builder(root)(save_steps=2, **MEASURED)
    trainer.train()
    expected = everything(trainer)
    return expected, root / "run"


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.large if c in LARGE else ()) for c in CASES])
def test_train_stop_resume_is_train(build, tmp_path, case):
    scheme, step, options = CASES[case]
    whole = build(scheme, save_steps=step, **options)
    before = weights(whole.model)
    whole.train()
    expected = everything(whole)
    assert whole.state.global_step == options.get("max_steps", 8)
    assert any(entry.get("aqn/sigma", 0) > 0 for entry in whole.state.log_history)
    if "mixture" in options:
        routed = [name for name in before if "experts" in name or "gate" in name]
        assert routed
        assert not any(torch.equal(before[name], expected["weights"][name]) for name in routed)
        coverage = [log["router_replay/coverage"] for log in expected["logs"] if "loss" in log]
        assert coverage == [1.0] * whole.args.max_steps
        assert any(log.get("router_replay/changed", 0) > 0 for log in expected["logs"])
        assert any(log.get("sampling/importance_sampling_ratio/max", 1) > 1 for log in expected["logs"])
    resumed = build(scheme, save_steps=step, output_dir=str(tmp_path / "resumed"), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
    assert_same(everything(resumed), expected)


@pytest.mark.parametrize("shards", [1, 2])
def test_streams_resume_in_their_epoch(build, tmp_path, shards):
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.append(prompts)
        return even_digits(completions)

    def trainer(**options):
        stream = prompts(6).to_iterable_dataset(num_shards=shards)
        return build(reward=reward, dataset=stream, max_steps=7, save_steps=5, **options)

    whole = trainer()
    whole.train()
    rollouts = [*seen]
    seen.clear()
    resumed = trainer(output_dir=str(tmp_path / "resumed"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert len({tuple(rollout) for rollout in rollouts[:3]}) == 3  # an epoch
    assert seen == rollouts[5:]
    assert_same(everything(resumed), everything(whole))


def test_streams_that_cannot_tell_their_position_warn(tmp_path, capsys):
    class Tokens(IterableDataset):
        def __iter__(self):
            return ({"input_ids": [i, 1, 2], "labels": [i, 1, 2]} for i in range(4))

    def trainer(**options):
        settings = {"max_steps": 6, "per_device_train_batch_size": 2, "save_steps": 3, "report_to": "none"}
        settings |= {"use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2}
        arguments = TrainingArguments(str(tmp_path / "run"), **settings)
        return StreamTrainer(quantized(layers=1), arguments, train_dataset=Tokens())

    whole = trainer()
    whole.train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert "Tokens is read again from the beginning of an epoch (1), and 1 steps are skipped" in capsys.readouterr().err
    assert_same(weights(resumed.model), weights(whole.model))


def test_another_split_of_rollouts_starts_them_anew(build, tmp_path, capsys):
    """The micro-batches of the checkpoint are those of another number of optimizer steps."""
    options = {"num_iterations": 2, "per_device_train_batch_size": 4}
    build(steps_per_generation=2, max_steps=3, save_steps=3, **options).train()
    checkpoint = tmp_path / "run" / "checkpoint-3"
    for steps in (1, 4):  # shorter, and longer
        out = str(tmp_path / f"resumed{steps}")
        resumed = build(steps_per_generation=steps, max_steps=5, output_dir=out, **options)
        capsys.readouterr()
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert f"is resumed with {{'steps_per_generation': {steps}, 'num_iterations': 2" in capsys.readouterr().err
        assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry] == [1, 2, 3, 4, 5]


def test_the_newest_complete_checkpoint_is_taken(build, whole, tmp_path, capsys):
    expected, folder = whole
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "checkpoint-8" / "trainer_state.json").unlink()
    optimizer = tmp_path / "run" / "checkpoint-6" / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:-1])
    capsys.readouterr()
    resumed = build(save_steps=2)
    resumed.train(resume_from_checkpoint=True)
    messages = capsys.readouterr().err
    assert "checkpoint-8 is not resumed from: it has no trainer_state.json" in messages
    assert "checkpoint-6 is not resumed from: optimizer.pt: it has" in messages
    assert_same(everything(resumed)["weights"], expected["weights"])
    for step in (2, 4, 6, 8):  # those that were cut short are written anew
        state = json.loads((tmp_path / "run" / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["global_step"] == step


def test_an_incomplete_checkpoint_is_refused_by_name(build, whole, tmp_path):
    folder = shutil.copytree(whole[1] / "checkpoint-2", tmp_path / "checkpoint-2")
    (folder / "scheduler.pt").unlink()
    with pytest.raises(ValueError, match="cannot be resumed from: scheduler.pt: it is missing"):
        build().train(resume_from_checkpoint=str(folder))
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        build().train(resume_from_checkpoint=True)


def test_a_flipped_byte_is_refused(build, whole, tmp_path):
    folder = shutil.copytree(whole[1] / "checkpoint-2", tmp_path / "checkpoint-2")
    file = folder / "mxfp4_state_0.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="cannot be resumed from: mxfp4_state_0.pt was changed"):
        build().train(resume_from_checkpoint=str(folder))


def test_an_update_that_is_not_finite_is_not_made(build, tmp_path, capsys):
    options = {"max_steps": 4, "use_adaptive_entropy": True, "entropy_coef": 0.25, "entropy_coef_delta": 0.125}
    options |= {"entropy_target": 10.0}  # which is never reached
    trainer = build(**options)

    def spoil(gradient):
        if trainer.state.global_step == 2:
            gradient.view(-1)[0] = float("inf")
        return gradient

    trainer.model.model.norm.weight.register_hook(spoil)
    with pytest.raises(FloatingPointError, match="gradient of step 3 holds NaN or infinity"):
        trainer.train()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert "saved as" in capsys.readouterr().err
    resumed = build(**options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert resumed.entropy_coef == 0.25 + 4 * 0.125  # TRL raises it before the update that is not made


def test_weights_that_are_not_finite_are_not_saved(build, tmp_path):
    trainer = build(max_steps=1, save_steps=1)
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match="step 0: model.norm.weight holds NaN or infinity"):
        trainer._save_checkpoint(trainer.model, trial=None)
    assert not list((tmp_path / "run").glob("checkpoint-*"))
