# SPDX-License-Identifier: Apache-2.0
"""Products of several packed layers at once: the bits of separate ones, when layers are joined, and when no longer."""

import copy
import gc
import io
import logging
import pickle
import threading
import weakref
from unittest import mock

import pytest
import torch
from lora_models import IDS, with_lora
from tiny_models import make_model
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from benchmarks import host_time
from hf_mxfp4 import MXFP4PackedLinear, MXFP4RLConfig, pack
from hf_mxfp4.integrations.transformers import quantize_linears
from hf_mxfp4.layers import joined_layers
from hf_mxfp4.ops import cpu
from mxfp4_kernels.decode import product as decode_product


K = 160
SIZES = {"q": 64, "k": 32, "v": 32}


class Attention(nn.Module):
    """Layers of one input, and how they are called."""

    def __init__(self, sizes=SIZES, bias=False, dtype=torch.float32, **scheme):
        super().__init__()
        torch.manual_seed(0)
        config = MXFP4RLConfig(mode="packed", **scheme)
        for name, rows in sizes.items():
            linear = nn.Linear(K, rows, bias, dtype=dtype)
            setattr(self, name, MXFP4PackedLinear.from_linear(linear, config, name))

    def forward(self, x):
        return torch.cat([layer(x) for layer in self.children()], -1)


def inputs(rows=3, dtype=torch.float32, seed=1):
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(seed)).to(dtype)


def joined(*arguments, **options) -> Attention:
    """An attention whose layers are joined."""
    attention = Attention(*arguments, **options)
    with torch.no_grad():
        attention(inputs(dtype=options.get("dtype", torch.float32)))
    assert joined_layers(attention) == [list(attention._modules)]
    return attention


@pytest.fixture(autouse=True)
def joined_on_the_processor(monkeypatch):
    """Products in C++ are joined too."""
    monkeypatch.setattr("hf_mxfp4.ops.joined.BACKENDS", ("triton", "cpu"))


@pytest.fixture
def products(monkeypatch):
    """The rows of weights in each product."""
    rows = []
    multiply = cpu.PackedProduct.__call__

    def counted(product, *arguments):
        rows.append(product.n)
        return multiply(product, *arguments)

    monkeypatch.setattr(cpu.PackedProduct, "__call__", counted)
    return rows


@pytest.fixture
def log(caplog):
    """The messages of the package."""
    logger = logging.getLogger("hf_mxfp4")
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, "hf_mxfp4"):
        yield caplog
    logger.removeHandler(caplog.handler)


# ---- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [{}, {"preset": "w4a8"}, {"preset": "w4a4", "outlier_fallback": 0.5}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_joined_product_has_the_bits_of_separate_ones(dtype, bias, scheme, products):
    separate = Attention(bias=bias, dtype=dtype, **scheme)
    attention = joined(bias=bias, dtype=dtype, **scheme)
    for rows in (1, 3, cpu.most_rows() + 1):
        x = inputs(rows, dtype)
        expected = torch.cat([layer(x.clone()) for layer in separate.children()], -1)
        products.clear()
        assert torch.equal(attention(x), expected)
        assert products == [128]


@torch.no_grad()
def test_outputs_of_three_axes():
    x = inputs(6).view(2, 3, K)
    expected = Attention()(x.clone())
    assert torch.equal(joined()(x), expected)


# ---- the layers -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_parameters_become_rows_of_one_buffer():
    attention = Attention(bias=True)
    parameters = dict(attention.named_parameters())
    state = {name: value.clone() for name, value in attention.state_dict().items()}
    attention(inputs())
    assert all(parameters[name] is parameter for name, parameter in attention.named_parameters())
    assert all(torch.equal(state[name], value) for name, value in attention.state_dict().items())
    storages = {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage() for parameter in parameters.values()
    }
    assert len(storages) == 4  # codes, scales, macro bytes, biases
    assert sum(map(len, storages.values())) == sum(parameter.nbytes for parameter in parameters.values())


@torch.no_grad()
def test_layers_that_get_another_input_are_not_joined(products):
    attention = Attention()

    def cross_attention(x, context):
        return attention.q(x), attention.k(context), attention.v(context)

    cross_attention(inputs(), inputs(5))
    assert joined_layers(attention) == [["k", "v"]]
    products.clear()
    cross_attention(inputs(), inputs(5))
    assert products == [64, 64]


