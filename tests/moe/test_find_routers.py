# SPDX-License-Identifier: Apache-2.0
"""Finding routers, and reading their choices, in the architectures of transformers."""

import pytest
import torch
from moe_models import FAMILIES, make_moe, tokens
from peft import LoraConfig, get_peft_model
from tiny_models import make_model
from torch import nn

from hf_mxfp4.moe import choice_agreement, find_routers, present_routers, recorded_choices


PLACES = {"gpt_oss": "mlp.router", "granitemoe": "block_sparse_moe.router"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_router_is_found_and_its_choices_are_read(family):
    model = make_moe(family)
    routers = find_routers(model)
    layers = [1] if family == "deepseek_v3" else [0, 1]  # whose first layer is dense
    assert list(routers) == [f"model.layers.{layer}.{PLACES.get(family, 'mlp.gate')}" for layer in layers]
    logits = []
    handles = [
        router.register_forward_hook(lambda module, args, output: logits.append(max(output, key=lambda t: t.shape[-1])))
        for router in routers.values()
    ]
    with torch.no_grad(), recorded_choices(routers) as choices:
        model(tokens())
    for handle in handles:
        handle.remove()
    for (name, (chosen,)), scores in zip(choices.items(), logits, strict=True):
        assert chosen.shape == (21, 2) and scores.shape == (21, 6), name
        if family != "deepseek_v3":  # the best of all, where there are no groups
            assert torch.equal(chosen.sort().values, scores.argsort(descending=True)[:, :2].sort().values)


def test_without_a_router():
    model = make_model("qwen2")
    assert present_routers(model) == {}
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has no router.*mixture-of-experts models"):
        find_routers(model)


def test_a_router_of_another_library_is_found_by_structure():
    class Gate(nn.Module):
        def __init__(self, experts):
            super().__init__()
            self.top_k, self.num_experts = 2, 4
            self.weight = nn.Parameter(torch.zeros(experts, 8))

    found = find_routers(nn.ModuleDict({"a": Gate(4), "b": Gate(5), "c": nn.Linear(8, 4)}))
    assert list(found) == ["a"]  # the others lack a row for each expert, or top_k


def test_of_a_router_trained_as_a_copy_the_copy_is_taken():
    options = {"target_modules": ["q_proj"], "modules_to_save": ["gate"], "r": 2}
    model = get_peft_model(make_moe(), LoraConfig(**options))
    routers = find_routers(model)
    assert len(routers) == 2 and all(name.endswith(".mlp.gate.modules_to_save.default") for name in routers)
    with torch.no_grad(), recorded_choices(routers) as choices:
        model(tokens())
    assert [len(passes) for passes in choices.values()] == [1, 1]


def test_routers_under_lora_on_their_weights():
    model = get_peft_model(make_moe(), LoraConfig(target_parameters=["mlp.gate.weight"], r=2))
    with torch.no_grad(), recorded_choices(find_routers(model)) as choices:
        model(tokens())
    assert [len(passes) for passes in choices.values()] == [1, 1]


def test_a_router_that_does_not_tell_its_choices_is_named():
    model = make_moe()
    router = model.model.layers[1].mlp.gate
    forward = router.forward
    router.forward = lambda x: (*forward(x)[:2], forward(x)[2].float())
    with torch.no_grad(), recorded_choices(find_routers(model)):
        with pytest.raises(ValueError, match=r"layers.1.mlp.gate \(Qwen3MoeTopKRouter\) does not return the indices"):
            model(tokens())


def test_recording_ends_with_its_context():
    model = make_moe()
    with recorded_choices(find_routers(model)) as choices:
        pass
    with torch.no_grad():
        model(tokens())
    assert not any(choices.values())


def test_agreement_counts_experts_in_any_order():
    a = torch.tensor([[0, 1, 2], [3, 4, 5], [0, 1, 2], [5, 0, 3]])
    b = torch.tensor([[2, 0, 1], [0, 1, 2], [0, 4, 3], [0, 3, 1]])
    assert choice_agreement(a, b).tolist() == pytest.approx([1.0, 0.0, 1 / 3, 2 / 3])
    with pytest.raises(ValueError, match="one shape"):
        choice_agreement(a, b[:, :2])
