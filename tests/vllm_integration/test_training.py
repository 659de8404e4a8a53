# SPDX-License-Identifier: Apache-2.0
"""GRPO with TRL's colocated vLLM: before every generation, the engine holds what the scheme makes of the policy."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import harness
import pytest
import torch
from grpo_runs import TOKENIZER, logged, prompts, trainer_factory
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from undrawn import leave_figures_undrawn

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.layers import MXFP4PackedLinear, trainable_matrices
from hf_mxfp4.recipes.grpo import main
from hf_mxfp4.recipes.tasks.tiny_model import build_byte_tokenizer
from hf_mxfp4.rl import plain_name
from hf_mxfp4.rl import rollout as correction


pytestmark = pytest.mark.vllm

CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
LORA = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")


@pytest.fixture(autouse=True)
def float32_engine(monkeypatch):
    harness.in_float32(monkeypatch.setattr)
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
    settings = {**harness.COLOCATED, "max_steps": 2, "aqn_num_stages": 2, **options}
    return trainer_factory(tmp_path)(policy=policy, **settings)


@dataclass
class Look:
    """What was inside vLLM before one generation.

    Attributes:
        is_training: whether that was a rollout to train on.
        n_compared: quantized tensors and factors of adapters that were compared with the policy's.
        wrong: those that were not the policy's, bit for bit.
        noise: standard deviation of what norms had beside the policy's weights.
    """

    is_training: bool
    n_compared: int = 0
    wrong: list[str] = field(default_factory=list)
    noise: float = 0.0


def looked_at(trainer):
    """The list of a [`Look`] before each generation of a run, which is to be filled."""
    engine = trainer.vllm_generation
    looks = []
    generate = engine.generate

    def looking(*arguments, **options):
        looks.append(look(trainer))
        return generate(*arguments, **options)

    engine.generate = looking
    return looks


@torch.no_grad()
def look(trainer):
    found = Look(trainer.model.training)
    inside = weights_inside(trainer)
    plain = {plain_name(name): parameter for name, parameter in trainer.model.named_parameters()}
    changes = [inside[name] - value for name, value in plain.items() if name.endswith("norm.weight")]
    found.noise = torch.cat(changes).std().item()
    expected = policy(trainer.model)
    found.n_compared = len(expected)
    found.wrong = [n for n, v in expected.items() if not torch.equal(inside[n], v)]
    return found


def policy(model):
    """What vLLM is to hold of a policy: codes and scales by the names of transformers, and factors of adapters by the
    names that vLLM has for them."""
    found = {}
    for matrix in trainable_matrices(model):
        name = plain_name(matrix.full_name)
        master = getattr(matrix.layer, matrix.parameter)
        if matrix.expert in (None, 0):
            found.update({f"{name}{suffix}": value for suffix, value in matrix.packed_values(master).items()})
    for full_name, layer in model.named_modules():
        if isinstance(layer, MXFP4PackedLinear):
            found.update({f"{plain_name(full_name)}.{own}": p for own, p in layer.named_parameters() if own != "bias"})
        if full_name.endswith(("self_attn", "mlp")) and model is not layer and hasattr(model, "peft_config"):
            name, parts = ("qkv_proj", "qkv") if full_name.endswith("attn") else ("gate_up_proj", ("gate", "up"))
            layers = [getattr(layer, f"{part}_proj") for part in parts]
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
    found = []
    add = correction.MismatchSums.add

    def recorded(self, log_ratio, mask, *limits):
        found.extend(log_ratio[mask.bool()].abs().tolist())
        add(self, log_ratio, mask, *limits)

    monkeypatch.setattr(correction.MismatchSums, "add", recorded)
    return found


def n_bytes(trainer):
    """What the format needs for all weights of a policy without adapters, float32 among them."""
    quantized = policy(trainer.model)
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
    assert {look.n_compared for look in looks} == {14 * 3}
    assert not any(look.wrong for look in looks)
    stds = [look.noise for look in looks]
    assert stds[3] == pytest.approx(0.02, rel=0.1)
    assert stds[:3] + stds[4:] == [0.0] * 5
    first, second = (logged(trainer, "sampling/importance_sampling_ratio/m" + end)[1] for end in ("in", "ax"))
    assert 1 - 1e-4 < first < second < 1 + 1e-4
    assert set(logged(trainer, "vllm/sync_bytes").values()) == {n_bytes(trainer)}


def test_quantized_inputs_from_its_own_checkpoint(tmp_path, differences):
    """Values that fall on an edge of the grid go either way, with the order of a sum."""
    folder = checkpoint(tmp_path / "policy", "qwen3", MXFP4RLConfig())
    policy = AutoModelForCausalLM.from_pretrained(folder)
    weights_only = load(checkpoint(tmp_path / "full", "qwen3"), preset="w4a16")
    typical = (harness.model_logprobs(policy) - harness.model_logprobs(weights_only)).abs().median()
    trainer = colocated(tmp_path, policy, aqn=False, max_completion_length=32, max_steps=3)
    looks = looked_at(trainer)
    assert trainer.vllm_policy.engine.inputs == trainer.model.config.quantization_config.activation_scheme
    trainer.train()
    assert len(looks) == 3
    assert not any(look.wrong for look in looks)
    found = torch.tensor(differences)
    tail = [f"{value:.1e}" for value in found.quantile(torch.tensor([0.5, 0.9, 0.99, 1.0])).tolist()]
    print(f"{len(found)} tokens, differences at 50, 90, 99, 100 %: {tail}; without quantized inputs {typical:.1e}")
    assert found.median() < min(1e-4, 0.02 * typical)
    assert len(found) > 200


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
    assert {look.n_compared for look in looks} == {14 * 3 + 8}
    assert not any(look.wrong for look in looks)
    assert max(differences) < 1e-4
    assert len(differences) > 60
    size = logged(trainer, "vllm/sync_bytes")
    adapters = [p for name, p in trainer.model.named_parameters() if "lora_" in name]
    assert all(p.abs().max() > 1e-3 for p in adapters)  # trained
    assert size[2] == size[3] == sum(p.nbytes for p in adapters) < size[1]


def test_experts(tmp_path, differences):
    policy = load(checkpoint(tmp_path / "full", "qwen3_moe"), preset="w4a16", outlier_fallback=None)
    trainer = colocated(tmp_path, policy, aqn=False)
    looks = looked_at(trainer)
    trainer.train()
    assert {look.n_compared for look in looks} == {2 * (4 + 2) * 3}
    assert not any(look.wrong for look in looks)
    assert max(differences) < 1e-4
    assert len(differences) > 40
    assert set(logged(trainer, "vllm/sync_bytes").values()) == {n_bytes(trainer)}


# ---- recipes --------------------------------------------------------------------------------------------------------

SMALL = [
    "--use_cpu=true", "--bf16=false", "--gradient_checkpointing=false", "--per_device_train_batch_size=8",
    "--gradient_accumulation_steps=1", "--num_generations=4", "--max_completion_length=8", "--max_steps=2",
    "--warmup_steps=0", "--learning_rate=1e-3", "--error_every=1", "--aqn=true", "--aqn_num_stages=2",
    "--save_strategy=no", "--report_every=0", "--evaluate_n=4",
    "--study={greedy_batch_size: 8, reload_check: 4}",
]  # fmt: skip


def run_recipe(name: str, model: Path, folder: Path, monkeypatch, *options: str) -> dict:
    """Run a shipped configuration on ``model``, cut down, with problems in the form of GSM8K's: its summary. What it
    writes is in ``folder / "out"``; figures, which need matplotlib, are left out."""
    leave_figures_undrawn(monkeypatch.setattr)
    problems = folder / "problems.jsonl"
    rows = [{"question": f"{i}+{i}?", "answer": f"{i} and {i} are #### {2 * i}"} for i in range(16)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"--dataset={problems}", f"--eval_dataset={problems}", f"--output_dir={folder / 'out'}"]
    choices = [f"--model_name_or_path={model}", "--prompt_template=Q: {question} A:", *options]
    return main(["--config", str(CONFIGS / f"{name}.yaml"), *SMALL, *files, *choices])


def test_the_recipe_with_vllm_colocated(tmp_path, monkeypatch):
    """The configuration shipped for Qwen2.5-3B, W4A4 with noise, with a small model in its place."""
    tokenizer = build_byte_tokenizer()
    harness.tiny_model("qwen2", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "full")
    tokenizer.save_pretrained(tmp_path / "full")
    options = ["--vllm_max_model_length=64", "--vllm_gpu_memory_utilization=0.1"]
    summary = run_recipe("qwen2.5_3b_gsm8k_vllm", tmp_path / "full", tmp_path, monkeypatch, *options)
    assert summary["steps"] == 2
    assert summary["reloaded"] == {"compared": 4, "identical": 4}
    history = json.loads((tmp_path / "out" / "log_history.json").read_text())
    steps = [entry for entry in history if "sampling/importance_sampling_ratio/mean" in entry]
    assert [entry["step"] for entry in steps] == [1, 2]
    assert [entry["aqn/n_modules"] for entry in steps if entry.get("aqn/sigma")] == [5]
    assert all(entry["sampling/effective_sample_size"] > 0.9 for entry in steps)
