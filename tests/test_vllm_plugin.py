# SPDX-License-Identifier: Apache-2.0
"""Linear layers of the vLLM plugin, and which layers it quantizes, against stand-ins for vLLM's classes;
`tests/vllm_integration` runs the real ones."""

import importlib
import json
import re
from pathlib import Path

import processes
import pytest
import torch
import vllm_stand_ins
from passes import assert_product
from tables import needs_fp8_on_cpu
from torch import nn
from transformers import AutoModelForCausalLM
from vllm_stand_ins import LinearBase, linear_method, make_layer, packed_layer, push_layers

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.vllm import EngineSettings, register
from hf_mxfp4.ops import matmul_counts, packed_shapes, reset_matmul_counts


ROOT = Path(hf_mxfp4.__file__).parents[1]
QKV = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
SCHEMES = [
    {},
    {"macro_search": "block_mantissas"},
    {"macro_search": "block_mantissas_fp8"},
    {"outlier_fallback": 0.5},
    {"preset": "w4a4", "outlier_fallback": 0.5, "scale_rule": "even"},
    {"macro_block": "row"},
    {"fprop": {"weight": "even+mbs32-dynamic+32x32"}},
    {"preset": "w4a8"},
    {"macro_block": None, "fprop": {"x": "mxfp8"}},
]
IDS = [" ".join(map(str, scheme.values())) or "default" for scheme in SCHEMES]


@pytest.fixture
def quantization(plugin):
    return plugin.quantization


def test_the_entry_point_registers_the_method(quantization):
    assert vllm_stand_ins.REGISTERED["mxfp4_rl"] is quantization.MXFP4RLVLLMConfig
    register()
    assert vllm_stand_ins.REGISTERED["mxfp4_rl"] is quantization.MXFP4RLVLLMConfig
    section = (ROOT / "pyproject.toml").read_text().partition('[project.entry-points."vllm.general_plugins"]\n')[2]
    module, _, name = re.match(r'mxfp4_rl = "(.*)"', section)[1].partition(":")
    assert getattr(importlib.import_module(module), name) is register


def test_importing_the_plugin_needs_no_vllm():
    code = "import sys, hf_mxfp4.integrations.vllm.weight_loading; sys.exit('vllm' in sys.modules)"
    assert processes.run(processes.code(code)).returncode == 0


def test_masters_that_cannot_be_quantized_alone_and_a_vllm_without_converters_are_refused(quantization, monkeypatch):
    config = MXFP4RLConfig(preset="w4a16", fprop={"rotation": "deterministic-32"})
    with pytest.raises(ValueError, match="vLLM cannot compute with their quantized values"):
        quantization.MXFP4RLVLLMConfig.from_config(config.to_dict())
    monkeypatch.delattr(vllm_stand_ins.QuantizationConfig, "get_checkpoint_weight_mapper")
    with pytest.raises(ValueError, match="install vLLM 0.31 or newer"):
        quantization.MXFP4RLVLLMConfig.from_config(MXFP4RLConfig(mode="packed").to_dict())


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", SCHEMES, ids=IDS)
def test_it_computes_what_the_packed_layer_does(plugin, options, dtype):
    config = MXFP4RLConfig(mode="packed", **options)
    source = packed_layer(config, dtype=dtype)
    method = linear_method(plugin, config)
    layer = make_layer(method, [source], dtype)
    addresses = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    push_layers(method, layer, [packed_layer(config, dtype=dtype, seed=1)])
    push_layers(method, layer, [source])  # again, into the memory that graphs know
    assert {name: parameter.data_ptr() for name, parameter in layer.named_parameters()} == addresses
    names = list(packed_shapes(48, 256, config.weight_scheme))
    assert [name for name, _ in layer.named_parameters()] == names
    assert all(torch.equal(getattr(layer, name), getattr(source, name)) for name in names)  # names as on disk
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(method.apply(layer, x), source(x))
    bias = torch.arange(48.0).to(dtype)
    assert_product(
        method.apply(layer, x, bias), source.quantized_input(x, dtype), source.dequantized_weight(dtype), bias
    )
    if config.activation_scheme is not None and dtype == torch.float32:
        torch._dynamo.reset()  # it would take numbers that change between the cases as symbols
        compiled = torch.compile(lambda x: method.apply(layer, x), fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), source(x))


