# SPDX-License-Identifier: Apache-2.0
"""Experts of the vLLM plugin against the packed experts of this package, bit for bit: what they compute, and what is
refused."""

import json
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tables import pairwise_params
from vllm_stand_ins import ACTIVATIONS, ENGINE, NAME, SIZES, Engine, packed_experts, plugin_with_stand_ins, tokens

import mxfp4_kernels
from hf_mxfp4.ops import Groups


SCHEMES = [
    {"preset": "w4a16"},
    {"preset": "w4a4"},
    {"preset": "w4a4", "macro_block": "row"},
    {"preset": "w4a4", "macro_block": None, "outlier_fallback": 0.5},
    {"preset": "w4a16", "fprop": {"weight": "even+mbs32-dynamic+32x32"}},
    {"preset": "w4a4", "macro_block": 32, "fprop": {"weight": "even+mbs32-dynamic+32x32"}},
    {"preset": "w4a8"},
]
IDS = [" ".join(map(str, scheme.values())) for scheme in SCHEMES]


@pytest.mark.parametrize("family", ACTIVATIONS)
@pytest.mark.parametrize("options", SCHEMES, ids=IDS)
def test_packed_experts_compute_what_the_packed_layer_does(plugin, family, options):
    source, config, _ = packed_experts(family, options)
    engine = Engine(plugin, source, config, family)
    places = {name: parameter.data_ptr() for name, parameter in engine.layer.named_parameters()}
    engine.push_codes(source)
    engine.method.process_weights_after_loading(engine.layer)
    x, ids, weights = tokens()
    assert torch.equal(engine(x, ids, weights), source(x, ids, weights))
    assert {name: parameter.data_ptr() for name, parameter in engine.layer.named_parameters()} == places


def test_every_option_of_products_reaches_experts(plugin, monkeypatch):
    source, config, _ = packed_experts("qwen3_moe", {"backend": "eager", "matmul_backend": "dense"})
    engine = Engine(plugin, source, config, "qwen3_moe")
    engine.push_codes(source)
    specs = []
    packed_forward = plugin.experts.packed_forward

    def noted(x, packed, bias, state, *others):
        specs.append(state.spec)
        return packed_forward(x, packed, bias, state, *others)

    monkeypatch.setattr(plugin.experts, "packed_forward", noted)
    x, ids, weights = tokens()
    engine(x, ids, weights)
    assert specs == [state.spec for state in source.states.values()]
    assert specs[0].matmul_backend == "dense"


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("family", ACTIVATIONS)
def test_dense_experts_have_quantized_inputs(plugin, family):
    source, config, _ = packed_experts(family, {"preset": "w4a4"})
    engine = Engine(plugin, source, config, family, weights="dense")
    assert type(engine.method) is plugin.experts.MXFP4RLExpertsMethod
    for projection, name in zip(source.projections, ("w13_weight", "w2_weight"), strict=True):
        values = source.dequantized_weight(projection)
        getattr(engine.layer, name).data.copy_(values.transpose(1, 2) if source.is_transposed else values)
    x, ids, weights = tokens()
    assert torch.equal(engine(x, ids, weights), source(x, ids, weights))


@pytest.mark.parametrize(
    ("family", "options", "by_expert"),
    pairwise_params(
        list(ACTIVATIONS), [SCHEMES[1], {"preset": "w4a16", "macro_block": "row"}, SCHEMES[4]], [False, True]
    ),
)
def test_two_processes_have_a_share_each(plugin, family, options, by_expert):
    source, config, plain = packed_experts(family, options)
    x, ids, weights = tokens()
    expected = source(x, ids, weights)
    parts = []
    from_plain = []
    for rank in (0, 1):
        engine = Engine(plugin, source, config, family, rank=rank, size=2, by_expert=by_expert)
        engine.push_codes(source)
        engine.method.process_weights_after_loading(engine.layer)
        parts.append(engine(x, ids, weights))
        again = Engine(plugin, source, config, family, rank=rank, size=2, by_expert=by_expert)
        for projection in source.projections:
            assert again.push(f"{NAME}.{projection}", getattr(plain, projection).detach()) == []
        from_plain.append(again(x, ids, weights))
    assert torch.allclose(parts[0] + parts[1], expected, rtol=1e-4, atol=1e-4)
    assert (parts[0] - expected).abs().max() > 0.1
    assert torch.equal(torch.stack(parts), torch.stack(from_plain))


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"activation": SimpleNamespace(value="relu2")}, "activation is 'relu2'"),
        ({"swiglu_limit": 7.0}, "swiglu_limit"),
        ({"apply_router_weight_on_input": True}, "multiplied by the router's weights"),
        ({"dp_size": 2}, "data or sequence parallelism"),
        ({"is_sequence_parallel": True}, "data or sequence parallelism"),
        ({"enable_eplb": True}, "enable_eplb"),
    ],
)
def test_experts_that_would_be_others_are_refused(plugin, changes, reason):
    source, config, _ = packed_experts("qwen3_moe", {"preset": "w4a16"})
    with pytest.raises(ValueError, match=rf'{reason}.*"weights": "dense"'):
        Engine(plugin, source, config, "qwen3_moe", **changes)


