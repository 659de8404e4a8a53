# SPDX-License-Identifier: Apache-2.0
"""Experts of the vLLM plugin against the packed and the trainable experts of this package, bit for bit, with stand-ins
for the classes of vLLM that the plugin builds on."""

import importlib
import re
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from tiny_models import make_model
from torch import nn

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.layers import MXFP4PackedExperts
from hf_mxfp4.vllm_plugin.arriving_experts import ArrivingExperts
from hf_mxfp4.vllm_plugin.expected import ExpectedLayers
from hf_mxfp4.vllm_plugin.experts_product import experts as experts_operator
from hf_mxfp4.vllm_plugin.settings import EngineSettings


NAME = "model.layers.0.mlp.experts"
ACTIVATIONS = {"qwen3_moe": "silu", "mixtral": "silu", "gpt_oss": "swigluoai"}
SIZES = {"hidden": 128, "intermediate": 256, "moe_intermediate_size": 256}
SCHEMES = [
    {"preset": "w4a16"},
    {"preset": "w4a4"},
    {"preset": "w4a4", "macro_block": "row"},
    {"preset": "w4a4", "macro_block": None, "outlier_fallback": 0.5},
    {"preset": "w4a16", "weight_block": "32x32", "macro_block": 32},
    {"preset": "w4a4", "weight_block": "32x32", "macro_block": 32},
]
IDS = [" ".join(map(str, scheme.values())) for scheme in SCHEMES]


# ---- stand-ins: what of vLLM 0.32.0 the module needs -----------------------------------------------------------------


class FusedMoEMethodBase:
    def __init__(self, moe):
        self.moe = moe

    def process_weights_after_loading(self, layer):
        layer.was_processed = True


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra):
        for name, shape in (
            ("w13", (num_experts, 2 * intermediate_size_per_partition, hidden_size)),
            ("w2", (num_experts, hidden_size, intermediate_size_per_partition)),
        ):
            layer.register_parameter(f"{name}_weight", nn.Parameter(torch.empty(shape, dtype=params_dtype)))
            if self.moe.has_bias:
                layer.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(shape[:2], dtype=params_dtype)))


def set_weight_attrs(weight, attributes):
    for name, value in attributes.items():
        assert not hasattr(weight, name)
        setattr(weight, name, value)


ENGINE = SimpleNamespace(lora_config=None, model_config=SimpleNamespace(enforce_eager=False))
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
STAND_INS = {
    "vllm": {},
    "vllm.config": {"get_current_vllm_config": lambda: ENGINE},
    "vllm.model_executor": {},
    "vllm.model_executor.layers": {},
    FUSED_MOE: {},
    f"{FUSED_MOE}.fused_moe_method_base": {"FusedMoEMethodBase": FusedMoEMethodBase},
    f"{FUSED_MOE}.unquantized_fused_moe_method": {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod},
    "vllm.model_executor.utils": {"set_weight_attrs": set_weight_attrs},
}


@pytest.fixture(scope="module")
def plugin():
    with pytest.MonkeyPatch.context() as patch:
        for name, members in STAND_INS.items():
            module = types.ModuleType(name)
            module.__dict__.update(members)
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "hf_mxfp4.vllm_plugin.experts", raising=False)
        yield importlib.import_module("hf_mxfp4.vllm_plugin.experts")
    sys.modules.pop("hf_mxfp4.vllm_plugin.experts", None)


