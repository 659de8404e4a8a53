# SPDX-License-Identifier: Apache-2.0
"""`save_pretrained(state_dict=...)` writes the state dict it is given, which transformers alone would not."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import take_state_dict


@pytest.fixture
def model(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint("qwen2"), quantization_config=MXFP4RLConfig())


def shifted(model) -> dict[str, torch.Tensor]:
    """A state dict that differs from the model's everywhere, as a gathered one does from a shard."""
    return {name: tensor + 1.0 for name, tensor in model.state_dict().items()}


def assert_written(folder, state_dict) -> None:
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == state_dict.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in state_dict.items())


def test_what_is_given_is_what_is_written(model, tmp_path):
    given = shifted(model)
    attributes = set(vars(model))
    model.save_pretrained(tmp_path / "saved", state_dict=dict(given))
    assert_written(tmp_path / "saved", given)
    assert set(vars(model)) == attributes and take_state_dict(model) is None
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(tensor, given[name]) for name, tensor in again.state_dict().items())
    assert again.quantization_report.n_quantized == 14


def test_without_one_the_models_own_is_written(model, tmp_path):
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "given", state_dict=shifted(model))
    model.save_pretrained(tmp_path / "own")
    assert_written(tmp_path / "own", own)
    model.save_pretrained(tmp_path / "none", state_dict=None)
    assert_written(tmp_path / "none", own)


def test_nothing_is_left_on_the_model_after_an_exception(model, tmp_path):
    (tmp_path / "file").write_text("")
    attributes = set(vars(model))
    with pytest.raises(NotADirectoryError):
        model.save_pretrained(tmp_path / "file" / "saved", state_dict=shifted(model))
    assert set(vars(model)) == attributes and take_state_dict(model) is None
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "saved")
    assert_written(tmp_path / "saved", own)


def test_after_dequantize_saving_is_transformers_own(model, tmp_path):
    plain = model.dequantize()
    assert "save_pretrained" not in vars(plain)
    given = shifted(plain)
    plain.save_pretrained(tmp_path, state_dict=dict(given))
    assert_written(tmp_path, given)
