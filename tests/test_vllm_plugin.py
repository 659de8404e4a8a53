# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin against stand-ins for the classes that it builds on; `VLLM_SOURCE`, a folder with vLLM's Python
sources, lets the stand-ins be compared with the real ones."""

import abc
import ast
import importlib
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.backends.select import dequantize
from hf_mxfp4.gemm import packed_shapes, packed_tensor
from hf_mxfp4.integrations.vllm.activations import quantize_input
from hf_mxfp4.integrations.vllm.expected import ExpectedLayers
from hf_mxfp4.integrations.vllm.settings import EngineSettings
from hf_mxfp4.layers import MXFP4PackedLinear


ROOT = Path(hf_mxfp4.__file__).parents[1]


# ---- stand-ins: names, signatures and abstract methods as in vLLM 0.33.0 ---------------------------------------------


class QuantizeMethodBase(abc.ABC):
    @abc.abstractmethod
    def create_weights(self, layer, *weight_args, **extra_weight_attrs): ...

    @abc.abstractmethod
    def apply(self, layer, *args, **kwargs): ...

    def process_weights_after_loading(self, layer):
        return


class LinearMethodBase(QuantizeMethodBase):
    @abc.abstractmethod
    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
        **extra_weight_attrs,
    ): ...  # fmt: skip

    @abc.abstractmethod
    def apply(self, layer, x, bias=None): ...


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(self, layer, *args, **kwargs):
        raise NotImplementedError

    def process_weights_after_loading(self, layer):
        layer.was_processed = True

    def apply(self, layer, x, bias=None):
        return nn.functional.linear(x, layer.weight, bias)


class LinearBase(nn.Module):
    pass


class QuantizationConfig(abc.ABC):
    def __init__(self):
        super().__init__()
        self.packed_modules_mapping = {}

    @abc.abstractmethod
    def get_name(self): ...

    @abc.abstractmethod
    def get_supported_act_dtypes(self): ...

    @classmethod
    @abc.abstractmethod
    def get_min_capability(cls): ...

    @staticmethod
    @abc.abstractmethod
    def get_config_filenames(): ...

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config): ...

    @abc.abstractmethod
    def get_quant_method(self, layer, prefix): ...


class ChannelQuantScaleParameter(nn.Parameter):
    def __new__(cls, data, **kwargs):
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data, output_dim, weight_loader):
        self.output_dim, self.weight_loader = output_dim, weight_loader


class ModelWeightParameter(ChannelQuantScaleParameter):
    def __init__(self, data, input_dim, output_dim, weight_loader):
        super().__init__(data, output_dim, weight_loader)
        self.input_dim = input_dim


REGISTERED: dict[str, type] = {}


def register_quantization_config(quantization):
    def register(cls):
        if not issubclass(cls, QuantizationConfig):
            raise ValueError("The quantization config must be a subclass of `QuantizationConfig`.")
        REGISTERED[quantization] = cls
        return cls

    return register


STAND_INS = {
    "vllm": {},
    "vllm.model_executor": {},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.linear": {
        "LinearBase": LinearBase,
        "LinearMethodBase": LinearMethodBase,
        "UnquantizedLinearMethod": UnquantizedLinearMethod,
    },
    "vllm.model_executor.layers.quantization": {"register_quantization_config": register_quantization_config},
    "vllm.model_executor.layers.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
    "vllm.model_executor.parameter": {
        "ChannelQuantScaleParameter": ChannelQuantScaleParameter,
        "ModelWeightParameter": ModelWeightParameter,
    },
}
MODULES = [f"hf_mxfp4.integrations.vllm.{name}" for name in ("quantization", "linears", "native")]


@pytest.fixture(scope="module")
def plugin():
    with pytest.MonkeyPatch.context() as patch:
        for name, members in STAND_INS.items():
            module = types.ModuleType(name)
            module.__dict__.update(members)
            patch.setitem(sys.modules, name, module)
        for name in MODULES:
            patch.delitem(sys.modules, name, raising=False)
        importlib.import_module("hf_mxfp4.integrations.vllm").register()
        yield importlib.import_module("hf_mxfp4.integrations.vllm.quantization")
    for name in MODULES:
        sys.modules.pop(name, None)


class Layer(LinearBase):
    """A layer as vLLM has it: parts joined along the rows, of which this process has a share of the columns."""

    def __init__(self, method, columns, rows, dtype, shares=1, rank=0):
        super().__init__()
        self.rows, self.rank = rows, rank
        sizes = columns // shares, rows, columns, sum(rows), dtype
        method.create_weights(self, *sizes, weight_loader=self.weight_loader)

    def weight_loader(self, param, loaded_weight, loaded_shard_id=None):
        """What vLLM's loaders do: narrow what came and what is there, and copy."""
        data = param.data
        if getattr(param, "input_dim", None) is not None:
            size = data.shape[param.input_dim]
            loaded_weight = loaded_weight.narrow(param.input_dim, self.rank * size, size)
        if loaded_shard_id is not None:
            index = "qkv".index(loaded_shard_id)
            data = data.narrow(param.output_dim, sum(self.rows[:index]), self.rows[index])
        assert data.shape == loaded_weight.shape
        data.copy_(loaded_weight)


