# SPDX-License-Identifier: Apache-2.0
"""Each of PEFT's methods on quantized layers: the same as on plain layers that hold ``Q(W)``, or refused at attach; and
the scheme of the base that adapters carry, which is compared when they are loaded."""

import copy
import functools
import inspect
import json
from pathlib import Path

import peft
import pytest
import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING, LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from same_bits import IDS, assert_same, logits
from tiny_models import make_model
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.peft import SUPPORTED, TRAINABLE_ONLY, MXFP4LoraConfig, MXFP4LoraModel
from hf_mxfp4.layers import QUANTIZED


#: What a method needs apart from its targets and, where it has one, a rank of 4.
OPTIONS = {
    "ADALORA": {"total_step": 10},
    "BEFT": {"target_modules": ["q_proj", "v_proj"]},  # it changes biases
    "BOFT": {"boft_block_size": 8},
    "C3A": {"block_size": 16},
    "FOURIERFT": {"n_frequency": 50},
    "GRALORA": {"gralora_k": 2},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "OFT": {"oft_block_size": 8, "r": 0},
    "OSF": {"effective_rank": 4},
    "ROAD": {"group_size": 8},
    "VBLORA": {"num_vectors": 16, "vector_length": 16, "topk": 2},
    "WAVEFT": {"n_frequency": 50},
}
TUNERS = sorted(
    kind.name
    for kind, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items()
    if inspect.isclass(tuner) and issubclass(tuner, BaseTuner)
)
#: These do not put adapters on linear layers, or need more than a config.
ELSEWHERE = {"ADAMSS", "LN_TUNING", "POLY", "SHADOW", "TRAINABLE_TOKENS", "XLORA"}
#: PEFT has no merge for this one.
NEVER_MERGED = {"LILY"}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """`load(mode, skips)` gives a model that is loaded once."""
    folder = tmp_path_factory.mktemp("base")
    make_model().save_pretrained(folder)

    @functools.cache
    def loaded(mode, skips):
        options = {"preset": "w4a16", "modules_to_not_convert": list(skips)}
        scheme = MXFP4RLConfig(mode=mode, **options)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=scheme)

    return lambda mode, skips=(): copy.deepcopy(loaded(mode, skips))


def config_of(method, **options):
    kind = peft.PeftType[method]
    fields = PEFT_TYPE_TO_CONFIG_MAPPING[kind].__dataclass_fields__
    given = {"target_modules": ["q_proj", "o_proj"], "r": 4, **OPTIONS.get(method, {}), **options}
    return PEFT_TYPE_TO_CONFIG_MAPPING[kind](**{name: value for name, value in given.items() if name in fields})


