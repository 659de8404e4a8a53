# SPDX-License-Identifier: Apache-2.0
"""Settings of vLLM, weights on their way into it, and adapters beside them: the codes of the policy, or what they stand
for, bit for bit."""

import re
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from vllm_stand_ins import ACTIVATIONS, Engine, Layer, linear_method, packed_experts, tokens
from vllm_stand_ins import NAME as EXPERTS

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.vllm import EngineSettings, ExpectedLayers, WeightConverter
from hf_mxfp4.ops import dequantize, packed_tensor, quantize_weight


NAME = "model.layers.0.mlp.down_proj"
CONFIGS = [
    MXFP4RLConfig(mode="packed"),
    MXFP4RLConfig(preset="w4a4", outlier_fallback=1.0),
    MXFP4RLConfig(fprop={"weight": "even+mbs128-blockwise+32x32"}),
]
IDS = ["packed", "fallback", "tiles"]


def test_settings_are_read_and_written():
    assert EngineSettings.read(None) == EngineSettings("packed", 0)
    settings = EngineSettings.read({"adapter_rank": 16})
    assert EngineSettings.read(asdict(settings)) == settings == EngineSettings("packed", 16)
    config = MXFP4RLConfig(preset="w4a16")  # policies pass over them
    assert MXFP4RLConfig.from_dict({**config.to_dict(), "vllm": {"weights": "dense"}}) == config


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weights": "sparse"}, r"vllm\.weights='sparse' must be 'packed' or 'dense'"),
        ({"weights": "native"}, "must be 'packed' or 'dense'"),
        ({"weight": "dense"}, "has no option 'weight'; did you mean 'weights'"),
        ({"adapter_rank": -1}, r"adapter_rank=-1 must be a whole number"),
        ({"adapter_rank": True}, r"adapter_rank=True must be a whole number"),
        ({"adapter_rank": 4, "weights": "dense"}, r"needs vllm\.weights='packed'"),
        ("dense", "must be a mapping"),
    ],
)
def test_unknown_settings_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        EngineSettings.read(options)


def test_a_layer_is_known_by_its_name_and_by_what_models_make_of_it():
    expected = ExpectedLayers(linears={"model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"})
    for name in ("model.layers.1.mlp.up_proj", "layers.1.mlp.up_proj", "language_model.model.layers.1.mlp.up_proj"):
        assert expected.linear(name) == "model.layers.1.mlp.up_proj"
    for name in ("mlp.up_proj", "model.layers.2.mlp.up_proj", "model.layers.11.mlp.up_proj"):  # the first is of either
        assert expected.linear(name) is None


def expected_layers(**options):
    return ExpectedLayers(EngineSettings(**options), linears={NAME}, dtype=torch.float32)


def convert(config, expected, tensors):
    """What a new converter makes of pairs of names and tensors: each stream has one of its own."""
    return list(WeightConverter(config, expected)(tensors))


def master(seed=0):
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(seed))


def values(packed, scheme):
    return dequantize(packed_tensor(packed, 256, scheme, torch.float32), torch.float32)


def named(packed):
    return {f"{NAME}.{part}": tensor for part, tensor in packed.items()}


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_masters_are_quantized_whole_for_packed_layers_and_once(config):
    expected = expected_layers()
    weight = master()
    found = convert(config, expected, [(f"{NAME}.weight", weight)])
    wanted = named(quantize_weight(weight, config.weight_scheme))
    assert dict(found).keys() == wanted.keys() == expected.loaded
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found)
    # The model hands them on to its parts.
    shorter = [(name.removeprefix("model."), tensor) for name, tensor in found]
    assert all(a is b for (_, a), (_, b) in zip(convert(config, expected, shorter), shorter, strict=True))


def test_codes_go_into_packed_layers_as_they_are_and_other_tensors_too():
    config = CONFIGS[0]
    expected = expected_layers()
    packed = named(quantize_weight(master(), config.weight_scheme))
    others = [("lm_head.weight", master()), ("model.norm.weight", torch.ones(4)), (f"{NAME}.bias", torch.ones(64))]
    given = [*packed.items(), *others]
    assert all(a is b for (_, a), (_, b) in zip(convert(config, expected, given), given, strict=True))
    assert expected.loaded == packed.keys()


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_codes_are_dequantized_for_dense_layers_once_all_are_there(config, is_loaded):
    """Each in a stream of its own, as trainers push; in any order; and again."""
    expected = expected_layers(weights="dense")
    expected.is_loaded = is_loaded
    for seed in (0, 1):
        packed = quantize_weight(master(seed), config.weight_scheme)
        *first, last = reversed(named(packed).items())
        for pair in first:
            assert convert(config, expected, [pair]) == []
        ((name, found),) = convert(config, expected, [last])
        assert name == f"{NAME}.weight"
        assert torch.equal(found, values(packed, config.weight_scheme))
        assert not expected.pending