def make_layer(method, sources, dtype, **split):
    """A layer with the weights of packed layers, loaded."""
    layer = Layer(method, sources[0].in_features, [source.out_features for source in sources], dtype, **split)
    for name, parameter in layer.named_parameters():
        for source, shard in zip(sources, "qkv" if len(sources) == 3 else [None], strict=True):
            parameter.weight_loader(parameter, getattr(source, name), *([shard] if shard else []))
    method.process_weights_after_loading(layer)
    return layer


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


SCHEMES = [
    {},
    {"macro_block": None},
    {"macro_search": "blockwise"},
    {"outlier_fallback": 0.5},
    {"preset": "w4a4"},
    {"preset": "w4a4", "outlier_fallback": 0.5, "scale_rule": "even"},
    {"macro_block": "row"},
    {"weight_block": "32x32", "macro_block": 32},
]
IDS = [" ".join(map(str, scheme.values())) or "default" for scheme in SCHEMES]


# ---- tests ----------------------------------------------------------------------------------------------------------


def test_registering_names_the_method(plugin):
    assert REGISTERED["mxfp4_rl"] is plugin.MXFP4RLVLLMConfig
    hf_mxfp4.integrations.vllm.register()
    assert REGISTERED["mxfp4_rl"] is plugin.MXFP4RLVLLMConfig


def test_the_entry_point_names_register():
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition('[project.entry-points."vllm.general_plugins"]\n')[2]
    module, _, name = re.match(r'mxfp4_rl = "(.*)"', section)[1].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_importing_the_plugin_needs_no_vllm():
    code = "import sys, hf_mxfp4.integrations.vllm; print('vllm' in sys.modules, 'torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split()[0] == "False", done.stderr


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", SCHEMES, ids=IDS)
def test_it_computes_what_the_packed_layer_does(plugin, options, dtype):
    config = MXFP4RLConfig(mode="packed", **options)
    source = packed_layer(config, dtype=dtype)
    method = plugin.MXFP4RLLinearMethod(config)
    layer = make_layer(method, [source], dtype)
    names = list(packed_shapes(48, 256, config.weight_scheme))
    assert [name for name, _ in layer.named_parameters()] == names
    assert all(torch.equal(getattr(layer, name), getattr(source, name)) for name in names)  # names as on disk
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(method.apply(layer, x), source(x))
    bias = torch.arange(48.0).to(dtype)
    assert torch.equal(
        method.apply(layer, x, bias),
        nn.functional.linear(source.quantized_input(x, dtype), source.dequantized_weight(dtype), bias),
    )


@pytest.mark.parametrize("options", SCHEMES, ids=IDS)
def test_joined_layers_are_those_that_were_joined(plugin, options):
    config = MXFP4RLConfig(mode="packed", **options)
    sources = [packed_layer(config, rows=rows, seed=rows) for rows in (64, 32, 32)]
    layer = make_layer(plugin.MXFP4RLLinearMethod(config), sources, torch.float32)
    assert torch.equal(dequantized(layer, config), torch.cat([source.dequantized_weight() for source in sources]))


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("preset", ["w4a16", "w4a4"])
def test_dense_layers_compute_the_same(plugin, preset):
    config, expected = MXFP4RLConfig(mode="packed", preset=preset), ExpectedLayers(EngineSettings("dense"))
    source, layer = packed_layer(config), LinearBase()
    method = plugin.MXFP4RLDenseLinearMethod(config, "model.down_proj", expected, ["model.down_proj"])
    layer.weight, layer.mxfp4_shape = nn.Parameter(source.dequantized_weight()), (48, 256)
    with pytest.raises(RuntimeError, match=r"^model\.down_proj: not converted, since vLLM loads"):
        method.process_weights_after_loading(layer)
    expected.pending["model.down_proj"] = {"weight": source.weight, "weight_macro": source.weight_macro}
    with pytest.raises(ValueError, match=r"^model\.down_proj\.weight_scale: in no file of the checkpoint"):
        method.process_weights_after_loading(layer)
    expected.arrived.add("model.down_proj")
    method.process_weights_after_loading(layer)
    assert layer.was_processed and expected.is_loaded
    x = torch.randn(5, 256)
    assert torch.equal(method.apply(layer, x), source(x))
    assert method.weight_bytes(layer).stored == 4 * 48 * 256


