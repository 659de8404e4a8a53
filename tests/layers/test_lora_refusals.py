# SPDX-License-Identifier: Apache-2.0
"""What PEFT would accept on packed layers and compute wrongly, or not train, is refused before the model is touched."""

import dataclasses

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import make_model
from torch import nn

from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig
from hf_mxfp4.integrations.peft import MXFP4LoraModel
from hf_mxfp4.integrations.transformers import quantize_linears


IDS = torch.arange(2, 14).view(2, 6)


def model_of(mode="packed", **options):
    assert MXFP4LoraModel  # registered by its import; loading a model does it too
    model = make_model(**options)
    quantize_linears(model, MXFP4RLConfig(mode=mode, preset="w4a16"))
    return model


def attach(model, **options):
    return get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": ["q_proj", "up_proj"], **options}))


def refused(message, **options):
    model = model_of()
    before = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(ValueError, match=message) as caught:
        attach(model, **options)
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert not any(p.requires_grad for m in model.modules() if isinstance(m, MXFP4PackedLinear) for p in [m.weight])
    return str(caught.value)


@pytest.mark.parametrize("init", ["pissa", "olora", "eva"])
def test_initial_values_made_from_the_base_weight(init):
    text = refused(f"init_lora_weights='{init}' is not supported on packed layers", init_lora_weights=init)
    assert "mode='qat'" in text and "True, False, 'gaussian'" in text


@pytest.mark.parametrize(
    ("option", "value"),
    [("use_dora", True), ("lora_bias", True), ("alora_invocation_tokens", [1]), ("kasa_config", {})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_variants_of_lora(option, value):
    from peft.tuners.lora import config

    if option not in {field.name for field in dataclasses.fields(config.LoraConfig)}:
        pytest.skip(f"{option} is not in this version of PEFT")
    if option.endswith("_config"):
        value = getattr(config, f"{option.removesuffix('_config').capitalize()}Config")()
    refused(f"{option}=.* is not supported on packed layers, .*use plain LoRA", **{option: value})


@pytest.mark.parametrize(
    "target",
    ["mlp.down_proj.weight", "weight_scale", "model.layers.0.mlp.gate_proj.weight_macro"],
    ids=["weight", "scales", "full-name"],
)
def test_stored_bytes_as_target_parameters(target):
    text = refused("target_parameters has", target_parameters=[target])
    assert target in text and "is a packed layer" in text and "modules_to_not_convert" in text


@pytest.mark.parametrize("target", ["down_proj", "model.layers.1.self_attn.o_proj", "mlp", "layers.1"])
def test_packed_layers_as_modules_to_save(target):
    refused(f"modules_to_save has '{target}': .*{target}.* is a packed layer", modules_to_save=[target])


def test_a_second_adapter_is_refused_too():
    model = attach(model_of())
    for options in ({"use_dora": True}, {"init_lora_weights": "pissa"}, {"modules_to_save": ["up_proj"]}):
        with pytest.raises(ValueError, match="packed layer"):
            model.add_adapter("second", LoraConfig(target_modules=["q_proj"], **options))


def test_a_layer_kept_in_full_precision_can_be_trained_in_full():
    model = make_model()
    quantize_linears(model, MXFP4RLConfig(mode="packed", modules_to_not_convert=["down_proj"]))
    model = attach(model, modules_to_save=["down_proj"])
    assert sum("down_proj.modules_to_save" in name for name, p in model.named_parameters() if p.requires_grad) == 2


def test_variants_that_compute_with_the_master_weight():
    with pytest.raises(ValueError, match="use_dora=True is not supported on layers that quantize their weight"):
        attach(model_of("qat"), use_dora=True)
    attach(model_of("qat"), use_dora=True, target_modules=["lm_head"])


@pytest.mark.parametrize(
    ("mode", "options", "factors"),
    [
        ("plain", {"use_dora": True}, 3),
        ("plain", {"init_lora_weights": "pissa"}, 2),
        ("qat", {"init_lora_weights": "pissa"}, 2),
    ],
    ids=["dora", "pissa", "pissa of masters"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trainable_and_plain_models_keep_what_peft_offers(mode, dtype, options, factors):
    model = make_model(dtype=dtype) if mode == "plain" else model_of("qat", dtype=dtype)
    model = attach(model, **options)
    model(IDS, labels=IDS).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    # PiSSA makes both factors of the weight; LoRA's B begins at zero, so that its A has no gradient yet.
    assert len(trained) == factors * 4 and all(p.grad.isfinite().all() for p in trained)
    assert sum(bool(p.grad.any()) for p in trained) >= 2 * 4
    assert sum(isinstance(m, MXFP4Linear) for m in model.modules()) == (14 if mode == "qat" else 0)


def test_plain_models_get_pefts_own_layers():
    model = attach(make_model())
    assert {type(m) for m in model.modules() if hasattr(m, "lora_A")} == {peft.tuners.lora.Linear}
    assert isinstance(model.base_model, peft.LoraModel)
    assert not hasattr(model.peft_config["default"], "base_quantization")
    assert type(model.get_output_embeddings()) is nn.Linear


# ---- names of nothing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        (
            "qat",
            {"target_modules": ["q_proj", "k_porj"]},
            "'k_porj', the name of no module of Qwen3Moe.*near: 'k_proj'",
        ),
        ("packed", {"target_modules": ["mlp.q_proj", "v_proj"]}, "'mlp.q_proj', the name .*near: 'self_attn.q_proj'"),
        (
            "qat",
            {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up"]},
            "target_parameters has 'experts.gate_up', the name of no parameter .*near: 'experts.gate_up_proj'",
        ),
    ],
    ids=["module", "part", "parameter"],
)
def test_a_target_that_is_the_name_of_nothing_is_refused_and_nothing_touched(mode, options, words):
    model = model_of(mode, family="qwen3_moe")
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=words):
        attach(model, **options)
    assert [type(module) for module in model.modules()] == before


def test_names_that_are_there_are_accepted():
    model = attach(model_of("qat"), target_modules=["q_proj", "layers.1.mlp.up_proj"])
    model.add_adapter("second", LoraConfig(target_modules=["q_proj", "model.layers.0.self_attn.k_proj"]))
    attach(model_of("packed"), target_modules="all-linear")
    attach(model_of("qat"), target_modules=r".*\.q_proj")
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    moe = attach(model_of("qat", family="qwen3_moe"), target_modules=["q_proj"], target_parameters=experts)
    moe.add_adapter("second", LoraConfig(target_modules=["q_proj"], target_parameters=experts))
    # Names that these experts had in older checkpoints, which PEFT translates.
    attach(model_of("qat", family="qwen3_moe"), target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    attach(model_of("qat"), target_modules=None)
    attach(make_model(), target_modules=["q_proj", "nonsense"])  # plain models are PEFT's matter
