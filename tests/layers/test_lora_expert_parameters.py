# SPDX-License-Identifier: Apache-2.0
"""PEFT's ``target_parameters`` on trainable experts: adapters beside the quantized weight, as linear layers have them,
in PEFT's own files."""

import copy

import lora_models
import pytest
import torch
from grpo_runs import trainer_factory
from lora_models import IDS, gradients
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from tiny_models import make_model

import hf_mxfp4.integrations.peft
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.peft import MXFP4LoraExpertParameter
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.layers import MXFP4Experts
from hf_mxfp4.numerics import apply_scheme


FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss"]
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
BLOCK = "base_model.model.model.layers.0.mlp"


def qat(family="qwen3_moe", layers=1, dtype=torch.float32, **scheme):
    assert hf_mxfp4.integrations.peft.MXFP4LoraModel  # registered by its import; loading a model does it too
    model = make_model(family, layers=layers, dtype=dtype)
    quantize_linears(model, MXFP4RLConfig(**{"preset": "w4a16", **scheme}))
    return model


def with_lora(model, std=0.01, **options):
    """Adapters of experts alone, unless the options name other targets."""
    targets = {"target_modules": [], "target_parameters": TARGETS}
    return lora_models.with_lora(model, std=std, **{**targets, **options})


def wrappers(model) -> dict[str, MXFP4LoraExpertParameter]:
    return {m.parameter_name: m for m in model.modules() if isinstance(m, MXFP4LoraExpertParameter)}


def experts_of(model) -> MXFP4Experts:
    return next(m for m in model.modules() if isinstance(m, MXFP4Experts))


def summed_twin(model: PeftModel) -> torch.nn.Module:
    """A plain model of weights ``Q(W) + s B A`` by PEFT's own sums, differentiable in the factors of ``model``."""
    twin = copy.deepcopy(model.get_base_model())
    for name, module in list(twin.named_modules()):
        if hasattr(module, "to_linear"):
            twin.set_submodule(name, module.to_linear().requires_grad_(False))
    for index, layer in enumerate(twin.model.layers):
        plain = experts_of(layer).to_experts()
        ours = wrappers(model.get_base_model().model.layers[index])
        for projection in ("gate_up_proj", "down_proj"):
            weight = getattr(plain, projection).detach() + ours[projection].get_delta_weight("default")
            del plain._parameters[projection]
            setattr(plain, projection, weight)
        layer.mlp.experts = plain
    twin.config._experts_implementation = "eager"
    return twin


# ---- values and gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [1e-4, 1e-2])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_effect_of_an_adapter_is_that_in_full_precision(family, std):
    x = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(3))
    effects = []
    for plain in (False, True):
        model = qat(family)
        block = model.model.layers[0].mlp
        if plain:  # the same values, and adapters by PEFT alone
            block.experts = block.experts.to_experts()
        before = block(x)
        block = with_lora(model, std).get_submodule(BLOCK)
        effects.append(_first(block(x)).double() - _first(before).double())
    ours, theirs = (effect.flatten() for effect in effects)
    cosine = torch.dot(ours, theirs) / (ours.norm() * theirs.norm())
    assert cosine > 0.999 and 0.99 < ours.norm() / theirs.norm() < 1.01


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=["", "rslora"])
def test_values_and_gradients_are_those_of_the_sums(family, options):
    model = with_lora(qat(family), std=0.05, **options)
    torch.testing.assert_close(model(IDS).logits, summed_twin(model)(IDS).logits, rtol=1e-4, atol=1e-5)
    ours = gradients(model)
    assert len(ours) == 4 and all("lora_" in name and grad.norm() > 0 for name, grad in ours.items())
    model.zero_grad(set_to_none=True)
    summed_twin(model)(IDS, labels=IDS, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        if name in ours:
            torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


@torch.no_grad()
def test_an_expert_by_hand_with_quantized_inputs():
    """The adapter takes the input in full precision, the weight takes it in MXFP4."""
    model = with_lora(qat(preset="w4a4"), std=1e-4)
    experts, ours = experts_of(model), wrappers(model)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    index, weights = torch.tensor([[2], [0], [2]]), torch.tensor([[0.5], [2.0], [1.0]])
    found = model.get_submodule(f"{BLOCK}.experts")(x, index, weights)
    plain = {name: experts.to_experts().get_parameter(name) for name in experts.projections}
    delta = {name: ours[name].get_delta_weight("default") for name in experts.projections}

    def project(name, x, expert):
        quantized = apply_scheme(x, experts.gemms[name].fprop.left)
        return quantized @ plain[name][expert].T + x @ delta[name][expert].T

    for token in range(3):
        expert = int(index[token])
        gate, linear = project("gate_up_proj", x[token : token + 1], expert).chunk(2, dim=-1)
        expected = weights[token] * project("down_proj", torch.nn.functional.silu(gate) * linear, expert)
        torch.testing.assert_close(found[token : token + 1], expected, rtol=1e-4, atol=1e-5)


# ---- PEFT's ways ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_pefts(family, tmp_path):
    model = with_lora(qat(family), std=0.05, target_modules=["q_proj"])
    expected = model(IDS).logits
    model.save_pretrained(tmp_path / "ours")
    with_lora(make_model(family, layers=1), target_modules=["q_proj"]).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()} and len(ours) == 6
    again = PeftModel.from_pretrained(qat(family), tmp_path / "ours")
    assert torch.equal(again(IDS).logits, expected) and len(wrappers(again)) == 2


@torch.no_grad()
def test_biases_are_adapted_by_peft():
    targets = [*TARGETS, "experts.down_proj_bias", "experts.gate_up_proj_bias"]
    model = with_lora(qat("gpt_oss"), std=0.05, target_parameters=targets)
    ours = wrappers(model)
    assert len(ours) == 4
    plain = qat("gpt_oss")
    experts = plain.model.layers[0].mlp.experts.to_experts()
    for name, wrapper in ours.items():
        experts.get_parameter(name).data += wrapper.get_delta_weight("default")
    plain.model.layers[0].mlp.experts = experts
    torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", ["q_proj.weight", "model.layers.0.self_attn.o_proj.weight"])
def test_weights_of_linear_layers_are_refused(target):
    with pytest.raises(ValueError, match=f"target_parameters has '{target}'.*name the layer in target_modules"):
        with_lora(qat(), target_modules=["v_proj"], target_parameters=[target])


# ---- a run ----------------------------------------------------------------------------------------------------------


def test_grpo_with_router_replay_and_checkpointing(tmp_path):
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], target_parameters=TARGETS)
    policy = qat(layers=2, preset="w4a4")
    build = trainer_factory(tmp_path)
    options = {"max_steps": 2, "gradient_checkpointing": True, "learning_rate": 1e-2, "router_replay": True}
    trainer = build(policy=policy, peft_config=lora, **options)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" not in name}
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "router_replay/coverage" in entry]
    assert logged and all(entry["router_replay/coverage"] == 1.0 for entry in logged)
    factors = [p for name, p in trainer.model.named_parameters() if "experts" in name and "lora_B.default" in name]
    assert len(factors) == 4 and all(p.any() for p in factors)
    after = dict(trainer.model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())


def _first(output):
    return output[0] if isinstance(output, tuple) else output