def test_packed_weights_are_written_in_place(plugin):
    """Loaded, pushed and loaded again: graphs hold the addresses."""
    config = MXFP4RLConfig(mode="packed", outlier_fallback=0.5)
    method = plugin.MXFP4RLLinearMethod(config)
    layer = make_layer(method, [packed_layer(config)], torch.float32)
    addresses = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    other = packed_layer(config, seed=1)
    for name, parameter in layer.named_parameters():
        parameter.weight_loader(parameter, getattr(other, name))
    method.process_weights_after_loading(layer)
    assert {name: parameter.data_ptr() for name, parameter in layer.named_parameters()} == addresses
    assert torch.equal(dequantized(layer, config), other.dequantized_weight())


@pytest.mark.parametrize("options", [options for options in SCHEMES if options.get("preset") != "w4a4"])
def test_two_processes_split_the_columns(plugin, options):
    config = MXFP4RLConfig(mode="packed", **options)
    source, method = packed_layer(config), plugin.MXFP4RLLinearMethod(config)
    halves = [make_layer(method, [source], torch.float32, shares=2, rank=rank) for rank in (0, 1)]
    values = torch.cat([dequantized(half, config) for half in halves], dim=1)
    assert torch.equal(values, source.dequantized_weight())


@pytest.mark.parametrize(
    "options, shares, reason",
    [
        ({}, 4, "cuts blocks of 128; choose a smaller tensor_parallel_size"),
        ({"macro_block": None}, 16, "cuts blocks of 32; choose"),
        ({"macro_block": "row"}, 16, "cuts blocks of 32; choose"),
        ({"macro_block": "row", "preset": "w4a4"}, 2, "mbsrow.* needs whole rows; use tensor_parallel_size=1"),
        ({"preset": "w4a4", "outlier_fallback": 1.0, "outlier_fallback_rate": 0.1}, 2, "of1@0.1 needs whole rows"),
    ],
)
def test_a_share_that_would_cut_blocks_is_refused(plugin, options, shares, reason):
    config = MXFP4RLConfig(mode="packed", **options)
    with pytest.raises(ValueError, match=rf"model\.down_proj: .*{reason}"):
        method = plugin.MXFP4RLLinearMethod(config, "model.down_proj")
        make_layer(method, [packed_layer(config)], torch.float32, shares=shares)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_what_is_not_packed_is_not_cut_to_size(plugin, dtype):
    """vLLM's loader of layers that are split by columns would take as many bytes as there is room for."""
    config = MXFP4RLConfig(mode="packed")
    layer = make_layer(plugin.MXFP4RLLinearMethod(config, "model.down_proj"), [packed_layer(config)], torch.float32)
    with pytest.raises(ValueError, match=r"model\.down_proj\.weight takes uint8 of 128 columns; torch.*48, 256"):
        layer.weight.weight_loader(layer.weight, torch.zeros(48, 256, dtype=dtype))


def test_parts_that_no_file_has_are_named(plugin):
    config = MXFP4RLConfig(mode="packed", modules_to_not_convert=["lm_head"])
    parts = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    method = plugin.MXFP4RLLinearMethod(config, "model.layers.0.self_attn.qkv_proj", parts=parts)
    layer = Layer(method, 256, [64, 32, 32], torch.float32)
    for name, parameter in layer.named_parameters():
        for shard, rows in zip("qkv", layer.rows, strict=True):
            if (name, shard) != ("weight_macro", "k"):
                parameter.weight_loader(parameter, getattr(packed_layer(config, rows), name), shard)
    with pytest.raises(ValueError, match=r"^model\.layers\.0\.self_attn\.k_proj\.weight_macro: in no file"):
        method.process_weights_after_loading(layer)


