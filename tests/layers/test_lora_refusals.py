# SPDX-License-Identifier: Apache-2.0
"""What PEFT would accept on packed layers and compute wrongly, or not train, is refused before the model is touched."""

import dataclasses

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import make_model
from torch import nn

import hf_mxfp4.integrations.peft
from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig
from hf_mxfp4.integrations.peft import strict_targets
from hf_mxfp4.integrations.transformers.swap import quantize_linears


IDS = torch.arange(2, 14).view(2, 6)


def model_of(mode="packed", **options):
    assert hf_mxfp4.integrations.peft.MXFP4LoraModel  # registered by its import; loading a model does it too
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


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "orthogonal", "mica", "eva"])
def test_initial_values_made_from_the_base_weight(init):
    text = refused(f"init_lora_weights='{init}' is not supported on packed layers", init_lora_weights=init)
    assert "mode='qat'" in text and "True, False, 'gaussian'" in text


@pytest.mark.parametrize("init", ["corda", "loftq", "lora_ga"])
def test_initial_values_that_need_more_than_a_word(init):
    class Config(LoraConfig):
        pass  # these inits need options and packages of their own, which is not the point here

    model = model_of()
    config = Config(r=4, target_modules=["q_proj"])
    config.init_lora_weights = init
    with pytest.raises(ValueError, match=f"init_lora_weights='{init}' is not supported on packed layers"):
        get_peft_model(model, config)


@pytest.mark.parametrize(
    ("option", "value"),
    [("use_dora", True), ("alora_invocation_tokens", [1]), ("kasa_config", {}), ("velora_config", {})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_variants_of_lora(option, value):
    from peft.tuners.lora import config

    if option not in {field.name for field in dataclasses.fields(config.LoraConfig)}:
        pytest.skip(f"{option} is not in this version of PEFT")
    if option.endswith("_config"):
        value = getattr(config, f"{option.removesuffix('_config').capitalize()}Config")()
    refused(f"{option}=.* is not supported on packed layers, .*use plain LoRA", **{option: value})


@pytest.mark.parametrize("init", [True, False, "gaussian"])
def test_other_initial_values_work(init):
    model = attach(model_of(), init_lora_weights=init)
    assert all(p.isfinite().all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "target",
    ["mlp.down_proj.weight", "weight_scale", "model.layers.0.mlp.gate_proj.weight_macro"],
    ids=["weight", "scales", "full-name"],
)
def test_stored_bytes_as_target_parameters(target):
    text = refused("target_parameters has", target_parameters=[target])
    assert target in text and "of a packed layer" in text and "modules_to_not_convert" in text


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("down_proj", "model.layers.0.mlp.down_proj is a packed layer"),
        ("proj", "is a packed layer"),
        ("model.layers.1.self_attn.o_proj", "model.layers.1.self_attn.o_proj is a packed layer"),
        ("mlp", "model.layers.0.mlp contains a packed layer"),
        ("layers.1", "model.layers.1 contains a packed layer"),
    ],
    ids=["kind", "ending", "full-name", "parent", "decoder-layer"],
)
def test_packed_layers_as_modules_to_save(target, place):
    assert place in refused("modules_to_save has", modules_to_save=[target])


def test_tokens_of_a_packed_layer():
    text = refused("trainable_token_indices has 'k_proj'", trainable_token_indices={"k_proj": [1]})
    assert "model.layers.0.self_attn.k_proj is a packed layer" in text


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


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_a_target_that_is_the_name_of_nothing_is_said(mode, capsys):
    model = attach(model_of(mode), target_modules=["q_proj", "k_porj"])
    said = capsys.readouterr().err
    assert "target_modules has 'k_porj', the name of no module of Qwen2ForCausalLM (near: 'k_proj'" in said
    assert "'q_proj'," not in said and sum(hasattr(m, "lora_A") for m in model.modules()) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_modules": ["q_proj", "nonsense"]}, "target_modules has 'nonsense', the name of no module"),
        ({"target_modules": ["mlp.q_proj", "v_proj"]}, "'mlp.q_proj', the name of .*near: 'self_attn.q_proj'"),
        (
            {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up"]},
            "target_parameters has 'experts.gate_up', the name of no parameter .*near: 'experts.gate_up_proj'",
        ),
    ],
    ids=["module", "part", "parameter"],
)
def test_within_strict_targets_it_is_an_error_and_nothing_is_touched(options, words):
    model = model_of("qat", family="qwen3_moe")
    before = [type(module) for module in model.modules()]
    with strict_targets(), pytest.raises(ValueError, match=words):
        attach(model, **options)
    assert [type(module) for module in model.modules()] == before


def test_names_that_are_there_are_no_matter(capsys):
    with strict_targets():
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
    assert "the name of no" not in capsys.readouterr().err


def test_plain_models_are_pefts_own_matter_but_for_strict_targets(capsys):
    attach(make_model(), target_modules=["q_proj", "nonsense"])
    assert "the name of no" not in capsys.readouterr().err
    with strict_targets(), pytest.raises(ValueError, match="'nonsense', the name of no module"):
        attach(make_model(), target_modules=["q_proj", "nonsense"])
