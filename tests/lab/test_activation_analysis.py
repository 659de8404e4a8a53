# SPDX-License-Identifier: Apache-2.0
"""Statistics of layer inputs, and the texts they come from."""

import pytest
import torch
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.lab import error_statistics, parse_scheme
from hf_mxfp4.lab.errors.activations import analyze_activations, quantized_layers
from hf_mxfp4.lab.errors.source import SourceError


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
    assert result.location.layer_type == "mlp.down_proj" and result.location.depth == 1
    for scheme in SCHEMES:
        expected = error_statistics(torch.cat(seen), scheme)
        found = result.statistics[str(scheme)]
        assert found.histogram == expected.histogram and found.total == pytest.approx(expected.total, rel=1e-9)
    assert result.sweep.energy > 0


class Branches(torch.nn.Module):
    """Layers that are given the same tensor: always, in the first pass alone, or after it was changed in place."""

    def __init__(self):
        super().__init__()
        self.always, self.twin, self.once, self.changed = (torch.nn.Linear(32, 32, bias=False) for _ in range(4))
        self.passes = 0

    def forward(self, input_ids):
        x = torch.arange(64.0).view(2, 32) + self.passes
        out = self.always(x) + self.twin(x) + self.once(x if self.passes == 0 else x.clone())
        self.passes += 1
        return out + self.changed(x.add_(1))


def test_only_layers_that_always_share_their_input_are_one_result():
    results, problems = analyze_activations(Branches(), batches(), SCHEMES[:1])
    assert problems == [] and [r.name for r in results] == ["always/twin", "once", "changed"]
    energies = {r.name: r.statistics["mxfp4+rceil"].energy for r in results}
    x = torch.arange(64.0)
    assert energies["always/twin"] == energies["once"] == float(x.square().sum() + (x + 1).square().sum())
    assert energies["changed"] == float((x + 1).square().sum() + (x + 2).square().sum())


def test_no_hook_stays_and_outputs_are_the_same():
    model = make_model("qwen2")
    with torch.no_grad():
        before = model(input_ids=batches()[0]).logits
    analyze_activations(model, batches(), SCHEMES)
    assert not any(module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(input_ids=batches()[0]).logits, before)


def test_hooks_are_gone_after_an_error():
    model = make_model("qwen2")
    with pytest.raises(IndexError):
        analyze_activations(model, [torch.tensor([[99]])], SCHEMES)
    assert not any(module._forward_pre_hooks for module in model.modules())


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
    assert [r.location.depth for r in results] == [0] * 4
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
