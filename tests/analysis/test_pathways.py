# SPDX-License-Identifier: Apache-2.0
"""One error component at a time in a model: injection, and damage to predictions."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tiny_models import make_model
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.analysis.policy.injection import inject_component, injectable_linears
from hf_mxfp4.analysis.policy.pathways import component_damage
from hf_mxfp4.analysis.policy.predictions import next_tokens, policy_logits
from hf_mxfp4.numerics import COMPONENTS, QuantScheme, apply_component, apply_scheme, decompose_scheme
from hf_mxfp4.quantizer.swap import quantize_linears


SCHEMES = [QuantScheme(), QuantScheme("rceil", 128, "static", 0.5), QuantScheme("even", 128, "blockwise")]
DTYPES = [torch.float32, torch.bfloat16]
IDS = torch.tensor([[3, 7, 1, 30, 12, 9], [8, 8, 2, 31, 5, 6]])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def quantized_model(model, config):
    model = copy.deepcopy(model)
    quantize_linears(model, config)
    return model


def logits_of(model):
    with torch.no_grad():
        return model(IDS).logits


# ---- injection ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_all_on_weights_is_the_model_with_quantized_weights(family, dtype, scheme):
    model = make_model(family, dtype=dtype)
    expected = copy.deepcopy(model)
    for name, parameter in expected.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data = apply_scheme(parameter.data, scheme)
    with inject_component(model, "all", scheme) as injection:
        assert torch.equal(logits_of(model), logits_of(expected))
    assert injection.n_layers == 14
    assert not torch.equal(logits_of(model), logits_of(expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"macro_block": None, "outlier_fallback": None}, {"preset": "w4a16"}], ids=str)
def test_all_by_config_is_the_quantized_model_forward_and_backward(dtype, options):
    config = MXFP4RLConfig(**options)
    model = make_model(dtype=dtype)
    expected = quantized_model(model, config)
    operands = "weights" if options.get("preset") == "w4a16" else "both"
    with inject_component(model, "all", config, operands=operands):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
    expected_loss = expected(IDS, labels=IDS).loss
    expected_loss.backward()
    assert torch.equal(loss, expected_loss)
    grads = {name: parameter.grad for name, parameter in expected.named_parameters()}
    assert all(torch.equal(parameter.grad, grads[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_none_is_full_precision_of_plain_and_of_quantized_models(dtype):
    model = make_model(dtype=dtype)
    plain = logits_of(model)
    quantized = quantized_model(model, MXFP4RLConfig())
    for either in (model, quantized):
        with inject_component(either, "none", QuantScheme(), operands="both") as injection:
            assert torch.equal(logits_of(either), plain)
        assert (injection.n_layers, injection.weights, injection.activations) == (14, None, None)
    assert not torch.equal(logits_of(quantized), plain)


@pytest.mark.parametrize("component", COMPONENTS)
def test_one_component_is_the_same_in_plain_and_quantized_models(component):
    model = make_model()
    quantized = quantized_model(model, MXFP4RLConfig())
    with inject_component(model, component, SCHEMES[1]), inject_component(quantized, component, SCHEMES[1]):
        assert torch.equal(logits_of(model), logits_of(quantized))


@pytest.mark.parametrize("operands", ["weights", "activations", "both"])
@pytest.mark.parametrize("component", COMPONENTS)
def test_what_a_layer_computes(component, operands):
    layer, scheme = nn.Linear(40, 5), QuantScheme("even")  # 40 is no multiple of the block
    x = torch.randn(3, 40)
    weight = layer.weight if operands == "activations" else apply_component(layer.weight, component, scheme)
    inputs = x if operands == "weights" else apply_component(x, component, scheme)
    with inject_component(nn.ModuleList([layer]), component, scheme, operands=operands):
        assert torch.equal(layer(x), F.linear(inputs, weight, layer.bias))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_components_of_a_layers_output_sum_to_the_whole(scheme):
    layer, x = nn.Linear(256, 16), torch.randn(4, 256)
    model = nn.ModuleList([layer])
    plain, changes = layer(x), {}
    for component in (*COMPONENTS, "all"):
        with inject_component(model, component, scheme):
            changes[component] = layer(x) - plain
    parts = sum(changes[component] for component in COMPONENTS)
    torch.testing.assert_close(parts, changes["all"], rtol=0, atol=1e-5)
    assert changes["all"].abs().max() > 1e-3


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_energies_are_those_of_the_decomposition(scheme):
    layer, x = nn.Linear(256, 16), torch.randn(4, 256)
    expected, of_input = decompose_scheme(layer.weight, scheme), decompose_scheme(x, scheme)
    for component in (*COMPONENTS, "all"):
        share = {**expected.energy_ratio, "all": 1.0}[component] * expected.relative_mse
        with inject_component(nn.ModuleList([layer]), component, scheme, operands="both") as injection:
            assert injection.weights.ratio == pytest.approx(share, rel=1e-4)
            assert math.isnan(injection.activations.ratio)
            layer(x), layer(x)
        share = {**of_input.energy_ratio, "all": 1.0}[component] * of_input.relative_mse
        assert injection.activations.ratio == pytest.approx(share, rel=1e-4)


def test_tiles_are_for_weights_alone():
    layer, x = nn.Linear(64, 32, bias=False), torch.randn(4, 64)
    layer.weight.data *= torch.exp2(torch.arange(32.0) % 3)[:, None]  # rows of different scales
    scheme = QuantScheme(block_rows=32)
    with inject_component(nn.ModuleList([layer]), "all", scheme, operands="both"):
        output = layer(x)
    assert torch.equal(output, F.linear(apply_scheme(x, QuantScheme()), apply_scheme(layer.weight, scheme)))
    assert not torch.equal(apply_scheme(layer.weight, scheme), apply_scheme(layer.weight, QuantScheme()))


def test_an_operand_left_alone_has_no_energy():
    model = make_model()
    with inject_component(model, "grid", QuantScheme()) as injection:
        assert injection.activations is None and injection.weights.ratio > 0.005
    with inject_component(model, "grid", QuantScheme(), operands="activations") as injection:
        logits_of(model)
    assert injection.weights is None and injection.activations.ratio > 0.005


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails):
    model = make_model()
    before = {name: (parameter.clone(), parameter._version) for name, parameter in model.named_parameters()}
    state = {name: set(module.__dict__) for name, module in model.named_modules()}
    plain = logits_of(model)
    try:
        with inject_component(model, "scale_bias", QuantScheme(), operands="both"):
            assert not torch.equal(logits_of(model), plain)
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert torch.equal(logits_of(model), plain)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == state
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][0]) and parameter._version == before[name][1]


def test_contexts_nest_and_a_forward_of_the_instance_comes_back():
    layer, x = nn.Linear(32, 4), torch.randn(2, 32)
    layer.forward = marked = lambda x: F.linear(x, layer.weight) * 0
    model = nn.ModuleList([layer])
    with inject_component(model, "grid", QuantScheme()):
        grid = layer(x)
        with inject_component(model, "none", QuantScheme()):
            assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        assert torch.equal(layer(x), grid)
    assert layer.forward is marked and not layer(x).any()


def test_a_weight_that_changes_meanwhile_is_followed():
    layer, x = nn.Linear(32, 4, bias=False), torch.randn(2, 32)
    with inject_component(nn.ModuleList([layer]), "all", QuantScheme()):
        layer(x)
        layer.weight.data.neg_()
        assert torch.equal(layer(x), F.linear(x, apply_scheme(layer.weight, QuantScheme())))


def test_the_way_back_alone():
    layer, x = nn.Linear(32, 4), torch.randn(2, 32, requires_grad=True)
    upstream = torch.randn(2, 4)
    with inject_component(nn.ModuleList([layer]), "all", QuantScheme(), operands="both", backward_only=True):
        output = layer(x)
    assert torch.equal(output, F.linear(x, layer.weight, layer.bias))
    output.backward(upstream)
    assert torch.equal(x.grad, upstream @ apply_scheme(layer.weight, QuantScheme()))
    torch.testing.assert_close(layer.weight.grad, upstream.t() @ apply_scheme(x.detach(), QuantScheme()))


def test_which_layers():
    model = make_model(layers=2)
    assert len(injectable_linears(model, ["layers.0"])) == 7
    assert "lm_head" not in injectable_linears(model)
    quantized = quantized_model(model, MXFP4RLConfig(modules_to_not_convert=["layers.0"]))
    assert list(injectable_linears(quantized)) == list(injectable_linears(model, ["layers.0"]))
    assert len(injectable_linears(quantized, ["mlp", "model.layers.1.self_attn.q_proj"])) == 3
    assert len(injectable_linears(model.model, ["model.layers.1"])) == 7  # a base model lacks the prefix
    assert len(injectable_linears(quantized.model, ["model.layers.1.mlp"])) == 4
    config = MXFP4RLConfig(modules_to_not_convert=["mlp"])
    with inject_component(model, "grid", config, modules_to_not_convert=["layers.1"]) as injection:
        assert injection.layers == tuple(f"model.layers.0.self_attn.{x}_proj" for x in "qkvo")


def test_adapters_on_a_quantized_model_are_left_alone():
    model = get_peft_model(quantized_model(make_model(), MXFP4RLConfig()), LoraConfig(target_modules=["q_proj"]))
    names = list(injectable_linears(model))
    assert len(names) == 14 and not any("lora" in name for name in names)
    with inject_component(model, "grid", QuantScheme()):
        grid = logits_of(model)
    with inject_component(model, "none", QuantScheme()):
        assert not torch.equal(logits_of(model), grid)


def test_a_layer_in_two_places_counts_once():
    layer = nn.Linear(32, 32)
    assert list(injectable_linears(nn.ModuleList([layer, layer]))) == ["0"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: inject_component(m, "noise", QuantScheme()), "component='noise'"),
        (lambda m: inject_component(m, "grid", QuantScheme(), operands="w"), "operands='w'"),
        (lambda m: inject_component(m, "grid", QuantScheme(rounding="stochastic")), "same in every pass"),
        (lambda m: inject_component(m, "grid", MXFP4RLConfig(preset="w4a16"), operands="both"), "no activations"),
        (lambda m: inject_component(m, "grid", QuantScheme(), modules_to_not_convert=["layer"]), "matches no module"),
        (lambda m: inject_component(m, "grid", QuantScheme(), modules_to_not_convert=["layers"]), "no layer of Qwen2"),
        (lambda m: inject_component(m.lm_head, "grid", QuantScheme(), modules_to_not_convert=["re:"]), "no layer of"),
        (lambda m: inject_component(m.to("meta"), "grid", QuantScheme()), "not materialised"),
    ],
)
def test_injection_refuses(call, message):
    with pytest.raises(ValueError, match=message), call(make_model(layers=1)):
        pass


def test_fused_experts_are_refused_unless_left_alone():
    model = make_model("qwen3_moe", layers=1)
    with pytest.raises(ValueError, match="fused"), inject_component(model, "grid", QuantScheme()):
        pass
    with inject_component(model, "grid", QuantScheme(), modules_to_not_convert=["experts"]) as injection:
        assert injection.n_layers == 4  # of the attention; the router never counts


# ---- sequences ------------------------------------------------------------------------------------------------------


def test_next_tokens_counts_what_labels_and_mask_leave():
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    assert next_tokens(ids).tolist() == [[6, 7, 8], [6, 0, 0]]
    assert next_tokens(ids, attention_mask=mask).tolist() == [[6, 7, 8], [6, -100, -100]]
    labels = torch.tensor([[-100, -100, 7, 8], [-100, -100, 0, 0]])
    assert next_tokens(ids, labels, mask).tolist() == [[-100, 7, 8], [-100, -100, -100]]
    left = torch.tensor([[0, 0, 1, 1]])
    assert next_tokens(ids[:1], attention_mask=left).tolist() == [[-100, -100, 8]]


@pytest.mark.parametrize(
    ("ids", "labels", "mask", "message"),
    [
        (IDS[0], None, None, "must be"),
        (IDS[:, :1], None, None, "no token counts"),
        (IDS, torch.full_like(IDS, -100), None, "no token counts"),
        (IDS, IDS[:1], None, "labels is"),
        (IDS, None, IDS[:, 1:], "attention_mask is"),
    ],
)
def test_next_tokens_refuses(ids, labels, mask, message):
    with pytest.raises(ValueError, match=message):
        next_tokens(ids, labels, mask)


def test_policy_logits_ignore_padding_and_modes():
    model = make_model().train()
    model.model.norm.eval()
    padded = F.pad(IDS, (0, 3))
    mask = (torch.arange(9) < 6).long().expand(2, 9)
    logits = policy_logits(model, padded, attention_mask=mask)
    assert logits.shape == (10, 32) and logits.dtype == torch.float32 and not logits.requires_grad
    torch.testing.assert_close(logits, logits_of(model)[:, :-1].flatten(0, 1), rtol=0, atol=1e-5)
    assert model.training and model.model.layers[0].training and not model.model.norm.training


@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "LoRA"])
def test_the_head_computes_the_counted_positions_alone_and_what_follows_it_stays(adapters):
    config = Gemma2Config(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, final_logit_softcapping=0.1,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    if adapters:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2)).eval()
    labels = IDS.clone()
    labels[0, :3] = labels[1, :5] = -100
    sizes = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: sizes.append(out.shape[:-1].numel()))
    logits = policy_logits(model, IDS, labels)
    expected = logits_of(model)
    torch.testing.assert_close(logits, torch.cat([expected[0, 2:5], expected[1, 4:5]]), rtol=0, atol=1e-6)
    assert sizes == [4, 12] and 0 < logits.abs().max() < 0.1


# ---- damage ---------------------------------------------------------------------------------------------------------


def softmax(row):
    top = max(row)
    weights = [math.exp(x - top) for x in row]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_damage_agrees_with_a_plain_loop(dtype):
    model, scheme = make_model(dtype=dtype), QuantScheme()
    changed = copy.deepcopy(model)
    for name, parameter in changed.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data = apply_component(parameter.data, "scale_bias", scheme)
    kl, nll, agree, entropy, count = 0.0, 0.0, 0, 0.0, 0
    for sequence, old, new in zip(IDS.tolist(), logits_of(model).tolist(), logits_of(changed).tolist(), strict=True):
        for position in range(3, 5):
            p, q = softmax(old[position]), softmax(new[position])
            kl += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            nll += math.log(p[sequence[position + 1]] / q[sequence[position + 1]])
            agree += p.index(max(p)) == q.index(max(q))
            entropy += sum(a * math.log(a) for a in p) - sum(b * math.log(b) for b in q)
            count += 1
    labels = IDS.clone()
    labels[:, :4] = -100
    damage = component_damage(model, IDS, scheme, labels=labels, components=["scale_bias"])["scale_bias"]
    assert (damage.n_tokens, damage.n_layers, count) == (4, 14, 4)
    assert damage.kl == pytest.approx(kl / 4, rel=1e-4) and damage.kl > 1e-6
    assert damage.nll_change == pytest.approx(nll / 4, rel=1e-4, abs=1e-7)
    assert damage.entropy_change == pytest.approx(entropy / 4, rel=1e-4, abs=1e-7)
    assert damage.top1_agreement == agree / 4
    assert damage.perplexity_ratio == pytest.approx(math.exp(nll / 4))


def test_nothing_injected_does_no_damage():
    damage = component_damage(make_model(), IDS, QuantScheme(), components=["none"], operands="both")["none"]
    assert (damage.kl, damage.nll_change, damage.entropy_change, damage.top1_agreement) == (0, 0, 0, 1)
    assert damage.weight_energy is None and damage.score is None and damage.score_change is None


def test_damage_is_the_same_for_quantized_models_and_again():
    model = make_model()
    quantized = quantized_model(model, MXFP4RLConfig())
    first = component_damage(model, IDS, SCHEMES[1], operands="both")
    assert first == component_damage(quantized, IDS, SCHEMES[1], operands="both")
    assert set(first) == {*COMPONENTS, "all"}
    assert first["deadzone"].weight_energy < first["grid"].weight_energy


def test_padding_does_no_damage():
    model, mask = make_model(), (torch.arange(9) < 6).long().expand(2, 9)
    plain = component_damage(model, IDS, QuantScheme(), components=["grid"])["grid"]
    padded = component_damage(model, F.pad(IDS, (0, 3)), QuantScheme(), attention_mask=mask, components=["grid"])
    assert padded["grid"].n_tokens == plain.n_tokens == 10
    assert padded["grid"].kl == pytest.approx(plain.kl, rel=1e-3)


def test_score_sees_each_component_in_evaluation_mode():
    model, seen = make_model().train(), []

    def score(policy):
        assert policy is model and not policy.training
        seen.append(logits_of(policy))
        return len(seen)

    damage = component_damage(model, IDS, QuantScheme(), components=["grid", "all"], score=score)
    assert [(d.score, d.score_change) for d in damage.values()] == [(2, 1), (3, 2)]
    assert torch.equal(seen[0], logits_of(model)) and not torch.equal(seen[1], seen[0])
    assert model.training
