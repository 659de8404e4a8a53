# SPDX-License-Identifier: Apache-2.0
"""`MXFP4Linear` inside decoders: every layer's equations, gradients down to layer 0, masters that nothing writes."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import make_model

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig, cached_weights, fake_quantize
from hf_mxfp4.quantizer.swap import quantize_linears


WEIGHT = {"scale_rule": "rceil", "macro_block": 128, "macro_search": "dynamic", "outlier_fallback": 0.5}
INPUT = {"scale_rule": "rceil", "macro_block": 128, "macro_search": "static", "outlier_fallback": 0.5}
IDS = torch.arange(2, 14).view(2, 6)


def quantized_model(family="qwen2", preset="w4a4", *, layers=2, **options):
    model = make_model(family, layers=layers, **options)
    quantized, _ = quantize_linears(model, MXFP4RLConfig(preset=preset))
    assert len(quantized) == 7 * layers
    return model


def mxfp4_layers(model) -> dict[str, MXFP4Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, MXFP4Linear)}


def loss_of(model) -> torch.Tensor:
    return model(IDS, labels=IDS).loss


def bits(model) -> dict[str, torch.Tensor]:
    """The bits of every parameter."""
    return {name: p.detach().clone().view(torch.uint8) for name, p in model.named_parameters()}


def assert_untouched(model, before: dict[str, torch.Tensor]) -> None:
    after = bits(model)
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("preset", ["w4a4", "w4a16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_layer_computes_its_equations(family, preset):
    model = quantized_model(family, preset, layers=4)
    layers = mxfp4_layers(model)
    seen = {name: {} for name in layers}
    for name, layer in layers.items():
        layer.register_forward_hook(lambda _, args, y, name=name: seen[name].update(x=args[0].detach(), y=y.detach()))
        layer.register_full_backward_hook(lambda _, dx, dy, name=name: seen[name].update(dx=dx[0], dy=dy[0]))
    loss_of(model).backward()

    for name, layer in layers.items():
        x, y, dx, dy = (seen[name][key] for key in ("x", "y", "dx", "dy"))
        quantized_x = fake_quantize(x, **INPUT) if preset == "w4a4" else x
        quantized_w = fake_quantize(layer.weight.detach(), **WEIGHT)
        rows = dy.reshape(-1, layer.out_features)
        assert torch.equal(y, F.linear(quantized_x, quantized_w, layer.bias)), name
        assert torch.equal(dx, dy @ quantized_w), name
        assert torch.equal(layer.weight.grad, rows.t() @ quantized_x.reshape(-1, layer.in_features)), name
        assert (layer.bias is not None) == (family == "qwen2" and name.endswith(("q_proj", "k_proj", "v_proj")))
        if layer.bias is not None:
            assert torch.equal(layer.bias.grad, rows.sum(0)), name


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gradients_reach_layer_0(family):
    model = quantized_model(family, layers=4)
    loss_of(model).backward()
    first = {name: p for name, p in model.named_parameters() if "layers.0." in name}
    assert len(first) == (12 if family == "qwen2" else 9)
    for name, parameter in first.items():
        # A bias of k shifts all scores of a query alike: its gradient is rounding noise, in any model.
        if not name.endswith("k_proj.bias"):
            assert parameter.grad.norm() > 1e-5, name
    assert model.get_input_embeddings().weight.grad.norm() > 1e-5


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "in-cached_weights"])
def test_forward_and_generate_leave_the_masters_alone(cached):
    model = quantized_model()
    before = bits(model)
    with torch.no_grad():
        model(IDS)
    assert_untouched(model, before)
    if cached:
        with cached_weights():
            model.generate(IDS, max_new_tokens=4, do_sample=False)
    else:
        model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert_untouched(model, before)
    loss_of(model).backward()
    assert_untouched(model, before)


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "in-cached_weights"])
@pytest.mark.parametrize("where", ["model.layers.0.mlp.act_fn", "model.layers.1.self_attn.o_proj", "model.norm"])
def test_an_exception_in_the_middle_leaves_the_masters_alone(where, cached):
    model = quantized_model()
    before, expected = bits(model), model(IDS).logits

    def fail(*_):
        raise KeyboardInterrupt("in the middle")

    hook = model.get_submodule(where).register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt, match="in the middle"):
        if cached:
            with cached_weights():
                model.generate(IDS, max_new_tokens=4)
        else:
            loss_of(model)
    hook.remove()
    assert_untouched(model, before)
    assert torch.equal(model(IDS).logits, expected)


def test_an_exception_in_backward_leaves_the_masters_alone():
    model = quantized_model()
    before = bits(model)

    def fail(*_):
        raise KeyboardInterrupt("in the middle")

    hook = model.model.layers[1].register_full_backward_hook(fail)
    with pytest.raises(KeyboardInterrupt, match="in the middle"):
        loss_of(model).backward()
    hook.remove()
    assert_untouched(model, before)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("preset", ["w4a4", "w4a16"])
def test_gradient_checkpointing_gives_the_same_gradients(preset, reentrant):
    model = quantized_model("qwen2", preset, layers=3).train()
    before = bits(model)
    loss_of(model).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()

    calls = []
    hook = model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    loss_of(model).backward()
    hook.remove()
    assert len(calls) == 2, "the layer was not recomputed"
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name
    assert_untouched(model, before)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_gradient_checkpointing_under_autocast(reentrant):
    model = quantized_model().train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model)
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        model.zero_grad()
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name


def test_autocast_trains_float32_masters():
    model = quantized_model()
    dtypes = set()
    for layer in mxfp4_layers(model).values():
        layer.register_forward_hook(lambda _, args, y: dtypes.add(y.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model)
    loss.backward()
    assert dtypes == {torch.bfloat16}
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    full = quantized_model()
    loss_of(full).backward()
    for (name, p), q in zip(model.named_parameters(), full.parameters(), strict=True):
        if not name.endswith("k_proj.bias"):
            assert torch.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0) > 0.9, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_learns(dtype):
    model = quantized_model(dtype=dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
