# SPDX-License-Identifier: Apache-2.0
"""Adapters carry the scheme of the base that they were trained on, and compare it when they are loaded."""

import json

import pytest
import torch
from factors import factors_config
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.peft import MXFP4LoraConfig


PACKED = factors_config(mode="packed")


@pytest.fixture
def load(saved_base):
    """`load(scheme)`: a model of one layer under a scheme, or under none."""

    def load(scheme=None):
        folder = saved_base("qwen2", layers=1)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=scheme)

    return load


def adapter(model, folder=None, **options):
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], **options)
    model = get_peft_model(model, config)
    if folder is not None:
        model.save_pretrained(folder)
    return model


def saved_scheme(folder):
    return json.loads((folder / "adapter_config.json").read_text()).get("base_quantization")


@pytest.mark.parametrize(
    "scheme",
    [PACKED, factors_config(), factors_config(mode="packed", preset="w4a4", modules_to_not_convert=["layers.0.mlp"])],
    ids=["packed", "qat", "packed-w4a4"],
)
def test_the_scheme_is_in_the_adapters_config(load, tmp_path, scheme):
    adapter(load(scheme), tmp_path)
    assert MXFP4RLConfig.from_dict(saved_scheme(tmp_path)) == scheme
    config = PeftConfig.from_pretrained(tmp_path)
    assert isinstance(config, MXFP4LoraConfig) and isinstance(config, LoraConfig)
    assert MXFP4RLConfig.from_dict(config.base_quantization) == scheme


@pytest.mark.parametrize(
    ("trained", "found"),
    [
        (PACKED, PACKED),
        (PACKED, factors_config(mode="qat", preset="w4a16", outlier_fallback=None)),
        (factors_config(), factors_config().packed()),
    ],
    ids=["same", "packed-on-trainable", "trainable-on-packed"],
)
def test_the_same_values_are_silent(load, tmp_path, capsys, trained, found):
    adapter(load(trained), tmp_path)
    capsys.readouterr()
    PeftModel.from_pretrained(load(found), tmp_path)
    assert "adapter" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (factors_config(mode="packed", macro_block=None), "w4a16 [weights mxfp4+rceil, activations full precision]"),
        (factors_config(mode="packed", preset="w4a4"), "activations mxfp4+rceil+mbs128-static"),
        (factors_config(), "w4a4 [weights mxfp4+rceil+mbs128-dynamic+of0.5"),
        (factors_config(mode="packed", modules_to_not_convert=["mlp"]), "full precision] without mlp"),
        (None, "attached to one in full precision"),
    ],
    ids=["weights", "activations", "qat", "skips", "plain"],
)
def test_another_scheme_is_a_warning_that_names_both(load, tmp_path, capsys, found, named):
    adapter(load(PACKED), tmp_path)
    capsys.readouterr()
    PeftModel.from_pretrained(load(found), tmp_path, adapter_name="mine")
    text = capsys.readouterr().err
    assert f"adapter 'mine' was made for a base quantized as {PACKED.describe()}, and is now attached to" in text
    assert named in text and text.count("adapter 'mine'") == 1


def test_loaded_for_inference_it_keeps_its_scheme_and_trained_further_it_takes_the_new_one(load, tmp_path):
    adapter(load(PACKED), tmp_path / "first")
    other = factors_config(mode="packed", macro_block=None)
    for trainable, expected in ((False, PACKED), (True, other)):
        model = PeftModel.from_pretrained(load(other), tmp_path / "first", is_trainable=trainable)
        model.save_pretrained(tmp_path / str(trainable))
        assert saved_scheme(tmp_path / str(trainable)) == expected.to_dict()
    model = PeftModel.from_pretrained(load(), tmp_path / "first", is_trainable=True)
    model.save_pretrained(tmp_path / "plain")
    assert saved_scheme(tmp_path / "plain") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [({"format_version": 99}, "format_version=99"), ({"preset": "w2a2"}, "preset='w2a2'"), ({"new": 1}, "'new'")],
    ids=["newer", "value", "option"],
)
def test_a_scheme_that_cannot_be_read_is_a_warning(load, tmp_path, capsys, change, message):
    adapter(load(PACKED), tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    config["base_quantization"].update(change)
    file.write_text(json.dumps(config))
    capsys.readouterr()
    PeftModel.from_pretrained(load(PACKED), tmp_path)
    text = capsys.readouterr().err
    assert "names a quantization scheme of its base that cannot be read" in text and message in text