def test_masters_are_quantized_for_dense_layers_until_they_are_pushed():
    config = CONFIGS[1]
    expected = expected_layers(weights="dense")
    weight = master()
    ((name, found),) = convert(config, expected, [(f"{NAME}.weight", weight)])
    assert name == f"{NAME}.weight"
    assert torch.equal(found, values(quantize_weight(weight, config.weight_scheme), config.weight_scheme))
    expected.is_loaded = True
    ((name, found),) = convert(config, expected, [(f"{NAME}.weight", weight)])
    assert found is weight


def test_codes_of_other_shapes_are_refused():
    config = CONFIGS[0]
    expected = expected_layers(weights="dense")
    packed = quantize_weight(master(), config.weight_scheme)
    packed["weight_macro"] = packed["weight_macro"][:, :1]
    with pytest.raises(ValueError, match=rf"{NAME}\.weight_macro is torch\.uint8 \[64, 1\]; expected uint8 \[64, 2\]"):
        convert(config, expected, named(packed).items())


def test_adapters_need_room():
    pair = f"{NAME}.lora_A.weight", torch.zeros(4, 256)
    with pytest.raises(ValueError, match=rf"{pair[0]} was pushed, and vLLM has no room for adapters; set adapter_rank"):
        convert(CONFIGS[0], expected_layers(), [pair])
    assert convert(CONFIGS[0], expected_layers(adapter_rank=4), [pair]) == [pair]


def adapted_layer(plugin, rows, n_parts, **split):
    """A layer that vLLM has joined, with room for adapters of rank 4."""
    method = linear_method(plugin, CONFIGS[0], [f"layer{i}" for i in range(n_parts)], adapter_rank=4)
    return Layer(method, 256, rows, torch.float32, **split)


def load(layer, a, b, *shard):
    layer.lora_A.weight.weight_loader(layer.lora_A.weight, a, *shard)
    layer.lora_B.weight.weight_loader(layer.lora_B.weight, b, *shard)


def test_adapters_of_joined_layers_have_ranks_of_their_own(plugin):
    layer = adapted_layer(plugin, [32, 8, 8], 3)
    add = plugin.linears.add_adapters
    x = torch.randn(5, 256)
    y = torch.randn(5, 48)
    addresses = [p.data_ptr() for p in layer.parameters()]
    assert torch.equal(add(y, x, layer), y)
    q = (torch.randn(4, 256), torch.randn(32, 4))
    v = (torch.randn(2, 256), torch.randn(8, 2))
    load(layer, *q, "q")
    load(layer, *v, "v")
    added = torch.cat([x @ q[0].T @ q[1].T, torch.zeros(5, 8), x @ v[0].T @ v[1].T], dim=1)
    assert torch.allclose(add(y, x, layer), y + added, atol=1e-4)
    smaller = torch.randn(1, 256), torch.randn(32, 1)
    load(layer, *smaller, "q")
    added[:, :32] = x @ smaller[0].T @ smaller[1].T
    assert torch.allclose(add(y, x, layer), y + added, atol=1e-4)
    assert [p.data_ptr() for p in layer.parameters()] == addresses


def test_processes_split_the_columns_of_an_adapter(plugin):
    a = torch.randn(2, 256)
    b = torch.randn(8, 2)
    x = torch.randn(5, 256)
    y = torch.zeros(5, 8)
    for rank in (0, 1):
        layer = adapted_layer(plugin, [8], 1, shares=2, rank=rank)
        load(layer, a, b)
        y = plugin.linears.add_adapters(y, x[:, 128 * rank :][:, :128], layer)
    assert torch.allclose(y, x @ a.T @ b.T, atol=1e-4)


