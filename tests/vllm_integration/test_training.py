# SPDX-License-Identifier: Apache-2.0
"""GRPO with TRL's colocated vLLM: before every generation, the engine holds what the scheme makes of the policy."""

import re
from dataclasses import dataclass, field

import harness
import pytest
import torch
import trl.generation.vllm_generation as generation
from grpo_runs import TOKENIZER, logged, prompts, trainer_factory
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.layers import MXFP4PackedLinear, trainable_matrices
from hf_mxfp4.rl import plain_name
from hf_mxfp4.rl import rollout as correction


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
        n_compared: quantized tensors and factors of adapters that were compared with the policy's.
        wrong: those that were not the policy's, bit for bit.
        noise: standard deviation of what norms had beside the policy's weights, and of what linear layers had,
            relative to the root mean square of each.
    """

    is_training: bool
    n_compared: int = 0
    wrong: list[str] = field(default_factory=list)
    noise: tuple[float, float] = (0.0, 0.0)


def looked_at(trainer, is_dense=False):
    """The list of a [`Look`] before each generation of a run, which is to be filled."""
    engine, looks = trainer.vllm_generation, []
    generate = engine.generate

    def looking(*arguments, **options):
        looks.append(look(trainer, is_dense))
        return generate(*arguments, **options)

    engine.generate = looking
    return looks


@torch.no_grad()
def look(trainer, is_dense):
    found, inside = Look(trainer.model.training), weights_inside(trainer)
    plain = {plain_name(name): parameter for name, parameter in trainer.model.named_parameters()}
    on_norms = [inside[name] - value for name, value in plain.items() if name.endswith("norm.weight")]
    on_linears = [torch.zeros(2)]
    for name, value in policy(trainer.model, is_dense).items():
        found.n_compared += 1
        if is_dense:
            on_linears.append(((inside[name] - value) / value.square().mean().sqrt()).flatten())
        elif not torch.equal(inside[name], value):
            found.wrong.append(name)
    found.noise = tuple(torch.cat(change).std().item() for change in (on_norms, on_linears))
    return found


def policy(model, is_dense):
    """What vLLM is to hold of a policy, by the names of transformers: codes and scales, or with ``is_dense`` values;
    and factors of adapters by the names that vLLM has for them."""
    found = {}
    for matrix in trainable_matrices(model):
        name, master = plain_name(matrix.full_name), getattr(matrix.layer, matrix.parameter)
        if is_dense:
            found[name] = matrix.layer_values(master)
        elif matrix.expert in (None, 0):
            found.update({f"{name}{suffix}": value for suffix, value in matrix.packed_values(master).items()})
    for full_name, layer in model.named_modules():
        if isinstance(layer, MXFP4PackedLinear):
            found.update({f"{plain_name(full_name)}.{own}": p for own, p in layer.named_parameters() if own != "bias"})
        if full_name.endswith(("self_attn", "mlp")) and model is not layer and hasattr(model, "peft_config"):
            joined = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
            parts = joined["qkv_proj" if full_name.endswith("attn") else "gate_up_proj"]
            for name, own in [("qkv_proj" if len(parts) == 3 else "gate_up_proj", parts)]:
                layers = [getattr(layer, part) for part in own]
                prefix = f"{plain_name(full_name)}.{name}"
                found[f"{prefix}.lora_A.weight"] = torch.cat([part.lora_A["default"].weight for part in layers])
                scaled = [part.lora_B["default"].weight * part.scaling["default"] for part in layers]
                found[f"{prefix}.lora_B.weight"] = torch.cat(scaled)
    return found


def weights_inside(trainer):
    """Of the served model, by the names of transformers."""
    inside = harness.served_weights(harness.served_model(trainer.vllm_generation.llm))
    names = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
    rename = lambda found: f"experts.{names[found[1]]}"  # noqa: E731
    return {re.sub(r"experts\.(?:\w+\.)*(w13_weight|w2_weight)", rename, name): value for name, value in inside.items()}


@pytest.fixture
def differences(monkeypatch):
    """Absolute differences of the log-probabilities of all sampled tokens, in vLLM and in training."""
    found, add = [], correction.MismatchSums.add

    def recorded(self, log_ratio, mask, *limits):
        found.extend(log_ratio[mask.bool()].abs().tolist())
        add(self, log_ratio, mask, *limits)

    monkeypatch.setattr(correction.MismatchSums, "add", recorded)
    return found


def n_bytes(trainer, is_dense=False):
    """What the format needs for all weights of a policy without adapters: of vLLM's float32 besides."""
    quantized = policy(trainer.model, is_dense)
    parameters = {plain_name(name): parameter for name, parameter in trainer.model.named_parameters()}
    others = [parameter for name, parameter in parameters.items() if name not in quantized]
    return sum(value.nbytes for value in [*quantized.values(), *others])