def test_the_scheme_comes_from_config_json(plugin, checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2"), quantization_config=MXFP4RLConfig())
    hf_mxfp4.pack(model).save_pretrained(tmp_path / "packed")
    stored = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    config = plugin.MXFP4RLVLLMConfig.from_config(stored)
    assert config.scheme == model.config.quantization_config and "mbs128" in repr(config)
    assert config.get_name() == "mxfp4_rl" and config.get_config_filenames() == []
    assert torch.bfloat16 in config.get_supported_act_dtypes() and config.get_min_capability() == 70
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    attention = "model.layers.0.self_attn"
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    method = config.get_quant_method(LinearBase(), f"{attention}.qkv_proj")
    sources = [model.get_submodule(f"{attention}.{name}_proj") for name in "qkv"]
    layer = make_layer(method, sources, torch.float32)
    for name in ("weight", "weight_scale", "weight_macro", "weight_residual", "weight_residual_scale"):
        assert torch.equal(getattr(sources[0], name), tensors[f"{attention}.q_proj.{name}"])  # names as on disk
    x = torch.randn(3, 64)
    expected = torch.cat([source(x) - source.bias for source in sources], dim=-1)
    assert torch.allclose(method.apply(layer, x), expected, atol=1e-5)


def test_which_layers_are_quantized(plugin):
    config = plugin.MXFP4RLVLLMConfig(MXFP4RLConfig(mode="packed", modules_to_not_convert=["layers.0", "q_b_proj"]))
    config.packed_modules_mapping = {
        "gate_up_proj": ["gate_proj", "up_proj"],
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    }
    kinds = {
        "model.layers.1.mlp.gate_up_proj": plugin.MXFP4RLLinearMethod,
        "model.layers.1.self_attn.qkv_proj": plugin.MXFP4RLLinearMethod,
        "model.layers.10.mlp.down_proj": plugin.MXFP4RLLinearMethod,
        "model.layers.0.mlp.down_proj": UnquantizedLinearMethod,
        "model.layers.0.self_attn.qkv_proj": UnquantizedLinearMethod,
        "model.layers.1.mlp.gate": UnquantizedLinearMethod,
        "model.layers.1.self_attn.q_b_proj": UnquantizedLinearMethod,
        "lm_head": UnquantizedLinearMethod,
    }
    assert {name: type(config.get_quant_method(LinearBase(), name)) for name in kinds} == kinds
    assert config.get_quant_method(nn.Embedding(2, 2), "model.embed_tokens") is None


def test_a_joined_layer_that_is_skipped_in_part_is_refused(plugin):
    config = plugin.MXFP4RLVLLMConfig(MXFP4RLConfig(mode="packed", modules_to_not_convert=["k_proj"]))
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    with pytest.raises(ValueError, match="skips only some of them"):
        config.get_quant_method(LinearBase(), "model.layers.0.self_attn.qkv_proj")


def test_latent_attention_with_quantized_inputs_is_refused_unless_its_layers_compute_it(plugin, monkeypatch):
    name = "model.layers.0.self_attn.kv_b_proj"
    monkeypatch.delenv("VLLM_MLA_DISABLE", raising=False)
    config = plugin.MXFP4RLVLLMConfig(MXFP4RLConfig(mode="packed", preset="w4a4"))
    with pytest.raises(ValueError, match=rf"{name}: .*VLLM_MLA_DISABLE=1"):
        config.get_quant_method(LinearBase(), name)
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    assert type(config.get_quant_method(LinearBase(), name)) is plugin.MXFP4RLLinearMethod
    weights_only = plugin.MXFP4RLVLLMConfig(MXFP4RLConfig(mode="packed"))
    monkeypatch.delenv("VLLM_MLA_DISABLE")
    assert type(weights_only.get_quant_method(LinearBase(), name)) is plugin.MXFP4RLLinearMethod


class RoutedExperts(nn.Module):
    """Stands in for vLLM's class of that name, in a version that sends no weights through the method's mapper."""


@pytest.mark.parametrize("name", ["RoutedExperts", "FusedMoE"])  # what it was called before
def test_packed_experts_are_refused_with_the_way_out_by_older_versions(plugin, name):
    experts = type(name, (RoutedExperts,), {})()
    config = plugin.MXFP4RLVLLMConfig(MXFP4RLConfig(mode="packed", modules_to_not_convert=["layers.1.mlp.experts"]))
    with pytest.raises(
        ValueError, match=r"layers.0.mlp.experts: quantized experts cannot .* 0.32 .* export the checkpoint"
    ):
        config.get_quant_method(experts, "model.layers.0.mlp.experts")
    assert config.get_quant_method(experts, "model.layers.1.mlp.experts") is None
    assert config.get_quant_method(experts, "model.layers.1.block_sparse_moe.experts") is None


def test_master_weights_are_refused_by_older_versions(plugin):
    with pytest.raises(ValueError, match=r"mode='qat'.*hf_mxfp4\.pack"):
        plugin.MXFP4RLVLLMConfig.from_config(MXFP4RLConfig().to_dict())


@pytest.mark.parametrize("settings", [{"weights": "dense"}, {"adapter_rank": 4}], ids=str)
def test_settings_that_need_conversion_are_refused_by_older_versions(plugin, settings):
    stored = MXFP4RLConfig(mode="packed").to_dict() | {"vllm": settings}
    with pytest.raises(ValueError, match=r"EngineSettings.*0\.32 does.*only packed checkpoints can be kept, packed"):
        plugin.MXFP4RLVLLMConfig.from_config(stored)


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ({}, "know no macro factors"),
        ({"macro_block": None, "outlier_fallback": 0.5}, "know no residuals"),
        ({"macro_block": None, "preset": "w4a4"}, "quantize activations by a rule of their own"),
        ({"macro_block": None}, "has no MXFP4 kernels for linear layers"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_the_kernels_of_vllm_cannot_compute_is_refused(plugin, monkeypatch, scheme, reason):
    monkeypatch.setattr(plugin, "_CONVERTS", True)
    stored = MXFP4RLConfig(mode="packed", **scheme).to_dict() | {"vllm": {"weights": "native"}}
    with pytest.raises(ValueError, match=f"weights='native'.*{reason}.*use 'packed'"):
        plugin.MXFP4RLVLLMConfig.from_config(stored)


def test_settings_in_force_are_where_vllm_looks_for_what_graphs_depend_on(plugin, monkeypatch):
    stored = MXFP4RLConfig(mode="packed").to_dict() | {"vllm": {"weights": "dense"}}
    monkeypatch.setenv("MXFP4_RL_VLLM_WEIGHTS", "packed")
    config = plugin.MXFP4RLVLLMConfig.from_config(stored)
    assert config.settings == EngineSettings("packed") and stored["vllm"] == {"weights": "dense"}
    config.maybe_update_config("name", hf_config=types.SimpleNamespace(quantization_config=stored))
    assert stored["vllm"] == {"weights": "packed", "adapter_rank": 0}
    nested = types.SimpleNamespace(text_config=types.SimpleNamespace(quantization_config={}))
    config.maybe_update_config("name", hf_config=nested)
    assert nested.text_config.quantization_config == {"vllm": {"weights": "packed", "adapter_rank": 0}}


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("rotation", [None, "deterministic-64"])
def test_selected_blocks_of_activations_are_those_of_the_packed_layer(plugin, rotation):
    """Of each row, whatever the layer saw before and whatever else is in the batch."""
    rate = {"outlier_fallback": 1.0, "outlier_fallback_rate": 0.1}
    config = MXFP4RLConfig(mode="packed", preset="w4a4", **rate, fprop=rotation and {"rotation": rotation})
    assert plugin.MXFP4RLVLLMConfig(config).scheme is config
    source, method = packed_layer(config), plugin.MXFP4RLLinearMethod(config)
    layer = make_layer(method, [source], torch.float32)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)) ** 3
    expected = source(x)
    method.apply(layer, 100 * x.flip(0))
    assert torch.equal(method.apply(layer, x), expected)
    compiled = torch.compile(lambda x: method.apply(layer, x), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), expected)
    quantized = source.quantized_input(torch.cat([100 * x, x]), torch.float32)[5:]
    assert torch.equal(quantized, source.quantized_input(x, torch.float32))