def test_what_has_no_room_is_refused(plugin):
    layer = adapted_layer(plugin, [32, 8, 8], 3)
    with pytest.raises(ValueError, match="layer0: an adapter of rank 5 was pushed, and there is room for rank 4"):
        load(layer, torch.zeros(5, 256), torch.zeros(32, 5), "q")
    with pytest.raises(ValueError, match="layer0: an adapter of rank 5 was pushed"):
        layer.lora_B.weight.weight_loader(layer.lora_B.weight, torch.zeros(32, 5), "q")
    with pytest.raises(ValueError, match="layer0: None is none of the layers that vLLM has joined"):
        load(layer, torch.zeros(4, 256), torch.zeros(48, 4))
    with pytest.raises(ValueError, match="layer0: vLLM joins 2 layers of checkpoints into 3 parts"):
        adapted_layer(plugin, [32, 8, 8], 2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fprop": {"weight": "even+mbs32-dynamic+32x32"}},
        {"outlier_fallback": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ACTIVATIONS)
def test_masters_become_the_codes_of_the_policy(plugin, family, options):
    """Fused as transformers has them in memory, or gate, up and down of each expert as it has them on disk."""
    options = {"preset": "w4a16", **options}
    source, _, plain = packed_experts(family, options)
    config = MXFP4RLConfig(**options)
    for is_fused in (True, False):
        if not is_fused and source.is_transposed:
            continue
        engine = Engine(plugin, source, config, family)
        for name, tensor in fused(plain) if is_fused else one_by_one(plain, engine.expected.projection_names):
            assert engine.push(f"{EXPERTS}.{name}", tensor) == []
        engine.method.process_weights_after_loading(engine.layer)
        for name in source.shapes():
            projection, part = re.match("(gate_up_proj|down_proj)(.*)", name).groups()
            inside = getattr(engine.layer, {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}[projection] + part)
            assert torch.equal(inside, getattr(source, name)), name
        places = {name: parameter.data_ptr() for name, parameter in engine.layer.named_parameters()}
        other, _, other_plain = packed_experts(family, options, seed=1)
        for name, tensor in fused(other_plain):
            assert engine.push(f"{EXPERTS}.{name}", tensor) == []
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
        found = dict(pair for name, tensor in tensors for pair in engine.push(f"{EXPERTS}.{name}", tensor))
        assert all(again is value for name, value in found.items() for _, again in engine.push(name, value))
        expected = dict(named_values(source, engine.expected.projection_names))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        engine.method.process_weights_after_loading(engine.layer)
        assert engine.layer.was_processed
        pushed = dict(pair for name, tensor in fused(plain) for pair in engine.push(f"{EXPERTS}.{name}", tensor))
        if source.is_transposed:
            assert torch.equal(pushed[f"{EXPERTS}.down_proj"], plain.down_proj)
        else:
            name = engine.expected.projection_names[2]
            assert torch.equal(pushed[f"{EXPERTS}.3.{name}.weight"], plain.down_proj[3])


def named_values(source, names):
    """What vLLM's own loaders read of dequantized experts."""
    plain = SimpleNamespace(**{name: source.dequantized_weight(name) for name in source.projections})
    if source.is_transposed:
        return [(f"{EXPERTS}.{name}", value) for name, value in vars(plain).items()]
    return [(f"{EXPERTS}.{name}", value) for name, value in one_by_one(plain, names)]


@pytest.mark.parametrize("weights", ["packed", "dense"])
def test_what_did_not_come_is_named(plugin, weights):
    source, config, plain = packed_experts("qwen3_moe", {"preset": "w4a16"})
    engine = Engine(plugin, source, config, "qwen3_moe", weights=weights)
    with pytest.raises(ValueError, match="gate_up_proj, .*down_proj_macro: in no file .* past the plugin"):
        engine.method.process_weights_after_loading(engine.layer)
    for name in source.shapes():
        if name != "down_proj_macro":
            engine.push(f"{EXPERTS}.{name}", getattr(source, name).detach())
    with pytest.raises(ValueError, match=rf"^{re.escape(EXPERTS)}.down_proj_macro: in no file"):
        engine.method.process_weights_after_loading(engine.layer)
    engine = Engine(plugin, source, MXFP4RLConfig(preset="w4a16"), "qwen3_moe", weights=weights)
    for name, tensor in one_by_one(plain, engine.expected.projection_names):
        if name != "2.up_proj.weight":
            engine.push(f"{EXPERTS}.{name}", tensor)
    with pytest.raises(ValueError, match=rf"^{re.escape(EXPERTS)}.2.gate_up_proj: in no file"):
        engine.method.process_weights_after_loading(engine.layer)


@pytest.mark.parametrize("weights", ["packed", "dense"])
def test_packed_tensors_of_another_scheme_are_refused(plugin, weights):
    source, config, _ = packed_experts("qwen3_moe", {"preset": "w4a16"})
    engine = Engine(plugin, source, config, "qwen3_moe", weights=weights)
    message = r"down_proj.weight_macro is torch.uint8 \[4, 128, 8\]; expected uint8 \[4, 128, 2\]"
    with pytest.raises(ValueError, match=message):
        engine.push(f"{EXPERTS}.down_proj_macro", torch.zeros(4, 128, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"weight_residual is .* no such tensor"):
        engine.push(f"{EXPERTS}.down_proj_residual", torch.zeros(4, 128, 8, dtype=torch.uint8))
