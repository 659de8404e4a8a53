# SPDX-License-Identifier: Apache-2.0
"""Weights of experts on their way into vLLM: the codes of the policy, or what they stand for, bit for bit."""

import re

import pytest
import torch
from vllm_experts import ACTIVATIONS, NAME, Engine, packed_experts, plugin_with_stand_ins, tokens

from hf_mxfp4 import MXFP4RLConfig


@pytest.fixture(scope="module")
def plugin():
    with plugin_with_stand_ins() as plugin:
        yield plugin


@pytest.mark.parametrize(
    "options",
    [{}, *({"weight_block": "32x32", "macro_block": 32}, {"outlier_fallback": 0.5, "outlier_fallback_rate": 0.2})],
    ids=str,
)
@pytest.mark.parametrize("family", ACTIVATIONS)
def test_masters_become_the_codes_of_the_policy(plugin, family, options):
    """Fused as transformers has them in memory, or gate, up and down of each expert as it has them on disk."""
    if "outlier_fallback_rate" in options:
        options = {**options, "outlier_fallback_operands": "weights"}
    options = {"preset": "w4a16", "outlier_fallback": None, **options}
    source, _, plain = packed_experts(family, options)
    config = MXFP4RLConfig(**options)
    for is_fused in (True, False):
        if not is_fused and source.is_transposed:
            continue
        engine = Engine(plugin, source, config, family)
        for name, tensor in fused(plain) if is_fused else one_by_one(plain, engine.expected.projection_names):
            assert engine.push(f"{NAME}.{name}", tensor) == []
        engine.method.process_weights_after_loading(engine.layer)
        assert engine.expected.n_quantized == 8
        for name in source.shapes():
            projection, part = re.match("(gate_up_proj|down_proj)(.*)", name).groups()
            inside = getattr(engine.layer, {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}[projection] + part)
            assert torch.equal(inside, getattr(source, name)), name
        places = {name: parameter.data_ptr() for name, parameter in engine.layer.named_parameters()}
        other, _, other_plain = packed_experts(family, options, seed=1)
        for name, tensor in fused(other_plain):
            assert engine.push(f"{NAME}.{name}", tensor) == []
        engine.set_biases(other)
        x, ids, weights = tokens()
        assert torch.equal(engine(x, ids, weights), other(x, ids, weights))
        assert {name: parameter.data_ptr() for name, parameter in engine.layer.named_parameters()} == places


def fused(plain):
    return [(name, getattr(plain, name).detach().clone()) for name in ("gate_up_proj", "down_proj")]


def one_by_one(plain, names):
    """In an order in which gate and up of an expert are far apart."""
    gate, up, down = names
    halves = [weight.chunk(2) for weight in plain.gate_up_proj.detach()]
    yield from ((f"{e}.{gate}.weight", half[0]) for e, half in enumerate(halves))
    yield from ((f"{e}.{down}.weight", weight) for e, weight in enumerate(plain.down_proj.detach()))
    yield from ((f"{e}.{up}.weight", half[1]) for e, half in enumerate(halves))


@pytest.mark.parametrize("family", ACTIVATIONS)
def test_dense_experts_get_what_the_packed_ones_stand_for(plugin, family):
    """From codes, one tensor in each stream, and from masters; the other way they come twice through models that hand
    weights on to their parts."""
    source, packed, plain = packed_experts(family, {"preset": "w4a16"})
    trained = MXFP4RLConfig(preset="w4a16", outlier_fallback=None)
    codes = [(name, getattr(source, name).detach()) for name in source.shapes()]
    for config, tensors in ((packed, codes), (packed, reversed(codes)), (trained, fused(plain))):
        engine = Engine(plugin, source, config, family, weights="dense")
        found = dict(pair for name, tensor in tensors for pair in engine.push(f"{NAME}.{name}", tensor))
        assert {name: value for name, value in found.items()} == {
            again: value for name, tensor in found.items() for again, value in engine.push(name, tensor)
        }
        expected = dict(named_values(source, engine.expected.projection_names))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        engine.method.process_weights_after_loading(engine.layer)
        assert engine.layer.was_processed
        pushed = dict(pair for name, tensor in fused(plain) for pair in engine.push(f"{NAME}.{name}", tensor))
        if source.is_transposed:
            assert torch.equal(pushed[f"{NAME}.down_proj"], plain.down_proj)
        else:
            name = engine.expected.projection_names[2]
            assert torch.equal(pushed[f"{NAME}.3.{name}.weight"], plain.down_proj[3])


