# SPDX-License-Identifier: Apache-2.0
"""Statistics of layer inputs, and the texts they come from."""

import pytest
import torch
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.lab import SourceError, analyze_activations, error_statistics, quantized_layers
from hf_mxfp4.numerics import parse_scheme


SCHEMES = [parse_scheme("rceil"), parse_scheme("rceil+mbs128-static")]


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 32, (1, length), generator=generator) for length in (5, 9)]


def test_inputs_of_every_layer():
    model = make_model("qwen2")
    results, problems = analyze_activations(model, batches(), SCHEMES)
    assert problems == [] and [r.name.removeprefix("model.layers.") for r in results] == [
        "0.self_attn.q_proj/k_proj/v_proj",
        "0.self_attn.o_proj",
        "0.mlp.gate_proj/up_proj",
        "0.mlp.down_proj",
        "1.self_attn.q_proj/k_proj/v_proj",
        "1.self_attn.o_proj",
        "1.mlp.gate_proj/up_proj",
        "1.mlp.down_proj",
    ]
    seen = []
    layer = model.model.layers[1].mlp.down_proj
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()[0]))
    with torch.no_grad():
        for batch in batches():
            model(input_ids=batch)
    handle.remove()
    result = next(r for r in results if r.name == "model.layers.1.mlp.down_proj")
    assert (result.kind, result.shape, result.dtype) == ("activation", (14, 96), "float32")
    for scheme in SCHEMES:
        expected = error_statistics(torch.cat(seen), scheme)
        found = result.statistics[str(scheme)]
        assert found.histogram == expected.histogram and found.total == pytest.approx(expected.total, rel=1e-9)
    assert result.sweep.energy > 0


def test_no_hook_stays_and_outputs_are_the_same():
    model = make_model("qwen2")
    with torch.no_grad():
        before = model(input_ids=batches()[0]).logits
    analyze_activations(model, batches(), SCHEMES)
    assert not any(module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(input_ids=batches()[0]).logits, before)


def test_a_quantized_policy(checkpoint):
    folder = checkpoint()
    config = MXFP4RLConfig(modules_to_not_convert=["layers.0"])
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    assert set(quantized_layers(model)) == set(model.quantization_report.quantized)
    results, problems = analyze_activations(model, batches(), [config.activation_scheme])
    assert len(results) == 4 and problems == []


def test_nan_inputs_are_problems():
    model = make_model("qwen2")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = float("nan")
    results, problems = analyze_activations(model, batches(), SCHEMES)
    assert len(results) == 4 and all(".layers.0." in r.name for r in results)
    assert problems[0].where == "model.layers.1.self_attn.q_proj/k_proj/v_proj"
    assert problems[0].reason == "14 elements of its input are NaN or infinite"


def test_a_layer_that_no_text_reaches_is_a_problem():
    model = make_model("qwen2")
    model.model.layers[0].spare = torch.nn.Linear(32, 32)
    _, problems = analyze_activations(model, batches(), SCHEMES)
    assert [(p.where, p.reason) for p in problems] == [("model.layers.0.spare", "no text reached this layer")]


def test_a_model_without_such_layers():
    with pytest.raises(SourceError, match="Sequential has no linear layer"):
        analyze_activations(torch.nn.Sequential(torch.nn.ReLU()), batches(), SCHEMES)
