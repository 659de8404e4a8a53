# SPDX-License-Identifier: Apache-2.0
"""Loading through `from_pretrained`: what is quantized, what is reported, what is refused, and the way back."""

import gc
import math
import re
import weakref

import pytest
import torch
from safetensors.torch import load_file
from same_bits import IDS, edit_config, layers_of
from tiny_models import make_model
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Lfm2Config, Lfm2ForCausalLM

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig, MXFP4RLQuantizer, fake_quantize, utils
from hf_mxfp4.integrations.transformers import quantize_linears


FAMILIES = ["llama", "qwen2", "qwen3", "gemma"]
#: How the default config quantizes weights.
DEFAULT_WEIGHT = {"scale_rule": "even", "macro_block": 128, "macro_search": "block_mantissas_fp8"}


def load(folder, **options):
    """Load a model under the default config, whose weights are not smoothed."""
    config = MXFP4RLConfig(**{"smooth": False, **options})
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def sqnr_db(weights) -> float:
    signal = 0.0
    noise = 0.0
    for weight in weights:
        error = fake_quantize(weight, **DEFAULT_WEIGHT).double() - weight.double()
        signal += float(weight.double().square().sum())
        noise += float(error.square().sum())
    return 10 * math.log10(signal / noise)


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_linear_layers_of_the_decoder_are_quantized(family, tie, checkpoint):
    folder = checkpoint(family, tie=tie, layers=3)
    model = load(folder)
    report = model.quantization_report
    layers = layers_of(model, MXFP4Linear)
    assert report.n_quantized == 7 * 3
    assert list(report.quantized) == list(layers)
    assert report.skipped == ("lm_head",)
    assert report.scheme == MXFP4RLConfig().describe()
    assert type(model.lm_head) is nn.Linear
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tie
    for name, layer in layers.items():
        assert layer.name == name
        assert layer.config == MXFP4RLConfig()
    assert model(IDS).logits.isfinite().all()


def test_the_signal_to_noise_ratio_is_that_of_all_quantized_weights(checkpoint):
    folder = checkpoint("qwen2")
    report = load(folder).quantization_report
    masters = load_file(f"{folder}/model.safetensors")
    expected = sqnr_db(masters[f"{name}.weight"] for name in report.quantized)
    assert report.sqnr_db == pytest.approx(expected, abs=1e-3)
    assert 19 < report.sqnr_db < 22


# heads 2 of 20: neither width is a multiple of 32, nor are the outputs.
@pytest.mark.parametrize("options", [{"hidden": 40, "intermediate": 72}, {"hidden": 24, "intermediate": 36}], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_sizes_that_are_not_multiples_of_32(family, options, checkpoint, tmp_path):
    folder = checkpoint(family, **options)
    model = load(folder)
    assert model.quantization_report.n_quantized == 14
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    original = load_file(f"{folder}/model.safetensors")
    assert {name: t.shape for name, t in saved.items()} == {name: t.shape for name, t in original.items()}


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [*((dtype, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_masters_are_the_checkpoints_bit_for_bit(stored, dtype, checkpoint):
    folder = checkpoint("qwen2", dtype=stored)
    config = MXFP4RLConfig(dither_ties=False, smooth=False)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)
    masters = load_file(f"{folder}/model.safetensors")
    parameters = dict(model.named_parameters())
    assert parameters.keys() == masters.keys()
    for name, tensor in masters.items():
        assert parameters[name].dtype == dtype and torch.equal(parameters[name], tensor.to(dtype)), name
    assert all(p.requires_grad for p in parameters.values())
    assert model(IDS).logits.dtype == dtype


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"outlier_fallback": 0.5}, "residuals of weight have more digits than E4M3"),
        ({"macro_search": "static"}, "macro factors of weight have more digits than E4M3"),
        ({}, None),
    ],
    ids=str,
)
def test_weights_that_leave_the_fp8_products_of_their_preset_are_warned_of(options, problem, checkpoint, caplog):
    AutoModelForCausalLM.from_pretrained(checkpoint(), quantization_config=MXFP4RLConfig(preset="w4a8", **options))
    warnings = [record.getMessage() for record in caplog.records if "FP8 tensor cores" in record.getMessage()]
    assert len(warnings) == (0 if problem is None else 1)
    assert all(problem in warning for warning in warnings)


@pytest.mark.parametrize(("slowdown", "count"), [(4.0, 1), (0.9, 0)])
def test_slow_bfloat16_is_warned_of_once(slowdown, count, checkpoint, caplog, monkeypatch):
    monkeypatch.setattr(utils, "bfloat16_slowdown", lambda: slowdown)
    utils.warn_of_slow_bfloat16.cache_clear()
    for _ in range(2):
        load(checkpoint(dtype=torch.bfloat16))
    assert caplog.text.count("multiplies in bfloat16 4 times slower than in float32") == count


