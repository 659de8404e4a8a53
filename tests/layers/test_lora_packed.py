# SPDX-License-Identifier: Apache-2.0
"""LoRA on packed layers: what trains, what stays, and that it is LoRA on the dequantized weights."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4PackedLinear, MXFP4RLConfig, fake_quantize
from hf_mxfp4.adapters import MXFP4LoraLinear


IDS = torch.arange(2, 14).view(2, 6)
UP = "base_model.model.model.layers.0.mlp.up_proj"


@pytest.fixture
def load(checkpoint):
    """`load(**scheme)` gives a packed model; each call reads the same checkpoint."""
    folders = {}

    def load(family="qwen2", model_options=None, dtype=torch.float32, **scheme):
        key = (family, repr(model_options))
        folders.setdefault(key, checkpoint(family, **(model_options or {})))
        config = MXFP4RLConfig(mode="packed", **scheme)
        return AutoModelForCausalLM.from_pretrained(folders[key], dtype=dtype, quantization_config=config)

    return load


def with_lora(model, adapter="default", **options) -> PeftModel:
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, **options}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings), adapter_name=adapter)


def float_twin(model: PeftModel) -> PeftModel:
    """The same adapters on plain layers that hold the dequantized weights."""
    twin = copy.deepcopy(model)
    for module in list(twin.modules()):
        if isinstance(module, MXFP4LoraLinear):
            module.base_layer = module.base_layer.to_linear().requires_grad_(False)
    return twin


def gradients(model, **options):
    model.train()
    model.zero_grad(set_to_none=True)
    model(IDS, labels=IDS, use_cache=False, **options).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def stored(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" not in name}


# ---- attaching ------------------------------------------------------------------------------------------------------


def test_adapters_attach_to_every_packed_layer_and_to_nothing_else(load):
    model = with_lora(load())
    wrapped = {name: m for name, m in model.named_modules() if isinstance(m, MXFP4LoraLinear)}
    assert len(wrapped) == 14 and all(type(m.base_layer) is MXFP4PackedLinear for m in wrapped.values())
    assert type(model.get_output_embeddings()) is nn.Linear
    assert "MXFP4LoraLinear" in repr(wrapped[UP])


def test_adapters_are_plain_float_layers_and_are_all_that_trains(load):
    model = with_lora(load())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 14 and all("lora_" in name for name in trained)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    adapters = [m for name, m in model.named_modules() if name.endswith(("lora_A.default", "lora_B.default"))]
    assert {type(m) for m in adapters} == {nn.Linear}


@pytest.mark.parametrize(("autocast", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_adapters_on_a_bfloat16_base(load, autocast, dtype):
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(load(dtype=torch.bfloat16), config, autocast_adapter_dtype=autocast)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {dtype}
    grads = gradients(model)
    assert len(grads) == 28 and all(g.dtype == dtype and g.isfinite().all() and g.norm() > 0 for g in grads.values())


def test_a_new_adapter_changes_nothing_yet(load):
    base = load()
    expected = base(IDS).logits
    assert torch.equal(with_lora(base, init_lora_weights=True)(IDS).logits, expected)


def test_through_transformers_own_adapter_methods(load):
    model = load()
    expected = model(IDS).logits
    model.add_adapter(LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False), "mine")
    assert sum(isinstance(m, MXFP4LoraLinear) for m in model.modules()) == 14
    assert not torch.equal(model(IDS).logits, expected)
    model.disable_adapters()
    assert torch.equal(model(IDS).logits, expected)


# ---- values and gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}}, {"lora_bias": True}, {"target_modules": ["v_proj"]}],
    ids=["plain", "rslora", "rank-pattern", "bias", "one-kind"],
)
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_values_and_gradients_are_those_of_the_dequantized_weights(load, options, family):
    model = with_lora(load(family), **options)
    twin = float_twin(model)
    torch.testing.assert_close(model(IDS).logits, twin(IDS).logits, rtol=1e-5, atol=1e-5)
    ours, theirs = gradients(model), gradients(twin)
    assert ours.keys() == theirs.keys() and len(ours) >= 4
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "scheme",
    [{"macro_block": None}, {"outlier_fallback": 0.5}, {"macro_search": "blockwise"}, {"scale_rule": "even"}],
    ids=["plain", "fallback", "blockwise", "even"],
)
def test_gradients_under_other_weight_schemes(load, scheme):
    model = with_lora(load(**scheme))
    ours, theirs = gradients(model), gradients(float_twin(model))
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_bfloat16_base_agrees_to_rounding(load):
    model = with_lora(load(dtype=torch.bfloat16))
    ours, theirs = gradients(model), gradients(float_twin(model))
    for name, grad in ours.items():
        assert (grad - theirs[name]).norm() <= 0.02 * theirs[name].norm(), name


def test_quantized_activations_reach_the_base_and_not_the_adapter(load):
    """``y = Q(x) Q(W)^T + 2 B A x``; ``dL/dB = 2 g^T A x``, ``dL/dx = g Q(W) + 2 g B A``."""
    layer = with_lora(load("llama", preset="w4a4")).get_submodule(UP)
    torch.manual_seed(1)
    x = torch.randn(3, 64, requires_grad=True)
    a, b = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
    quantized_x = fake_quantize(x.detach(), scale_rule="rceil", macro_block=128, macro_search="static")
    weight = layer.base_layer.dequantized_weight()
    y = layer(x)
    torch.testing.assert_close(y, quantized_x @ weight.T + 2 * (x @ a.T @ b.T), rtol=1e-5, atol=1e-5)
    g = torch.randn_like(y)
    y.backward(g)
    torch.testing.assert_close(layer.lora_B["default"].weight.grad, 2 * g.T @ (x.detach() @ a.T), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, g @ weight + 2 * (g @ b @ a), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(load, reentrant, order):
    expected = gradients(with_lora(load()))
    base = load()
    if order == "before":
        base.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model = with_lora(base)
    if order == "after":
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients(model)
    assert found.keys() == expected.keys() and len(found) == 28
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-7, msg=name)


def test_under_autocast(load):
    model = with_lora(load())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grads = gradients(model)
    exact = gradients(model)
    for name, grad in grads.items():
        assert grad.dtype == torch.float32 and (grad - exact[name]).norm() < 0.1 * exact[name].norm(), name


# ---- training leaves the base alone ---------------------------------------------------------------------------------


def test_training_moves_adapters_and_not_one_bit_of_the_base(load):
    model = with_lora(load())
    before, adapters = stored(model), {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = stored(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(not torch.equal(p, adapters[n]) for n, p in model.named_parameters() if "lora_" in n)


def test_biases_train_on_request_and_weights_still_do_not(load):
    model = with_lora(load(), bias="all")
    grads = gradients(model)
    biases = [name for name in grads if name.endswith(".bias")]
    assert len(biases) == 2 * 3 and all(grads[name].norm() > 0 for name in biases)


def test_token_embeddings_train_on_request(load):
    model = with_lora(load(), trainable_token_indices=[3, 5])
    grads = gradients(model)
    (delta,) = (grad for name, grad in grads.items() if "trainable_tokens_delta" in name)
    assert delta.shape == (2, 64) and delta.norm() > 0
    assert sum("lora_" in name for name in grads) == 28


def test_modules_in_full_precision_train_on_request(load):
    model = with_lora(load(), modules_to_save=["lm_head", "input_layernorm"])
    grads = gradients(model)
    assert sum("modules_to_save" in name and grad.norm() > 0 for name, grad in grads.items()) == 3


# ---- several adapters, saving, loading ------------------------------------------------------------------------------


def test_switching_and_disabling_adapters(load):
    base = load()
    plain = base(IDS).logits
    model = with_lora(base, "first")
    torch.manual_seed(7)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False))
    outputs = {}
    for name in ("first", "second"):
        model.set_adapter(name)
        outputs[name] = model(IDS).logits
    assert not torch.equal(outputs["first"], outputs["second"])
    model.set_adapter("first")
    assert torch.equal(model(IDS).logits, outputs["first"])
    with model.disable_adapter():
        assert torch.equal(model(IDS).logits, plain)
    model.delete_adapter("second")
    assert torch.equal(model(IDS).logits, outputs["first"])
    assert torch.equal(model.unload()(IDS).logits, plain)


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


def test_adapters_round_trip_over_a_freshly_packed_base(load, tmp_path):
    model = with_lora(load())
    expected = model(IDS).logits
    model.save_pretrained(tmp_path / "adapter")
    files = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    again = PeftModel.from_pretrained(load(), tmp_path / "adapter")
    assert sum(isinstance(m, MXFP4LoraLinear) for m in again.modules()) == 14
    assert torch.equal(again(IDS).logits, expected)
    assert not any(p.requires_grad for p in again.parameters())
    again.load_adapter(tmp_path / "adapter", "trainable", is_trainable=True)
    again.set_adapter("trainable")
    assert len(gradients(again)) == 28


def test_adapters_round_trip_over_a_saved_packed_base(load, tmp_path):
    base = load()
    base.save_pretrained(tmp_path / "packed")
    model = with_lora(base)
    expected = model(IDS).logits
    model.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(PeftModel.from_pretrained(base, tmp_path / "adapter")(IDS).logits, expected)


def test_only_adapters_are_saved(load, tmp_path):
    from safetensors import safe_open

    with_lora(load()).save_pretrained(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert len(file.keys()) == 28 and all("lora_" in name for name in file.keys())


def test_deep_copies_are_independent(load):
    model = with_lora(load())
    twin = copy.deepcopy(model)
    expected = model(IDS).logits
    with torch.no_grad():
        twin.get_submodule(UP).lora_B["default"].weight.add_(1.0)
    assert torch.equal(model(IDS).logits, expected) and not torch.equal(twin(IDS).logits, expected)
