# SPDX-License-Identifier: Apache-2.0
"""Noise never reaches a norm whose output a router reads."""

import pytest
import torch
from moe_models import FAMILIES, make_moe, tokens
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_mxfp4.rl.noise.norms import find_norms
from hf_mxfp4.routing import find_routers


def norms_before_routers(model):
    """The norms whose output is what a router gets, seen while the model runs: the same memory."""
    outputs, feeding = {}, set()
    handles = [
        module.register_forward_hook(lambda m, args, output, name=name: outputs.update({name: output}))
        for name, module in model.named_modules()
        if "norm" in name.rsplit(".", 1)[-1]
    ]

    def look(module, args):
        same = [name for name, output in outputs.items() if output.data_ptr() == args[0].data_ptr()]
        assert same, "a router reads something else than a norm's output"
        feeding.update(same)

    handles += [router.register_forward_pre_hook(look) for router in find_routers(model).values()]
    with torch.no_grad():
        model(tokens())
    for handle in handles:
        handle.remove()
    return feeding


@pytest.mark.parametrize("peft", [False, True], ids=["plain", "peft"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_norm_that_feeds_a_router_is_noised(family, peft):
    model = make_moe(family)
    if peft:
        model = get_peft_model(model, LoraConfig(target_modules=["q_b_proj" if family == "deepseek_v3" else "q_proj"]))
    feeding, noised = norms_before_routers(model), set(find_norms(model))
    assert len(feeding) == len(find_routers(model))
    assert not feeding & noised
    # All else is: the two norms before attention, the final one, and for a dense layer the one before its MLP.
    expected = {name for name, _ in model.named_modules() if name.endswith((".input_layernorm", "model.norm"))}
    if family == "deepseek_v3":
        expected |= {name for name, _ in model.named_modules() if name.endswith("layers.0.post_attention_layernorm")}
    assert len(expected) == 3 + (family == "deepseek_v3") and expected <= noised


def test_routers_that_are_plain_linear_layers_count_by_name():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(4), nn.RMSNorm(4)
            self.mlp = nn.ModuleDict({"gate": nn.Linear(4, 2)})

    assert list(find_norms(nn.ModuleDict({"layer": Block()}))) == ["layer.input_layernorm"]
