# SPDX-License-Identifier: Apache-2.0
"""LoRA on quantized layers: values and gradients, PEFT's ways with adapters, and what is refused."""

import copy
from typing import NamedTuple

import peft
import pytest
import torch
from lora_models import IDS, UP, fill, gradients, same_tensors, stored, with_lora
from peft import EvaConfig, LoraConfig, PeftModel, get_peft_model, initialize_lora_eva_weights
from peft.optimizers import create_lorafa_optimizer
from safetensors.torch import load_file
from tiny_models import make_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig
from hf_mxfp4.integrations import peft as adapters
from hf_mxfp4.integrations.peft import MXFP4LoraLinear, MXFP4LoraModel
from hf_mxfp4.integrations.transformers import quantize_linears
from hf_mxfp4.numerics import fake_quantize_e4m3


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}}], ids=str)
def test_values_and_gradients_are_those_of_the_dequantized_weights(load, options):
    model = with_lora(load(), **options)
    # A twin with plain layers that hold the dequantized weights.
    twin = copy.deepcopy(model)
    for module in list(twin.modules()):
        if isinstance(module, MXFP4LoraLinear):
            module.base_layer = module.base_layer.to_linear().requires_grad_(False)
    torch.testing.assert_close(model(IDS).logits, twin(IDS).logits, rtol=1e-5, atol=1e-5)
    ours = gradients(model)
    theirs = gradients(twin)
    assert len(ours) >= 4
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["packed", "qat"])
def test_quantized_activations_reach_the_base_and_not_the_adapter(load, mode):
    """``y = Q(x) Q(W)^T + 2 B A x``; ``dL/dB = 2 g^T A x``, ``dL/dx = g Q(W) + 2 g B A``."""
    model = with_lora(load("llama", mode=mode, preset="w4a8"))
    layer = model.get_submodule(UP)
    torch.manual_seed(1)
    x = torch.randn(3, 64, requires_grad=True)
    a = layer.lora_A["default"].weight.detach()
    b = layer.lora_B["default"].weight.detach()
    quantized_x = fake_quantize_e4m3(x.detach())
    weight = layer.base_layer.to_linear().weight.detach()

    y = layer(x)
    torch.testing.assert_close(y, quantized_x @ weight.T + 2 * (x @ a.T @ b.T), rtol=1e-5, atol=1e-5)

    g = torch.randn_like(y)
    y.backward(g)
    torch.testing.assert_close(layer.lora_B["default"].weight.grad, 2 * g.T @ (x.detach() @ a.T), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, g @ weight + 2 * (g @ b @ a), rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        torch.testing.assert_close(layer(x), quantized_x @ weight.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_that_was_switched_on_before_adapters_came(load, reentrant):
    expected = gradients(with_lora(load()))
    base = load()
    base.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients(with_lora(base))
    assert len(found) == 28
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "part", "expected"),
    [
        ({"bias": "all"}, ".bias", 2 * 3),
        ({"modules_to_save": ["lm_head", "input_layernorm"]}, "modules_to_save", 3),
        ({"trainable_token_indices": [3, 5]}, "trainable_tokens_delta", 1),
    ],
    ids=["biases", "modules", "tokens"],
)
def test_other_parameters_train_on_request(load, options, part, expected):
    grads = gradients(with_lora(load(), **options))
    found = [grad for name, grad in grads.items() if part in name]
    assert len(found) == expected
    assert all(grad.norm() > 0 for grad in found)
    assert sum("lora_" in name for name in grads) == 28
    assert part != "trainable_tokens_delta" or found[0].shape == (2, 64)


