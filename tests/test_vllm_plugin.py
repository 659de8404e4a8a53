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


class ModelWeightParameter(nn.Parameter):
    def __new__(cls, data, **kwargs):
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data, input_dim, output_dim, weight_loader):
        self.input_dim, self.output_dim, self.weight_loader = input_dim, output_dim, weight_loader


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
    "vllm.model_executor.parameter": {"ModelWeightParameter": ModelWeightParameter},
}


@pytest.fixture(scope="module")
def plugin():
    with pytest.MonkeyPatch.context() as patch:
        for name, members in STAND_INS.items():
            module = types.ModuleType(name)
            module.__dict__.update(members)
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "hf_mxfp4.vllm_plugin.quantization", raising=False)
        importlib.import_module("hf_mxfp4.vllm_plugin").register()
        yield importlib.import_module("hf_mxfp4.vllm_plugin.quantization")
    sys.modules.pop("hf_mxfp4.vllm_plugin.quantization", None)


def load(parameter, tensor, rank=0):
    """What vLLM's loaders do to a parameter of a layer that is not joined: take this process's share of the columns."""
    size = parameter.shape[parameter.input_dim]
    tensor = tensor.narrow(parameter.input_dim, rank * size, size)
    assert tensor.shape == parameter.shape and tensor.dtype == parameter.dtype
    parameter.data.copy_(tensor)


def make_layer(method, sources, dtype, *, shares=1, rank=0):
    """A layer as vLLM builds it, from packed layers that it joins along the rows."""
    layer = LinearBase()
    columns, rows = sources[0].in_features, [source.out_features for source in sources]
    method.create_weights(layer, columns // shares, rows, columns, sum(rows), dtype, weight_loader=load)
    for name, parameter in layer.named_parameters():
        parameter.weight_loader(parameter, torch.cat([getattr(source, name) for source in sources]), rank)
    method.process_weights_after_loading(layer)
    return layer


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
    hf_mxfp4.vllm_plugin.register()
    assert REGISTERED["mxfp4_rl"] is plugin.MXFP4RLVLLMConfig


def test_the_entry_point_names_register():
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition('[project.entry-points."vllm.general_plugins"]\n')[2]
    module, _, name = re.match(r'mxfp4_rl = "(.*)"', section)[1].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_importing_the_plugin_needs_no_vllm():
    code = "import sys, hf_mxfp4.vllm_plugin; print('vllm' in sys.modules, 'torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split()[0] == "False", done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", SCHEMES, ids=IDS)
def test_it_computes_what_the_packed_layer_does(plugin, options, dtype):
    config = MXFP4RLConfig(mode="packed", **options)
    source = packed_layer(config, dtype=dtype)
    method = plugin.MXFP4RLLinearMethod(config)
    layer = make_layer(method, [source], dtype)
    assert [name for name, _ in layer.named_parameters()] == ["weight"] and layer.was_processed
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert layer.weight.dtype == dtype
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
    assert torch.equal(layer.weight, torch.cat([source.dequantized_weight() for source in sources]))


def test_weights_are_pushed_as_they_are_after_loading(plugin):
    config = MXFP4RLConfig(mode="packed")
    layer = make_layer(plugin.MXFP4RLLinearMethod(config), [packed_layer(config)], torch.float32)
    pushed = torch.arange(48 * 256.0).view(48, 256)
    assert (layer.weight.input_dim, layer.weight.output_dim) == (1, 0)
    layer.weight.weight_loader(layer.weight, pushed)
    layer.was_processed = False
    plugin.MXFP4RLLinearMethod(config).process_weights_after_loading(layer)
    assert torch.equal(layer.weight, pushed) and layer.was_processed


@pytest.mark.parametrize("options", [scheme for scheme in SCHEMES if scheme.get("macro_block") != "row"])
def test_two_processes_split_the_columns(plugin, options):
    config = MXFP4RLConfig(mode="packed", **options)
    source, method = packed_layer(config), plugin.MXFP4RLLinearMethod(config)
    halves = [make_layer(method, [source], torch.float32, shares=2, rank=rank).weight for rank in (0, 1)]
    assert torch.equal(torch.cat(halves, dim=1), source.dequantized_weight())


@pytest.mark.parametrize("options, shares", [({}, 4), ({"macro_block": None}, 16), ({"macro_block": "row"}, 2)])
def test_a_share_that_would_cut_blocks_is_refused(plugin, options, shares):
    config = MXFP4RLConfig(mode="packed", **options)
    with pytest.raises(ValueError, match=r"model\.down_proj: .*smaller tensor_parallel_size"):
        method = plugin.MXFP4RLLinearMethod(config, "model.down_proj")
        make_layer(method, [packed_layer(config)], torch.float32, shares=shares)


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


def test_activations_with_a_learned_threshold_are_refused(plugin):
    scheme = MXFP4RLConfig(mode="packed", preset="w4a4", outlier_fallback=0.5, outlier_fallback_rate=0.1)
    with pytest.raises(ValueError, match="outlier_fallback_rate=0.1"):
        plugin.MXFP4RLVLLMConfig(scheme)


def test_it_compiles_as_one_graph(plugin):
    config = MXFP4RLConfig(mode="packed", preset="w4a4")
    source, method = packed_layer(config), plugin.MXFP4RLLinearMethod(config)
    layer = make_layer(method, [source], torch.float32)
    x = torch.randn(5, 256)
    compiled = torch.compile(lambda x: method.apply(layer, x), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), source(x))
    torch.library.opcheck(plugin.quantize_input, (x, method._json), test_utils=["test_schema", "test_faketensor"])


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
    plugin = ast.parse((ROOT / "hf_mxfp4" / "vllm_plugin" / "quantization.py").read_text())
    wanted = [n for n in plugin.body if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("vllm.")]
    assert len(wanted) == 4
    for node in wanted:
        path = folder / node.module.replace(".", "/")
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        for alias in node.names:
            assert re.search(rf"^(class|def) {alias.name}\b", text, re.MULTILINE), alias.name