def attach(model, method, **options):
    """Adapters of random values, the same ones for models of the same shape."""
    torch.manual_seed(5)
    model = get_peft_model(model, config_of(method, **options)).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def gradients(model):
    model.train()
    torch.manual_seed(3)
    model(IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def distance(found, expected):
    return float((found - expected).norm() / expected.norm())


def codes(model):
    return {name: p.clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}


@pytest.mark.parametrize("mode", ["qat", "packed"])
@pytest.mark.parametrize("method", sorted(SUPPORTED | TRAINABLE_ONLY))
def test_a_supported_method_computes_and_trains_as_on_plain_weights(load, method, mode):
    if method not in TUNERS:
        pytest.skip("not in this version of PEFT")
    if mode == "packed" and method in TRAINABLE_ONLY:
        return refused(load, method, mode)
    plain = attach(load(mode).hf_quantizer.dequantize(load(mode)), method)
    model = attach(load(mode), method)
    adapted = logits(model)
    with model.disable_adapter():
        assert distance(logits(model), adapted) > 1e-3
    assert distance(adapted, logits(plain)) < 2e-6

    found = gradients(model)

    assert all(p.dtype != torch.uint8 for p in found.values())
    torch.testing.assert_close(found, gradients(plain), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("mode", ["qat", "packed"])
@pytest.mark.parametrize("method", sorted(SUPPORTED | TRAINABLE_ONLY))
def test_a_supported_method_is_merged_into_bfloat16_alone(load, method, mode):
    if method not in TUNERS or (mode == "packed" and method in TRAINABLE_ONLY):
        pytest.skip("not in this version of PEFT, or not on packed layers")
    model = attach(load(mode), method)
    adapted = logits(model)
    stored = codes(model)

    merging_is_refused(model)

    assert torch.equal(logits(model), adapted)
    assert_same(codes(model), stored)
    if method not in NEVER_MERGED:
        merged = hf_mxfp4.merge_adapters(model, into="bf16")
        assert not any(isinstance(m, (*QUANTIZED, BaseTunerLayer)) for m in merged.modules())
        assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
        assert distance(logits(merged.float()), adapted) < 3e-2


def merging_is_refused(model):
    if isinstance(model.base_model, MXFP4LoraModel):
        return  # tests of LoRA are elsewhere
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match="only LoRA can be merged"):
            merge()
    with pytest.raises(ValueError, match="only LoRA can be merged"):
        hf_mxfp4.merge_adapters(model, into="packed")


@pytest.mark.parametrize("mode", ["qat", "packed"])
@pytest.mark.parametrize("method", [name for name in TUNERS if name not in SUPPORTED | TRAINABLE_ONLY | ELSEWHERE])
def test_another_method_is_refused_before_the_model_is_touched(load, method, mode):
    refused(load, method, mode)


def refused(load, method, mode, **options):
    model = load(mode)
    before = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(ValueError, match=f"{method}.* is not supported on model.layers.0.*") as caught:
        get_peft_model(model, config_of(method, **options))
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    return str(caught.value)


def test_a_refusal_says_what_to_use_instead(load):
    text = refused(load, "HRA", "packed")
    assert "IA3" in text
    assert "LOHA" not in text
    assert "modules_to_not_convert" in text
    assert "LOHA" in refused(load, "SHIRA", "qat")
    assert "computes with the plain weight" in refused(load, "MISS", "qat", init_weights="bat")


def test_layers_in_full_precision_take_any_method(load):
    model = attach(load("packed", ("q_proj", "o_proj")), "HRA")
    before = logits(model)
    assert distance(logits(model.merge_and_unload()), before) < 1e-5


def test_mixed_models_are_refused(load):
    with pytest.raises(ValueError, match="MixedModel is not supported on .*q_proj, a packed quantized layer"):
        get_peft_model(load("packed"), config_of("LORA"), mixed=True)


def test_a_second_adapter_is_checked_too(load):
    model = attach(load("packed"), "MISS")
    with pytest.raises(ValueError, match="init_weights='bat' is not supported"):
        model.add_adapter("second", config_of("MISS", init_weights="bat"))


def test_the_table_of_the_docs_is_what_is_checked_here():
    rows = {}
    for line in (Path(__file__).parents[2] / "docs/lora.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 4 and cells[1] in ("yes", "no"):
            rows |= {name.strip(" `").upper(): tuple(cells[1:]) for name in cells[0].split(",")}
    for method in SUPPORTED | TRAINABLE_ONLY:
        merge = "packed, masters, bfloat16" if method == "LORA" else "no" if method in NEVER_MERGED else "bfloat16"
        assert rows.pop(method) == ("yes" if method in SUPPORTED else "no", "yes", merge)
    assert all(row == ("no", "no", "no") for row in rows.values())
    assert {name for name in TUNERS if name not in SUPPORTED | TRAINABLE_ONLY | ELSEWHERE} <= rows.keys()


# ---- the scheme of the base -----------------------------------------------------------------------------------------


PACKED = MXFP4RLConfig(mode="packed")


@pytest.fixture
def base_of(saved_base):
    """`base_of(scheme)`: a model of one layer under a scheme, or under none."""

    def base_of(scheme=None):
        folder = saved_base("qwen2", layers=1)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=scheme)

    return base_of


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
    [
        PACKED,
        MXFP4RLConfig(smooth=False),
        MXFP4RLConfig(mode="packed", preset="w4a4", modules_to_not_convert=["layers.0.mlp"]),
    ],
    ids=["packed", "qat", "packed-w4a4"],
)
def test_the_scheme_is_in_the_adapters_config(base_of, tmp_path, scheme):
    adapter(base_of(scheme), tmp_path)
    assert MXFP4RLConfig.from_dict(saved_scheme(tmp_path)) == scheme
    config = peft.PeftConfig.from_pretrained(tmp_path)
    assert isinstance(config, MXFP4LoraConfig)
    assert isinstance(config, LoraConfig)
    assert MXFP4RLConfig.from_dict(config.base_quantization) == scheme


@pytest.mark.parametrize(
    ("trained", "found"),
    [
        (PACKED, PACKED),
        (PACKED, MXFP4RLConfig(preset="w4a16", smooth=False)),
        (MXFP4RLConfig(smooth=False), MXFP4RLConfig(smooth=False).packed()),
    ],
    ids=["same", "packed-on-trainable", "trainable-on-packed"],
)
def test_the_same_values_are_silent(base_of, tmp_path, capsys, trained, found):
    adapter(base_of(trained), tmp_path)
    capsys.readouterr()
    PeftModel.from_pretrained(base_of(found), tmp_path)
    assert "adapter" not in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["packed", "qat"])