class Engine:
    """One process of vLLM with the experts of one layer: ``rank`` of ``size``, by columns or, with ``by_expert``, by
    experts."""

    def __init__(self, plugin, source, config, family, *, rank=0, size=1, by_expert=False, weights="packed", **changes):
        self.config = config
        (n_experts, rows, hidden), (_, _, columns) = (source.weight_size(name) for name in source.projections)
        ids = list(range(n_experts))
        is_split = by_expert and size > 1
        own = ids[rank::size] if is_split else ids
        parallel = SimpleNamespace(
            tp_rank=0 if by_expert else rank,
            tp_size=1 if by_expert else size,
            dp_size=1,
            pcp_size=1,
            is_sequence_parallel=False,
            enable_eplb=False,
        )
        moe = SimpleNamespace(
            num_experts=n_experts,
            hidden_dim=hidden,
            intermediate_size=columns,
            has_bias=source.has_bias,
            activation=SimpleNamespace(value=ACTIVATIONS[family]),
            swiglu_limit=None,
            moe_parallel_config=parallel,
        )
        self.layer = layer = nn.Module()
        layer.moe_config, layer.activation, layer.apply_router_weight_on_input = moe, moe.activation, False
        layer.expert_map_manager = SimpleNamespace(get_local_expert_ids=lambda: own)
        layer.expert_map = torch.tensor([own.index(e) if e in own else -1 for e in ids]) if is_split else None
        names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = names
        for name, value in changes.items():
            owner = next(owner for owner in (parallel, moe, layer) if hasattr(owner, name))
            setattr(owner, name, value)
        self.expected = ExpectedLayers(EngineSettings(weights=weights))
        self.method = plugin.experts_method(layer, config, self.expected, NAME)
        dtype = source.compute_dtype if hasattr(source, "compute_dtype") else torch.float32
        width = columns // parallel.tp_size
        self.method.create_weights(layer, len(own), hidden, width, dtype, weight_loader=None)
        self.expected.dtype, self.expected.is_transposed = dtype, source.is_transposed
        self.rank, self.own = parallel.tp_rank, own
        self.set_biases(source)

    def set_biases(self, source):
        if not source.has_bias:
            return
        rows = len(self.layer.w13_bias[0])
        up, down = (source.bias_of(name).detach()[self.own] for name in source.projections)
        self.layer.w13_bias.data.copy_(up[:, self.rank * rows :][:, :rows])
        self.layer.w2_bias.data.copy_(down if self.rank == 0 else torch.zeros_like(down))

    def push(self, name, tensor):
        """What goes on to vLLM's loaders."""
        converted = ArrivingExperts(self.config, self.expected).convert(name, tensor)
        return [(name, tensor)] if converted is None else list(converted)

    def push_codes(self, source):
        for name in source.shapes():
            assert self.push(f"{NAME}.{name}", getattr(source, name).detach().clone()) == []

    def __call__(self, x, ids, weights):
        return self.method.apply(self.layer, x, weights, ids, None, None)


def packed_experts(family, options, dtype=torch.float32, seed=0):
    model = make_model(family, dtype=dtype, seed=seed, **{**SIZES, "layers": 1})
    plain = model.get_submodule(NAME)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.5)
    config = MXFP4RLConfig(mode="packed", **options)
    return MXFP4PackedExperts.from_experts(plain, config), config, plain


def tokens(dtype=torch.float32, n=9):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, SIZES["hidden"], generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(n)])
    return x, ids, torch.rand(n, 2, generator=generator).to(dtype)


# ---- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ACTIVATIONS)
@pytest.mark.parametrize("options", SCHEMES, ids=IDS)
def test_packed_experts_compute_what_the_packed_layer_does(plugin, family, options):
    source, config, _ = packed_experts(family, options)
    engine = Engine(plugin, source, config, family)
    places = {name: parameter.data_ptr() for name, parameter in engine.layer.named_parameters()}
    engine.push_codes(source)
    engine.method.process_weights_after_loading(engine.layer)
    x, ids, weights = tokens()
    assert torch.equal(engine(x, ids, weights), source(x, ids, weights))
    assert {name: parameter.data_ptr() for name, parameter in engine.layer.named_parameters()} == places
    needed = sum(value.numel() for value in (getattr(source, name) for name in source.shapes()))
    size = engine.method.weight_bytes(engine.layer)
    assert size.stored == size.needed == needed