def named_values(source, names):
    gate, up, down = names
    values = {projection: source.dequantized_weight(projection) for projection in source.projections}
    if source.is_transposed:
        return [(f"{NAME}.{projection}", value) for projection, value in values.items()]
    found = []
    for e in range(source.n_experts):
        halves = values["gate_up_proj"][e].chunk(2)
        found += [(f"{NAME}.{e}.{own}.weight", half) for own, half in zip((gate, up), halves, strict=True)]
        found.append((f"{NAME}.{e}.{down}.weight", values["down_proj"][e]))
    return found


def test_names_with_more_or_less_before_the_layers(plugin):
    source, config, _ = packed_experts("qwen3_moe", {"preset": "w4a16"})
    for name in (f"language_model.{NAME}", NAME.removeprefix("model.")):
        engine = Engine(plugin, source, config, "qwen3_moe")
        assert engine.push(f"{name}.down_proj", source.down_proj.detach()) == []
        assert torch.equal(engine.layer.w2_weight, source.down_proj)
    other = f"{NAME.replace('0', '1')}.down_proj"  # a layer of another process
    assert engine.push(other, source.down_proj) == [(other, source.down_proj)]


@pytest.mark.parametrize("weights", ["packed", "dense"])
def test_what_did_not_come_is_named(plugin, weights):
    source, config, plain = packed_experts("qwen3_moe", {"preset": "w4a16"})
    engine = Engine(plugin, source, config, "qwen3_moe", weights=weights)
    with pytest.raises(RuntimeError, match="gate_up_proj, .*down_proj_macro: nothing came"):
        engine.method.process_weights_after_loading(engine.layer)
    for name in source.shapes():
        if name != "down_proj_macro":
            engine.push(f"{NAME}.{name}", getattr(source, name).detach())
    with pytest.raises(ValueError, match=rf"^{re.escape(NAME)}.down_proj_macro: in no file"):
        engine.method.process_weights_after_loading(engine.layer)
    engine = Engine(plugin, source, MXFP4RLConfig(preset="w4a16"), "qwen3_moe", weights=weights)
    for name, tensor in one_by_one(plain, engine.expected.projection_names):
        if name != "2.up_proj.weight":
            engine.push(f"{NAME}.{name}", tensor)
    with pytest.raises(ValueError, match=rf"^{re.escape(NAME)}.2.gate_up_proj: in no file"):
        engine.method.process_weights_after_loading(engine.layer)


@pytest.mark.parametrize("weights", ["packed", "dense"])
def test_packed_tensors_of_another_scheme_are_refused(plugin, weights):
    source, config, _ = packed_experts("qwen3_moe", {"preset": "w4a16"})
    engine = Engine(plugin, source, config, "qwen3_moe", weights=weights)
    with pytest.raises(
        ValueError, match=r"down_proj.weight_macro is torch.uint8 \[4, 128, 8\]; expected uint8 \[4, 128, 2\]"
    ):
        engine.push(f"{NAME}.down_proj_macro", torch.zeros(4, 128, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"weight_residual is .* no such tensor"):
        engine.push(f"{NAME}.down_proj_residual", torch.zeros(4, 128, 8, dtype=torch.uint8))


def test_weights_that_come_past_the_plugin_are_refused(plugin):
    source, config, _ = packed_experts("qwen3_moe", {"preset": "w4a16"})
    engine = Engine(plugin, source, config, "qwen3_moe")
    with pytest.raises(RuntimeError, match='"weights": "dense"'):
        options = {"weight_name": "w2_weight", "shard_id": "w2", "expert_id": 0, "return_success": True}
        engine.layer.w2_weight.weight_loader(param=engine.layer.w2_weight, loaded_weight=torch.zeros(1), **options)
