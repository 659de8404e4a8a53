# SPDX-License-Identifier: Apache-2.0
"""Exports straight from full-precision checkpoints, plain and trained ones: every weight is quantized once."""

import json
import math

import pytest
import torch
from export_files import config_in, decode, save_packed, save_plain
from factors import factors_config
from same_bits import tensors_in
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import CheckpointError, export


Q_PROJ, DOWN_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def plain_scheme(rule="even", **options) -> MXFP4RLConfig:
    return factors_config(mode="packed", preset="w4a16", scale_rule=rule, macro_block=None, **options)


def save_qat(folder, **options):
    """A trained checkpoint in float32 masters."""
    plain = save_plain(folder.with_name(f"{folder.name}-plain"), "llama", layers=1, dtype=torch.float32)
    config = factors_config(preset="w4a16", **options)
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("rule", "shard_size"),
    [("rceil", "50GB"), ("floor", "30KB"), ("even", "50GB"), ("mse", "30KB"), (None, "50GB"), (None, "30KB")],
)
def test_codes_and_scales_are_those_of_quantize(rule, shard_size, tmp_path):
    plain = save_plain(tmp_path / "plain", "llama")
    AutoModelForCausalLM.from_pretrained(plain).save_pretrained(tmp_path / "source", max_shard_size=shard_size)
    report = export(tmp_path / "source", tmp_path / "out", "compressed-tensors", scale_rule=rule)
    before, after = tensors_in(tmp_path / "source"), tensors_in(tmp_path / "out")
    layers = {name.removesuffix("_packed") for name in after if name.endswith(".weight_packed")}
    assert len(layers) == 14 and report.counts() == {"packed": 14}
    for name in layers:
        expected = hf_mxfp4.quantize(before[name], scale_rule=rule or "even")
        assert torch.equal(after[f"{name}_packed"], expected.codes), name
        assert torch.equal(after[f"{name}_scale"], expected.scale), name
    for name in before.keys() - layers:
        assert torch.equal(after[name], before[name]), name
    assert report.weights == f"mxfp4+{rule or 'even'}" and report.scheme == "full precision"


@pytest.mark.parametrize("format", ["compressed-tensors", "bf16"])
def test_errors_are_those_against_the_full_precision_weights(format, tmp_path):
    plain = save_plain(tmp_path / "plain", "llama", layers=1, dtype=torch.float32)
    report = export(plain, tmp_path / "out", format, scale_rule="floor")
    signal = noise = 0.0
    for cost in report.layers:
        weight = tensors_in(plain)[f"{cost.name}.weight"]
        packed = hf_mxfp4.quantize(weight, scale_rule="floor")
        error = (decode(packed.codes, packed.scale) - weight.double()).square().sum().item()
        energy = weight.double().square().sum().item()
        assert cost.sqnr_db == pytest.approx(10 * math.log10(energy / error), abs=1e-3)
        signal, noise = signal + energy, noise + error
    sqnr = 10 * math.log10(signal / noise)
    assert report.total_sqnr_db == pytest.approx(sqnr, abs=1e-3) and 10 < sqnr < 40
    assert report.error() == f"SQNR {sqnr:.2f} dB against the full-precision weights"
    written = json.loads((tmp_path / "out" / "export_report.json").read_text())
    assert written["sqnr_against"] == "the full-precision weights" and written["source_sqnr_db"] is None
    assert written["sqnr_db"] == pytest.approx(sqnr, abs=1e-3)


def test_what_the_user_leaves_alone_stays(tmp_path):
    plain = save_plain(tmp_path / "plain", "llama")
    report = export(plain, tmp_path / "out", "quark", modules_to_not_convert=["mlp.up_proj"], preset="w4a4")
    assert report.counts() == {"packed": 12}
    scheme = config_in(tmp_path / "out")["quantization_config"]
    assert scheme["exclude"] == ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    assert scheme["global_quant_config"]["input_tensors"]["scale_calculation_mode"] == "even"
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(tensors_in(tmp_path / "out")[name], tensors_in(plain)[name])