@pytest.mark.parametrize("family", ACTIVATIONS)
def test_sixteen_bit_inputs(plugin, family):
    source, config, _ = packed_experts(family, {"preset": "w4a4"}, torch.bfloat16)
    engine = Engine(plugin, source, config, family)
    engine.push_codes(source)
    x, ids, weights = tokens(torch.bfloat16)
    found = engine(x, ids, weights)
    assert found.dtype == torch.bfloat16 and torch.equal(found, source(x, ids, weights))
    # vLLM's routers weigh in float32.
    weighed = engine(x, ids, weights.float())
    assert weighed.dtype == torch.bfloat16 and (weighed - found).abs().max() < 0.02 * found.abs().max()


@pytest.mark.parametrize("family", ACTIVATIONS)
def test_dense_experts_have_quantized_inputs(plugin, family):
    source, config, _ = packed_experts(family, {"preset": "w4a4"})
    engine = Engine(plugin, source, config, family, weights="dense")
    assert type(engine.method) is plugin.MXFP4RLExpertsMethod
    for projection, name in zip(source.projections, ("w13_weight", "w2_weight"), strict=True):
        values = source.dequantized_weight(projection)
        getattr(engine.layer, name).data.copy_(values.transpose(1, 2) if source.is_transposed else values)
    x, ids, weights = tokens()
    assert torch.equal(engine(x, ids, weights), source(x, ids, weights))


def test_dense_experts_whose_inputs_are_not_quantized_are_those_of_vllm(plugin):
    source, config, _ = packed_experts("qwen3_moe", {"preset": "w4a16"})
    engine = Engine(plugin, source, config, "qwen3_moe", weights="dense", activation=SimpleNamespace(value="other"))
    assert type(engine.method) is plugin.MXFP4RLDenseExpertsMethod


@pytest.mark.parametrize("by_expert", [False, True], ids=["by columns", "by experts"])
@pytest.mark.parametrize("family", ACTIVATIONS)
@pytest.mark.parametrize("options", [*SCHEMES[:2], {"preset": "w4a16", "macro_block": "row"}, *SCHEMES[3:5]], ids=str)
def test_two_processes_have_a_share_each(plugin, family, options, by_expert):
    source, config, plain = packed_experts(family, options)
    x, ids, weights = tokens()
    expected, parts, from_plain = source(x, ids, weights), [], []
    for rank in (0, 1):
        engine = Engine(plugin, source, config, family, rank=rank, size=2, by_expert=by_expert)
        engine.push_codes(source)
        engine.method.process_weights_after_loading(engine.layer)
        parts.append(engine(x, ids, weights))
        assert 2 * engine.method.weight_bytes(engine.layer).values == sum(
            n * rows * columns for n, rows, columns in source.sizes.values()
        )
        again = Engine(plugin, source, config, family, rank=rank, size=2, by_expert=by_expert)
        for projection in source.projections:
            assert again.push(f"{NAME}.{projection}", getattr(plain, projection).detach()) == []
        from_plain.append(again(x, ids, weights))
    assert torch.allclose(parts[0] + parts[1], expected, rtol=1e-4, atol=1e-4)
    assert (parts[0] - expected).abs().max() > 0.1
    assert torch.equal(torch.stack(parts), torch.stack(from_plain))


def test_dense_experts_of_two_processes_with_biases(plugin):
    source, config, _ = packed_experts("gpt_oss", {"preset": "w4a4"})
    x, ids, weights = tokens()
    parts = []
    for rank in (0, 1):
        engine = Engine(plugin, source, config, "gpt_oss", rank=rank, size=2, by_expert=True, weights="dense")
        for projection, name in zip(source.projections, ("w13_weight", "w2_weight"), strict=True):
            values = source.dequantized_weight(projection).transpose(1, 2)
            getattr(engine.layer, name).data.copy_(values[engine.own])
        parts.append(engine(x, ids, weights))
    assert torch.allclose(parts[0] + parts[1], source(x, ids, weights), rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"activation": SimpleNamespace(value="relu2")}, "activation is 'relu2'"),
        ({"swiglu_limit": 7.0}, "swiglu_limit"),
        ({"apply_router_weight_on_input": True}, "multiplied by the router's weights"),
        ({"dp_size": 2}, "data or sequence parallelism"),
        ({"is_sequence_parallel": True}, "data or sequence parallelism"),
        ({"enable_eplb": True}, "enable_eplb"),
    ],
)
def test_experts_that_would_be_others_are_refused(plugin, changes, reason):
    source, config, _ = packed_experts("qwen3_moe", {"preset": "w4a16"})
    with pytest.raises(ValueError, match=rf'{reason}.*"weights": "dense"'):
        Engine(plugin, source, config, "qwen3_moe", **changes)