def test_rows_of_one_batch_with_different_adapters(load):
    model = with_lora(load(), "first")
    torch.manual_seed(7)
    model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.eval()
    mixed = model(IDS, adapter_names=["__base__", "second"]).logits
    model.set_adapter("second")
    torch.testing.assert_close(mixed[1], model(IDS).logits[1], rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        torch.testing.assert_close(mixed[0], model(IDS).logits[0], rtol=1e-5, atol=1e-5)


class Kind(NamedTuple):
    """A quantized model of two layers, what is adapted in it, and by what: a class of layers and tensors of factors."""

    family: str
    scheme: dict
    lora: dict
    layer: type
    layers: int
    factors: int


LINEAR = {"target_modules": "all-linear"}
EXPERTS = {"target_modules": ["experts"]}
PARAMETERS = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
KINDS = {
    "packed": Kind("qwen2", {"mode": "packed"}, LINEAR, adapters.MXFP4LoraLinear, 14, 28),
    "trainable": Kind("qwen2", {"mode": "qat"}, LINEAR, adapters.MXFP4LoraMasterLinear, 14, 28),
    "packed experts": Kind("qwen3_moe", {"mode": "packed"}, EXPERTS, adapters.MXFP4LoraPackedExpertParameter, 4, 8),
    "trainable experts": Kind(
        "qwen3_moe", {"mode": "qat", "preset": "w4a16"}, PARAMETERS, adapters.MXFP4LoraExpertParameter, 4, 8
    ),
}

#: What stands for the targets on plain models.
TWINS = {"qwen3_moe": PARAMETERS}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def count(model, kind) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def factors(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


def test_parameters_are_counted_as_on_the_plain_model(load, kind):
    expected = with_lora(make_model(kind.family), **TWINS.get(kind.family, kind.lora)).get_nb_trainable_parameters()
    model = with_lora(load(kind.family, **kind.scheme), **kind.lora)
    assert model.get_nb_trainable_parameters() == expected
    assert model.num_parameters() == expected[1]
    model.merge_adapter()
    assert model.get_nb_trainable_parameters() == expected


@pytest.mark.parametrize(("autocast", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_adapters_on_a_bfloat16_base(load, kind, autocast, dtype):
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, **kind.lora)
    base = load(kind.family, dtype=torch.bfloat16, **kind.scheme)
    model = get_peft_model(base, config, autocast_adapter_dtype=autocast)
    fill(model, "default", 0.05)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {dtype}
    grads = gradients(model).values()
    assert len(grads) == kind.factors
    assert all(grad.dtype == dtype and grad.isfinite().all() and grad.norm() > 0 for grad in grads)
    assert model(IDS).logits.dtype == torch.bfloat16


def test_training_moves_adapters_and_not_one_bit_of_the_base(load, kind):
    model = with_lora(load(kind.family, **{**kind.scheme, "preset": "w4a4"}), std=0.05, **kind.lora)
    base = stored(model)
    before = factors(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None and parameter.grad.norm() > 0) == ("lora_" in name), name
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert same_tensors(stored(model), base)
    after = factors(model)
    assert len(after) == kind.factors
    assert not any(torch.equal(after[name], before[name]) for name in before)


def test_adapters_are_switched_removed_and_unloaded(load, kind):
    base = load(kind.family, **kind.scheme)
    plain = base(IDS).logits
    model = with_lora(base, std=0.05, **kind.lora)
    first = model(IDS).logits
    assert not torch.equal(first, plain)

    model.add_adapter("second", LoraConfig(r=2, **kind.lora))
    fill(model, "second", 0.07)
    model.set_adapter("second")
    assert not torch.equal(model(IDS).logits, first)
    with model.disable_adapter():
        assert torch.equal(model(IDS).logits, plain)

    model.set_adapter("default")
    assert torch.equal(model(IDS).logits, first)
    model.delete_adapter("second")
    assert torch.equal(model(IDS).logits, first)
    assert torch.equal(model.unload()(IDS).logits, plain)


def test_the_adapter_that_is_set_trains_alone(load, kind):
    model = with_lora(load(kind.family, **kind.scheme), **kind.lora)
    model.add_adapter("second", LoraConfig(r=2, **kind.lora))
    model.set_adapter("second")
    assert count(model, kind.layer) == kind.layers
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in factors(model) if ".second." in name}
    assert len(trained) == kind.factors


def test_files_of_an_adapter_hold_its_factors_alone(load, kind, tmp_path):
    with_lora(load(kind.family, **kind.scheme), **kind.lora).save_pretrained(tmp_path)
    files = {file.name for file in tmp_path.iterdir()}
    assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    names = load_file(tmp_path / "adapter_model.safetensors").keys()
    assert len(names) == kind.factors
    assert all("lora_" in name for name in names)


@pytest.mark.parametrize("is_saved", [False, True], ids=["quantized again", "saved"])
def test_adapters_round_trip(load, kind, tmp_path, is_saved):
    base = load(kind.family, **kind.scheme)
    base.save_pretrained(tmp_path / "base")
    model = with_lora(base, std=0.05, **kind.lora)
    expected = model(IDS).logits
    model.save_pretrained(tmp_path / "adapter")

    if is_saved:
        other_base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    else:
        other_base = load(kind.family, **kind.scheme)
    again = PeftModel.from_pretrained(other_base, tmp_path / "adapter")

    assert count(again, kind.layer) == kind.layers
    assert torch.equal(again(IDS).logits, expected)
    assert again.peft_config["default"].base_quantization["mode"] == kind.scheme["mode"]
    assert not any("lora_" in name and p.requires_grad for name, p in again.named_parameters())
    again.load_adapter(tmp_path / "adapter", "trainable", is_trainable=True)
    again.set_adapter("trainable")
    assert len(gradients(again)) == kind.factors


def test_lora_fa_trains_every_b_and_no_a(load, kind):
    model = with_lora(load(kind.family, **kind.scheme), std=0.05, **kind.lora).train()
    before = factors(model)
    optimizer = create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=1e-2)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    after = factors(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "lora_B" in name}


def test_through_transformers_own_adapter_methods(load, kind, tmp_path):
    pytest.importorskip("peft", MIN_PEFT_VERSION)  # transformers 5.24 asks for one that there is not yet
    model = load(kind.family, **kind.scheme)
    plain = model(IDS).logits
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=2, **kind.lora), "mine")
    fill(model, "mine", 0.05)
    assert count(model, kind.layer) == kind.layers
    expected = model(IDS).logits
    assert not torch.equal(expected, plain)
    model.save_pretrained(tmp_path)
    model.disable_adapters()
    assert torch.equal(model(IDS).logits, plain)
    other = load(kind.family, **kind.scheme)
    other.load_adapter(tmp_path)
    assert torch.equal(other(IDS).logits, expected)


