# SPDX-License-Identifier: Apache-2.0
"""Analysis of checkpoints: against whole tensors, of experts, and with broken files."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from same_bits import edit_config, tensors_in
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from benchmarks.tiny_architectures import architectures, tiny_model
from hf_mxfp4 import MXFP4RLConfig, fake_quantize, lab
from hf_mxfp4.checkpoint import FileNames
from hf_mxfp4.lab import Selection, analyze_weights, error_statistics, open_source
from hf_mxfp4.lab.errors import weights as module
from hf_mxfp4.model.layer_names import find_layers
from hf_mxfp4.numerics import QuantScheme, parse_scheme


RCEIL = QuantScheme()


def analyzed(folder, schemes=(RCEIL,), exclude=(), **options):
    source = open_source(str(folder))
    return analyze_weights(source, schemes, Selection.of(source, exclude), **options)


def test_every_weight_of_a_sharded_checkpoint(checkpoint):
    folder = checkpoint(shard_size="60KB")
    schemes = [parse_scheme(text) for text in ("rceil", "even+mbs128-blockwise")]
    analysis = analyzed(folder, schemes)
    tensors = tensors_in(folder)
    assert len(analysis.results) == 14
    assert analysis.problems == []
    for result in analysis.results:
        x = tensors.pop(result.name)
        assert (result.shape, result.dtype) == (tuple(x.shape), "float32")
        assert result.statistics == {str(scheme): error_statistics(x, scheme) for scheme in schemes}
    skipped = {name for names in analysis.skipped.values() for name in names}
    assert skipped == set(tensors)
    assert {reason: len(names) for reason, names in analysis.skipped.items()} == {
        "head, router or other tower": 1,
        "embedding": 1,
        "norm, bias or other vector": 11,
    }


def test_groups_and_totals(checkpoint):
    analysis = analyzed(checkpoint())
    total = analysis.totals()["mxfp4+rceil"]
    types = analysis.by_layer_type("mxfp4+rceil")
    depths = analysis.by_depth("mxfp4+rceil")
    assert list(depths) == [0, 1]
    assert len(types) == 7
    assert "mlp.down_proj" in types
    for groups in (types, depths):
        elements = sum(s.elements for s in groups.values())
        assert elements == total.elements == 2 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 96)
        assert sum(s.total for s in groups.values()) == pytest.approx(total.total, rel=1e-12)
    worst = analysis.worst("mxfp4+rceil", 3)
    errors = [r.statistics["mxfp4+rceil"].relative_mse for r in analysis.results]
    assert [s.relative_mse for s in worst.values()] == sorted(errors, reverse=True)[:3]


def test_slices_give_the_whole(checkpoint, monkeypatch):
    folder = checkpoint()
    whole = analyzed(folder, [QuantScheme(block_rows=32)])
    monkeypatch.setattr(module, "SLICE_ELEMENTS", 64 * 32)
    sliced = analyzed(folder, [QuantScheme(block_rows=32)])
    for a, b in zip(whole.results, sliced.results, strict=True):
        x = a.statistics["mxfp4+rceil+32x32"]
        y = b.statistics["mxfp4+rceil+32x32"]
        assert x.histogram == y.histogram
        assert x.total == pytest.approx(y.total, rel=1e-12)


def test_a_model_of_conv1d_is_told_so(tmp_path):
    save_file({"transformer.h.0.attn.c_attn.weight": torch.ones(32, 96)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ValueError, match="This architecture keeps its projections in .* Conv1D, as GPT-2 does"):
        analyzed(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "fp8"}, "stores quantized weights already \\(quant_method 'fp8'"),
        ({"quant_method": "mxfp4_rl", "mode": "packed"}, "quant_method 'mxfp4_rl', mode='packed'"),
        ({"bits": 4}, "quant_method None"),
        ({"quant_method": "mxfp4_rl", "preset": "w9"}, "quantization_config of .* cannot be read: preset='w9'"),
    ],
)
def test_quantized_checkpoints_are_refused(checkpoint, quantization, message):
    folder = edit_config(checkpoint(), quantization_config=quantization)
    with pytest.raises(lab.SourceError, match=message):
        analyzed(folder)


def test_a_tensor_that_the_index_promises(checkpoint):
    folder = Path(checkpoint(shard_size="60KB"))
    shard = list(open_source(str(folder)).expected)[-1]
    tensors = load_file(folder / shard)
    lost = sorted(tensors)[0]
    save_file({name: x for name, x in tensors.items() if name != lost}, folder / shard)
    [problem] = analyzed(folder).problems
    assert problem.where == lost
    assert shard in problem.reason


def test_nan_and_infinity_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SLICE_ELEMENTS", 64)
    x = torch.ones(8, 64)
    x[1, 2], x[6, :3] = float("nan"), float("inf")
    tensors = {"layers.0.a.weight": x, "layers.0.b.weight": torch.ones(8, 64)}
    save_file(tensors, tmp_path / "model.safetensors")
    analysis = analyzed(tmp_path)
    assert [r.name for r in analysis.results] == ["layers.0.b.weight"]
    [problem] = analysis.problems
    assert (problem.where, problem.reason) == ("layers.0.a.weight", "4 of 512 elements are NaN or infinite")


def test_a_tensor_in_two_files(tmp_path):
    for file in "ab":
        save_file({"layers.0.w.weight": torch.ones(8, 64)}, tmp_path / f"{file}.safetensors")
    analysis = analyzed(tmp_path)
    assert len(analysis.results) == 1
    [problem] = analysis.problems
    assert problem.reason == "is in b.safetensors too; the one in a.safetensors counts"


def quantized_tensors(model) -> set[str]:
    """The names in files of what a loaded model has in MXFP4, from its own report."""
    names = FileNames(make_model_like(model))
    found = set()
    for name in model.quantization_report.quantized:
        stem, _, projection = name.rpartition(".")
        experts, _, number = stem.rpartition(".")
        if not number.isdigit():
            found.add(f"{name}.weight")
            continue
        pieces = names.pieces.get(f"{experts}.{projection}")
        found |= {p.name for p in pieces if p.expert == int(number)} if pieces else {f"{experts}.{projection}"}
    return found


def make_model_like(model):
    with torch.device("meta"):
        return type(model)(model.config)


@pytest.mark.parametrize(
    ("family", "skips"),
    [
        ("qwen3_moe", None),
        ("qwen2_moe", ["experts"]),
        ("mixtral", ["layers.0.mlp.experts"]),
        ("gpt_oss", None),
        ("gpt_oss", ["re:.*1.mlp.experts"]),
    ],
)
def test_what_is_analysed_is_what_is_quantized(family, skips, tmp_path):
    make_model(family).save_pretrained(tmp_path / "base")
    config = MXFP4RLConfig(modules_to_not_convert=skips)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    model.save_pretrained(tmp_path / "qat")
    source = open_source(str(tmp_path / "qat"))
    analysis = analyze_weights(source, [RCEIL], Selection.of(source))
    assert {result.name for result in analysis.results} == quantized_tensors(model)
    assert not analysis.problems


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_errors_are_those_of_each_expert_by_itself(family, tmp_path):
    model = make_model(family, layers=1)
    model.save_pretrained(tmp_path / "base")
    source = open_source(str(tmp_path / "base"))
    analysis = analyze_weights(source, [RCEIL], Selection.of(source))
    down = [result for result in analysis.results if "down" in result.name]
    total = sum(result.statistics[str(RCEIL)].total for result in down)
    weight = model.model.layers[0].mlp.experts.down_proj.detach()
    weight = weight.transpose(1, 2) if family == "gpt_oss" else weight
    expected = sum((fake_quantize(matrix.contiguous()) - matrix).double().square().sum().item() for matrix in weight)
    assert total == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["granitemoe", "llama4_text", "mamba2", "smolvlm", "t5"])
def test_architectures_are_measured_as_they_are_quantized(family, tmp_path):
    """Names do not tell: of other towers, joined experts, and layers whose weight the model reads itself."""
    torch.manual_seed(0)
    model = tiny_model(family, architectures()[family][1])
    model.save_pretrained(tmp_path)
    layers = find_layers(model)[0].values()
    weights = [x for layer in layers for name, x in layer.named_parameters() if x.dim() > 1 and "bias" not in name]
    source = open_source(str(tmp_path))
    results = analyze_weights(source, [RCEIL], Selection.of(source)).results
    assert sum(math.prod(result.shape) for result in results) == sum(x.numel() for x in weights)