def test_adapters_of_vllm_on_experts_are_refused(plugin, monkeypatch):
    source, config, _ = packed_experts("qwen3_moe", {"preset": "w4a16"})
    monkeypatch.setattr(ENGINE, "lora_config", SimpleNamespace(target_modules=None))
    with pytest.raises(ValueError, match="lora_target_modules"):
        Engine(plugin, source, config, "qwen3_moe")
    ENGINE.lora_config.target_modules = ["q_proj", "o_proj"]
    Engine(plugin, source, config, "qwen3_moe")


@pytest.mark.parametrize(
    "options, size, reason",
    [
        ({"preset": "w4a16"}, 4, "64 of 256 columns, which cuts blocks of 128"),
        ({"preset": "w4a16", "macro_block": None}, 16, "16 of 256 columns, which cuts blocks of 32"),
        ({"preset": "w4a4", "macro_block": "row"}, 2, "one factor for the whole row"),
    ],
)
def test_a_share_that_would_cut_blocks_is_refused(plugin, options, size, reason):
    source, config, _ = packed_experts("qwen3_moe", options)
    with pytest.raises(ValueError, match=f"{reason}.*enable_expert_parallel"):
        Engine(plugin, source, config, "qwen3_moe", size=size)


def test_cuda_graphs_need_a_kernel(plugin, monkeypatch):
    source, config, _ = packed_experts("qwen3_moe", {"preset": "w4a16", "macro_block": "row"})
    monkeypatch.setattr(plugin.torch, "get_default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(plugin, "reads_packed_on_gpus", lambda scheme, backend: False)
    with pytest.raises(ValueError, match="enforce_eager=True"):
        Engine(plugin, source, config, "qwen3_moe")
    monkeypatch.setattr(ENGINE.model_config, "enforce_eager", True)
    Engine(plugin, source, config, "qwen3_moe")


@pytest.mark.parametrize("weights", ["packed", "dense"])
def test_the_operator_is_one_for_compiled_code(plugin, weights):
    source, config, _ = packed_experts("gpt_oss", {"preset": "w4a4"})
    engine = Engine(plugin, source, config, "gpt_oss", weights=weights)
    if weights == "packed":
        engine.push_codes(source)
    x, ids, topk_weights = tokens()
    compiled = torch.compile(lambda *inputs: engine(*inputs), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, ids, topk_weights), engine(x, ids, topk_weights))
    parts = [[parameter for name, parameter in engine.layer.named_parameters() if name.startswith(f"{own}_weight")]
             for own in ("w13", "w2")]  # fmt: skip
    biases = [engine.layer.w13_bias, engine.layer.w2_bias]
    scheme = str(config.weight_scheme) if weights == "packed" else ""
    texts = scheme, str(config.activation_scheme), "swigluoai", "auto"
    arguments = x, topk_weights, ids, torch.tensor([0, 1, -1, 2, 3]), *parts, biases, *texts
    torch.library.opcheck(experts_operator, arguments, test_utils=["test_schema", "test_faketensor"])
    assert experts_operator(x[:0], topk_weights[:0], ids[:0], *arguments[3:]).shape == (0, SIZES["hidden"])


def test_on_the_kernels_nothing_is_read_back(run_script):
    """Of one process and of two with half the experts each: rows of the other's experts are in no product."""
    report = run_script("run_vllm_experts.py", interpret=True)
    for case, found in report.items():
        kernel = "grouped_matmul_packed" if case.startswith("packed") else "grouped_matmul"
        assert found["launches"][kernel] == 2 and found["read"] == 0, case
        assert max(found["differences"].values()) < 1e-5, case
    assert report.keys() == {"packed w4a16", "packed w4a4", "dense w4a4"}
