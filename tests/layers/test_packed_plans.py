# SPDX-License-Identifier: Apache-2.0
"""Plans of packed layers: what a call decides again, that no change of a layer leaves a stale one, and what compiled
code holds of a layer."""

import copy
import pickle
import sys

import pytest
import torch
from tiny_models import make_model
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounterWithBackend

from benchmarks import host_time
from hf_mxfp4 import MXFP4PackedLinear, MXFP4RLConfig, cached_weights, pack
from hf_mxfp4.integrations.transformers import quantize_linears


PARTS = ("weight", "weight_scale", "weight_macro")


def packed(seed: int = 0, backend: str = "auto", **scheme) -> MXFP4PackedLinear:
    torch.manual_seed(seed)
    config = MXFP4RLConfig(mode="packed", backend=backend, **scheme)
    return MXFP4PackedLinear.from_linear(nn.Linear(160, 40), config, "a.layer")


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, 160, generator=torch.Generator().manual_seed(2)).to(dtype)


# ---- what a call decides again --------------------------------------------------------------------------------------


def python_calls(call) -> list[str]:
    """The Python functions that a call calls, in order."""
    names = []

    def note(frame, event, _):
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


@torch.no_grad()
def test_a_product_in_c_is_few_python_calls_away():
    layer = packed()
    x = inputs()
    layer(x)
    assert len(python_calls(lambda: layer(x))) <= 12


@torch.no_grad()
def test_a_launch_on_a_gpu_is_few_python_calls_away():
    layer = host_time.packed_layer(256)
    x = torch.randn(1, 256).bfloat16()
    with host_time.stubbed_launches():
        host_time.planned_for_gpu(layer, x)
        names = python_calls(lambda: layer(x))
    before_triton = names[: names.index("run") + 1]
    assert len(before_triton) <= 12


def test_a_plan_is_made_once_for_a_dtype():
    layer = packed()
    layer(inputs())
    plan = layer.state.plans[torch.float32]
    layer(inputs())
    layer(torch.randn(2, 300, 160))
    assert layer.state.plans == {torch.float32: plan}


@torch.no_grad()
def test_a_planned_layer_still_minds_autocast_gradients_and_caches():
    layer = packed(backend="eager")
    x = inputs()
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with torch.enable_grad():
        assert layer(x.clone().requires_grad_()).requires_grad
        assert layer(x).requires_grad  # by the bias
    with cached_weights(layer, "dense"):
        layer(x)
        layer.weight.data.zero_()
        assert torch.equal(layer(x), expected)  # who opens a cache promises that weights do not change
    assert not torch.equal(layer(x), expected)


@torch.no_grad()
def test_a_planned_layer_still_refuses_wrong_inputs():
    layer = packed()
    layer(inputs())
    with pytest.raises(ValueError, match="does not end in in_features=160"):
        layer(torch.randn(3, 159))
    with pytest.raises(TypeError, match="the layer's dtype is torch.float32"):
        layer(inputs(torch.bfloat16))


