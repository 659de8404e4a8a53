# SPDX-License-Identifier: Apache-2.0
"""`analyze` and `compare` of mixtures of experts: exactly what the quantizer takes, in blocks along the right axis."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_mxfp4 import MXFP4RLConfig, fake_quantize
from hf_mxfp4.checkpoint import FileNames
from hf_mxfp4.cli import app
from hf_mxfp4.lab import Selection, analyze_weights, open_source
from hf_mxfp4.lab.layers import classify
from hf_mxfp4.numerics import QuantScheme


FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss"]
SCHEME = QuantScheme()


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


SKIPS = [None, ["layers.0.mlp.experts"], ["experts"], ["re:.*1.mlp.experts"]]
#: In every run each family as it is, and with patterns of another kind.
FEW = {(family, number) for i, family in enumerate(FAMILIES) for number in (0, 1 + i % 3)}


@pytest.mark.parametrize(
    ("family", "skips"),
    [
        pytest.param(family, skips, marks=() if (family, number) in FEW else pytest.mark.large)
        for family in FAMILIES
        for number, skips in enumerate(SKIPS)
    ],
)
def test_what_is_analysed_is_what_is_quantized(family, skips, tmp_path):
    make_model(family).save_pretrained(tmp_path / "base")
    config = MXFP4RLConfig(modules_to_not_convert=skips)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    model.save_pretrained(tmp_path / "qat")
    source = open_source(str(tmp_path / "qat"))
    analysis = analyze_weights(source, [SCHEME], Selection.of(source))
    assert {result.name for result in analysis.results} == quantized_tensors(model) and not analysis.problems


@pytest.mark.parametrize("family", FAMILIES)
def test_errors_are_those_of_each_expert_by_itself(family, tmp_path):
    model = make_model(family, layers=1)
    model.save_pretrained(tmp_path / "base")
    source = open_source(str(tmp_path / "base"))
    analysis = analyze_weights(source, [SCHEME], Selection.of(source))
    down = [
        result.statistics[str(SCHEME)] for result in analysis.results if "down" in result.name or "w2" in result.name
    ]
    total = sum(statistics.total for statistics in down)
    weight = model.model.layers[0].mlp.experts.down_proj.detach()
    weight = weight.transpose(1, 2) if family == "gpt_oss" else weight
    expected = sum((fake_quantize(matrix.contiguous()) - matrix).double().square().sum().item() for matrix in weight)
    if family == "qwen2_moe":
        shared = model.model.layers[0].mlp.shared_expert.down_proj.weight.detach()
        expected += (fake_quantize(shared) - shared).double().square().sum().item()
    assert total == pytest.approx(expected, rel=1e-5)


def test_a_pattern_means_the_modules_of_the_model():
    name, shape = "model.layers.1.block_sparse_moe.experts.3.w1.weight", (64, 32)
    for pattern in ("experts", "layers.1.mlp.experts", "layers.1.mlp", "re:.*mlp.experts", "layers.1"):
        assert classify(name, shape, torch.float32, "mixtral", [pattern]).skipped == "modules_to_not_convert", pattern
    for pattern in ("layers.0.mlp.experts", "re:.*w1", "re:experts"):
        assert classify(name, shape, torch.float32, "mixtral", [pattern]).axis == -1, pattern


@pytest.mark.usefixtures("blank_pictures")
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_the_commands(family, tmp_path):
    make_model(family, layers=1).save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    moved = {name: t * 1.5 if "down_proj" in name or "w2" in name else t for name, t in tensors.items()}
    (tmp_path / "other").mkdir()
    save_file(moved, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    (tmp_path / "other" / "config.json").write_text((tmp_path / "base" / "config.json").read_text())
    run = CliRunner().invoke
    result = run(app, ["analyze", str(tmp_path / "base"), "--scheme", "rceil", "--out", str(tmp_path / "a"), "--json"])
    assert result.exit_code == 0, result.output
    kind = "block_sparse_moe.experts.w1" if family == "mixtral" else "mlp.experts.gate_up_proj"
    assert kind in json.loads(result.stdout)["kinds"]["weight"]["by_layer_type"]["mxfp4+rceil"]
    result = run(app, ["compare", str(tmp_path / "base"), str(tmp_path / "other"), "--json"])
    assert result.exit_code == 0, result.output
    pairs = json.loads(result.stdout)["tensors"]
    changed = {name: pair["relative_difference"] for name, pair in pairs.items() if pair["relative_difference"]}
    assert changed and all("down_proj" in name or "w2" in name for name in changed)
    assert all(value == pytest.approx(0.5) for value in changed.values())


def test_packed_experts_have_no_error_left(tmp_path):
    config = MXFP4RLConfig(mode="packed")
    make_model("qwen3_moe", layers=1).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    model.save_pretrained(tmp_path / "packed")
    result = CliRunner().invoke(app, ["analyze", str(tmp_path / "packed"), "--out", str(tmp_path / "a")])
    assert result.exit_code == 2 and "stores quantized weights already" in result.output
    (tmp_path / "packed" / "config.json").unlink()
    result = CliRunner().invoke(app, ["analyze", str(tmp_path / "packed"), "--out", str(tmp_path / "a")])
    assert result.exit_code == 2 and "stores quantized weights already" in result.output
