# SPDX-License-Identifier: Apache-2.0
"""LoRA on experts, packed and trainable: values and gradients against sums of weights, merging, other engines."""

import functools

import lora_models
import pytest
import torch
from grpo_runs import trainer_factory
from lora_models import IDS, changes_of, experts_of, gradients, qat, same_tensors, stored, summed_twin, wrappers
from peft import LoraConfig, prepare_model_for_kbit_training
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from hf_mxfp4 import merge_adapters, quantize
from hf_mxfp4.integrations import peft as adapters
from hf_mxfp4.integrations.peft import (
    MXFP4LoraLinear,
    MXFP4LoraPackedExpertParameter,
)
from hf_mxfp4.numerics import apply_scheme


FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss"]
EXPERTS = "base_model.model.model.layers.0.mlp.experts"
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
#: Adapters of experts alone.
with_lora = functools.partial(lora_models.with_lora, target_modules=["experts"])


def with_parameters(model, std=0.01, **options):
    """Adapters of experts alone, unless the options name other targets."""
    targets = {"target_modules": [], "target_parameters": TARGETS}
    return lora_models.with_lora(model, std=std, **{**targets, **options})


@pytest.mark.parametrize(("family", "width"), [("qwen3_moe", 32), ("qwen2_moe", 32), ("mixtral", 96), ("gpt_oss", 96)])
def test_every_expert_gets_factors_of_its_own(load, family, width):
    """Of four experts with rank 4."""
    model = with_lora(load(family), init_lora_weights=True)
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 8
    assert {name: size for name, size in trained.items() if name.startswith(EXPERTS)} == {
        f"{EXPERTS}.base_layer.lora_A.default.weight": (4 * 4, 64),
        f"{EXPERTS}.lora_A.default.weight": (4 * 4, width),
        f"{EXPERTS}.base_layer.lora_B.default.weight": (2 * width, 4 * 4),
        f"{EXPERTS}.lora_B.default.weight": (64, 4 * 4),
    }


def test_factors_begin_as_those_of_one_matrix(load):
    model = with_lora(load("qwen3_moe"), init_lora_weights=True)
    a, b = wrappers(model.get_submodule(EXPERTS))["gate_up_proj"].expert_factors("default")
    assert a.shape == (4, 4, 64)
    assert b.shape == (4, 64, 4)
    # kaiming_uniform of one matrix [r, K] with a = sqrt(5): bound 1/sqrt(K), whatever the number of experts.
    assert 0.9 / 8 < a.abs().max() <= 1 / 8
    assert not torch.equal(a[0], a[1])
    assert not b.any()


def assert_values_and_gradients_of_the_sums(model):
    torch.testing.assert_close(model(IDS).logits, summed_twin(model)(IDS).logits, rtol=1e-4, atol=1e-5)
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    summed_twin(model).train()(IDS, labels=IDS, use_cache=False).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all("lora_" in name and grad.norm() > 0 for name, grad in found.items())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_experts_compute_with_the_sums(load, family):
    assert_values_and_gradients_of_the_sums(with_lora(load(family)))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_trainable_experts_compute_with_the_sums(family):
    assert_values_and_gradients_of_the_sums(with_parameters(qat(family), std=0.05))


@pytest.mark.parametrize("mode", ["packed", "qat"])
def test_rank_stabilized_scaling(load, mode):
    model = load("gpt_oss", mode=mode, preset="w4a16")
    if mode == "packed":
        model = with_lora(model, use_rslora=True, r=2)
    else:
        model = with_parameters(model, std=0.05, use_rslora=True, r=2)
    assert model.get_submodule(EXPERTS).scaling["default"] == 8 / 2**0.5
    assert_values_and_gradients_of_the_sums(model)


