# SPDX-License-Identifier: Apache-2.0
"""A resumed run has the bits of one that was never stopped."""

import functools
import json
import shutil

import pytest
import torch
from grpo_runs import ResumableTrainer, even_digits, train_plainly, trainer_factory
from peft import LoraConfig, get_peft_model
from same_bits import assert_same
from tiny_models import make_model
from transformers import AutoModelForCausalLM, Trainer

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.layers import named_fallback_thresholds
from hf_mxfp4.rl import RewardError
from hf_mxfp4.rl.resume.state import missing_parameters


#: Eight steps are two epochs of four.
RUN = {"max_steps": 8, "save_strategy": "steps", "lr_scheduler_type": "linear", "learning_rate": 3e-3}
TIMES = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "step_time", "total_flos")

SCHEMES = {
    "w4a4": MXFP4RLConfig(),
    "random": MXFP4RLConfig(
        preset="w4a4g4",
        fprop={"weight": "rceil+stochastic"},
        dgrad={"grad": "rceil+stochastic"},
        wgrad={"grad": "rceil+stochastic", "rotation": "random-16"},
    ),
    "fallback": MXFP4RLConfig(outlier_fallback_rate=0.2),
    "lora": MXFP4RLConfig(mode="packed", preset="w4a4", outlier_fallback=0.5, outlier_fallback_rate=0.2),
}

CASES = {
    "in the second epoch and between two logs": ("w4a4", 7, {"logging_steps": 2}),
    "inside a rollout's steps": (
        "w4a4",
        3,
        {
            "num_iterations": 2,
            "steps_per_generation": 4,
            "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": 4,
        },
    ),
    "stochastic rounding and random rotation": ("random", 3, {}),
    "fallback thresholds": ("fallback", 2, {"gradient_checkpointing": True, "max_steps": 4}),
    "packed weights and LoRA": ("lora", 5, {}),
}


def lora_policy(base):
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=SCHEMES["lora"])
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4))


def builder(folder):
    """`make(scheme, **options)` makes a trainer that writes below ``folder``."""
    factory = trainer_factory(folder)

    def make(scheme="w4a4", **options):
        if scheme == "lora":
            factory(**RUN)  # writes the base
            return factory(policy=lora_policy(folder / "base"), **{**RUN, **options})
        return factory(scheme=SCHEMES[scheme], **{**RUN, **options})

    return make


