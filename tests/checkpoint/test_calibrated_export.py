# SPDX-License-Identifier: Apache-2.0
"""Export with calibration texts: rounding that takes back its own errors in the outputs."""

import pytest
import torch
from export_files import save_packed, save_plain
from same_bits import tensors_in
from tiny_tokenizers import TEXT, make_tokenizer
from transformers import AutoModelForCausalLM

from hf_mxfp4 import QuantScheme
from hf_mxfp4.checkpoint import export
from hf_mxfp4.checkpoint.convert.calibration import Calibration
from hf_mxfp4.checkpoint.io.folder import ArgumentError, CheckpointError, open_checkpoint
from hf_mxfp4.gemm import quantize_weight
from hf_mxfp4.lab import round_weight


TEXTS = TEXT * 12


@pytest.fixture
def plain(tmp_path):
    folder = save_plain(tmp_path / "plain", "llama", vocab_size=404, dtype=torch.float32, max_position_embeddings=1024)
    make_tokenizer("gpt-2").save_pretrained(folder)
    return folder


def test_several_passes_give_the_same_sums(plain):
    folder = open_checkpoint(plain)
    layers = {f"model.layers.{i}.mlp.{name}_proj": size for i in (0, 1) for name, size in (("up", 64), ("down", 96))}
    at_once, by_two = (Calibration(folder, layers, TEXTS, size) for size in (1 << 30, 4 * (64**2 + 96**2)))
    assert at_once.n_tokens == by_two.n_tokens == 512 * (at_once.n_tokens // 512) > 0
    sums = {name: (at_once.gram(name), by_two.gram(name)) for name in layers}
    for one, other in sums.values():
        assert torch.equal(one, other) and one.diagonal().min() > 0
    tokens = make_tokenizer("gpt-2")("\n\n".join(TEXTS), return_tensors="pt").input_ids[0, : at_once.n_tokens]
    inputs = []
    model = AutoModelForCausalLM.from_pretrained(plain)
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(
        lambda _, x: inputs.append(x[0].detach().flatten(0, 1))
    )
    model(tokens.view(-1, 512))
    expected = inputs[0].t() @ inputs[0]
    assert torch.allclose(sums["model.layers.1.mlp.down_proj"][0], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("format", ["gguf", "compressed-tensors"])
def test_an_export_with_texts(format, plain, tmp_path):
    report = export(plain, tmp_path / "out", format, calibration=TEXTS)
    assert report.counts() == {"packed": 14} and "tokens of calibration texts: their own SQNR" in report.notes[-1]
    nearest = export(plain, tmp_path / "nearest", format)
    assert report.total_sqnr_db < nearest.total_sqnr_db
    if format == "compressed-tensors":
        found, before = tensors_in(tmp_path / "out"), tensors_in(plain)
        name = "model.layers.1.mlp.down_proj"
        calibration = Calibration(open_checkpoint(plain), {name: 96}, TEXTS)
        rounded = round_weight(before[f"{name}.weight"], calibration.gram(name), QuantScheme("even"))
        expected = quantize_weight(rounded, QuantScheme("even"))
        assert torch.equal(found[f"{name}.weight_packed"], expected["weight"])
        assert torch.equal(found[f"{name}.weight_scale"], expected["weight_scale"])


def test_experts_are_rounded_to_nearest_and_it_is_said(tmp_path):
    plain = save_plain(tmp_path / "plain", "qwen3_moe", vocab_size=404, max_position_embeddings=1024)
    make_tokenizer("gpt-2").save_pretrained(plain)
    report = export(plain, tmp_path / "out", "compressed-tensors", calibration=TEXTS)
    assert "(4 weights of experts are rounded to nearest)" in report.notes[-1]


def test_texts_that_have_no_effect_or_are_too_short(plain, tmp_path):
    with pytest.raises(CheckpointError, match="tokens; give 512 or more"):
        export(plain, tmp_path / "out", "gguf", calibration=["short"])
    packed = save_packed(tmp_path / "packed", "llama")
    with pytest.raises(ArgumentError, match="has no effect here"):
        export(packed, tmp_path / "out", "gguf", calibration=TEXTS)
    assert not (tmp_path / "out").exists()
