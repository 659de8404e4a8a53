# SPDX-License-Identifier: Apache-2.0
"""Quantized layers in models: equations, untouched masters, experts, full precision for a while, checkpointing."""

import contextlib
import copy

import pytest
import torch
from lora_models import gradients, with_lora
from same_bits import IDS, assert_same, logits
from tables import CONFIGS
from tiny_models import make_model

import hf_mxfp4.integrations.peft
from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig, cached_weights, pack
from hf_mxfp4.integrations.transformers import quantize_linears
from hf_mxfp4.layers import QUANTIZED, full_precision, trainable_matrices


def loss_of(model) -> torch.Tensor:
    return model(IDS, labels=IDS).loss


def bits(model) -> dict[str, torch.Tensor]:
    """The bits of every parameter."""
    return {name: p.detach().clone().view(torch.uint8) for name, p in model.named_parameters()}


def interrupt(*_):
    raise KeyboardInterrupt


@contextlib.contextmanager
def masters_stay(model):
    """Check that a block neither writes nor moves a parameter."""
    before = bits(model)
    places = [(p._version, p.data_ptr()) for p in model.parameters()]
    yield
    assert_same(bits(model), before)
    assert [(p._version, p.data_ptr()) for p in model.parameters()] == places


CACHES = pytest.mark.parametrize("cache", [contextlib.nullcontext, cached_weights], ids=["plain", "cached"])
FAMILIES = pytest.mark.parametrize(
    ("family", "scheme"), [("qwen2", {}), ("qwen3_moe", CONFIGS["random"])], ids=["dense", "experts"]
)


@CACHES
@FAMILIES
def test_generation_writes_no_master(family, scheme, cache):
    model = quantized(family, **scheme)
    with masters_stay(model), cache(model):
        model.generate(IDS, max_new_tokens=4, do_sample=False)


@CACHES
@pytest.mark.parametrize(
    ("family", "place"),
    [
        ("qwen2", "model.layers.0.mlp.act_fn"),
        ("qwen2", "model.layers.1.self_attn.o_proj"),
        ("qwen2", "model.norm"),
        ("qwen3_moe", "model.layers.1.mlp.experts.act_fn"),
    ],
)
def test_a_pass_that_is_interrupted_writes_no_master(family, place, cache):
    model = quantized(family)
    model.get_submodule(place).register_forward_hook(interrupt)
    with masters_stay(model):
        with pytest.raises(KeyboardInterrupt), cache(model):
            model.generate(IDS, max_new_tokens=4)
        with pytest.raises(KeyboardInterrupt), cache(model):
            loss_of(model)


@FAMILIES
def test_a_backward_pass_writes_no_master(family, scheme):
    model = quantized(family, **scheme)
    with masters_stay(model):
        loss_of(model).backward()
    model.model.layers[1].register_full_backward_hook(interrupt)
    with masters_stay(model), pytest.raises(KeyboardInterrupt):
        loss_of(model).backward()


@pytest.mark.parametrize("reentrant", [True, False])
@FAMILIES
def test_a_recomputed_pass_writes_no_master(family, scheme, reentrant):
    model = quantized(family, **scheme).train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with masters_stay(model):
        loss_of(model).backward()


EXPERTS = "model.layers.{}.mlp.experts"
STOCHASTIC = {"wgrad": {"grad": "rceil+stochastic", "rotation": "random-16"}}


def quantized(family="qwen3_moe", layers=2, **options):
    model = make_model(family, layers=layers)
    quantize_linears(model, MXFP4RLConfig(**options))
    return model


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_the_experts_implementation_of_the_model_does_not_matter(family, implementation):
    model = quantized(family, layers=1)
    expected = model(IDS).logits
    model.set_experts_implementation(implementation)
    assert torch.equal(model(IDS).logits, expected)


def test_matrices_one_by_one():
    model = quantized("gpt_oss", layers=1)
    found = {matrix.name: matrix for matrix in trainable_matrices(model)}
    assert len(found) == 4 + 8
    matrix = found[f"{EXPERTS.format(0)}.2.down_proj"]
    linear = found["model.layers.0.self_attn.q_proj"]
    experts = model.model.layers[0].mlp.experts
    assert torch.equal(matrix.weight(), experts.down_proj[2].T)
    assert torch.equal(matrix.effective_rows(matrix.weight()), experts.to_experts().down_proj[2].T)
    assert matrix.full_name == f"{EXPERTS.format(0)}.down_proj"
    assert matrix.siblings == 4
    assert linear.full_name.endswith(".q_proj.weight")
    assert linear.siblings == 1
    assert linear.weight().shape == (64, 64)


