# SPDX-License-Identifier: Apache-2.0
"""Which layers are quantized: whole name parts, never substrings."""

import pytest
from tiny_models import make_model
from torch import nn

from hf_mxfp4.module_names import fused_experts, name_matches, split_linears


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("model.layers.2.mlp.up_proj", "layers.2", True),
        ("model.layers.20.mlp.up_proj", "layers.2", False),
        ("model.layers.2.mlp.gate", "mlp.gate", True),
        ("model.layers.2.mlp.gate_proj", "mlp.gate", False),
        ("model.layers.2.mlp.gate_up_proj", "up_proj", False),
        ("lm_head", "lm_head", True),
        ("lm_head_2", "lm_head", False),
        ("model.layers.0", "model.layers.0.mlp", False),
        ("model.layers.0.mlp", "layers.mlp", False),
        ("model.layers.0.mlp", "layers.0.", False),
        ("model.layers.0.mlp", "layers.*.mlp", False),
        ("model.layers.0.mlp.up_proj", r"re:model\.layers\.\d+\.mlp\..*", True),
        ("model.layers.0.mlp.up_proj", r"re:model\.layers\.\d+\.mlp", False),
        ("model.layers.0.mlp.up_proj", "re:up_proj", False),
        ("model.layers.0.mlp.up_proj", "re:.*(up|gate)_proj", True),
        ("model.layers.0.mlp.down_proj", "re:.*(up|gate)_proj", False),
    ],
)
def test_name_matches(name, pattern, expected):
    assert name_matches(name, pattern) is expected


def tree(**linears: nn.Module) -> nn.Module:
    """A module with the given dotted names, two underscores for a dot."""
    root = nn.Module()
    for name, module in linears.items():
        *parents, last = name.split("__")
        node = root
        for part in parents:
            if part not in node._modules:
                node.add_module(part, nn.Module())
            node = node._modules[part]
        node.add_module(last, module)
    return root


ROUTERS = (
    "mlp__gate", "mlp__shared_expert_gate", "block_sparse_moe__gate", "feed_forward__router", "mlp__router__layer",
)  # fmt: skip
HEADS = ("lm_head", "embed_out", "score", "classifier", "qa_outputs")


@pytest.mark.parametrize("name", [*(f"layers__0__{router}" for router in ROUTERS), *HEADS])
def test_routers_and_heads_are_left_alone_by_name(name):
    model = tree(**{name: nn.Linear(4, 2), "layers__0__mlp__gate_proj": nn.Linear(4, 4)})
    quantized, skipped = split_linears(model)
    assert list(quantized) == ["layers.0.mlp.gate_proj"] and skipped == [name.replace("__", ".")]


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("extra", [(), ("layers.0",)], ids=["no-extra", "extra"])
def test_the_head_of_a_model_is_always_skipped(tie, extra):
    quantized, skipped = split_linears(make_model("llama", tie=tie), extra)
    assert "lm_head" in skipped and "lm_head" not in quantized
    assert len(quantized) == (7 if extra else 14)


@pytest.mark.parametrize(
    ("patterns", "n_quantized"),
    [
        (["mlp"], 8),
        (["down_proj"], 12),
        (["self_attn.q_proj", "self_attn.k_proj"], 10),
        (["layers.1"], 7),
        (["model.layers.1.mlp.up_proj"], 13),
        (["re:.*(q|k|v)_proj"], 8),
        ([r"re:model\.layers\.0\..*"], 7),
        (["lm_head"], 14),
        (["mlp.gate"], 14),
        (["embed_tokens"], 14),
    ],
    ids=str,
)
def test_extra_skips(patterns, n_quantized):
    quantized, skipped = split_linears(make_model(), patterns)
    assert len(quantized) == n_quantized and len(skipped) == 15 - n_quantized


@pytest.mark.parametrize("pattern", ["layers.2", "mlp.gate_pro", "q_projs", "re:down_proj", "model.layer.0", "layers."])
def test_a_skip_that_matches_nothing_is_an_error(pattern):
    with pytest.raises(ValueError, match="modules_to_not_convert.*matches no module of Qwen2ForCausalLM") as error:
        split_linears(make_model(), ["layers.0", pattern])
    assert repr(pattern) in str(error.value)


@pytest.mark.parametrize("pattern", ["model.layers.1", "layers.1", r"re:model\.layers\.1\..*", r"re:layers\.1\..*"])
def test_a_base_model_understands_the_names_of_its_head_model(pattern):
    quantized, skipped = split_linears(make_model("llama").model, [pattern])
    assert len(quantized) == 7 and all(name.startswith("layers.0.") for name in quantized)
    assert len(skipped) == 7


def test_subclasses_of_linear_are_left_alone():
    class Special(nn.Linear):
        pass

    quantized, skipped = split_linears(tree(a=nn.Linear(4, 4), b=Special(4, 4), c=nn.Bilinear(4, 4, 4)))
    assert list(quantized) == ["a"] and skipped == []


def test_fused_experts_are_found():
    model = make_model("qwen3_moe")
    names = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert fused_experts(model) == names
    assert fused_experts(make_model("qwen2")) == []


def test_expressions_that_would_take_hours_are_refused():
    name = "model.layers.0.self_attn.q_proj" * 4
    with pytest.raises(ValueError, match="takes too long to match 'model.layers.0"):
        name_matches(name, "re:((.|..)+(.|...)+)+[!?]")
