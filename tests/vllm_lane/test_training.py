# SPDX-License-Identifier: Apache-2.0
"""GRPO with TRL's colocated vLLM: before every generation, the engine holds what the scheme makes of the policy."""

from dataclasses import dataclass, field

import harness
import pytest
import torch
import trl.generation.vllm_generation as generation
from grpo_runs import TOKENIZER, logged, prompts, trainer_factory
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.layers import trainable_matrices
from hf_mxfp4.rl.noise.targets import plain_name


pytestmark = pytest.mark.vllm

LORA = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")


@pytest.fixture(autouse=True)
def float32_engine(monkeypatch):
    """TRL says no dtype, and vLLM then computes float32 checkpoints in bfloat16."""
    make = generation.LLM
    options = {"dtype": "float32", "enforce_eager": True, "disable_log_stats": True}
    monkeypatch.setattr(generation, "LLM", lambda **given: make(**{**given, **options}))
    yield
    harness.give_back()


def checkpoint(folder, family="qwen2", scheme=None, **options):
    """A folder with a random model: in full precision, or as a policy of ``scheme`` is saved."""
    harness.tiny_model(family, **options).save_pretrained(folder)
    if scheme is not None:
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=scheme).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def colocated(tmp_path, policy, **options):
    settings = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 64,
        "vllm_gpu_memory_utilization": 0.1,
        "max_steps": 2,
        "aqn_num_stages": 2,
    }
    return trainer_factory(tmp_path)(policy=policy, **{**settings, **options})


@dataclass
class Look:
    """What was inside vLLM before one generation.

    Attributes:
        is_training: whether that was a rollout to train on.
        wrong: quantized weights that were not those of the policy, of ``quantized`` in number.
        noise: the standard deviation of what norms had beside their weights.
    """

    is_training: bool
    wrong: list[str] = field(default_factory=list)
    quantized: int = 0
    noise: float = 0.0


def looked_at(trainer):
    """The list of a [`Look`] before each generation of a run, which is to be filled."""
    engine, looks = trainer.vllm_generation, []
    generate = engine.generate

    def looking(*arguments, **options):
        inside = weights_inside(trainer)
        found = Look(trainer.model.training)
        for name, value in expected_codes(trainer.model).items():
            found.quantized += 1
            found.wrong += [] if torch.equal(inside[name], value) else [name]
        own = {plain_name(name): parameter for name, parameter in trainer.model.named_parameters()}
        change = [inside[name] - value.detach() for name, value in own.items() if name.endswith("norm.weight")]
        found.noise = torch.cat(change).std().item()
        looks.append(found)
        return generate(*arguments, **options)

    engine.generate = looking
    return looks


def expected_codes(model):
    """Codes and scales of a policy's trainable layers, by their names in checkpoints."""
    found = {}
    for matrix in trainable_matrices(model):
        if matrix.expert in (None, 0):
            packed = matrix.packed_values(getattr(matrix.layer, matrix.parameter))
            found.update({f"{plain_name(matrix.full_name)}{suffix}": value for suffix, value in packed.items()})
    return found


def weights_inside(trainer):
    return harness.served_weights(harness.served_model(trainer.vllm_generation.llm))


def test_qat(tmp_path):
    """From a checkpoint in full precision: 4 bits inside, and noise on norms while it samples to train."""
    scheme = MXFP4RLConfig(preset="w4a16")
    policy = AutoModelForCausalLM.from_pretrained(checkpoint(tmp_path / "full"), quantization_config=scheme)
    noise = {"aqn_schedule": "constant", "aqn_sigma_start": 0.02, "eval_strategy": "steps", "eval_steps": 1}
    trainer = colocated(tmp_path, policy, eval_dataset=prompts(4), **noise)
    looks = looked_at(trainer)
    trainer.train()
    print(looks)
    print(trainer.state.log_history)
    assert [look.wrong for look in looks] == [[]] * len(looks)
