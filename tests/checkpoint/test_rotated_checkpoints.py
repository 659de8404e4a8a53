# SPDX-License-Identifier: Apache-2.0
"""Packed checkpoints whose weights were rotated before they were quantized: made in every way, read by every reader."""

import json

import pytest
import torch
from same_bits import tensors_in
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_mxfp4 import MXFP4PackedLinear, MXFP4RLConfig, numerics, pack, quantize
from hf_mxfp4.checkpoint import CheckpointError, export, pack_checkpoint
from hf_mxfp4.cli import app


IDS = torch.arange(2, 14).view(2, 6)
SCHEME = {"scale_rule": "even", "macro_search": "blockwise", "fprop": {"rotation": "deterministic-32"}}
PACKED = MXFP4RLConfig(mode="packed", **SCHEME)


def load(folder, config=None, **options):
    options |= {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def layers_of(model) -> dict[str, MXFP4PackedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, MXFP4PackedLinear)}


def qat(folder, **options):
    scheme = {"preset": "w4a16", "outlier_fallback": None, "dither_ties": False, **SCHEME, **options}
    return load(folder, MXFP4RLConfig(**scheme))


@pytest.fixture
def packed_folder(checkpoint, tmp_path):
    source, out = checkpoint(dtype=torch.bfloat16), tmp_path / "packed"
    pack_checkpoint(source, out, PACKED)
    return source, out


# ---- made, saved, loaded --------------------------------------------------------------------------------------------


def test_files_hold_the_codes_of_rotated_weights_and_load_to_the_same_model(checkpoint, tmp_path):
    source = checkpoint(dtype=torch.bfloat16)
    model = load(source, PACKED)
    expected, report = logits(model), model.quantization_report
    model.save_pretrained(tmp_path / "saved")
    stored, original = tensors_in(tmp_path / "saved"), tensors_in(source)
    for name in layers_of(model):
        rotated = numerics.rotate(original[f"{name}.weight"].float(), 32)
        tensor = quantize(rotated, scale_rule="even", macro_block=128, macro_search="blockwise")
        assert torch.equal(stored[f"{name}.weight"], tensor.codes), name
        assert torch.equal(stored[f"{name}.weight_macro"], tensor.macro), name
    again = load(tmp_path / "saved")
    assert torch.equal(logits(again), expected) and again.hf_quantizer.quantization_config == PACKED
    assert "rotation deterministic-32" in str(again.quantization_report)
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "rotation deterministic-32" in card
    # Errors are those of the values rotated back: what is lost is what any packing of such weights loses.
    plain = load(source, MXFP4RLConfig(mode="packed", scale_rule="even", macro_search="blockwise"))
    assert report.sqnr_db == pytest.approx(plain.quantization_report.sqnr_db, abs=1.5)


def test_every_way_to_pack_writes_the_same_files(packed_folder, checkpoint, tmp_path):
    source, folder = packed_folder
    model = qat(source)
    model.save_pretrained(tmp_path / "qat")
    expected = logits(model)
    pack(model).save_pretrained(tmp_path / "trained")
    torch.testing.assert_close(logits(load(tmp_path / "trained")).float(), expected.float(), rtol=0.05, atol=0.05)
    pack_checkpoint(tmp_path / "qat", tmp_path / "of qat")
    load(source, PACKED).save_pretrained(tmp_path / "loaded")
    options = ["--scale-rule", "even", "--macro-search", "blockwise", "--rotation", "deterministic-32"]
    result = CliRunner().invoke(app, ["pack", str(source), str(tmp_path / "cli"), *options])
    assert result.exit_code == 0, result.output
    for way in ("trained", "of qat", "loaded", "cli"):
        stored = tensors_in(tmp_path / way)
        found = tensors_in(folder)
        assert stored.keys() == found.keys() and all(torch.equal(stored[name], found[name]) for name in found), way
    cost = json.loads((tmp_path / "cli" / "pack_report.json").read_text())["layers"][0]
    assert 10 < cost["sqnr_db"] < 30
    assert CliRunner().invoke(app, ["verify", str(folder)]).exit_code == 0


def test_rotations_that_do_not_divide_the_inputs_of_a_layer_are_refused_by_its_name(checkpoint, tmp_path):
    source = checkpoint(intermediate=96)
    config = MXFP4RLConfig(mode="packed", fprop={"rotation": "deterministic-64"})
    words = r"down_proj has 96 inputs, no multiple of 64.*modules_to_not_convert"
    with pytest.raises(CheckpointError, match=words):
        pack_checkpoint(source, tmp_path / "out", config)
    with pytest.raises(ValueError, match=words):
        load(source, config)
    result = CliRunner().invoke(app, ["pack", str(source), str(tmp_path / "out"), "--rotation", "random-16"])
    assert result.exit_code == 2 and "drawn anew in every step" in " ".join(result.output.split())


def test_a_config_without_the_rotation_of_the_weights_is_noticed(packed_folder):
    _, folder = packed_folder
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["fprop"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="'rotation': 'deterministic-32'"):
        load(folder)


# ---- read by others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["packed", "qat"])
def test_of_other_formats_bfloat16_alone_takes_the_weights_and_rotates_them_back(kind, packed_folder, tmp_path):
    source, folder = packed_folder
    if kind == "qat":
        qat(source).save_pretrained(tmp_path / "qat")
    origin = {"packed": folder, "qat": tmp_path / "qat"}[kind]
    for format in ("compressed-tensors", "quark", "gguf"):
        for on_mismatch in ("refuse", "requantize", "dequantize"):
            with pytest.raises(CheckpointError, match=f"rotate both operands .*, and format '{format}' cannot hold"):
                export(origin, tmp_path / "other", format, on_mismatch)
    report = export(origin, tmp_path / "plain", "bf16")
    assert any("rotated back" in note for note in report.notes)
    stored = tensors_in(tmp_path / "plain")
    packed = load(folder)
    for name, layer in layers_of(packed).items():
        assert torch.equal(stored[f"{name}.weight"], layer.dequantized_weight(torch.float32).bfloat16()), name
    torch.testing.assert_close(logits(load(tmp_path / "plain")), logits(packed), rtol=0.1, atol=0.1)