def model_of(mode="packed", **options):
    assert MXFP4LoraModel  # registered by its import; loading a model does it too
    model = make_model(**options)
    quantize_linears(model, MXFP4RLConfig(mode=mode, preset="w4a16"))
    return model


def attach(model, **options):
    return get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": ["q_proj", "up_proj"], **options}))


#: Mode, family, options, and words of why they are refused.
REFUSED = [
    ("packed", "qwen2", {"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
    ("packed", "qwen2", {"use_dora": True}, "use_dora=True is not supported"),
    ("packed", "qwen2", {"lora_bias": True}, "lora_bias=True is not supported"),
    ("packed", "qwen2", {"alora_invocation_tokens": [1]}, "alora_invocation_tokens=.* is not supported"),
    ("packed", "qwen2", {"target_parameters": ["mlp.down_proj.weight"]}, "down_proj.weight.*is a packed layer"),
    ("packed", "qwen2", {"target_parameters": ["weight_scale"]}, "weight_scale.*is a packed layer"),
    ("packed", "qwen2", {"modules_to_save": ["layers.1.self_attn.o_proj"]}, "o_proj.* is a packed layer"),
    ("packed", "qwen2", {"modules_to_save": ["mlp"]}, "modules_to_save has 'mlp': .* is a packed layer"),
    ("packed", "qwen3_moe", {"target_modules": ["mlp.q_proj", "v_proj"]}, "near: 'self_attn.q_proj'"),
    ("packed", "qwen3_moe", {"modules_to_save": ["mlp"]}, "modules_to_save has 'mlp'"),
    ("packed", "qwen3_moe", {"target_parameters": ["experts.gate_up_proj_scale"]}, "gate_up_proj_scale is a packed"),
    (
        "packed",
        "qwen3_moe",
        {"target_modules": ["experts"], "init_lora_weights": "orthogonal"},
        "init_lora_weights='orthogonal' is not supported on experts",
    ),
    ("qat", "qwen2", {"use_dora": True}, "use_dora=True is not supported on layers that quantize their weight"),
    ("qat", "qwen3_moe", {"target_modules": ["q_proj", "k_porj"]}, "no module of Qwen3Moe.*near: 'k_proj'"),
    ("qat", "qwen3_moe", {"target_parameters": ["experts.gate_up"]}, "near: 'experts.gate_up_proj'"),
    ("qat", "qwen3_moe", {"target_parameters": ["q_proj.weight"]}, "name the layer in target_modules"),
]


@pytest.mark.parametrize(("mode", "family", "options", "message"), REFUSED, ids=str)
def test_what_cannot_be_done_is_refused_and_nothing_touched(mode, family, options, message):
    model = model_of(mode, family=family)
    before = [(name, type(module)) for name, module in model.named_modules()]

    with pytest.raises(ValueError, match=message):
        attach(model, **{"target_modules": ["q_proj"], **options})

    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert not any(m.weight.requires_grad for m in model.modules() if isinstance(m, MXFP4PackedLinear))


@pytest.mark.parametrize("mode", ["packed", "qat"])
@pytest.mark.parametrize("init", ["orthogonal", "eva"])
def test_initial_values_that_are_not_made_from_the_weight(load, init, mode):
    """They are those of the plain model; of EVA's singular vectors up to their sign."""
    batches = [
        {"input_ids": torch.randint(0, 32, (4, 16), generator=torch.Generator().manual_seed(n))} for n in range(4)
    ]

    def attached(model):
        torch.manual_seed(0)
        config = {"init_lora_weights": init, "eva_config": EvaConfig(rho=1.0) if init == "eva" else None}
        lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], **config)
        model = get_peft_model(model, lora)
        if init == "eva":
            initialize_lora_eva_weights(model, dataloader=copy.deepcopy(batches), show_progress_bar=False)
        return model

    base = load(mode=mode, preset="w4a16")
    expected = factors(attached(copy.deepcopy(base).dequantize()))
    found = factors(attached(base))
    assert len(found) == 8
    for name, value in expected.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name].abs(), value.abs(), rtol=1e-3, atol=1e-5)