@pytest.mark.parametrize("preset", ["w4a16", "w4a4"])
def test_rotated_weights_meet_rotated_inputs(plugin, preset):
    config = MXFP4RLConfig(mode="packed", preset=preset, fprop={"rotation": "deterministic-64"})
    sources = [packed_layer(config, rows, seed=rows) for rows in (64, 32, 32)]
    layer = make_layer(method := plugin.MXFP4RLLinearMethod(config), sources, torch.float32)
    x = torch.randn(5, 256)
    assert torch.equal(method.apply(layer, x), torch.cat([source(x) for source in sources], dim=-1))
    compiled = torch.compile(lambda x: method.apply(layer, x), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), method.apply(layer, x))
    # Values in the basis of the model are those of the layer, so that a wrong rotation would be seen.
    if preset == "w4a16":
        whole = torch.cat([source.dequantized_weight() for source in sources])
        torch.testing.assert_close(method.apply(layer, x), x @ whole.T, rtol=1e-4, atol=1e-3)


def test_rotations_are_refused_where_inputs_stay_as_they_are(plugin):
    config = MXFP4RLConfig(mode="packed", macro_block=None, fprop={"rotation": "deterministic-64"})
    with pytest.raises(ValueError, match=r"rotated before they were packed \(deterministic-64\).*use 'packed'"):
        plugin.MXFP4RLVLLMConfig(config, EngineSettings("dense"))
    with pytest.raises(ValueError, match=r"mlp\.experts: .* their inputs are not rotated here .*bf16"):
        plugin.MXFP4RLVLLMConfig(config).get_quant_method(RoutedExperts(), "model.layers.0.mlp.experts")
    with pytest.raises(ValueError, match=r"model\.down_proj: .* cuts blocks of 64; choose a smaller"):
        method = plugin.MXFP4RLLinearMethod(config, "model.down_proj")
        make_layer(method, [packed_layer(config)], torch.float32, shares=8)
    with pytest.raises(ValueError, match=r"model\.down_proj has 288 inputs, no multiple of 64"):
        Layer(plugin.MXFP4RLLinearMethod(config, "model.down_proj"), 288, [48], torch.float32)