@torch.no_grad()
def test_vmap_after_a_plan():
    layer = packed()
    x = inputs()
    expected = layer(x)
    found = torch.vmap(layer)(x.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# ---- changes of a layer ---------------------------------------------------------------------------------------------


def write_in_place(layer, other):
    for name in PARTS:
        getattr(layer, name).copy_(getattr(other, name))


def exchange_data(layer, other):
    for name in PARTS:
        getattr(layer, name).data = getattr(other, name).data.clone()


def replace_all(layer, other):
    for name in PARTS:
        setattr(layer, name, getattr(other, name))


def replace_scales(layer, other):
    layer.weight_scale = other.weight_scale


def replace_behind_the_module(layer, other):
    for name in PARTS:
        layer._parameters[name] = other._parameters[name]


def load_a_copy(layer, other):
    layer.load_state_dict(other.state_dict())


def assign_a_state(layer, other):
    layer.load_state_dict(copy.deepcopy(other).state_dict(), assign=True)


def move_and_load(layer, other):
    layer.to("meta").to_empty(device="cpu")
    layer.load_state_dict(other.state_dict())


def remove_the_bias(layer, other):
    layer.bias = None


def exchange_the_spec(layer, other):
    layer.state.spec = packed(0, "eager", preset="w4a4").state.spec


CHANGES = [
    write_in_place,
    exchange_data,
    replace_all,
    replace_scales,
    replace_behind_the_module,
    load_a_copy,
    assign_a_state,
    move_and_load,
    remove_the_bias,
    exchange_the_spec,
]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_changed_layer_multiplies_with_what_it_has_now(change, backend, is_compiled):
    layer = packed(0, backend)
    other = packed(1, backend)
    x = inputs()
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if is_compiled else layer
    before = call(x)
    change(layer, other)
    expected = copy.deepcopy(layer)(x)  # which has no plan
    assert torch.equal(call(x), expected)
    assert not torch.equal(before, expected)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@torch.no_grad()
def test_a_layer_of_another_dtype(is_compiled):
    layer = packed()
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if is_compiled else layer
    call(inputs())
    layer.to(torch.bfloat16)
    x = inputs(torch.bfloat16)
    found = call(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, copy.deepcopy(layer)(x))


@torch.no_grad()
def test_a_layer_on_another_device():
    layer = packed()
    layer(inputs())
    assert layer.to("meta")(inputs().to("meta")).is_meta


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
@torch.no_grad()
def test_copies_of_a_planned_layer_are_independent(copied, is_compiled):
    layer = packed()
    x = inputs()
    expected = layer(x)
    twin = copied(layer)
    assert not twin.state.plans
    call = torch.compile(twin, backend="aot_eager", fullgraph=True) if is_compiled else twin
    assert torch.equal(call(x), expected)
    twin.weight.zero_()
    assert torch.equal(call(x), twin.bias.expand(3, -1))
    assert torch.equal(layer(x), expected)


# ---- compiled code --------------------------------------------------------------------------------------------------


def llama(layers: int, is_packed: bool) -> nn.Module:
    model = make_model("llama", layers=layers, attn_implementation="eager")
    if is_packed:
        quantize_linears(model, MXFP4RLConfig())
        pack(model)
    return model.model


def leaf_guards(manager) -> int:
    """How many guards a manager checks, with those below it."""
    below = [child for pair in getattr(manager, "get_key_value_managers", dict)().values() for child in pair if child]
    return len(manager.get_leaf_guards()) + sum(map(leaf_guards, [*manager.get_child_managers(), *below]))


def inputs_and_guards(layers: int, is_packed: bool, is_joined: bool = False) -> tuple[int, int]:
    """Of a compiled stack of decoder layers; ``is_joined``: that has multiplied before."""
    torch._dynamo.reset()
    model = llama(layers, is_packed)
    graphs = []

    def compiler(graph, example_inputs):
        graphs.append(graph)
        return graph

    def run(x, positions):
        for layer in model.layers:
            x = layer(x, position_embeddings=positions)
        return x

    x = torch.randn(1, 3, model.config.hidden_size)
    positions = model.rotary_emb(x, torch.arange(3)[None])
    if is_joined:
        run(x, positions)
    torch.compile(run, backend=compiler, fullgraph=True)(x, positions)
    (graph,) = graphs
    (entry,) = _debug_get_cache_entry_list(run)
    n_inputs = sum(node.op == "placeholder" for node in graph.graph.nodes)
    return n_inputs, leaf_guards(entry.guard_manager.root)


@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_a_packed_decoder_layer_brings_the_inputs_and_guards_of_the_plain_one():
    counts = {(layers, is_packed): inputs_and_guards(layers, is_packed) for layers in (1, 2) for is_packed in (0, 1)}
    plain = [two - one for one, two in zip(counts[1, 0], counts[2, 0], strict=True)]
    packed = [two - one for one, two in zip(counts[1, 1], counts[2, 1], strict=True)]
    assert packed[0] == plain[0]
    assert packed[1] == plain[1] + 7  # that each layer multiplies alone
    assert counts[1, 1][0] == counts[1, 0][0]


@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_a_decoder_layer_with_joined_products_brings_fewer_inputs(monkeypatch):
    monkeypatch.setattr("hf_mxfp4.ops.joined.BACKENDS", ("triton", "cpu"))
    one = inputs_and_guards(1, is_packed=True, is_joined=True)
    two = inputs_and_guards(2, is_packed=True, is_joined=True)
    assert two[0] - one[0] == 6  # 4 of packed weights, 2 of norms
    assert two[1] - one[1] <= 86


@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_packed_blocks_compiled_one_by_one_share_a_graph():
    model = llama(3, is_packed=True)
    ids = torch.arange(2, 14).view(2, 6)
    expected = model(ids, use_cache=False).last_hidden_state
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers:
        block.compile(fullgraph=True, backend=counter)
    assert torch.equal(model(ids, use_cache=False).last_hidden_state, expected)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_compiled_code_of_a_layer_that_is_gone_says_so():
    layer = packed()
    codes = layer.weight.clone()
    with pytest.raises(RuntimeError, match="no layer has the packed weight"):
        torch.ops.hf_mxfp4.packed_linear(inputs(), codes, None, None, torch.float32)