@pytest.mark.parametrize(
    ("family", "scheme", "layers"),
    [
        ("qwen2", {}, 14),
        ("qwen2", {"preset": "w4a4g4"}, 14),
        ("qwen2", {"fprop": {"rotation": "random-16"}}, 14),
        ("qwen3_moe", {}, 10),
    ],
    ids=str,
)
def test_full_precision_is_the_plain_model_bit_for_bit(family, scheme, layers):
    plain = make_model(family)
    model = copy.deepcopy(plain)
    quantize_linears(model, MXFP4RLConfig(**scheme))
    before = logits(model)
    configs = [module.config for module in model.modules() if isinstance(module, QUANTIZED)]
    with full_precision(model) as switched:
        assert switched == layers == len(configs)
        assert torch.equal(logits(model), logits(plain))
    assert not torch.equal(before, logits(plain))
    assert torch.equal(logits(model), before)
    assert [module.config for module in model.modules() if isinstance(module, QUANTIZED)] == configs
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_adapters_stay_on_in_full_precision():
    plain = make_model()
    model = copy.deepcopy(plain)
    quantize_linears(model, MXFP4RLConfig())
    adapted, reference = (with_lora(each, target_modules=["q_proj"]) for each in (model, plain))
    reference.load_state_dict(adapted.state_dict())
    with full_precision(adapted):
        assert torch.equal(logits(adapted), logits(reference))


def test_an_exception_leaves_nothing_behind():
    model = quantized("qwen2")
    layers = [module for module in model.modules() if isinstance(module, MXFP4Linear)]
    own = layers[0].forward
    layers[0].forward = own  # as accelerate's hooks leave it
    before = logits(model)
    with pytest.raises(ZeroDivisionError), full_precision(model):
        raise ZeroDivisionError
    assert layers[0].__dict__["forward"] is own
    assert not any("forward" in layer.__dict__ for layer in layers[1:])
    assert torch.equal(logits(model), before)


def test_models_that_have_no_full_precision_are_refused():
    with pytest.raises(ValueError, match="has no quantized layer"), full_precision(make_model()):
        pytest.fail("not entered")
    with pytest.raises(ValueError, match="packed layers"), full_precision(pack(quantized("qwen2"))):
        pytest.fail("not entered")


PARAMETERS = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
#: Family, scheme, options of adapters or none.
MODELS = {
    "default": ("qwen2", {}, None),
    "w4a4": ("qwen2", {"preset": "w4a4"}, None),
    "experts": ("qwen3_moe", {}, None),
    "experts at random": ("qwen3_moe", STOCHASTIC, None),
    "adapters": ("qwen2", {"mode": "packed", "preset": "w4a4"}, {}),
    "adapters of packed experts": ("qwen3_moe", {"mode": "packed"}, {"target_modules": ["experts"]}),
    "adapters of trainable experts": ("qwen3_moe", {"preset": "w4a16"}, PARAMETERS),
}


@pytest.mark.parametrize(
    ("name", "reentrant", "autocast"),
    [
        *((name, number % 2 == 0, False) for number, name in enumerate(MODELS)),
        *(pytest.param(name, number % 2 == 1, False, marks=pytest.mark.large) for number, name in enumerate(MODELS)),
        ("default", True, True),
        ("default", False, True),
    ],
)
def test_the_gradients_are_those_of_a_plain_backward_pass(name, reentrant, autocast):
    assert hf_mxfp4.integrations.peft.MXFP4LoraModel  # registered by its import
    family, scheme, lora = MODELS[name]
    found = []
    calls = []
    for checkpointing in (False, True):
        model = make_model(family)
        quantize_linears(model, MXFP4RLConfig(**scheme))
        block = model.model.layers[0].mlp
        if lora is not None:
            model = with_lora(model, **lora)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
            block.register_forward_pre_hook(lambda *_: calls.append(1))
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            found.append(gradients(model))
    expected, found = found
    assert len(calls) == 2, "the block was not recomputed"
    assert_same(found, expected)
    assert len(found) >= 8
    assert all(grad.isfinite().all() for grad in found.values())