def test_a_base_model(checkpoint):
    folder = checkpoint("qwen2")
    config = MXFP4RLConfig(modules_to_not_convert=["model.layers.0"], smooth=False)
    model = AutoModel.from_pretrained(folder, quantization_config=config)
    assert len(layers_of(model, MXFP4Linear)) == model.quantization_report.n_quantized == 7
    expected = load(folder, modules_to_not_convert=["model.layers.0"]).model
    assert torch.equal(model(IDS).last_hidden_state, expected(IDS).last_hidden_state)


@pytest.mark.parametrize("skips", [["layers.0", "layers.1"], ["re:.*"]], ids=str)
def test_nothing_left_to_quantize_is_an_error(skips, checkpoint):
    with pytest.raises(ValueError) as error:
        load(checkpoint("qwen2"), modules_to_not_convert=skips)
    assert "matches no layer of Qwen2ForCausalLM: it has 15 nn.Linear, all skipped" in str(error.value)
    assert f"modules_to_not_convert={skips}" in str(error.value)


def test_a_model_of_other_layers_is_an_error(tmp_path):
    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=32, bos_token_id=0, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    message = r"matches no layer of GPT2LMHeadModel: it has 1 nn.Linear.*'Conv1D': 4"
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path)
    assert "Conv1D, as GPT-2 does, which is not supported; what is are models on nn.Linear, such as" in str(error.value)


def test_experts_of_another_layout_are_refused_with_the_way_out():
    model = make_model("qwen3_moe")
    del model.model.layers[1].mlp.experts.is_transposed
    with pytest.raises(ValueError) as error:
        quantize_linears(model, MXFP4RLConfig())
    assert "Qwen3MoeForCausalLM keeps experts in fused 3-D weights that cannot be quantized" in str(error.value)
    assert "(model.layers.1.mlp.experts: Qwen3MoeExperts is not made by" in str(error.value)
    assert "add 'experts' to modules_to_not_convert" in str(error.value)


def test_exactly_the_weights_of_packed_layers_are_packed_as_they_are_read(checkpoint):
    model = load(checkpoint("qwen2"), mode="packed", modules_to_not_convert=["layers.1"])
    parameters = dict(model.named_parameters())
    on_the_fly = MXFP4RLQuantizer(MXFP4RLConfig(mode="packed"), pre_quantized=False)
    expected = [f"{name}.weight" for name in model.quantization_report.quantized]
    assert [name for name in parameters if on_the_fly.param_needs_quantization(model, name)] == expected
    for mode, is_stored in (("packed", True), ("qat", False)):
        quantizer = MXFP4RLQuantizer(MXFP4RLConfig(mode=mode), pre_quantized=is_stored)
        assert not any(quantizer.param_needs_quantization(model, name) for name in parameters)
    sizes = {name: on_the_fly.param_element_size(model, name, value) for name, value in parameters.items()}
    layer = "model.layers.0.self_attn.q_proj"
    assert [sizes[f"{layer}.{part}"] for part in ("weight", "weight_scale", "weight_macro", "bias")] == [0.5, 1, 1, 4]
    assert sizes["model.layers.1.self_attn.q_proj.weight"] == sizes["model.norm.weight"] == 4


@pytest.mark.parametrize(("dtype", "tie"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_dequantize_gives_a_plain_model_of_the_quantized_values(dtype, tie, checkpoint, tmp_path):
    model = load(checkpoint("qwen2", tie=tie, dtype=dtype), preset="w4a16")
    expected = model(IDS).logits
    layers = layers_of(model, MXFP4Linear)
    values = {name: fake_quantize(layer.weight.detach(), **DEFAULT_WEIGHT) for name, layer in layers.items()}
    others = {n: p.detach().clone() for n, p in model.named_parameters() if n.removesuffix(".weight") not in values}
    plain = model.dequantize()
    for name, value in values.items():
        layer = plain.get_submodule(name)
        assert type(layer) is nn.Linear
        assert layer.weight.dtype == dtype and torch.equal(layer.weight, value), name
    parameters = dict(plain.named_parameters())
    assert all(torch.equal(parameters[name], tensor) for name, tensor in others.items())
    assert torch.equal(plain(IDS).logits, expected)

    assert not hasattr(plain.config, "quantization_config")
    assert not hasattr(plain, "quantization_report")
    assert not plain.is_quantized
    assert not hasattr(plain, "hf_quantizer")
    plain.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert {type(m).__name__ for m in again.modules() if isinstance(m, nn.Linear)} == {"Linear"}
    assert torch.equal(again(IDS).logits, expected)


@pytest.mark.parametrize("options", [{"mode": "packed"}, {"mode": "packed", "outlier_fallback": 1.0}, {}], ids=str)
@pytest.mark.parametrize(("family", "tie"), [("qwen2", True), ("qwen3_moe", False), ("gpt_oss", False)])
def test_parameters_are_counted_as_those_of_the_plain_model(family, tie, options, checkpoint):
    plain = make_model(family, tie=tie)
    model = load(checkpoint(family, tie=tie), **options)
    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == plain.num_parameters(exclude_embeddings=True)
    assert model.num_parameters(True) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert model.dequantize().num_parameters() == plain.num_parameters()


def test_dequantize_keeps_frozen_weights_frozen_and_twice_is_an_error(checkpoint):
    model = load(checkpoint("qwen2"))
    model.requires_grad_(False)
    quantizer = model.hf_quantizer
    assert not any(p.requires_grad for p in model.dequantize().parameters())
    with pytest.raises(ValueError):
        model.dequantize()
    with pytest.raises(ValueError, match="nothing to dequantize"):
        quantizer.dequantize(model)


# ---- corners that were broken once ----------------------------------------------------------------------------------


def test_convolutions_are_not_experts(tmp_path):
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0}
    config = Lfm2Config(num_attention_heads=2, num_key_value_heads=1, full_attn_idxs=[1], **sizes)
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MXFP4RLConfig())