def test_adapters_of_vllm_on_experts_are_refused(plugin, monkeypatch):
    source, config, _ = packed_experts("qwen3_moe", {"preset": "w4a16"})
    monkeypatch.setattr(ENGINE, "lora_config", SimpleNamespace(target_modules=["q_proj", "o_proj"]))
    Engine(plugin, source, config, "qwen3_moe")
    ENGINE.lora_config.target_modules = None
    with pytest.raises(ValueError, match="lora_target_modules"):
        Engine(plugin, source, config, "qwen3_moe")


@pytest.mark.parametrize(
    "options, size, reason",
    [
        ({"preset": "w4a16"}, 4, "64 of 256 columns, which cuts blocks of 128"),
        ({"preset": "w4a16", "macro_block": None}, 16, "16 of 256 columns, which cuts blocks of 32"),
        ({"preset": "w4a4", "macro_block": "row"}, 2, "mbsrow-static needs whole rows"),
    ],
)
def test_a_share_that_would_cut_blocks_is_refused(plugin, options, size, reason):
    source, config, _ = packed_experts("qwen3_moe", options)
    with pytest.raises(ValueError, match=f"{reason}.*enable_expert_parallel"):
        Engine(plugin, source, config, "qwen3_moe", size=size)


def test_cuda_graphs_need_a_kernel(plugin, monkeypatch):
    source, config, _ = packed_experts("qwen3_moe", {"preset": "w4a16", "macro_block": "row"})
    monkeypatch.setattr(plugin.experts.torch, "get_default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(plugin.experts, "reads_packed_on_gpus", lambda scheme, backend: False)
    with pytest.raises(ValueError, match="enforce_eager=True"):
        Engine(plugin, source, config, "qwen3_moe")
    monkeypatch.setattr(ENGINE.model_config, "enforce_eager", True)
    Engine(plugin, source, config, "qwen3_moe")


@pytest.mark.parametrize("weights", ["packed", "dense"])
def test_the_operator_is_one_for_compiled_code(plugin, weights):
    source, config, _ = packed_experts("gpt_oss", {"preset": "w4a4"})
    engine = Engine(plugin, source, config, "gpt_oss", weights=weights)
    if weights == "packed":
        engine.push_codes(source)
    x, ids, topk_weights = tokens()
    compiled = torch.compile(lambda *inputs: engine(*inputs), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, ids, topk_weights), engine(x, ids, topk_weights))
    assert engine(x[:0], ids[:0], topk_weights[:0]).shape == (0, SIZES["hidden"])


CASES = {"packed w4a16": {"preset": "w4a16"}, "packed w4a4": {"preset": "w4a4", "outlier_fallback": 0.5}}


@pytest.mark.large
def test_on_the_kernels_nothing_is_read_back(run_script):
    """Of one process and of two with half the experts each: rows of the other's experts are in no product."""
    report = run_script("test_vllm_experts.py", interpret=True)
    for case, found in report.items():
        assert found["launches"] == {"product": 2, "read": 0}, case
        assert max(found["differences"]) < 2e-2, case
    assert report.keys() == CASES.keys()


def compute(plugin, case: str, backend: str, size: int) -> torch.Tensor:
    """The sum over ``size`` processes of what their experts add."""
    source, config, _ = packed_experts("gpt_oss", {**CASES[case], "backend": backend}, torch.bfloat16)
    x, ids, weights = tokens(torch.bfloat16, n=4)
    out = 0
    for rank in range(size):
        engine = Engine(plugin, source, config, "gpt_oss", rank=rank, size=size, by_expert=True)
        engine.push_codes(source)
        out = out + engine(x, ids, weights)
    return out


def counted(name, function, *args, **kwargs):
    LAUNCHES[name] += 1
    return function(*args, **kwargs)


if __name__ == "__main__":  # in a process whose kernels are interpreted; memory that nothing was written to is NaN
    LAUNCHES = Counter()
    report = {}
    SIZES["intermediate"] = 64
    product = mxfp4_kernels.PackedProduct.__call__
    mxfp4_kernels.PackedProduct.__call__ = lambda *arguments: counted("product", product, *arguments)
    read = vars(Groups)["counts"].func
    Groups.counts = property(partial(counted, "read", read))  # where rows of experts end
    torch.use_deterministic_algorithms(True)
    with plugin_with_stand_ins() as modules:
        for case in CASES:
            wanted = compute(modules, case, "eager", 1)
            LAUNCHES.clear()
            one = compute(modules, case, "triton", 1)
            launches = dict(LAUNCHES)
            found = one, compute(modules, case, "triton", 2)
            differences = [((out - wanted).abs().max() / wanted.abs().max()).item() for out in found]
            report[case] = {"differences": differences, "launches": launches | {"read": LAUNCHES["read"]}}
    print(json.dumps(report))