def test_two_adapters_at_once_are_added_and_not_mixed_in_one_batch(load):
    model = with_lora(load("qwen3_moe"))
    torch.manual_seed(9)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["experts"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    layer = model.get_submodule(EXPERTS)

    both = changes_of(layer)["down_proj"] + changes_of(layer, "second")["down_proj"]
    expected = layer.get_base_layer().dequantized_weight("down_proj") + both
    torch.testing.assert_close(wrappers(layer)["down_proj"].effective_weight(torch.float32), expected)
    with pytest.raises(ValueError, match="adapter_names in one batch"):
        model.eval()(IDS, adapter_names=["default", "__base__"])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model_that_peft_has_cast_to_float32_trains(load, family):
    model = load(family, torch.bfloat16, modules_to_not_convert=["self_attn"])
    model = with_lora(prepare_model_for_kbit_training(model))
    torch.testing.assert_close(model(IDS).logits, summed_twin(model)(IDS).logits, rtol=1e-4, atol=1e-5)
    assert len(gradients(model)) == 8


@pytest.mark.parametrize(("family", "linears"), [("qwen3_moe", 8), ("qwen2_moe", 14)])
def test_all_linear_means_linear_layers_and_says_so(load, family, linears, capsys):
    model = with_lora(load(family), target_modules="all-linear")
    said = capsys.readouterr().err
    assert "experts of 2 layers get no adapters" in said
    assert '"experts" among them' in said
    assert sum(isinstance(m, MXFP4LoraLinear) for m in model.modules()) == linears
    assert not wrappers(model)


def test_names_that_experts_no_longer_have(load):
    with pytest.raises(ValueError, match="target_modules has 'down_proj', the name of no .*'experts'"):
        with_lora(load("qwen3_moe"), target_modules=["experts", "down_proj"])
    with pytest.raises(ValueError, match="w1 without also targeting w3"):
        with_lora(load("mixtral"), target_modules=["w1", "w2"])
    # The shared expert of Qwen2-MoE does have them.
    model = with_lora(load("qwen2_moe"), target_modules=["gate_proj", "experts"])
    assert sum(isinstance(m, MXFP4LoraLinear) for m in model.modules()) == 2
    assert sum(isinstance(m, MXFP4LoraPackedExpertParameter) for m in model.modules()) == 4


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_merging_packs_the_sums_and_unmerging_restores_every_bit(load, family):
    model = with_lora(load(family))
    layer = model.get_submodule(EXPERTS)
    base = layer.get_base_layer()
    before = stored(model)
    logits = model(IDS).logits
    delta = changes_of(layer)["down_proj"][1]
    if base.is_transposed:
        delta = delta.T
    total = base.quantized_tensor("down_proj", 1).dequantize(torch.float32) + delta
    expected = quantize(total, scale_rule="even", macro_block=128, macro_search="block_mantissas_fp8")

    model.merge_adapter()

    assert torch.equal(base.down_proj[1], expected.codes)
    assert torch.equal(base.down_proj_scale[1], expected.scale)
    assert torch.equal(base.down_proj_macro[1], expected.macro)
    layers = model.base_model.merge_report.layers
    assert set(layers) == {f"model.layers.{n}.mlp.{target}" for n in range(2) for target in TARGETS}
    signal = base.dequantized_weight("down_proj").square().sum().item()
    assert layer.merge_error.signal == pytest.approx(signal, rel=0.05)
    assert layer.merge_error.sqnr_db > 10

    model.unmerge_adapter()

    assert same_tensors(stored(model), before)
    assert torch.equal(model(IDS).logits, logits)
    assert layer.merge_error is None


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_merged_into_bf16(load, family, tmp_path):
    model = with_lora(load(family), target_modules=["experts", "q_proj", "k_proj", "v_proj", "o_proj"])
    layer = model.get_submodule(EXPERTS)
    base = layer.get_base_layer()
    delta = changes_of(layer)["gate_up_proj"].detach()
    expected = (base.dequantized_weight("gate_up_proj", torch.float32) + delta).to(torch.bfloat16)

    plain = merge_adapters(model, into="bf16")

    experts = plain.model.layers[0].mlp.experts
    assert type(experts) is type(base).plain_class
    assert torch.equal(experts.gate_up_proj, expected)
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16}
    assert not hasattr(plain.config, "quantization_config")
    plain.save_pretrained(tmp_path)
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(reloaded(IDS).logits, plain(IDS).logits)


def test_a_sum_that_is_not_finite_changes_nothing(load):
    model = with_lora(load("qwen3_moe"))
    layer = model.get_submodule(EXPERTS)
    before = stored(model)
    b = layer.expert_factors("default")[1]
    b.data[2, 0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"experts\.down_proj\.2: .* not finite"):
        layer.merge(safe_merge=True)
    assert not layer.merged
    assert same_tensors(stored(model), before)


def with_experts_and_a_plain_layer(model):
    """Adapters on experts, and on a linear layer that is in full precision."""
    return with_lora(model, target_modules=["experts", "q_proj"])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_other_engines_are_given_sums(load, family):
    model = with_experts_and_a_plain_layer(load(family, modules_to_not_convert=["self_attn"]))
    layer = model.get_submodule(EXPERTS)
    total = layer.get_base_layer().dequantized_weight("down_proj") + changes_of(layer)["down_proj"].detach()

    given = dict(adapters.policy_parameters(model))

    torch.testing.assert_close(given["model.layers.0.mlp.experts.down_proj"], total)
    plain = make_model(family)
    plain.load_state_dict(given)
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    changed = {name for name in given if name.endswith(("q_proj.weight", "up_proj", "n_proj"))}
    assert adapters.adapted_parameters(model) == changed


def test_other_engines_are_given_merged_weights_as_they_are(load):
    model = with_experts_and_a_plain_layer(load("qwen3_moe", modules_to_not_convert=["self_attn"]))
    base = model.get_submodule(EXPERTS).get_base_layer()
    before = base.dequantized_weight("down_proj")
    model.merge_adapter()
    given = dict(adapters.policy_parameters(model))["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(given, base.dequantized_weight("down_proj"))
    assert not torch.equal(given, before)


def test_an_adapter_on_a_tied_head_is_not_given_away(load):
    model = load("qwen2")
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(ValueError, match="lm_head has an adapter and is tied"):
        dict(adapters.policy_parameters(with_lora(model, target_modules=["q_proj", "lm_head"])))


@torch.no_grad()
def test_an_expert_by_hand_with_quantized_inputs():
    """The adapter takes the input in full precision, the weight takes it in MXFP4."""
    model = with_parameters(qat("qwen3_moe", preset="w4a4"), std=1e-4)
    experts = experts_of(model)
    ours = wrappers(model)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    index = torch.tensor([[2], [0], [2]])
    weights = torch.tensor([[0.5], [2.0], [1.0]])
    found = model.get_submodule(EXPERTS)(x, index, weights)
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


def test_grpo_with_router_replay_and_checkpointing(tmp_path):
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], target_parameters=TARGETS)
    policy = qat("qwen3_moe", layers=2, preset="w4a4")
    build = trainer_factory(tmp_path)
    options = {"max_steps": 2, "gradient_checkpointing": True, "learning_rate": 1e-2, "router_replay": True}
    trainer = build(policy=policy, peft_config=lora, **options)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" not in name}
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "router_replay/coverage" in entry]
    assert logged
    assert all(entry["router_replay/coverage"] == 1.0 for entry in logged)
    factors = [p for name, p in trainer.model.named_parameters() if "experts" in name and "lora_B.default" in name]
    assert len(factors) == 4
    assert all(p.any() for p in factors)
    after = dict(trainer.model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