def test_positional_state_dict(checkpoint, tmp_path):
    model = load(checkpoint("qwen2"))
    model.save_pretrained(tmp_path / "saved", True, model.state_dict())


@pytest.mark.parametrize("preset", ["w4a4", "w4a16"])
def test_meta_forward(preset):
    layer = MXFP4Linear(64, 32, device="meta", config=MXFP4RLConfig(preset=preset))
    assert layer(torch.zeros(2, 64, device="meta")).shape == (2, 32)


def test_a_frozen_weight_does_not_keep_the_input_alive():
    layer = MXFP4Linear(64, 32)
    layer.requires_grad_(False)
    y = layer(torch.randn(2, 64, requires_grad=True))
    assert (2, 64) not in [tuple(t.shape) for t in y.grad_fn.saved_tensors if t is not None]


def test_shared_module():
    linear = torch.nn.Linear(8, 8)
    model = torch.nn.ModuleDict({"a": linear, "b": linear})
    quantize_linears(model, MXFP4RLConfig())
    assert type(model["b"]) is MXFP4Linear
    assert model["a"] is model["b"]


def test_a_deleted_model_is_freed_at_once(checkpoint):
    model = load(checkpoint("qwen2"))
    gc.collect()
    reference = weakref.ref(model.lm_head.weight)
    gc.disable()
    del model
    gc.enable()
    assert reference() is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale_rul": "floor"}, TypeError, "MXFP4RLConfig has no option 'scale_rul'; did you mean 'scale_rule'?"),
        ({"modules_to_not_convert": "lm_head"}, ValueError, "'lm_head' must be a list of module names"),
        ({"format_version": 2}, ValueError, "reads version 1; install a newer hf_mxfp4 to load this checkpoint"),
    ],
    ids=str,
)
def test_the_message_is_the_same_from_python_a_dictionary_and_a_checkpoint(options, error, message, checkpoint):
    folder = checkpoint("qwen2", layers=1)
    as_dict = {"quant_method": "mxfp4_rl", **options}
    builds = [
        lambda: MXFP4RLConfig(**options),
        lambda: AutoModelForCausalLM.from_pretrained(folder, quantization_config=as_dict),
        lambda: AutoModelForCausalLM.from_pretrained(edit_config(folder, quantization_config=as_dict)),
    ]
    for build in builds:
        with pytest.raises(error, match=re.escape(message)):
            build()


def test_a_dictionary_that_does_not_say_whose_it_is(checkpoint):
    with pytest.raises(ValueError, match="has no `quant_method`"):
        AutoModelForCausalLM.from_pretrained(checkpoint("qwen2", layers=1), quantization_config={"preset": "w4a16"})


@pytest.mark.parametrize(("method", "owner"), [("mxfp4", "Mxfp4Config"), ("fp8", "FineGrainedFP8Config")])
def test_a_checkpoint_of_another_method_is_refused(method, owner, checkpoint):
    folder = edit_config(checkpoint("qwen2", layers=1), quantization_config={"quant_method": method})
    with pytest.raises(ValueError, match=f"{owner}.*MXFP4RLConfig"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=MXFP4RLConfig())


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_integers_are_no_input_of_a_layer(dtype):
    layer = MXFP4Linear(32, 8, name="model.layers.0.mlp.up_proj")
    message = f"up_proj: input is {dtype} but the layer's dtype is torch.float32; convert one of them, or run under"
    with pytest.raises(TypeError, match=message):
        layer(torch.zeros(2, 32, dtype=dtype))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="MXFP4Linear model.layers.0.mlp.up_pr"):
        layer(torch.zeros(2, 32, dtype=dtype))


@pytest.mark.parametrize("shape", [(2, 33), ()], ids=str)
def test_an_input_of_the_wrong_size(shape):
    message = f"MXFP4Linear model.layers.0.mlp.up_proj: input {shape} does not end in in_features=32"
    with pytest.raises(ValueError, match=re.escape(message)):
        MXFP4Linear(32, 8, name="model.layers.0.mlp.up_proj")(torch.zeros(shape))