@pytest.mark.parametrize(
    "other",
    [
        lambda: Attention({"k": 24}).k,  # rows that are no multiple of 16
        lambda: Attention({"k": 32}, bias=True).k,
        lambda: Attention({"k": 32}, preset="w4a8").k,
    ],
    ids=["rows", "bias", "scheme"],
)
@torch.no_grad()
def test_layers_that_differ_are_not_joined(other):
    attention = Attention()
    attention.k = other()
    attention(inputs())
    assert joined_layers(attention) == []


@torch.no_grad()
def test_layers_with_one_weight_are_not_joined():
    attention = Attention({"k": 32, "v": 32})
    attention.k.weight = attention.v.weight
    attention(inputs())
    assert joined_layers(attention) == []


@torch.no_grad()
def test_products_have_four_layers_at_most():
    experts = Attention({f"expert{i}": 16 for i in range(6)})
    experts(inputs())
    assert [len(names) for names in joined_layers(experts)] == [4, 2]


@torch.no_grad()
def test_layers_with_captured_graphs_stay_where_they_are():
    attention = Attention()
    addresses = [parameter.data_ptr() for parameter in attention.parameters()]
    on_gpu = mock.patch.object(torch.Tensor, "is_cuda", property(lambda x: True))
    with on_gpu, mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        attention(inputs())
    attention(inputs())
    assert addresses == [parameter.data_ptr() for parameter in attention.parameters()]
    assert joined_layers(attention) == []


@torch.no_grad()
def test_layers_that_were_called_before_their_siblings_stay_where_they_are():
    attention = Attention()
    x = inputs()
    for layer in attention.children():
        layer(x)
        layer(x)  # which may be captured
    assert joined_layers(attention) == []


@torch.no_grad()
def test_copies_of_a_model_are_not_joined_with_it():
    attention = Attention()
    twin = copy.deepcopy(attention)
    x = inputs()
    attention(x)
    twin(x)
    assert joined_layers(attention) == joined_layers(twin) == [["q", "k", "v"]]


@torch.no_grad()
def test_the_log_counts_joined_layers_once(log):
    attention = joined()
    attention(inputs())
    attention(inputs())
    assert log.messages == ["3 packed layers with common inputs are multiplied in 1 products"]


@torch.no_grad()
def test_a_deleted_model_leaves_no_memory_behind():
    attention = joined()
    attention(inputs())
    codes = weakref.ref(attention.q.joined.product.weights[0][0])
    gc.disable()
    try:
        del attention
        assert codes() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_layers_without_memory_stay_separate():
    attention = Attention().to("meta")
    assert attention(inputs().to("meta")).is_meta
    assert joined_layers(attention) == []


@torch.no_grad()
def test_layers_on_a_processor_stay_separate(monkeypatch):
    monkeypatch.undo()
    attention = Attention()
    attention(inputs())
    assert joined_layers(attention) == []


# ---- inputs ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_an_equal_input_is_multiplied_alone(products):
    attention = joined()
    x = inputs()
    attention.q(x)
    products.clear()
    assert torch.equal(attention.k(x.clone()), Attention().k(x))
    assert products == [32, 32]


@torch.no_grad()
def test_an_input_that_was_written_is_multiplied_again():
    attention = joined()
    x = inputs()
    attention.q(x)
    x.mul_(2)
    assert torch.equal(attention.k(x), Attention().k(x.clone()))


@torch.no_grad()
def test_another_stream_of_a_gpu_multiplies_alone(products, monkeypatch):
    attention = joined()
    streams = iter([1, 1, 2])
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: next(streams), raising=False)
    products.clear()
    attention(inputs())
    assert products == [128, 32]


@torch.no_grad()
def test_an_input_of_inference_mode_is_multiplied_alone(products):
    attention = joined()
    with torch.inference_mode():
        products.clear()
        attention(inputs())
    assert products == [64, 32, 32]


@torch.no_grad()
def test_outputs_are_not_kept():
    attention = joined()
    x = inputs()
    out = [layer(x) for layer in attention.children()]
    base = weakref.ref(out[0]._base)
    del out
    assert base() is None