@needs_fp8_on_cpu
def test_products_of_many_rows_run_on_fp8_cores(plugin):
    config = MXFP4RLConfig(mode="packed", preset="w4a8", backend="eager", matmul_backend="fp8")
    source = packed_layer(config)
    method = linear_method(plugin, config)
    layer = make_layer(method, [source], torch.float32)
    x = torch.randn(5, 256)
    reset_matmul_counts()
    with torch.inference_mode():
        found = method.apply(layer, x)
    assert torch.equal(found, source(x))
    assert matmul_counts()["fprop"] == {"fp8": 2}
    torch.testing.assert_close(found, source.quantized_input(x, x.dtype) @ source.dequantized_weight().T)


@pytest.mark.parametrize("options", SCHEMES, ids=IDS)
def test_joined_layers_and_shares_of_columns(plugin, options):
    config = MXFP4RLConfig(mode="packed", **options)
    sources = [packed_layer(config, rows=rows, seed=rows) for rows in (64, 32, 32)]
    layer = make_layer(linear_method(plugin, config, QKV), sources, torch.float32)
    whole = torch.cat([source.dequantized_weight() for source in sources])
    assert torch.equal(vllm_stand_ins.dequantized(layer, config), whole)
    if config.activation_scheme is None:
        split = {"dtype": torch.float32, "shares": 2}
        halves = [make_layer(linear_method(plugin, config), sources[:1], **split, rank=rank) for rank in (0, 1)]
        values = torch.cat([vllm_stand_ins.dequantized(half, config) for half in halves], dim=1)
        assert torch.equal(values, sources[0].dequantized_weight())


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("options", [{}, *SCHEMES[-2:], {"preset": "w4a4"}], ids=str)
def test_dense_layers_compute_the_same(plugin, options):
    config = MXFP4RLConfig(mode="packed", **options)
    source = packed_layer(config)
    layer = LinearBase()
    method = linear_method(plugin, config, weights="dense")
    layer.weight = nn.Parameter(torch.zeros(48, 256))
    layer.weight.weight_loader = lambda parameter, tensor: parameter.data.copy_(tensor)
    push_layers(method, layer, [source])
    method.process_weights_after_loading(layer)
    assert layer.was_processed
    assert method.expected.is_loaded
    x = torch.randn(5, 256)
    assert torch.equal(method.apply(layer, x), source(x))
    compiled = torch.compile(lambda x: method.apply(layer, x), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), source(x))


@pytest.mark.parametrize("preset", ["w4a16", "w4a4"])
def test_rotated_weights_meet_rotated_inputs(plugin, preset):
    config = MXFP4RLConfig(mode="packed", preset=preset, fprop={"rotation": "deterministic-64"})
    sources = [packed_layer(config, rows, seed=rows) for rows in (64, 32, 32)]
    layer = make_layer(method := linear_method(plugin, config, QKV), sources, torch.float32)
    x = torch.randn(5, 256)
    assert torch.equal(method.apply(layer, x), torch.cat([source(x) for source in sources], dim=-1))
    # Values in the basis of the model are those of the layer, so that a wrong rotation would be seen.
    if preset == "w4a16":
        whole = torch.cat([source.dequantized_weight() for source in sources])
        torch.testing.assert_close(method.apply(layer, x), x @ whole.T, rtol=1e-4, atol=1e-3)


ROTATED = {"macro_block": None, "fprop": {"rotation": "deterministic-64"}}


@pytest.mark.parametrize(
    ("options", "shares", "reason"),
    [
        ({}, 4, "cuts blocks of 128; choose a smaller tensor_parallel_size"),
        ({"macro_block": "row"}, 16, "cuts blocks of 32; choose"),
        (ROTATED, 8, "cuts blocks of 64; choose"),
        ({"macro_block": "row", "preset": "w4a4"}, 2, "mbsrow.* needs whole rows; use tensor_parallel_size=1"),
        ({"preset": "w4a8"}, 2, "fp8 needs whole rows; use tensor_parallel_size=1"),
        (SCHEMES[-1], 16, "cuts blocks of 32; choose"),
    ],
    ids=str,
)
def test_a_share_that_would_cut_blocks_is_refused(plugin, options, shares, reason):
    config = MXFP4RLConfig(mode="packed", **options)
    with pytest.raises(ValueError, match=rf"model\.down_proj: .*{reason}"):
        make_layer(linear_method(plugin, config), [packed_layer(config)], torch.float32, shares=shares)


