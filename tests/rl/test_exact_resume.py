# SPDX-License-Identifier: Apache-2.0
"""A resumed run has the bits of one that was never stopped."""

import json
import shutil

import pytest
import torch
from grpo_runs import MEASURED, TOKENIZER, everything, trainer_factory
from moe_models import make_moe
from peft import LoraConfig, get_peft_model
from same_bits import assert_same
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4Experts, MXFP4RLConfig


#: Eight steps are two epochs of four.
RUN = {"max_steps": 8, "save_strategy": "steps", "lr_scheduler_type": "linear", "learning_rate": 3e-3, "error_every": 2}
RANDOM = {
    "preset": "w4a4g4",
    "fprop": {"weight": "rceil+stochastic"},
    "dgrad": {"grad": "rceil+stochastic"},
    "wgrad": {"grad": "rceil+stochastic", "rotation": "random-16"},
}
SCHEMES = {
    "w4a4": MXFP4RLConfig(),
    "random": MXFP4RLConfig(**RANDOM),
    "lora": MXFP4RLConfig(mode="packed", preset="w4a4"),
}

#: A checkpoint in the middle of a rollout's steps, with accumulated gradients.
REUSED = {"num_iterations": 2, "steps_per_generation": 4}
REUSED |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
#: Scheme, step of the checkpoint, options.
CASES = {
    "in the second epoch and between two logs": ("w4a4", 7, {"logging_steps": 2}),
    "packed weights and LoRA": ("lora", 2, {"max_steps": 4}),
}
#: Mixtures of quantized experts: what was trained, noised, corrected and replayed.
MIXTURE = {"router_replay": True, "aqn_num_stages": 3}
MIXTURES = {
    "inside a rollout's steps": ("random", 3, {**REUSED, "max_steps": 5}),
    "between rollouts": ("random", 3, {"max_steps": 6}),
    "checkpointing": ("w4a4", 2, {"gradient_checkpointing": True, "max_steps": 4}),
}


def lora_policy(base):
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=SCHEMES["lora"])
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4))


def builder(folder):
    """`make(scheme, **options)` makes a trainer that writes below ``folder``, of a mixture of experts if wanted."""
    factory = trainer_factory(folder)

    def make(scheme="w4a4", mixture=False, **options):
        options = {**RUN, **(MIXTURE if mixture else {}), **options}
        if scheme == "lora":
            factory(**RUN)  # writes the base
            options["policy"] = lora_policy(folder / "base")
        if mixture:
            moe = save_mixture(folder)
            options["policy"] = AutoModelForCausalLM.from_pretrained(moe, quantization_config=SCHEMES[scheme])
        return factory(scheme=SCHEMES[scheme], **options)

    return make


def save_mixture(folder):
    if not (folder / "moe").exists():
        make_moe(num_hidden_layers=1).save_pretrained(folder / "moe")
        TOKENIZER.save_pretrained(folder / "moe")
    return folder / "moe"


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


@pytest.mark.parametrize("case", CASES)
def test_train_stop_resume_is_train(build, tmp_path, case):
    scheme, step, options = CASES[case]
    whole = build(scheme, save_steps=step, **options)
    whole.train()
    expected = everything(whole)
    assert whole.state.global_step == options.get("max_steps", 8)
    assert any(entry.get("aqn/sigma", 0) > 0 for entry in whole.state.log_history)
    resumed = build(scheme, save_steps=step, output_dir=str(tmp_path / "resumed"), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
    assert_same(everything(resumed), expected)


def test_a_finished_run_is_not_trained_further(build, tmp_path):
    """In the middle of an epoch; the next one is at the end of one."""
    finished = build(max_steps=3, save_steps=3)
    finished.train()
    resumed = build(max_steps=3, output_dir=str(tmp_path / "resumed"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert resumed.state.global_step == 3
    assert_same(everything(resumed)["weights"], everything(finished)["weights"])


def test_another_split_of_rollouts_starts_them_anew(build, tmp_path, capsys):
    """The micro-batches of the checkpoint are those of another number of optimizer steps."""
    options = {"num_iterations": 2, "per_device_train_batch_size": 4}
    build(steps_per_generation=2, max_steps=3, save_steps=3, **options).train()
    checkpoint = tmp_path / "run" / "checkpoint-3"
    for steps in (1, 4):  # shorter, and longer
        resumed = build(
            steps_per_generation=steps, max_steps=5, output_dir=str(tmp_path / f"resumed{steps}"), **options
        )
        capsys.readouterr()
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert f"is resumed with {{'steps_per_generation': {steps}, 'num_iterations': 2" in capsys.readouterr().err
        assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry] == [1, 2, 3, 4, 5]


# ---- mixtures of experts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.large if n else ()) for n, c in enumerate(MIXTURES)]
)
def test_mixtures_of_experts_are_resumed_to_the_bit(build, tmp_path, case):
    scheme, step, options = MIXTURES[case]
    whole = build(scheme, mixture=True, save_steps=step, **options)
    assert sum(isinstance(module, MXFP4Experts) for module in whole.model.modules()) == 1
    before = {name: weight.clone() for name, weight in whole.model.state_dict().items()}
    whole.train()
    expected = everything(whole)
    after = expected["weights"]
    assert not any(torch.equal(before[name], after[name]) for name in after if "experts" in name or "gate" in name)
    assert [log["router_replay/coverage"] for log in expected["logs"] if "loss" in log] == [1.0] * whole.args.max_steps
    assert any(log.get("router_replay/changed", 0) > 0 for log in expected["logs"])
    assert any(log.get("sampling/importance_sampling_ratio/max", 1) > 1 for log in expected["logs"])
    resumed = build(scheme, mixture=True, save_steps=step, output_dir=str(tmp_path / "resumed"), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
    assert_same(everything(resumed), expected)


# ---- which checkpoint -----------------------------------------------------------------------------------------------


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
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(whole[1] / "checkpoint-2", folder)
    (folder / "scheduler.pt").unlink()
    for given, message in (
        (str(folder), "checkpoint-2 cannot be resumed from: scheduler.pt: it is missing"),
        (True, "holds no complete checkpoint"),
    ):
        with pytest.raises(ValueError, match=message):
            build().train(resume_from_checkpoint=given)


# ---- values that are not finite --------------------------------------------------------------------------------------


def test_an_update_that_is_not_finite_is_not_made(build, tmp_path, capsys):
    options = {"max_steps": 4, "use_adaptive_entropy": True, "entropy_coef": 0.25, "entropy_coef_delta": 0.125}
    options |= {"entropy_target": 10.0}  # which is never reached
    trainer = build(**options)

    def spoil(gradient):
        if trainer.state.global_step == 2:
            gradient.view(-1)[0] = float("inf")
        return gradient

    trainer.model.model.norm.weight.register_hook(spoil)
    with pytest.raises(FloatingPointError, match="gradient of step 3 holds NaN or infinity.* weights were not changed"):
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
    with pytest.raises(ValueError, match=r"step 0: model.norm.weight holds NaN or infinity, so no checkpoint"):
        trainer._save_checkpoint(trainer.model, trial=None)
    assert not list((tmp_path / "run").glob("checkpoint-*"))
