# SPDX-License-Identifier: Apache-2.0
"""Adapters carry the scheme of the base that they were trained on, and compare it when they are loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from factors import factors_config
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.peft import MXFP4LoraConfig


ROOT = Path(__file__).resolve().parents[2]
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


def test_adapters_of_plain_models_say_nothing_about_schemes(load, tmp_path):
    adapter(load(), tmp_path)
    assert "base_quantization" not in json.loads((tmp_path / "adapter_config.json").read_text())
    PeftModel.from_pretrained(load(), tmp_path)


def test_every_adapter_of_a_model_is_saved_with_it(load, tmp_path):
    model = adapter(load(PACKED))
    model.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj"]))
    model.save_pretrained(tmp_path)
    assert saved_scheme(tmp_path) == saved_scheme(tmp_path / "second") == PACKED.to_dict()


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


def test_a_second_adapter_is_compared_too(load, tmp_path, capsys):
    adapter(load(factors_config()), tmp_path)
    model = adapter(load(PACKED))
    capsys.readouterr()
    model.load_adapter(tmp_path, "other")
    assert "adapter 'other' was made for a base quantized as w4a4" in capsys.readouterr().err


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


def test_a_config_class_of_ones_own_is_left_alone_and_pointed_out(load, capsys):
    class Mine(LoraConfig):
        pass

    capsys.readouterr()
    model = get_peft_model(load(PACKED), Mine(r=2, target_modules=["q_proj"]))
    assert type(model.peft_config["default"]) is Mine
    assert "class Mine, which cannot carry the scheme" in capsys.readouterr().err


#: Answers of two processes in which nothing of this package, nor PEFT, has been imported before the base is loaded.
ANEW = """
import os, sys, warnings
sys.modules["torchao"] = None
from transformers import AutoModelForCausalLM
from transformers.models.qwen2 import modeling_qwen2  # once for both
folder, adapter = sys.argv[1:]

def peft_alone():
    from peft import PeftModel
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    print(any("base_quantization" in str(w.message) for w in caught), "hf_mxfp4" in sys.modules, flush=True)

def quantized_base():
    import hf_mxfp4
    config = hf_mxfp4.MXFP4RLConfig(mode="packed")
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    from peft import PeftModel
    model = PeftModel.from_pretrained(base, adapter)
    print(type(model.base_model).__name__, type(model.peft_config["default"]).__name__, flush=True)

assert not {"peft", "hf_mxfp4"} & sys.modules.keys()
if os.fork() == 0:
    peft_alone()
else:
    assert os.wait()[1] == 0
    quantized_base()
"""


def test_peft_alone_says_what_it_ignores_and_loading_a_quantized_model_is_enough_for_it_to_know(
    load, saved_base, tmp_path
):
    adapter(load(PACKED), tmp_path / "adapter")
    arguments = [sys.executable, "-c", ANEW, saved_base("qwen2", layers=1), str(tmp_path / "adapter")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert done.stdout.splitlines() == ["True False", "MXFP4LoraModel MXFP4LoraConfig"], done.stderr[-2000:]