def test_parts_that_no_file_has_are_named(plugin):
    config = MXFP4RLConfig(mode="packed")
    method = linear_method(plugin, config, QKV)
    sources = [packed_layer(config, rows) for rows in (64, 32, 32)]
    layer = vllm_stand_ins.Layer(method, 256, [64, 32, 32], torch.float32)
    push_layers(method, layer, sources, without=[f"{QKV[1]}.weight_macro"])
    with pytest.raises(ValueError, match=r"^model\.layers\.0\.self_attn\.k_proj\.weight_macro: in no file"):
        method.process_weights_after_loading(layer)


def test_rotations_are_refused_where_inputs_stay_as_they_are(plugin, quantization):
    config = MXFP4RLConfig(mode="packed", **ROTATED)
    with pytest.raises(ValueError, match=r"rotated before they were packed \(deterministic-64\).*use 'packed'"):
        quantization.MXFP4RLVLLMConfig(config, EngineSettings("dense"))
    experts = type("RoutedExperts", (nn.Module,), {})()
    with pytest.raises(ValueError, match=r"mlp\.experts: inputs of experts are not rotated.*bf16"):
        quantization.MXFP4RLVLLMConfig(config).get_quant_method(experts, "model.layers.0.mlp.experts")
    with pytest.raises(ValueError, match=r"model\.down_proj has 288 inputs, no multiple of 64"):
        vllm_stand_ins.Layer(linear_method(plugin, config), 288, [48], torch.float32)


def test_the_scheme_comes_from_config_json(quantization, checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2"), quantization_config=MXFP4RLConfig(mode="packed"))
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config = quantization.MXFP4RLVLLMConfig.from_config({**stored, "vllm": {"adapter_rank": 4}})
    assert config.settings == EngineSettings("packed", 4)
    config = quantization.MXFP4RLVLLMConfig.from_config(stored)
    assert config.scheme == model.config.quantization_config
    assert "mbs128" in repr(config)
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    method = config.get_quant_method(LinearBase(), "model.layers.0.self_attn.qkv_proj")
    assert method.parts == QKV
    assert config.expected.linears == set(QKV)


def test_which_layers_are_quantized(plugin, quantization):
    scheme = MXFP4RLConfig(mode="packed", modules_to_not_convert=["layers.0", "q_b_proj", "k_proj"])
    config = quantization.MXFP4RLVLLMConfig(scheme)
    joined = {"gate_up_proj": ["gate_proj", "up_proj"], "qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    config.packed_modules_mapping = joined
    quantized = ["model.layers.1.mlp.gate_up_proj", "model.layers.10.mlp.down_proj"]
    skipped = ["layers.0.mlp.down_proj", "layers.0.self_attn.qkv_proj", "layers.1.mlp.gate", "layers.1.attn.q_b_proj"]
    skipped = ["lm_head", *(f"model.{name}" for name in skipped)]
    found = {name: type(config.get_quant_method(LinearBase(), name)) for name in (*quantized, *skipped)}
    kinds = dict.fromkeys(quantized, plugin.linears.MXFP4RLLinearMethod)
    assert found == kinds | dict.fromkeys(skipped, vllm_stand_ins.UnquantizedLinearMethod)
    assert config.get_quant_method(nn.Embedding(2, 2), "model.embed_tokens") is None
    experts = type("FusedMoE", (nn.Module,), {})()
    assert config.get_quant_method(experts, "model.layers.0.block_sparse_moe.experts") is None
    with pytest.raises(ValueError, match="skips only some of them"):
        config.get_quant_method(LinearBase(), "model.layers.1.self_attn.qkv_proj")


def test_latent_attention_with_quantized_inputs_is_refused_unless_its_layers_compute_it(
    plugin, quantization, monkeypatch
):
    name = "model.layers.0.self_attn.kv_b_proj"
    kind = plugin.linears.MXFP4RLLinearMethod
    monkeypatch.delenv("VLLM_MLA_DISABLE", raising=False)
    config = quantization.MXFP4RLVLLMConfig(MXFP4RLConfig(mode="packed", preset="w4a4"))
    with pytest.raises(ValueError, match=rf"{name}: .*VLLM_MLA_DISABLE=1"):
        config.get_quant_method(LinearBase(), name)
    weights_only = quantization.MXFP4RLVLLMConfig(MXFP4RLConfig(mode="packed"))
    assert type(weights_only.get_quant_method(LinearBase(), name)) is kind
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    assert type(config.get_quant_method(LinearBase(), name)) is kind
