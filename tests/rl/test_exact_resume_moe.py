# SPDX-License-Identifier: Apache-2.0
"""Mixtures of quantized experts: what was trained, noised, corrected and replayed is resumed to the bit."""

import pytest
import torch
from grpo_runs import TOKENIZER, ResumableTrainer, train_plainly, trainer_factory
from moe_models import make_moe
from safetensors import safe_open
from same_bits import assert_same
from transformers import AutoModelForCausalLM, Trainer

from hf_mxfp4 import MXFP4Experts, MXFP4RLConfig
from hf_mxfp4.layers import named_fallback_thresholds


STOCHASTIC = MXFP4RLConfig(
    preset="w4a4g4",
    fprop={"weight": "rceil+stochastic"},
    dgrad={"grad": "rceil+stochastic"},
    wgrad={"grad": "rceil+stochastic", "rotation": "random-16"},
)
RUN = {
    "max_steps": 6,
    "save_strategy": "steps",
    "lr_scheduler_type": "linear",
    "learning_rate": 3e-3,
    "error_every": 2,
    "router_every": 2,
    "router_replay": True,
    "aqn_num_stages": 3,
}
#: A checkpoint in the middle of a rollout's steps, with accumulated gradients.
REUSED = {
    "num_iterations": 2,
    "steps_per_generation": 4,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 4,
}
CASES = {
    "stochastic": (STOCHASTIC, 3, {}),
    "stochastic, inside a rollout's steps": (STOCHASTIC, 3, REUSED),
    "selective fallback, checkpointing": (
        MXFP4RLConfig(outlier_fallback_rate=0.2),
        2,
        {"gradient_checkpointing": True, "max_steps": 4},
    ),
}
SLOW = ("stochastic", "selective fallback, checkpointing")
TIMES = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "step_time", "total_flos")


@pytest.fixture
def base(tmp_path):
    make_moe().save_pretrained(tmp_path / "moe")
    TOKENIZER.save_pretrained(tmp_path / "moe")
    return tmp_path / "moe"


@pytest.fixture
def build(tmp_path, base):
    factory = trainer_factory(tmp_path)

    def make(scheme, **options):
        policy = AutoModelForCausalLM.from_pretrained(base, quantization_config=scheme)
        return factory(policy=policy, **{**RUN, **options})

    return make


def everything(trainer):
    """Weights, optimizer, thresholds, logs, callbacks and random states of a trainer."""
    logs = [{k: v for k, v in entry.items() if k not in TIMES} for entry in trainer.state.log_history]
    return {
        "weights": dict(trainer.model.state_dict()),
        "optimizer": trainer.optimizer.state_dict(),
        "thresholds": {n: t.state_dict() for n, t in named_fallback_thresholds(trainer.model).items()},
        "logs": logs,
        "errors": trainer.error_callback and trainer.error_callback.history,
        "random": torch.get_rng_state(),
    }


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.large if c in SLOW else ()) for c in CASES])
def test_train_stop_resume_is_train(build, tmp_path, case):
    scheme, step, options = CASES[case]
    whole = build(scheme, save_steps=step, **options)
    assert sum(isinstance(module, MXFP4Experts) for module in whole.model.modules()) == 2
    before = {name: weight.clone() for name, weight in whole.model.state_dict().items()}
    whole.train()
    expected = everything(whole)
    after = expected["weights"]
    assert not any(torch.equal(before[name], after[name]) for name in after if "experts" in name or "gate" in name)
    assert [log["router_replay/coverage"] for log in expected["logs"] if "loss" in log] == [1.0] * whole.args.max_steps
    assert any(log.get("router_replay/changed", 0) > 0 for log in expected["logs"])
    assert any(log.get("sampling/importance_sampling_ratio/max", 1) > 1 for log in expected["logs"])
    assert len(expected["thresholds"]) == (0 if scheme is STOCHASTIC else 12)  # 4 linears and 2 projections a layer
    resumed = build(scheme, save_steps=step, output_dir=str(tmp_path / "resumed"), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
    assert_same(everything(resumed), expected)
    later = [entry for entry in whole.router_callback.history if entry["step"] > step]
    assert resumed.router_callback.history == later and len(later) >= 2


def test_rollouts_without_kept_copies_have_the_same_bits(build, tmp_path):
    """Of weights too that are rounded stochastically: once a step, however often they are quantized."""
    kept = build(STOCHASTIC, max_steps=2, aqn_num_stages=2, save_strategy="no")
    kept.train()
    none = build(STOCHASTIC, max_steps=2, aqn_num_stages=2, save_strategy="no", cache_rollout_weights=False)
    none.train()
    assert_same(everything(none), everything(kept))


@pytest.mark.parametrize(("cached", "times"), [(True, 1), (False, 4)])
def test_how_often_a_rollout_quantizes_the_experts(build, monkeypatch, cached, times):
    """For each of four tokens, or once."""
    import hf_mxfp4.gemm.operands as module

    trainer = build(MXFP4RLConfig(), max_steps=1, save_strategy="no", cache_rollout_weights=cached, aqn=False)
    trainer.generation_config.eos_token_id = None
    calls, quantize, generate = [], module.weight_operand, trainer._generate
    monkeypatch.setattr(module, "weight_operand", lambda *args: calls.append(args[0].shape) or quantize(*args))
    counts = []

    def counted(prompts):
        calls.clear()
        output = generate(prompts)
        counts.append(sum(len(shape) == 3 for shape in calls))  # not those of attention
        return output

    trainer._generate = counted
    trainer.train()
    assert counts == [times * 2 * 2]  # layers, projections


# ---- with any Trainer -----------------------------------------------------------------------------------------------


@pytest.fixture
def train(tmp_path, base):
    def run(cls, out, resume=None):
        return train_plainly(cls, base, STOCHASTIC, tmp_path / out, resume and tmp_path / resume)

    return run


def test_quantized_experts_are_restored_by_any_trainer(train, tmp_path):
    whole = train(ResumableTrainer, "run")
    resumed = train(ResumableTrainer, "resumed", resume="run/checkpoint-2")
    assert_same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4")
    assert sum(isinstance(module, MXFP4Experts) for module in loaded.modules()) == 2
    assert_same(dict(loaded.state_dict()), dict(whole.model.state_dict()))
    whole.save_model(str(tmp_path / "final"))
    with safe_open(tmp_path / "final" / "model.safetensors", "pt") as file:
        assert file.get_tensor("model.layers.1.mlp.experts.5.gate_proj.weight").shape == (32, 32)


def test_a_checkpoint_without_the_quantized_experts_is_refused(train):
    train(Trainer, "plain")
    with pytest.raises(ValueError, match=r"no weights for 4 parameters .*mlp\.experts\.gate_up_proj"):
        train(ResumableTrainer, "resumed", resume="plain/checkpoint-2")