@torch.no_grad()
def test_layers_that_no_longer_share_an_input_are_separated_for_good(log, products):
    attention = joined()
    expected = Attention().q(inputs())
    assert torch.equal(attention.q(inputs()), expected)
    assert torch.equal(attention.q(inputs()), expected)  # k and v have not taken the first product
    assert (
        log.messages[-1] == "q, k, v are no longer multiplied in one product: they were not called with the same input"
    )
    assert joined_layers(attention) == []
    products.clear()
    attention(inputs())
    assert products == [64, 32, 32]


@torch.no_grad()
def test_threads_multiply_their_own_inputs():
    attention = joined()
    expected = Attention()
    barrier = threading.Barrier(2)
    wrong = []

    def run(seed):
        torch.set_grad_enabled(False)
        for step in range(20):
            x = inputs(seed=100 * seed + step)
            barrier.wait()
            found = attention(x)
            if not torch.equal(found, expected(x.clone())):
                wrong.append((seed, step))

    with torch.no_grad():
        for layer in expected.children():
            layer(inputs().clone())
    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert joined_layers(attention) == [["q", "k", "v"]]


@torch.no_grad()
def test_layers_are_joined_under_an_autocast_that_casts_nothing(products):
    attention = Attention(dtype=torch.bfloat16)
    x = inputs(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = attention(x)
        products.clear()
        out = attention(x.clone())
    assert products == [128]
    assert torch.equal(out, expected)


@torch.no_grad()
def test_layers_compute_alone_under_an_autocast_that_casts(products):
    attention = joined()
    products.clear()
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(inputs(seed=2))
    assert products == [64, 32, 32]
    assert out.dtype == torch.bfloat16


# ---- weights --------------------------------------------------------------------------------------------------------


def other(attention) -> Attention:
    """An attention with other weights."""
    twin = Attention()
    for parameter in twin.parameters():
        parameter.copy_(parameter.flip(0))
    return twin


def write_in_place(attention, twin):
    attention.k.weight.copy_(twin.k.weight)


def exchange_data(attention, twin):
    attention.k.weight.data = twin.k.weight.data.clone()


def replace_the_parameter(attention, twin):
    attention.k.weight = twin.k.weight


def load(attention, twin):
    attention.load_state_dict(twin.state_dict())


def assign(attention, twin):
    attention.load_state_dict(copy.deepcopy(twin).state_dict(), assign=True)


def replace_the_layer(attention, twin):
    attention.k = twin.k


def copy_memory(attention, twin):
    attention._apply(torch.clone)


CHANGES = [write_in_place, exchange_data, replace_the_parameter, load, assign, replace_the_layer, copy_memory]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changed_layers_multiply_with_what_they_have_now(change, is_compiled):
    attention = joined()
    call = torch.compile(attention, backend="aot_eager", fullgraph=True) if is_compiled else attention
    call(inputs())
    change(attention, other(attention))
    expected = copy.deepcopy(attention)(inputs())
    for _ in range(3):
        assert torch.equal(call(inputs()), expected)


@torch.no_grad()
def test_a_weight_written_after_the_product_is_multiplied_again():
    attention = joined()
    x = inputs()
    attention.q(x)
    attention.k.weight.zero_()
    assert torch.equal(attention.k(x), torch.zeros(3, 32))


@torch.no_grad()
def test_replaced_tensors_separate_layers(log):
    attention = joined()
    attention.k.weight = nn.Parameter(attention.k.weight.clone(), requires_grad=False)
    attention(inputs())
    assert log.messages[-1] == "q, k, v are no longer multiplied in one product: tensors were replaced"
    assert joined_layers(attention) == []


@torch.no_grad()
def test_moved_layers_are_joined_again():
    attention = joined()
    buffer = weakref.ref(attention.q.joined.product.weights[0][0])
    attention._apply(torch.clone)
    assert buffer() is None
    attention(inputs())
    assert joined_layers(attention) == [["q", "k", "v"]]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@torch.no_grad()
def test_copies_are_independent(copied):
    attention = joined()
    expected = attention(inputs())
    twin = copied(attention)
    assert joined_layers(twin) == []
    for _ in range(2):
        assert torch.equal(twin(inputs()), expected)
    assert joined_layers(twin) == [["q", "k", "v"]]
    twin.k.weight.zero_()
    assert torch.equal(attention(inputs()), expected)


@torch.no_grad()
def test_saved_models_are_as_large_as_before():
    sizes = []
    for attention in (Attention(), joined()):
        file = io.BytesIO()
        torch.save(attention.state_dict(), file)
        sizes.append(len(file.getvalue()))
        file.seek(0)
        assert torch.equal(torch.load(file)["k.weight"], attention.k.weight)
    assert sizes[1] <= sizes[0]


def tiny(family="qwen2", layers=2, **options) -> nn.Module:
    model = make_model(family, layers=layers, **options)
    quantize_linears(model, MXFP4RLConfig())
    pack(model)
    return model


@torch.no_grad()
def test_files_are_the_same_bytes(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path / "before")
    model(IDS)
    assert len(joined_layers(model)) == 4
    model.save_pretrained(tmp_path / "after")
    name = "model.safetensors"
    assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()


# ---- models ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_joined_layers_of_a_model():
    model = tiny(layers=1)
    model(IDS)
    layer = "model.layers.0"
    assert joined_layers(model) == [
        [f"{layer}.self_attn.{name}_proj" for name in "qkv"],
        [f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"],
    ]


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma3_text", "qwen3"])
def test_generated_tokens_are_the_same(family, products):
    model = tiny(family)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with mock.patch("hf_mxfp4.layers.packed_linear.observe", lambda *_: None):
        expected = copy.deepcopy(model).generate(IDS, **options)
    found = model.generate(IDS, **options)
    assert len(joined_layers(model)) == 4
    assert torch.equal(found, expected)


def test_rollouts_of_adapters_are_joined_and_training_is_not(products):
    model = with_lora(tiny(layers=1))
    with torch.no_grad():
        model(IDS)
        expected = model(IDS).logits
    assert [len(names) for names in joined_layers(model)] == [3, 2]
    products.clear()
    found = model(IDS).logits
    assert torch.equal(found.detach(), expected)
    assert len(products) == 7
    found.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@torch.no_grad()
def test_a_decoder_layer_is_four_launches_on_a_gpu():
    model = make_model("llama", layers=1, hidden=128, intermediate=256, dtype=torch.bfloat16)
    quantize_linears(model, MXFP4RLConfig(preset="w4a16"))
    pack(model)
    launches = []
    launched = mock.patch.object(decode_product.decode_kernel, "run", lambda *_, **__: launches.append(1))
    with host_time.stubbed_launches(), launched:
        host_time.planned_for_gpu(model.model, IDS[:1, :1])
        launches.clear()
        model.model(IDS[:1, :1])
    assert len(launches) == 4


# ---- compiled code --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_compiled_code_calls_one_operator(products):
    attention = joined()
    graphs = []

    def compiler(graph, _):
        graphs.append(graph)
        return graph

    call = torch.compile(attention, backend=compiler, fullgraph=True)
    expected = attention(inputs())
    products.clear()
    assert torch.equal(call(inputs()), expected)
    assert products == [128]
    (graph,) = graphs
    assert sum(node.op == "placeholder" for node in graph.graph.nodes) == 2
    assert attention.q.joined.product.traced is None


@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_joined_blocks_compiled_one_by_one_share_a_graph():
    model = tiny("llama", layers=3).model
    model(IDS, use_cache=False)
    expected = model(IDS, use_cache=False).last_hidden_state
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers:
        block.compile(fullgraph=True, backend=counter)
    assert torch.equal(model(IDS, use_cache=False).last_hidden_state, expected)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_with_gradients_multiplies_separately(products):
    attention = joined()
    call = torch.compile(attention, backend="aot_eager", fullgraph=True)
    x = inputs().requires_grad_()
    products.clear()
    call(x).sum().backward()
    assert products == [64, 32, 32]
    assert x.grad is not None


@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_layers_of_compiled_code_stay_where_they_are():
    attention = Attention()
    torch.compile(attention, backend="aot_eager", fullgraph=True)(inputs())
    address = attention.q.weight.data_ptr()
    for layer in attention.children():
        layer.state.plans.clear()
    attention(inputs())
    assert attention.q.weight.data_ptr() == address
    assert joined_layers(attention) == []
