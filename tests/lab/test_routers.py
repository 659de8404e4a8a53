# SPDX-License-Identifier: Apache-2.0
"""Statistics of routers: agreement with the model in full precision, and the load of experts."""

import copy
import math

import pytest
import torch
from moe_models import make_moe, tokens
from tables import PLAIN
from tiny_models import make_model

from hf_mxfp4 import MXFP4RLConfig, pack
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.lab import RouterStatistics, router_statistics
from hf_mxfp4.model.routers import find_routers, recorded_choices


def quantized(family="qwen3_moe"):
    model = make_moe(family)
    quantize_linears(model, MXFP4RLConfig(**PLAIN))
    return model


def chosen_sets(model, ids):
    with torch.no_grad(), recorded_choices(find_routers(model)) as choices:
        model(ids)
    return {name: [set(row) for row in passes[0].tolist()] for name, passes in choices.items()}


def test_load_in_numbers():
    choices = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 1]])  # 4, 3 and 1 of 8 choices; the fourth expert is dead
    found = RouterStatistics.of("gate", choices, 4)
    entropy = -(1 / 2 * math.log(1 / 2) + 3 / 8 * math.log(3 / 8) + 1 / 8 * math.log(1 / 8))
    assert found.load_entropy == pytest.approx(entropy / math.log(4))
    assert found.load_max_over_mean == pytest.approx(2)
    assert found.dead_experts == pytest.approx(1 / 4)
    assert found.agreement is None


def test_an_even_load():
    found = RouterStatistics.of("gate", torch.tensor([[0, 1], [2, 3]]), 4)
    assert found == RouterStatistics("gate", None, 1.0, 1.0, 0.0)


def test_a_single_expert_takes_all():
    found = RouterStatistics.of("gate", torch.tensor([[2], [2]]), 4, torch.tensor([[2], [1]]))
    assert found == RouterStatistics("gate", 0.5, 0.0, 4.0, 0.75)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss"])
def test_agreement_is_that_of_the_model_before_quantization(family):
    model = quantized(family)
    ids = tokens(16, 16)
    theirs = chosen_sets(make_moe(family), ids)
    ours = chosen_sets(model, ids)
    agreement = {stats.name: stats.agreement for stats in router_statistics(model, ids)}
    for name in ours:
        shared = [len(a & b) / 2 for a, b in zip(ours[name], theirs[name], strict=True)]
        assert agreement[name] == pytest.approx(sum(shared) / len(shared))
    assert 0.5 < min(agreement.values()) < 1
    assert list(agreement) == list(find_routers(model))


def test_padding_does_not_count():
    model = quantized()
    ids = tokens(4, 9)
    padded = torch.cat([ids, torch.zeros(4, 30, dtype=torch.long)], dim=1)
    mask = (padded != 0).long()
    for a, b in zip(router_statistics(model, ids), router_statistics(model, padded, mask), strict=True):
        assert a == b
    with pytest.raises(ValueError, match="no token was routed"):
        router_statistics(model, ids, torch.zeros_like(ids))


def test_the_model_is_left_as_it_was():
    model = quantized().train()
    state = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    router_statistics(model, tokens())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or "forward" in module.__dict__ for module in model.modules())


def test_models_without_something_to_compare_with():
    plain = make_moe()
    packed = pack(quantized())
    with pytest.raises(ValueError, match="no quantized layer"):
        router_statistics(plain, tokens())
    with pytest.raises(ValueError, match="4 bits only"):
        router_statistics(packed, tokens())
    with pytest.raises(ValueError, match="has no router"):
        router_statistics(make_model(), tokens())
