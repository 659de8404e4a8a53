# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the classes of vLLM that the plugin builds on, for tests without vLLM; and layers with their
weights as vLLM has them."""

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from tiny_models import make_model
from torch import nn

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.vllm import EngineSettings, ExpectedLayers, WeightConverter
from hf_mxfp4.layers import MXFP4PackedExperts, MXFP4PackedLinear
from hf_mxfp4.ops import dequantize, packed_shapes, packed_tensor


NAME = "model.layers.0.mlp.experts"
ACTIVATIONS = {"qwen3_moe": "silu", "mixtral": "silu", "gpt_oss": "swigluoai"}
SIZES = {"hidden": 128, "intermediate": 256, "moe_intermediate_size": 256}


# ---- classes of vLLM -------------------------------------------------------------------------------------------------


class LinearMethodBase:
    def process_weights_after_loading(self, layer):
        pass


class UnquantizedLinearMethod(LinearMethodBase):
    def process_weights_after_loading(self, layer):
        layer.was_processed = True

    def apply(self, layer, x, bias=None):
        return nn.functional.linear(x, layer.weight, bias)


class LinearBase(nn.Module):
    pass


class QuantizationConfig:
    def __init__(self):
        self.packed_modules_mapping = {}

    def get_checkpoint_weight_mapper(self):
        return None


class WeightsMapper:
    def apply(self, weights):
        return weights


class ChannelQuantScaleParameter(nn.Parameter):
    def __new__(cls, data, **kwargs):
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data, output_dim, weight_loader):
        self.output_dim = output_dim
        self.weight_loader = weight_loader


class ModelWeightParameter(ChannelQuantScaleParameter):
    def __init__(self, data, input_dim, output_dim, weight_loader):
        super().__init__(data, output_dim, weight_loader)
        self.input_dim = input_dim


REGISTERED: dict[str, type] = {}


def register_quantization_config(quantization):
    return lambda cls: REGISTERED.update({quantization: cls})


class FusedMoEMethodBase:
    def __init__(self, moe):
        self.moe = moe

    def process_weights_after_loading(self, layer):
        layer.was_processed = True


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra):
        rows = {"w13": 2 * intermediate_size_per_partition, "w2": hidden_size}
        if self.moe.has_bias:  # weights are not looked at
            for name, n in rows.items():
                layer.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(num_experts, n, dtype=params_dtype)))


def set_weight_attrs(weight, attributes):
    for name, value in attributes.items():
        assert not hasattr(weight, name)
        setattr(weight, name, value)


ENGINE = SimpleNamespace(lora_config=None, model_config=SimpleNamespace(enforce_eager=False))


def get_current_vllm_config():
    return ENGINE


LAYERS = "vllm.model_executor.layers"
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
STAND_INS = {
    **{name: [] for name in ("vllm", "vllm.model_executor", LAYERS, "vllm.model_executor.models", FUSED_MOE)},
    "vllm.config": [get_current_vllm_config],
    f"{LAYERS}.linear": [LinearBase, LinearMethodBase, UnquantizedLinearMethod],
    f"{LAYERS}.quantization": [register_quantization_config],
    f"{LAYERS}.quantization.base_config": [QuantizationConfig],
    "vllm.model_executor.models.utils": [WeightsMapper],
    "vllm.model_executor.parameter": [ChannelQuantScaleParameter, ModelWeightParameter],
    f"{FUSED_MOE}.fused_moe_method_base": [FusedMoEMethodBase],
    f"{FUSED_MOE}.unquantized_fused_moe_method": [UnquantizedFusedMoEMethod],
    "vllm.model_executor.utils": [set_weight_attrs],
}
PACKAGE = "hf_mxfp4.integrations.vllm"


@contextmanager
def plugin_with_stand_ins() -> Iterator[SimpleNamespace]:
    """The modules of the plugin that import vLLM, as long as the stand-ins are there."""
    names = ("linears", "quantization", "experts")
    with pytest.MonkeyPatch.context() as patch:
        for name, members in STAND_INS.items():
            module = types.ModuleType(name)
            module.__dict__.update({member.__name__: member for member in members})
            patch.setitem(sys.modules, name, module)
        for name in names:
            patch.delitem(sys.modules, f"{PACKAGE}.{name}", raising=False)
        importlib.import_module(PACKAGE).register()
        yield SimpleNamespace(**{name: importlib.import_module(f"{PACKAGE}.{name}") for name in names})
    for name in names:
        sys.modules.pop(f"{PACKAGE}.{name}", None)


# ---- experts ---------------------------------------------------------------------------------------------------------


class Engine:
    """One process of vLLM with the experts of one layer: ``rank`` of ``size``, by columns or, with ``by_expert``, by
    experts."""

    def __init__(self, plugin, source, config, family, *, rank=0, size=1, by_expert=False, weights="packed", **changes):
        self.config = config
        (n_experts, rows, hidden), (_, _, columns) = (source.weight_size(name) for name in source.projections)
        ids = list(range(n_experts))
        is_split = by_expert and size > 1
        own = ids[rank::size] if is_split else ids
        tp_rank, tp_size = (0, 1) if by_expert else (rank, size)
        others = {"dp_size": 1, "pcp_size": 1, "is_sequence_parallel": False, "enable_eplb": False}
        parallel = SimpleNamespace(tp_rank=tp_rank, tp_size=tp_size, **others)
        sizes = {"num_experts": n_experts, "hidden_dim": hidden, "intermediate_size": columns}
        activation = SimpleNamespace(value=ACTIVATIONS[family])
        moe = SimpleNamespace(**sizes, has_bias=source.has_bias, activation=activation, swiglu_limit=None)
        moe.moe_parallel_config = parallel
        self.layer = layer = nn.Module()
        layer.moe_config = moe
        layer.activation = moe.activation
        layer.apply_router_weight_on_input = False
        layer.expert_map_manager = SimpleNamespace(is_local_expert=own.__contains__)
        layer.expert_map = torch.tensor([own.index(e) if e in own else -1 for e in ids]) if is_split else None
        names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = names
        for name, value in changes.items():
            owner = next(owner for owner in (parallel, moe, layer) if hasattr(owner, name))
            setattr(owner, name, value)
        self.expected = ExpectedLayers(EngineSettings(weights=weights))
        self.method = plugin.experts.experts_method(layer, config, self.expected, NAME)
        dtype = source.compute_dtype if hasattr(source, "compute_dtype") else torch.float32
        width = columns // parallel.tp_size
        self.method.create_weights(layer, len(own), hidden, width, dtype, weight_loader=None)
        self.expected.dtype = dtype
        self.expected.is_transposed = source.is_transposed
        self.rank = parallel.tp_rank
        self.own = own
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
        return list(WeightConverter(self.config, self.expected)([(name, tensor)]))

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


# ---- linear layers ---------------------------------------------------------------------------------------------------


class Layer(LinearBase):
    """A layer as vLLM has it: parts joined along the rows, of which this process has a share of the columns."""

    def __init__(self, method, columns, rows, dtype, shares=1, rank=0):
        super().__init__()
        self.rows = rows
        self.tp_rank = rank
        sizes = columns // shares, rows, columns, sum(rows), dtype
        method.create_weights(self, *sizes, weight_loader=self.weight_loader)

    def weight_loader(self, param, loaded_weight, loaded_shard_id=None):
        """What vLLM's loaders do: narrow what came and what is there, and copy."""
        data = param.data
        if getattr(param, "input_dim", None) is not None:
            size = data.shape[param.input_dim]
            loaded_weight = loaded_weight.narrow(param.input_dim, self.tp_rank * size, size)
        if loaded_shard_id is not None:
            index = "qkv".index(loaded_shard_id)
            data = data.narrow(param.output_dim, sum(self.rows[:index]), self.rows[index])
        assert data.shape == loaded_weight.shape
        data.copy_(loaded_weight)


