# SPDX-License-Identifier: Apache-2.0
"""Quantized experts inside of models: routers, checkpointing, adapters, GRPO, and everything that looks for layers."""

import pytest
import torch
from factors import factors_config
from grpo_runs import trainer_factory
from peft import LoraConfig, get_peft_model
from tiny_models import make_model
from torch import nn

from hf_mxfp4 import fake_quantize
from hf_mxfp4.integrations.peft.rollout import policy_parameters
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.layers import trainable_matrices
from hf_mxfp4.rl import rollout_parameters


IDS = torch.arange(2, 26).view(2, 12)
EXPERTS = "model.layers.{}.mlp.experts"
STOCHASTIC = {"preset": "w4a4g4", "wgrad": {"grad": "rceil+stochastic", "rotation": "random-16"}}


def quantized(family="qwen3_moe", layers=2, **options):
    model = make_model(family, layers=layers)
    quantize_linears(model, factors_config(**options))
    return model


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss"])
def test_routers_and_gates_of_shared_experts_are_left_alone(family):
    plain, model = make_model(family, layers=1), quantized(family, layers=1)
    block, twin = model.model.layers[0].mlp, plain.model.layers[0].mlp
    router, plain_router = (b.router if family == "gpt_oss" else b.gate for b in (block, twin))
    assert type(router) is type(plain_router)
    states = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    for found, want in zip(router(states), plain_router(states), strict=True):
        assert torch.equal(found, want)
    if family == "qwen2_moe":
        assert type(block.shared_expert_gate) is nn.Linear
        assert type(block.shared_expert.up_proj).__name__ == "MXFP4Linear"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_the_experts_implementation_of_the_model_does_not_matter(family, implementation):
    model = quantized(family, layers=1)
    expected = model(IDS).logits
    model.set_experts_implementation(implementation)
    assert torch.equal(model(IDS).logits, expected)


def test_adapters_beside_packed_experts_train_and_the_policy_can_be_pushed():
    model = quantized(layers=1, mode="packed")
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    peft(IDS, labels=IDS).loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in peft.parameters())
    pushed = dict(policy_parameters(peft))
    plain = make_model("qwen3_moe", layers=1)
    assert pushed.keys() == dict(plain.named_parameters()).keys()
    name = f"{EXPERTS.format(0)}.down_proj"
    weight = plain.get_parameter(name).detach()
    assert torch.equal(pushed[name], fake_quantize(weight, macro_block=128, macro_search="dynamic"))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_vllm_gets_the_quantized_values(family):
    model = quantized(family, layers=1)
    pushed = dict(rollout_parameters(model.named_parameters(), model))
    experts, name = model.model.layers[0].mlp.experts, EXPERTS.format(0)
    expected = experts.to_experts()
    for projection in ("gate_up_proj", "down_proj"):
        assert torch.equal(pushed[f"{name}.{projection}"], getattr(expected, projection))
        assert not torch.equal(pushed[f"{name}.{projection}"], getattr(experts, projection))
    assert list(pushed) == [name for name, _ in model.named_parameters()]


def test_matrices_one_by_one():
    model = quantized("gpt_oss", layers=1)
    found = {matrix.name: matrix for matrix in trainable_matrices(model)}
    assert len(found) == 4 + 8
    matrix, linear = found[f"{EXPERTS.format(0)}.2.down_proj"], found["model.layers.0.self_attn.q_proj"]
    experts = model.model.layers[0].mlp.experts
    assert torch.equal(matrix.weight(), experts.down_proj[2].T) and matrix.siblings == 4
    assert matrix.full_name == f"{EXPERTS.format(0)}.down_proj" and linear.full_name.endswith(".q_proj.weight")
    assert torch.equal(matrix.effective_rows(matrix.weight()), experts.to_experts().down_proj[2].T)
    assert linear.siblings == 1 and linear.weight().shape == (64, 64)


def test_missing_weights_are_initialised_by_the_models_own_rule():
    model = quantized(layers=1)
    experts = model.model.layers[0].mlp.experts
    nn.init.constant_(experts.gate_up_proj, 7.0)
    model._init_weights(experts)
    assert experts.gate_up_proj.detach().std().item() == pytest.approx(model.config.initializer_range, rel=0.1)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.large), {**STOCHASTIC, "outlier_fallback_rate": 0.2}],
    ids=["w4a4", "stochastic"],
)
def test_grpo_trains_experts(options, tmp_path):
    config = {"layers": 2, "hidden": 32, "moe_intermediate_size": 32}
    policy = make_model("qwen3_moe", **config)
    quantize_linears(policy, factors_config(**options))
    before = policy.model.layers[1].mlp.experts.down_proj.detach().clone()
    trainer = trainer_factory(tmp_path)(policy=policy, max_steps=2, error_every=1)
    assert trainer.n_quantized == 2 * (4 + 8)
    trainer.train()
    assert not torch.equal(policy.model.layers[1].mlp.experts.down_proj, before)
    layers = {entry["layer"] for entry in trainer.error_callback.history}
    assert len(layers) == 4 and any(".mlp.experts." in name for name in layers)
    logged = trainer.state.log_history[0]
    assert all(name in logged for name in ("error/grid", "aqn/sigma"))