def test_it_compiles_as_one_graph(plugin):
    config = MXFP4RLConfig(mode="packed", preset="w4a4")
    source, method = packed_layer(config), plugin.MXFP4RLLinearMethod(config)
    layer = make_layer(method, [source], torch.float32)
    x = torch.randn(5, 256)
    compiled = torch.compile(lambda x: method.apply(layer, x), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), source(x))
    scheme = json.dumps(config.to_dict())
    torch.library.opcheck(quantize_input, (x, scheme), test_utils=["test_schema", "test_faketensor"])


# ---- the stand-ins against the real sources -------------------------------------------------------------------------

SOURCES = {
    "QuantizeMethodBase": "layers/quantization/base_config.py",
    "QuantizationConfig": "layers/quantization/base_config.py",
    "LinearMethodBase": "layers/linear.py",
}


@pytest.mark.skipif("VLLM_SOURCE" not in os.environ, reason="set VLLM_SOURCE to a folder with vLLM's sources")
@pytest.mark.parametrize("name", SOURCES)
def test_stand_ins_have_the_real_signatures(name):
    def methods(tree):
        (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        found = {}
        for node in cls.body:
            if isinstance(node, ast.FunctionDef):
                arguments = node.args
                starred = [arg.arg for arg in (arguments.vararg, arguments.kwarg) if arg]
                marks = {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}
                found[node.name] = ([arg.arg for arg in arguments.args] + starred, marks, len(arguments.defaults))
        return found

    folder = Path(os.environ["VLLM_SOURCE"]) / "vllm" / "model_executor"
    real = methods(ast.parse((folder / SOURCES[name]).read_text()))
    ours = methods(ast.parse(Path(__file__).read_text()))
    assert {method: real[method] for method in ours} == ours
    abstract = {method for method, (_, marks, _) in real.items() if "abstractmethod" in marks}
    assert abstract == {method for method, (_, marks, _) in ours.items() if "abstractmethod" in marks}


@pytest.mark.skipif("VLLM_SOURCE" not in os.environ, reason="set VLLM_SOURCE to a folder with vLLM's sources")
def test_what_the_plugin_imports_is_there():
    folder = Path(os.environ["VLLM_SOURCE"])
    sources = [path.read_text() for path in (ROOT / "hf_mxfp4" / "vllm_plugin").glob("*.py")]
    nodes = [node for text in sources for node in ast.parse(text).body]
    wanted = [n for n in nodes if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("vllm.")]
    assert len(wanted) > 5
    for node in wanted:
        path = folder / node.module.replace(".", "/")
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        for alias in node.names:
            assert re.search(rf"^(class|def) {alias.name}\b|^ +{alias.name},$", text, re.MULTILINE), alias.name
