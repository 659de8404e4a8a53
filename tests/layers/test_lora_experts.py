# SPDX-License-Identifier: Apache-2.0
"""LoRA on packed experts: values and gradients against a loop over tokens, PEFT's own ways of saving and switching,
merging, and what other engines are given."""

import copy
import functools

import lora_models
import pytest
import torch
from grpo_runs import trainer_factory
from lora_models import IDS, gradients, same_tensors, stored
from peft import LoraConfig, PeftModel
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig, merge_adapters, quantize
from hf_mxfp4.integrations.peft import MXFP4LoraExperts, MXFP4LoraLinear, policy_parameters
from hf_mxfp4.layers import MXFP4PackedExperts


FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss"]
EXPERTS = "base_model.model.model.layers.0.mlp.experts"


#: Adapters of experts alone.
with_lora = functools.partial(lora_models.with_lora, target_modules=["experts"])


def deltas(layer: MXFP4LoraExperts, projection: str, name: str = "default") -> torch.Tensor:
    a, b = (getattr(side[name], projection) for side in (layer.lora_A, layer.lora_B))
    return layer.scaling[name] * torch.einsum("enr,erk->enk", b, a)


def summed_twin(model: PeftModel):
    """A plain model of weights ``Q(W) + s B A``, differentiable in the factors of ``model``, and those of the packed
    linear layers dequantized."""
    twin = copy.deepcopy(model.get_base_model())
    for name, module in list(twin.named_modules()):
        if isinstance(module, MXFP4LoraExperts):
            layer = model.get_base_model().get_submodule(name)
            plain = module.get_base_layer().to_experts(torch.float32)
            for projection in layer.base_layer.projections:
                delta = deltas(layer, projection)
                delta = delta.transpose(1, 2) if layer.base_layer.is_transposed else delta
                weight = getattr(plain, projection).detach() + delta
                del plain._parameters[projection]
                setattr(plain, projection, weight)
            twin.set_submodule(name, plain)
        elif isinstance(module, MXFP4LoraLinear):
            raise AssertionError("only experts have adapters here")
        elif hasattr(module, "to_linear"):
            twin.set_submodule(name, module.to_linear().requires_grad_(False))
    twin.config._experts_implementation = "eager"
    return twin


# ---- attaching ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_gets_factors_of_its_own(load, family):
    model = with_lora(load(family), init_lora_weights=True)
    layers = [m for m in model.modules() if isinstance(m, MXFP4LoraExperts)]
    assert len(layers) == 2 and all(isinstance(layer.base_layer, MXFP4PackedExperts) for layer in layers)
    width = {"qwen3_moe": 32, "qwen2_moe": 32, "mixtral": 96, "gpt_oss": 96}[family]
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert {name: size for name, size in trained.items() if name.startswith(EXPERTS)} == {
        f"{EXPERTS}.lora_A.default.gate_up_proj": (4, 4, 64),
        f"{EXPERTS}.lora_A.default.down_proj": (4, 4, width),
        f"{EXPERTS}.lora_B.default.gate_up_proj": (4, 2 * width, 4),
        f"{EXPERTS}.lora_B.default.down_proj": (4, 64, 4),
    }
    assert len(trained) == 8
    factors = layers[0].lora_A["default"].gate_up_proj
    # kaiming_uniform of one matrix [r, K] with a = sqrt(5): bound 1/sqrt(K), whatever the number of experts.
    assert 0.9 / 8 < factors.abs().max() <= 1 / 8 and not torch.equal(factors[0], factors[1])
    assert not layers[0].lora_B["default"].gate_up_proj.any()
    assert "MXFP4LoraExperts" in repr(layers[0])


# ---- values and gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options"), [*((family, {}) for family in FAMILIES), ("gpt_oss", {"use_rslora": True, "r": 2})], ids=str
)
def test_values_and_gradients_are_those_of_the_sums(load, options, family):
    model = with_lora(load(family), **options)
    scale = model.get_submodule(EXPERTS).scaling["default"]
    assert scale == pytest.approx(8 / 2**0.5 if options else 2.0)
    twin = summed_twin(model)
    torch.testing.assert_close(model(IDS).logits, twin(IDS).logits, rtol=1e-4, atol=1e-5)
    ours = gradients(model)
    model.zero_grad(set_to_none=True)
    summed_twin(model).train()(IDS, labels=IDS, use_cache=False).loss.backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys() and len(ours) == 8
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-3, atol=1e-6, msg=name)