def load(folder, **scheme):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=MXFP4RLConfig(**scheme))


def test_qat_with_noise_on_norms(tmp_path, differences):
    """From a checkpoint in full precision; constant noise has two stages, the first without."""
    policy = load(checkpoint(tmp_path / "full"), preset="w4a16")
    noise = {"aqn_sigma_start": 0.02, "aqn_sigma_end": 0.02, "eval_strategy": "steps", "eval_steps": 1}
    trainer = colocated(tmp_path, policy, eval_dataset=prompts(4), **noise)
    looks = looked_at(trainer)
    trainer.train()
    assert [look.is_training for look in looks] == [True, False, False] * 2
    assert {look.n_compared for look in looks} == {14 * 5} and not any(look.wrong for look in looks)
    stds = [look.noise[0] for look in looks]
    assert stds[3] == pytest.approx(0.02, rel=0.1) and stds[:3] + stds[4:] == [0.0] * 5
    first, second = (logged(trainer, "sampling/importance_sampling_ratio/m" + end)[1] for end in ("in", "ax"))
    assert 1 - 1e-4 < first < second < 1 + 1e-4
    assert set(logged(trainer, "vllm/sync_bytes").values()) == {n_bytes(trainer)}


def test_w4a4_from_its_own_checkpoint(tmp_path, differences):
    """Values that fall on an edge of the grid go either way, with the order of a sum."""
    folder = checkpoint(tmp_path / "policy", "qwen3", MXFP4RLConfig())
    policy = AutoModelForCausalLM.from_pretrained(folder)
    weights_only = load(checkpoint(tmp_path / "full", "qwen3"), preset="w4a16")
    typical = (harness.model_logprobs(policy) - harness.model_logprobs(weights_only)).abs().median()
    trainer = colocated(tmp_path, policy, aqn=False, max_completion_length=32, max_steps=3)
    looks = looked_at(trainer)
    assert trainer.vllm_policy.engine.inputs == trainer.model.config.quantization_config.activation_scheme
    trainer.train()
    assert len(looks) == 3 and not any(look.wrong for look in looks)
    found = torch.tensor(differences)
    tail = [f"{value:.1e}" for value in found.quantile(torch.tensor([0.5, 0.9, 0.99, 1.0])).tolist()]
    print(f"{len(found)} tokens, differences at 50, 90, 99, 100 %: {tail}; without quantized inputs {typical:.1e}")
    assert found.median() < min(1e-4, 0.02 * typical) and len(found) > 200


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "qat"])
def test_lora(tmp_path, packed, differences):
    """The base is pushed once, then the factors alone, into the room that vLLM has for them."""
    folder = checkpoint(tmp_path / "full", "llama" if packed else "qwen2")
    if packed:
        load(folder, mode="packed").save_pretrained(tmp_path / "packed")
        TOKENIZER.save_pretrained(tmp_path / "packed")
        policy = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    else:
        policy = load(folder, preset="w4a16", outlier_fallback=None)
    trainer = colocated(tmp_path, policy, peft_config=LORA, aqn=False, max_steps=3, learning_rate=1e-2)
    looks = looked_at(trainer)
    trainer.train()
    assert {look.n_compared for look in looks} == {14 * 3 + 8} and not any(look.wrong for look in looks)
    assert max(differences) < 1e-4 and len(differences) > 60
    size = logged(trainer, "vllm/sync_bytes")
    adapters = [p for name, p in trainer.model.named_parameters() if "lora_" in name]
    assert all(p.abs().max() > 1e-3 for p in adapters)  # trained
    assert size[2] == size[3] == sum(p.nbytes for p in adapters) < size[1]


def test_experts(tmp_path, differences):
    policy = load(checkpoint(tmp_path / "full", "qwen3_moe"), preset="w4a16", outlier_fallback=None)
    trainer = colocated(tmp_path, policy, aqn=False)
    looks = looked_at(trainer)
    trainer.train()
    assert {look.n_compared for look in looks} == {2 * (4 + 2) * 3} and not any(look.wrong for look in looks)
    assert max(differences) < 1e-4 and len(differences) > 40
    assert set(logged(trainer, "vllm/sync_bytes").values()) == {n_bytes(trainer)}
