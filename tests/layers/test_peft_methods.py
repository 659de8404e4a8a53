# SPDX-License-Identifier: Apache-2.0
"""Each of PEFT's methods on quantized layers: the same as on plain layers that hold ``Q(W)``, or refused at attach."""

import copy
import functools
import inspect
from pathlib import Path

import peft
import pytest
import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING, get_peft_model
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from tiny_models import make_model
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4.integrations.peft import SUPPORTED, TRAINABLE_ONLY, MXFP4LoraModel
from hf_mxfp4.layers import QUANTIZED


IDS = torch.arange(2, 14).view(2, 6)
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
        options = {"preset": "w4a16", "outlier_fallback": None, "modules_to_not_convert": list(skips)}
        scheme = hf_mxfp4.MXFP4RLConfig(mode=mode, **options)
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


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


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
    before, stored = logits(model), codes(model)
    with model.disable_adapter():
        assert distance(logits(model), before) > 1e-3
    assert distance(before, logits(plain)) < 2e-6
    merging_is_refused(model)
    assert torch.equal(logits(model), before)
    assert all(torch.equal(value, stored[name]) for name, value in codes(model).items())
    if method not in NEVER_MERGED:
        quantized = [m for m in model.modules() if isinstance(m, QUANTIZED)]
        merged = hf_mxfp4.merge_adapters(attach(load(mode), method), into="bf16")
        assert quantized and not any(isinstance(m, (*QUANTIZED, BaseTunerLayer)) for m in merged.modules())
        assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
        assert distance(logits(merged.float()), before) < 3e-2
    found, expected = gradients(model), gradients(plain)
    assert found.keys() == expected.keys() and all(p.dtype != torch.uint8 for p in found.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)


def merging_is_refused(model):
    if isinstance(model.base_model, MXFP4LoraModel):
        return  # tests of LoRA are elsewhere
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match=r"only LoRA can be merged .*merge_adapters\(model, into='bf16'\)"):
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
    assert "IA3" in text and "LOHA" not in text and "modules_to_not_convert" in text
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