def test_one_expert_by_hand(load):
    model = with_lora(load("mixtral", macro_block=None))
    layer = model.get_submodule(EXPERTS)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    index, weights = torch.tensor([[2], [0], [2]]), torch.tensor([[0.5], [2.0], [1.0]])
    found = layer(x, index, weights)
    for token in range(3):
        expert = int(index[token])
        up, down = (
            layer.base_layer.quantized_tensor(name, expert).dequantize(torch.float32) + deltas(layer, name)[expert]
            for name in ("gate_up_proj", "down_proj")
        )
        gate, linear = (up @ x[token]).chunk(2)
        expected = weights[token] * (down @ (torch.nn.functional.silu(gate) * linear))
        torch.testing.assert_close(found[token], expected, rtol=1e-4, atol=1e-5)


# ---- PEFT's ways ----------------------------------------------------------------------------------------------------


def test_two_adapters_at_once_are_added_and_not_mixed_in_one_batch(load):
    model = with_lora(load("qwen3_moe"))
    torch.manual_seed(9)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["experts"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    layer = model.get_submodule(EXPERTS)
    both = deltas(layer, "down_proj") + deltas(layer, "down_proj", "second")
    expected = layer.base_layer.dequantized_weight("down_proj") + both
    torch.testing.assert_close(layer.effective_weight("down_proj", torch.float32), expected)
    with pytest.raises(ValueError, match="adapter_names in one batch"):
        model.eval()(IDS, adapter_names=["default", "__base__"])


# ---- which names reach experts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "linears"), [("qwen3_moe", 8), ("qwen2_moe", 14), ("gpt_oss", 8)])
def test_all_linear_means_linear_layers_and_says_so(load, family, linears, capsys, tmp_path):
    model = with_lora(load(family), target_modules="all-linear")
    said = capsys.readouterr().err
    assert "experts of 2 layers get no adapters" in said and '"experts" among them' in said
    assert sum(isinstance(m, MXFP4LoraLinear) for m in model.modules()) == linears
    assert not any(isinstance(m, MXFP4LoraExperts) for m in model.modules())
    model.save_pretrained(tmp_path)
    reloaded = PeftModel.from_pretrained(load(family), tmp_path)
    assert torch.equal(reloaded(IDS).logits, model(IDS).logits)


def test_names_that_experts_no_longer_have_are_refused(load):
    for targets in (["q_proj", "gate_proj", "up_proj", "down_proj"], ["experts", "down_proj"]):
        with pytest.raises(ValueError, match="target_modules has 'down_proj', the name of no .*'experts'"):
            with_lora(load("qwen3_moe"), target_modules=targets)
    with pytest.raises(ValueError, match="'w1', the name of no module of MixtralForCausalLM"):
        with_lora(load("mixtral"), target_modules=["w1", "w3"])
    # The shared expert of Qwen2-MoE does have them.
    model = with_lora(load("qwen2_moe"), target_modules=["gate_proj", "experts"])
    assert sum(isinstance(m, MXFP4LoraLinear) for m in model.modules()) == 2
    assert sum(isinstance(m, MXFP4LoraExperts) for m in model.modules()) == 2


BYTES = "target_parameters has '{0}': .*{0} is a packed layer.*modules_to_not_convert"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}, BYTES.format("experts.down_proj")),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, BYTES.format("mlp.experts.gate_up_proj")),
        ({"target_parameters": ["down_proj_scale"]}, BYTES.format("down_proj_scale")),
        ({"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}, "modules_to_save has 'mlp'"),
        ({"lora_bias": True}, "lora_bias=True is not supported on packed layers"),
        ({"use_dora": True}, "use_dora=True is not supported on packed layers"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
    ],
    ids=["parameter", "longer-name", "scale", "module", "bias", "dora", "pissa"],
)
def test_what_cannot_be_is_refused(load, options, words):
    model = load("qwen3_moe")
    with pytest.raises(ValueError, match=words):
        with_lora(model, **options)
    assert isinstance(model.model.layers[0].mlp.experts, MXFP4PackedExperts)


# ---- merging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_merging_packs_the_sums_and_unmerging_restores_every_bit(load, family):
    scheme = {"scale_rule": "rceil", "macro_block": 128, "macro_search": "dynamic"}
    model = with_lora(load(family, **scheme))
    layer, before, logits = model.get_submodule(EXPERTS), stored(model), model(IDS).logits
    weight = layer.base_layer.quantized_tensor("down_proj", 1).dequantize(torch.float32)
    expected = quantize(weight + deltas(layer, "down_proj")[1], **scheme)
    model.merge_adapter()
    base = layer.base_layer
    assert torch.equal(base.down_proj[1], expected.codes) and torch.equal(base.down_proj_macro[1], expected.macro)
    assert torch.equal(base.down_proj_scale[1], expected.scale)
    report = model.base_model.merge_report
    assert set(report.layers) == {f"model.layers.{n}.mlp.experts" for n in range(2)}
    signal = 0.0
    for projection in ("gate_up_proj", "down_proj"):
        packed = torch.stack([base.quantized_tensor(projection, e).dequantize(torch.float32) for e in range(4)])
        rows = [n for n in before if n.startswith(EXPERTS) and n.endswith(f".{projection}")]
        assert len(rows) == 1 and not torch.equal(before[rows[0]], getattr(base, projection))
        signal += packed.square().sum().item()
    assert layer.merge_error.signal == pytest.approx(signal, rel=0.05) and layer.merge_error.sqnr_db > 10
    model.unmerge_adapter()
    assert same_tensors(stored(model), before)
    assert torch.equal(model(IDS).logits, logits) and layer.merge_error is None


_ALL = ["experts", "q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(
    ("family", "targets"),
    [("qwen3_moe", _ALL), ("qwen2_moe", ["experts"]), ("mixtral", ["experts"]), ("gpt_oss", _ALL)],
    ids=str,
)
def test_merged_into_bf16(load, family, targets, tmp_path):
    skips = ["shared_expert"] if family == "qwen2_moe" else None
    model = with_lora(load(family, modules_to_not_convert=skips), target_modules=targets)
    layer = model.get_submodule(EXPERTS)
    delta = deltas(layer, "gate_up_proj").detach()
    delta = delta.transpose(1, 2) if layer.base_layer.is_transposed else delta
    expected = (layer.base_layer.dequantized_weight("gate_up_proj", torch.float32) + delta).to(torch.bfloat16)
    plain_class = type(layer.base_layer).plain_class
    plain = merge_adapters(model, into="bf16")
    experts = plain.model.layers[0].mlp.experts
    assert type(experts) is plain_class and plain.dtype == torch.bfloat16
    assert torch.equal(experts.gate_up_proj, expected)
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16} and not hasattr(
        plain.config, "quantization_config"
    )
    plain.save_pretrained(tmp_path)
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and torch.equal(reloaded(IDS).logits, plain(IDS).logits)


