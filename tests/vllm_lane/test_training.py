# SPDX-License-Identifier: Apache-2.0
"""GRPO with TRL's colocated vLLM: the engine samples from the policy that is trained."""

import harness
import pytest
import torch
import trl.generation.vllm_generation as generation
from grpo_runs import TOKENIZER, logged, trainer_factory
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.adapters import policy_parameters


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


def weights_inside(trainer):
    return harness.served_weights(harness.served_model(trainer.vllm_generation.llm))


def test_lora_on_a_packed_checkpoint(tmp_path):
    """The folder that vLLM reads packed is the policy's too, and takes the weights that are pushed later."""
    harness.tiny_model("qwen2").save_pretrained(tmp_path / "full")
    config = MXFP4RLConfig(mode="packed")
    AutoModelForCausalLM.from_pretrained(tmp_path / "full", quantization_config=config).save_pretrained(
        tmp_path / "packed"
    )
    TOKENIZER.save_pretrained(tmp_path / "packed")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    trainer = colocated(tmp_path, policy, peft_config=LORA, aqn=False)
    before = weights_inside(trainer)
    trainer.train()
    assert len(logged(trainer, "loss")) == 2
    assert max(logged(trainer, "sampling/sampling_logp_difference/max").values()) < 1e-3
    trainer.vllm_generation.sync_weights()
    inside = weights_inside(trainer)
    expected = {name: value.detach() for name, value in policy_parameters(trainer.model)}
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.allclose(inside[name], expected[name], atol=1e-6)
    assert not torch.allclose(inside[name], before[name], atol=1e-6)


def test_a_policy_goes_on_from_its_own_checkpoint(tmp_path):
    """TRL starts vLLM on the folder of master weights; what is pushed after the first step is quantized once."""
    harness.tiny_model("qwen2").save_pretrained(tmp_path / "full")
    config = MXFP4RLConfig(preset="w4a16")
    AutoModelForCausalLM.from_pretrained(tmp_path / "full", quantization_config=config).save_pretrained(
        tmp_path / "policy"
    )
    TOKENIZER.save_pretrained(tmp_path / "policy")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    trainer = colocated(tmp_path, policy, aqn=False)
    before = weights_inside(trainer)
    layer, name = policy.model.layers[0].mlp.down_proj, "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(before[name], layer.effective_weight(layer.weight).detach())
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max").values()) < 1e-3
    trainer.vllm_generation.sync_weights()
    inside = weights_inside(trainer)
    assert torch.equal(inside[name], layer.effective_weight(layer.weight).detach())
    assert not torch.equal(inside[name], before[name])


def test_noise_is_in_the_engine_while_it_samples(tmp_path):
    """Constant noise has two stages, the first without; weights inside vLLM are looked at in each rollout."""
    harness.tiny_model("qwen3").save_pretrained(tmp_path / "full")
    TOKENIZER.save_pretrained(tmp_path / "full")
    config = MXFP4RLConfig(preset="w4a16")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "full", quantization_config=config)
    noise = {"aqn_schedule": "constant", "aqn_sigma_start": 0.02}
    trainer = colocated(tmp_path, policy, **noise)
    engine, seen = trainer.vllm_generation, []
    generate = engine.generate

    def looking(*arguments, **options):
        inside, norm, layer = weights_inside(trainer), policy.model.norm, policy.model.layers[1].mlp.up_proj
        change = inside["model.norm.weight"] - norm.weight.detach()
        quantized = layer.effective_weight(layer.weight).detach()
        seen.append((change.std().item(), torch.equal(inside["model.layers.1.mlp.up_proj.weight"], quantized)))
        return generate(*arguments, **options)

    engine.generate = looking
    trainer.train()
    assert [quantized for _, quantized in seen] == [True, True]
    assert seen[0][0] == 0.0 and seen[1][0] == pytest.approx(0.02, rel=0.2)