def test_a_trained_checkpoint_of_plain_mxfp4_has_the_codes_of_its_policy(tmp_path):
    source = save_qat(tmp_path / "qat", scale_rule="floor", macro_block=None, outlier_fallback=None)
    report = export(source, tmp_path / "out", "quark")
    policy = AutoModelForCausalLM.from_pretrained(source)
    master = policy.get_submodule(Q_PROJ).weight.detach()
    expected = hf_mxfp4.quantize(master, scale_rule="floor")
    assert torch.equal(tensors_in(tmp_path / "out")[f"{Q_PROJ}.weight"], expected.codes)
    assert report.counts() == {"packed": 7} and report.error().endswith(" dB against the full-precision weights")
    assert report.total_sqnr_db == pytest.approx(policy.quantization_report.sqnr_db, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [({"scale_rule": "even"}, "even"), ({"on_mismatch": "requantize"}, "rceil")],
    ids=["rule", "requantize"],
)
def test_a_trained_checkpoint_with_macro_factors_is_quantized_once(arguments, rule, tmp_path):
    source = save_qat(tmp_path / "qat")
    report = export(source, tmp_path / "out", "quark", **arguments)
    expected = hf_mxfp4.quantize(tensors_in(source)[f"{Q_PROJ}.weight"], scale_rule=rule)
    assert torch.equal(tensors_in(tmp_path / "out")[f"{Q_PROJ}.weight"], expected.codes)
    assert report.counts() == {"packed": 7}
    assert any("trained with weights in mxfp4+rceil+mbs128-dynamic+of0.5" in note for note in report.notes)


def test_the_refusals_name_the_better_way_first(tmp_path):
    qat = save_qat(tmp_path / "qat")
    packed = save_packed(tmp_path / "packed", "llama", layers=1, config={"macro_block": 128})
    for source in (qat, packed):
        with pytest.raises(CheckpointError) as refusal:
            export(source, tmp_path / "out", "compressed-tensors")
        text, rule, choice = str(refusal.value), "scale_rule='even' (--scale-rule even)", "on_mismatch='requantize'"
        assert 0 < text.index("Best: ") < text.index(rule) < text.index(choice)
        assert "export the original full-precision checkpoint" in text or source is qat
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "format", "arguments", "words"),
    [
        (
            "packed",
            "quark",
            {"scale_rule": "floor"},
            "--scale-rule floor. has no effect here: the packed bytes are kept",
        ),
        ("packed", "bf16", {"scale_rule": "floor"}, "has no effect here"),
        ("qat", "bf16", {"scale_rule": "floor"}, "has no effect here: the quantized values are written"),
        ("packed", "quark", {"preset": "w4a4"}, "has a scheme of its own .*; leave out preset='w4a4'"),
        (
            "qat",
            "quark",
            {"modules_to_not_convert": ["mlp"]},
            r"a scheme of its own .*; leave out modules_to_not_convert=\['mlp'\]",
        ),
        ("plain", "compressed-tensors", {"preset": "w4a4"}, "--preset w4a4. has no effect in format"),
        ("plain", "quark", {"modules_to_not_convert": ["nonsense"]}, "'nonsense', which matches no module"),
        ("plain", "gpt-oss", {}, "is for the architecture 'gpt_oss'"),
    ],
)
def test_arguments_without_effect_are_refused(kind, format, arguments, words, tmp_path):
    make = {"packed": save_packed, "qat": save_qat, "plain": save_plain}[kind]
    source = make(tmp_path / kind) if kind == "qat" else make(tmp_path / kind, layers=1)
    with pytest.raises(CheckpointError, match=words):
        export(source, tmp_path / "out", format, **arguments)
    assert not (tmp_path / "out").exists()
