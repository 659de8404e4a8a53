# SPDX-License-Identifier: Apache-2.0
"""Experts of the vLLM plugin with stand-ins for the classes of vLLM that it builds on, for tests without vLLM."""

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
from hf_mxfp4.integrations.vllm.arriving_experts import ArrivingExperts
from hf_mxfp4.integrations.vllm.expected import ExpectedLayers
from hf_mxfp4.integrations.vllm.settings import EngineSettings
from hf_mxfp4.layers import MXFP4PackedExperts


NAME = "model.layers.0.mlp.experts"
ACTIVATIONS = {"qwen3_moe": "silu", "mixtral": "silu", "gpt_oss": "swigluoai"}
SIZES = {"hidden": 128, "intermediate": 256, "moe_intermediate_size": 256}


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


@contextmanager
def plugin_with_stand_ins() -> Iterator[types.ModuleType]:
    """The module of the plugin, as long as the stand-ins are there."""
    with pytest.MonkeyPatch.context() as patch:
        for name, members in STAND_INS.items():
            module = types.ModuleType(name)
            module.__dict__.update(members)
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "hf_mxfp4.integrations.vllm.experts", raising=False)
        yield importlib.import_module("hf_mxfp4.integrations.vllm.experts")
    sys.modules.pop("hf_mxfp4.integrations.vllm.experts", None)


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