def test_other_weights_under_the_same_scheme_are_a_warning(base_of, checkpoint, tmp_path, capsys, mode):
    adapter(base_of(PACKED), tmp_path)
    scheme = PACKED if mode == "packed" else MXFP4RLConfig(preset="w4a16", smooth=False)
    other = AutoModelForCausalLM.from_pretrained(checkpoint(seed=1), quantization_config=scheme)
    capsys.readouterr()
    PeftModel.from_pretrained(other, tmp_path, adapter_name="mine")
    said = capsys.readouterr().err
    assert "adapter 'mine' was made for a base of the same scheme with other weights" in said


def test_a_base_that_is_smoothed_again_is_silent(base_of, tmp_path, capsys):
    adapter(base_of(MXFP4RLConfig()), tmp_path)
    PeftModel.from_pretrained(base_of(MXFP4RLConfig()), tmp_path)
    assert "adapter" not in capsys.readouterr().err


@pytest.mark.parametrize("smooth", [True, False])
def test_a_base_with_other_scales_is_a_warning(base_of, tmp_path, capsys, smooth):
    adapter(base_of(MXFP4RLConfig()), tmp_path)
    base = base_of(MXFP4RLConfig(smooth=smooth))
    with torch.no_grad():
        base.model.layers[0].self_attn.q_proj.weight[:, 3] *= 2
    PeftModel.from_pretrained(base, tmp_path)
    assert "A base that was smoothed as it was loaded must be so again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (MXFP4RLConfig(mode="packed", macro_block=None), "w4a16 [weights mxfp4+even, activations full precision]"),
        (MXFP4RLConfig(smooth=False), "w4a8 [weights mxfp4+even+mbs128-blockwise_fp8, activations fp8"),
        (MXFP4RLConfig(mode="packed", modules_to_not_convert=["mlp"]), "full precision] without mlp"),
        (None, "attached to one in full precision"),
    ],
    ids=["weights", "activations", "skips", "plain"],
)
def test_another_scheme_is_a_warning_that_names_both(base_of, tmp_path, capsys, found, named):
    adapter(base_of(PACKED), tmp_path)
    capsys.readouterr()
    PeftModel.from_pretrained(base_of(found), tmp_path, adapter_name="mine")
    text = capsys.readouterr().err
    assert f"adapter 'mine' was made for a base quantized as {PACKED.describe()}, and is now attached to" in text
    assert named in text
    assert text.count("adapter 'mine'") == 1


@pytest.mark.parametrize("trainable", [False, True])
def test_loaded_for_inference_it_keeps_its_scheme_and_trained_further_it_takes_the_new_one(
    base_of, tmp_path, trainable
):
    adapter(base_of(PACKED), tmp_path / "first")
    other = MXFP4RLConfig(mode="packed", macro_block=None)
    model = PeftModel.from_pretrained(base_of(other), tmp_path / "first", is_trainable=trainable)
    model.save_pretrained(tmp_path / "again")
    assert saved_scheme(tmp_path / "again") == (other if trainable else PACKED).to_dict()


def test_trained_further_on_a_plain_model_it_loses_its_scheme(base_of, tmp_path):
    adapter(base_of(PACKED), tmp_path / "first")
    model = PeftModel.from_pretrained(base_of(), tmp_path / "first", is_trainable=True)
    model.save_pretrained(tmp_path / "plain")
    assert saved_scheme(tmp_path / "plain") is None


def test_an_adapter_of_a_plain_model_gets_no_entry_of_ours(base_of, tmp_path):
    adapter(base_of(), tmp_path / "first")
    model = PeftModel.from_pretrained(base_of(), tmp_path / "first")
    model.save_pretrained(tmp_path / "again")
    peft.PeftConfig.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "config")
    for name in ("first", "again", "config"):
        assert "base_quantization" not in json.loads((tmp_path / name / "adapter_config.json").read_text())


@pytest.mark.parametrize(
    ("change", "message"),
    [({"format_version": 99}, "format_version=99"), ({"preset": "w2a2"}, "preset='w2a2'"), ({"new": 1}, "'new'")],
    ids=["newer", "value", "option"],
)
def test_a_scheme_that_cannot_be_read_is_a_warning(base_of, tmp_path, capsys, change, message):
    adapter(base_of(PACKED), tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    config["base_quantization"].update(change)
    file.write_text(json.dumps(config))
    capsys.readouterr()
    PeftModel.from_pretrained(base_of(PACKED), tmp_path)
    text = capsys.readouterr().err
    assert "names a quantization scheme of its base that cannot be read" in text
    assert message in text
