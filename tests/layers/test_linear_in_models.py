# SPDX-License-Identifier: Apache-2.0
"""`MXFP4Linear` inside decoders: every layer's equations, gradients down to layer 0, masters that nothing writes."""

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from factors import factors_config
from tables import CONFIGS
from tiny_models import make_model

from hf_mxfp4 import MXFP4Linear, cached_weights, fake_quantize
from hf_mxfp4.integrations.transformers.swap import quantize_linears


WEIGHT = {"scale_rule": "rceil", "macro_block": 128, "macro_search": "dynamic", "outlier_fallback": 0.5}
INPUT = {"scale_rule": "rceil", "macro_block": 128, "macro_search": "static", "outlier_fallback": 0.5}
IDS = torch.arange(2, 14).view(2, 6)


def quantized_model(family="qwen2", preset="w4a4", *, layers=2, **options):
    model = make_model(family, layers=layers, **options)
    quantized, _ = quantize_linears(model, factors_config(preset=preset))
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


def interrupt(*_):
    raise KeyboardInterrupt("in the middle")


#: Families, their schemes, and modules after which a pass fails.
WRITTEN = [
    ("qwen2", {}, ["model.layers.0.mlp.act_fn", "model.layers.1.self_attn.o_proj", "model.norm"]),
    ("qwen3_moe", CONFIGS["random"], ["model.layers.1.mlp.experts.act_fn"]),
]


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "in-cached_weights"])
@pytest.mark.parametrize(("family", "scheme", "places"), WRITTEN, ids=[family for family, *_ in WRITTEN])
def test_nothing_writes_the_masters(family, scheme, places, cached, dense_products):
    model = make_model(family)
    quantize_linears(model, factors_config(**scheme))
    before, versions = bits(model), [(p._version, p.data_ptr()) for p in model.parameters()]
    context = partial(cached_weights, model) if cached else contextlib.nullcontext
    with torch.no_grad(), context():
        expected = model(IDS).logits
    assert_untouched(model, before)
    with context():
        model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert_untouched(model, before)
    for place in places:
        hook = model.get_submodule(place).register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt, match="in the middle"), context():
            model.generate(IDS, max_new_tokens=4)
        with pytest.raises(KeyboardInterrupt, match="in the middle"), context():
            loss_of(model)
        hook.remove()
        assert_untouched(model, before)
    hook = model.model.layers[1].register_full_backward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt, match="in the middle"):
        loss_of(model).backward()
    hook.remove()
    assert_untouched(model, before)
    loss_of(model).backward()
    assert_untouched(model, before)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected)
    assert [(p._version, p.data_ptr()) for p in model.parameters()] == versions


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