@pytest.fixture
def build(tmp_path):
    return builder(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The end of a run that was never stopped, and its folder, with a checkpoint every 2 steps."""
    root = tmp_path_factory.mktemp("whole")
    trainer = builder(root)(save_steps=2)
    trainer.train()
    return everything(trainer), root / "run"


def everything(trainer):
    """Weights, optimizer, schedule, thresholds, logs and callbacks of a trainer."""
    # Trainer's mean loss since the last log starts anew where a run is resumed; with a log each step it is exact.
    left_out = (*TIMES, *(["loss"] if trainer.args.logging_steps > 1 else []))
    logs = [{k: v for k, v in entry.items() if k not in left_out} for entry in trainer.state.log_history]
    return {
        "weights": dict(trainer.model.state_dict()),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "thresholds": {n: t.state_dict() for n, t in named_fallback_thresholds(trainer.model).items()},
        "logs": logs,
        "callbacks": [c.state_dict() for c in (trainer.entropy_callback, trainer.error_callback) if c is not None],
        "random": torch.get_rng_state(),
    }


@pytest.mark.parametrize("case", CASES)
def test_train_stop_resume_is_train(build, tmp_path, case):
    scheme, step, options = CASES[case]
    whole = build(scheme, save_steps=step, **options)
    whole.train()
    expected = everything(whole)
    assert whole.state.global_step == options.get("max_steps", 8)
    if scheme in ("fallback", "lora"):
        assert len(expected["thresholds"]) == 14
        assert all(state["value"] > 0 for state in expected["thresholds"].values())
    resumed = build(scheme, save_steps=step, output_dir=str(tmp_path / "resumed"), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
    assert_same(everything(resumed), expected)


@pytest.mark.parametrize("step", [2, 4], ids=["inside an epoch", "between epochs"])
def test_train_stop_resume_is_train_without_the_rest_of_the_folder(build, whole, step):
    expected, folder = whole
    resumed = build(save_strategy="no")
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert_same(everything(resumed), expected)


def test_a_finished_run_is_not_trained_further(build, tmp_path):
    """In the middle of an epoch; the next one is at the end of one."""
    finished = build(max_steps=3, save_steps=3)
    finished.train()
    resumed = build(max_steps=3, output_dir=str(tmp_path / "resumed"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert resumed.state.global_step == 3
    assert_same(everything(resumed)["weights"], everything(finished)["weights"])


def test_a_run_that_finished_with_an_epoch_is_not_trained_further(build, whole):
    expected, folder = whole
    resumed = build()
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-8"))
    assert resumed.state.global_step == 8
    assert_same(everything(resumed)["weights"], expected["weights"])


def test_what_would_not_be_exact_without_the_state_of_the_process(build, tmp_path):
    """The same resume with a checkpoint that lacks it, as other trainers write: other rollouts, other weights."""
    options = {"num_iterations": 2, "save_steps": 3}
    whole = build(**options)
    whole.train()
    checkpoint = tmp_path / "run" / "checkpoint-3"
    for name in ("mxfp4_manifest.json", "mxfp4_state_0.pt"):
        (checkpoint / name).unlink()
    resumed = build(output_dir=str(tmp_path / "resumed"), **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert any(not torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


def test_a_run_that_failed_is_continued_as_if_it_had_not(tmp_path):
    factory = trainer_factory(tmp_path)
    options = {**RUN, "num_iterations": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}

    def train(folder, resume=None, fails_at=None):
        def even_digits_drawing(completions, trainer_state, **kwargs):
            torch.rand(len(completions))  # a reward function may draw numbers
            if trainer_state.global_step == fails_at:
                raise KeyError("answer")
            return even_digits(completions)

        trainer = factory(even_digits_drawing, scheme=SCHEMES["w4a4"], output_dir=str(tmp_path / folder), **options)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = train("whole")
    with pytest.raises(RewardError):
        train("failing", fails_at=6)
    assert [path.name for path in (tmp_path / "failing").glob("checkpoint-*")] == ["checkpoint-6"]
    assert_same(everything(train("failing", resume=True)), everything(whole))


@pytest.mark.parametrize("steps", [1, 4], ids=["shorter", "longer"])
def test_another_split_of_rollouts_starts_them_anew(build, tmp_path, steps, capsys):
    """The micro-batches of the checkpoint are those of another number of optimizer steps."""
    options = {"num_iterations": 2, "per_device_train_batch_size": 4}
    build(steps_per_generation=2, max_steps=3, save_steps=3, **options).train()
    checkpoint = tmp_path / "run" / "checkpoint-3"
    resumed = build(steps_per_generation=steps, max_steps=6, output_dir=str(tmp_path / "resumed"), **options)
    capsys.readouterr()
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert f"is resumed with steps_per_generation={steps}, num_iterations=2" in capsys.readouterr().err
    assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    # Checkpoints from before the split was kept have the one that they are resumed with.
    state = torch.load(checkpoint / "mxfp4_state_0.pt", weights_only=True)
    assert state["rollouts"].pop("split") == {**resumed.checkpoints.batch_split(), "steps_per_generation": 2}
    resumed._load_process_state(state, exact=True)
    assert resumed._step == 3 and len(resumed._buffered_inputs) == 2


def test_an_interrupted_update_is_not_saved(build, tmp_path, capsys):
    trainer = build()
    step = torch.optim.AdamW.step

    def interrupted(self, *args, **kwargs):
        if trainer.state.global_step == 2:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.optim.AdamW, "step", interrupted)
        trainer.train()
    assert "the weights are half-updated" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("checkpoint-*"))


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
    assert "checkpoint-6 is not resumed from: optimizer.pt has" in messages
    assert_same(everything(resumed)["weights"], expected["weights"])
    for step in (2, 4, 6, 8):  # those that were cut short are written anew
        state = json.loads((tmp_path / "run" / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["global_step"] == step


def test_an_incomplete_checkpoint_is_refused_by_name(build, whole, tmp_path):
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(whole[1] / "checkpoint-2", folder)
    (folder / "scheduler.pt").unlink()
    with pytest.raises(ValueError, match="checkpoint-2 cannot be resumed from: scheduler.pt is missing"):
        build().train(resume_from_checkpoint=str(folder))


def test_without_a_checkpoint_there_is_nothing_to_resume(build):
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        build().train(resume_from_checkpoint=True)


def test_another_scheme_is_refused(build, whole):
    with pytest.raises(ValueError, match="thresholds of 0 layers and the model 14 layers"):
        build("fallback").train(resume_from_checkpoint=str(whole[1] / "checkpoint-2"))


# ---- fused experts, with any Trainer --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def train_experts(tmp_path_factory):
    """`train(cls, out, resume)` gives a trainer after a run, of which those that start anew are trained once."""
    root = tmp_path_factory.mktemp("experts")
    base = root / "moe"
    make_model("qwen3_moe", hidden=32).save_pretrained(base)

    @functools.cache
    def train(cls, out, resume=None):
        scheme = MXFP4RLConfig(modules_to_not_convert=["experts"])
        return train_plainly(cls, base, scheme, root / out, resume and root / resume)

    train.root = root
    return train


def test_experts_are_restored(train_experts):
    whole = train_experts(ResumableTrainer, "run")
    experts = [n for n, _ in whole.model.named_parameters() if "experts" in n]
    assert len(experts) == 4
    resumed = train_experts(ResumableTrainer, "resumed", resume="run/checkpoint-2")
    assert_same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
    loaded = AutoModelForCausalLM.from_pretrained(train_experts.root / "run" / "checkpoint-4")
    assert_same(dict(loaded.state_dict()), dict(whole.model.state_dict()))


def test_a_final_save_has_the_names_of_the_hub(train_experts, tmp_path):
    trainer = train_experts(ResumableTrainer, "run")
    trainer.save_model(str(tmp_path / "final"))
    from safetensors import safe_open

    with safe_open(tmp_path / "final" / "model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.experts.0.gate_proj.weight" in file.keys()


def test_a_checkpoint_without_the_experts_is_refused(train_experts):
    train_experts(Trainer, "plain")
    with pytest.raises(ValueError, match=r"no weights for 4 parameters .*mlp\.experts\.gate_up_proj"):
        train_experts(ResumableTrainer, "resumed", resume="plain/checkpoint-2")


def test_tied_weights_are_not_missing():
    model = make_model(tie=True)
    assert missing_parameters(model, ["lm_head.weight"]) == []
    assert missing_parameters(model, ["lm_head.weight", "model.embed_tokens.weight"]) != []
    assert missing_parameters(model, ["model.norm.weight"]) == ["model.norm.weight"]
