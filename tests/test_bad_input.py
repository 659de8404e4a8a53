# SPDX-License-Identifier: Apache-2.0
"""What a user reads who asked for something that cannot be done: every message names the thing and the way out."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig


def with_quantization_config(folder: str, scheme: dict) -> str:
    """``folder`` again, after an edit of its config.json."""
    file = Path(folder, "config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": scheme}))
    return folder


MESSAGES = {
    "unknown-preset": (
        {"preset": "w4a8"},
        ValueError,
        "preset='w4a8' is not supported; choose one of 'w4a16', 'w4a4', 'w4a4_tuned', 'w4a4_h64', 'w4a4g8', 'w4a4g4', "
        "'paper_a', 'paper_b', 'w4a4g4_tuned'",
    ),
    "misspelt-option": (
        {"scale_rul": "floor"},
        TypeError,
        "MXFP4RLConfig has no option 'scale_rul'; did you mean 'scale_rule'?",
    ),
    "skips-as-text": (
        {"modules_to_not_convert": "lm_head"},
        ValueError,
        "modules_to_not_convert='lm_head' must be a list of module names",
    ),
    "newer-format": (
        {"format_version": 2},
        ValueError,
        "format_version=2: this hf_mxfp4 reads version 1; install a newer hf_mxfp4 to load this checkpoint",
    ),
}


@pytest.mark.parametrize(("options", "error", "message"), MESSAGES.values(), ids=MESSAGES)
def test_the_message_is_the_same_from_python_a_dictionary_and_a_checkpoint(options, error, message, checkpoint):
    folder, as_dict = checkpoint("qwen2", layers=1), {"quant_method": "mxfp4_rl", **options}
    builds = [
        lambda: MXFP4RLConfig(**options),
        lambda: AutoModelForCausalLM.from_pretrained(folder, quantization_config=as_dict),
        lambda: AutoModelForCausalLM.from_pretrained(with_quantization_config(folder, as_dict)),
    ]
    for build in builds:
        with pytest.raises(error) as caught:
            build()
        assert str(caught.value) == message


def test_a_dictionary_that_does_not_say_whose_it_is(checkpoint):
    with pytest.raises(ValueError, match="has no `quant_method`"):
        AutoModelForCausalLM.from_pretrained(checkpoint("qwen2", layers=1), quantization_config={"preset": "w4a16"})


@pytest.mark.parametrize(
    ("scheme", "owner"),
    [
        ({"quant_method": "mxfp4"}, "Mxfp4Config"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "BitsAndBytesConfig"),
        ({"quant_method": "fp8"}, "FineGrainedFP8Config"),
    ],
    ids=["mxfp4", "bitsandbytes", "fp8"],
)
def test_a_checkpoint_of_another_method_is_refused(scheme, owner, checkpoint):
    folder = with_quantization_config(checkpoint("qwen2", layers=1), scheme)
    with pytest.raises(ValueError, match=f"{owner}.*MXFP4RLConfig"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=MXFP4RLConfig())


@pytest.mark.parametrize("preset", ["w4a4", "w4a16"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_integers_are_no_input_of_a_layer(dtype, preset):
    layer = MXFP4Linear(32, 8, config=MXFP4RLConfig(preset=preset), name="model.layers.0.mlp.up_proj")
    with pytest.raises(TypeError) as error:
        layer(torch.zeros(2, 32, dtype=dtype))
    assert str(error.value) == (
        f"MXFP4Linear model.layers.0.mlp.up_proj: input is {dtype} but the layer's dtype is torch.float32; "
        "convert one of them, or run under torch.autocast"
    )
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="MXFP4Linear model.layers.0.mlp.up_pr"):
        layer(torch.zeros(2, 32, dtype=dtype))


@pytest.mark.parametrize("shape", [(2, 33), ()], ids=str)
def test_an_input_of_the_wrong_size(shape):
    with pytest.raises(ValueError) as error:
        MXFP4Linear(32, 8, name="model.layers.0.mlp.up_proj")(torch.zeros(shape))
    assert str(error.value) == f"MXFP4Linear model.layers.0.mlp.up_proj: input {shape} does not end in in_features=32"