def test_a_second_adapter_is_refused_too():
    model = attach(model_of())
    with pytest.raises(ValueError, match="packed layer"):
        model.add_adapter("second", LoraConfig(target_modules=["q_proj"], use_dora=True))


def test_a_layer_kept_in_full_precision_can_be_trained_in_full():
    model = make_model()
    quantize_linears(model, MXFP4RLConfig(mode="packed", modules_to_not_convert=["down_proj"]))
    model = attach(model, modules_to_save=["down_proj"])
    assert sum("down_proj.modules_to_save" in name for name, p in model.named_parameters() if p.requires_grad) == 2


def test_layers_in_full_precision_take_dora():
    model = attach(model_of("qat"), use_dora=True, target_modules=["lm_head"])
    assert any("lora_magnitude_vector" in name for name, _ in model.named_parameters())


def test_trainable_models_take_pissa():
    model = attach(model_of("qat"), init_lora_weights="pissa")
    # PiSSA makes both factors of the weight, so that both have a gradient at once.
    grads = gradients(model)
    assert len(grads) == 2 * 4
    assert all(grad.any() for grad in grads.values())
    assert sum(isinstance(m, MXFP4Linear) for m in model.modules()) == 14


def test_plain_models_get_pefts_own_layers():
    model = attach(make_model())
    assert {type(m) for m in model.modules() if hasattr(m, "lora_A")} == {peft.tuners.lora.Linear}
    assert isinstance(model.base_model, peft.LoraModel)
    assert not hasattr(model.peft_config["default"], "base_quantization")
    assert type(model.get_output_embeddings()) is nn.Linear


def test_names_that_are_there_are_accepted():
    model = attach(model_of("qat"), target_modules=["q_proj", "layers.1.mlp.up_proj"])
    model.add_adapter("second", LoraConfig(target_modules=["q_proj", "model.layers.0.self_attn.k_proj"]))
    attach(model_of("packed"), target_modules="all-linear")
    attach(model_of("qat"), target_modules=r".*\.q_proj")
    # Names that these experts had in older checkpoints, which PEFT translates.
    attach(model_of("qat", family="qwen3_moe"), target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    attach(model_of("qat"), target_modules=None)
    attach(make_model(), target_modules=["q_proj", "nonsense"])  # plain models are PEFT's matter