def linear_method(plugin, config, parts=("model.down_proj",), **settings):
    """The method of a layer that vLLM has joined from ``parts``, and what is expected for it."""
    expected = ExpectedLayers(EngineSettings(**settings), linears=set(parts))
    kind = plugin.linears.MXFP4RLLinearMethod if expected.is_packed else plugin.linears.MXFP4RLDenseLinearMethod
    return kind(config, parts[0], expected, list(parts))


def make_layer(method, sources, dtype, **split):
    """A layer with the weights of packed layers, loaded through the converter."""
    layer = Layer(method, sources[0].in_features, [source.out_features for source in sources], dtype, **split)
    push_layers(method, layer, sources)
    method.process_weights_after_loading(layer)
    return layer


def push_layers(method, layer, sources, without=()):
    """Load packed layers into one that vLLM has joined from them."""
    converter = WeightConverter(method.scheme, method.expected)
    for source, part, shard in zip(sources, method.parts, "qkv" if len(sources) == 3 else [None], strict=True):
        tensors = [(f"{part}.{name}", tensor) for name, tensor in source.named_parameters() if name != "bias"]
        for name, tensor in converter(pair for pair in tensors if pair[0] not in without):
            parameter = getattr(layer, name.rpartition(".")[2])
            parameter.weight_loader(parameter, tensor, *([shard] if shard else []))


def dequantized(layer, config, dtype=torch.float32):
    """The weight that the parameters of a layer stand for."""
    parts = {name: getattr(layer, name).data for name in packed_shapes(1, 32, config.weight_scheme)}
    tensor = packed_tensor(parts, 2 * layer.weight.shape[1], config.weight_scheme, dtype)
    return dequantize(tensor, dtype)


def packed_layer(config, rows=48, columns=256, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(columns, rows, bias=False, dtype=dtype)
    linear.weight = nn.Parameter(torch.randn(rows, columns, generator=generator).to(dtype))
    return MXFP4PackedLinear.from_linear(linear, config)