def test_a_sum_that_is_not_finite_changes_nothing(load):
    model = with_lora(load("qwen3_moe"))
    layer, before = model.get_submodule(EXPERTS), stored(model)
    layer.lora_B["default"].down_proj.data[2, 0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"experts\.down_proj\.2: merging default gives weights that are not finite"):
        layer.merge(safe_merge=True)
    assert not layer.merged and same_tensors(stored(model), before)


# ---- other engines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_what_other_engines_are_given(load, family):
    model = with_lora(load(family))
    given = dict(policy_parameters(model))
    assert given.keys() == dict(make_model(family).named_parameters()).keys()
    layer = model.get_submodule(EXPERTS)
    delta = deltas(layer, "down_proj").detach()
    delta = delta.transpose(1, 2) if layer.base_layer.is_transposed else delta
    expected = layer.base_layer.dequantized_weight("down_proj") + delta
    torch.testing.assert_close(given["model.layers.0.mlp.experts.down_proj"], expected)
    before = given["model.layers.0.mlp.experts.down_proj"].clone()
    model.merge_adapter()
    merged = dict(policy_parameters(model))["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(merged, layer.base_layer.dequantized_weight("down_proj")) and not torch.equal(merged, before)


def test_grpo_trains_the_factors_of_experts(tmp_path):
    make_model("qwen3_moe", hidden=32, intermediate=48, moe_intermediate_size=32).save_pretrained(tmp_path / "moe")
    scheme = MXFP4RLConfig(mode="packed")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", quantization_config=scheme)
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.05, target_modules=["q_proj", "experts"])
    build = trainer_factory(tmp_path)
    trainer = build(policy=policy, peft_config=lora, max_steps=2, gradient_checkpointing=True, learning_rate=1e-2)
    before = stored(trainer.model)
    trainer.train()
    factors = [p for name, p in trainer.model.named_parameters() if "experts.lora_B.default" in name]
    assert len(factors) == 4 and all(p.any() for p in factors) and same_tensors(stored(trainer.model), before)
