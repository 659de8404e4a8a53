# SPDX-License-Identifier: Apache-2.0
"""`torch.compile` of quantized layers and models: one graph, never compiled again, and the bits of eager code.

The contract: operators run the very code of eager mode, so whatever the compiler leaves alone has the same bits: all of
a layer, and all of a model under ``aot_eager`` where transformers runs the same attention (its SDPA takes another
backward kernel when compiled). Inductor rounds what it fuses around the operators in its own way.
"""

import pytest
import torch
from compiled_training import STOCHASTIC, adapted, check_training, compiled
from passes import passes
from same_bits import assert_same
from tables import pairwise_params
from tiny_models import make_model
from torch._dynamo.testing import CompileCounterWithBackend

from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig, cached_weights, fake_quantize, quantize
from hf_mxfp4.integrations.transformers import quantize_linears
from hf_mxfp4.layers import set_quantization_step
from hf_mxfp4.ops import weight_quantizations
from hf_mxfp4.presets import PRESETS


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: fake_quantize(x, axis=0),
        lambda x: quantize(x, macro_block=128, macro_search="block_mantissas_fp8", outlier_fallback=0.3).dequantize(),
    ],
    ids=["fake_quantize", "quantize"],
)
def test_functions_on_tensors(function):
    call, counter = compiled(function)
    for rows in (33, 34, 35):  # the second makes sizes symbols
        x = torch.randn(rows, rows + 7, requires_grad=True)
        assert torch.equal(call(x), function(x))
        assert not call(x).requires_grad
    assert counter.frame_count <= 2


def check_layer(layer, autocast, dtype=torch.float32):
    call, counter = compiled(layer)
    for _ in range(3):
        x = torch.randn(2, 5, 70, dtype=dtype)
        assert_same(passes(call, x, autocast=autocast), passes(layer, x, autocast=autocast))
        with torch.no_grad():  # a step of an optimizer: no stale weight
            torch._foreach_add_([parameter for parameter in layer.parameters() if parameter.requires_grad], 0.1)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("preset", "dtype_and_autocast"),
    pairwise_params(list(PRESETS), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)]),
    ids=str,
)
def test_trainable_layers(preset, dtype_and_autocast):
    dtype, autocast = dtype_and_autocast
    config = MXFP4RLConfig(preset=preset)
    check_layer(MXFP4Linear.from_linear(torch.nn.Linear(70, 40).to(dtype), config), autocast, dtype)


@pytest.mark.parametrize("scheme", [{}, {"preset": "w4a4"}], ids=["w4a16", "w4a4"])
@pytest.mark.parametrize("autocast", [False, True])
def test_packed_layers(scheme, autocast):
    config = MXFP4RLConfig(mode="packed", **scheme)
    check_layer(MXFP4PackedLinear.from_linear(torch.nn.Linear(70, 40), config), autocast)


def test_rows_may_vary():
    layer = MXFP4Linear(40, 24)
    call, counter = compiled(layer)
    for rows in (5, 7, 9, 2):
        x = torch.randn(rows, 40)
        assert_same(passes(call, x), passes(layer, x))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_step_set_between_forward_and_backward_is_an_error(is_compiled):
    layer = MXFP4Linear(32, 32, config=MXFP4RLConfig(**STOCHASTIC), name="a")
    out = (compiled(layer)[0] if is_compiled else layer)(torch.randn(2, 32))
    layer.set_step(1)
    with pytest.raises(RuntimeError, match="the quantization step of a went from 0 to 1"):
        out.sum().backward()


def test_the_cached_weight_is_used_and_renewed():
    layer = MXFP4Linear(64, 32)
    x = torch.randn(3, 64)
    (call, _) = compiled(layer)
    for form in ("dense", "packed"):
        with torch.no_grad(), cached_weights(layer, form):
            expected = layer(x)
            before = weight_quantizations()
            for _ in range(2):
                assert torch.equal(call(x), expected)
            assert weight_quantizations() == before
        with torch.no_grad():
            layer.weight.data.neg_()
            assert torch.equal(call(x), layer(x))
            assert not torch.equal(call(x), expected)


def quantized(family="qwen2", layers=1, dtype=torch.float32, **scheme):
    model = make_model(family, layers=layers, dtype=dtype, attn_implementation="eager")
    quantize_linears(model, MXFP4RLConfig(**scheme))
    return model


LARGE = pytest.mark.large
#: Options of the scheme, and of training. Layers of each preset are above.
MODELS = [
    pytest.param(STOCHASTIC, {"random": True, "checkpointing": True}, id="random"),
    pytest.param({}, {"autocast": True, "checkpointing": True}, marks=LARGE, id="autocast"),
    pytest.param({"preset": "paper_b", "dtype": torch.bfloat16}, {}, marks=LARGE, id="bfloat16"),
    pytest.param({"preset": "w4a8g8"}, {"backend": "inductor"}, marks=LARGE, id="inductor"),
]


@pytest.mark.parametrize(("scheme", "options"), MODELS)
def test_models_train_as_in_eager_mode(scheme, options):
    check_training(quantized(**scheme), **options)


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("w4a16", {"autocast": True, "checkpointing": True}),
        pytest.param("w4a4", {"checkpointing": True}, marks=pytest.mark.large),
    ],
    ids=str,
)
def test_adapters_on_packed_models(checkpoint, preset, options):
    check_training(adapted(checkpoint(layers=1), ["q_proj", "down_proj"], preset), **options)


def test_blocks_compiled_one_by_one_share_a_graph():
    model = quantized(layers=4, **STOCHASTIC).train()
    ids = torch.arange(2, 14).view(2, 6)
    found = []
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for compiles in (False, True):
        set_quantization_step(model, 0)
        model.zero_grad()
        for block in model.model.layers if compiles else ():
            block.compile(fullgraph=True, backend=counter)
        out = model(ids, labels=ids, use_cache=False)
        out.loss.backward()
        found.append([out.logits.detach(), *(p.grad.clone() for p in model.parameters())])
    assert_same(*found)
    assert counter.frame_count == 1
