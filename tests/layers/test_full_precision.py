# SPDX-License-Identifier: Apache-2.0
"""A quantized model computed in full precision for the length of a context."""

import copy

import pytest
import torch
from moe_models import make_moe, tokens
from peft import LoraConfig, get_peft_model
from tiny_models import make_model

from hf_mxfp4 import MXFP4RLConfig, pack
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.layers import MXFP4Linear, full_precision


IDS = torch.arange(2, 18).view(2, 8)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("scheme", [{}, {"preset": "w4a4g4"}, {"fprop": {"rotation": "random-16"}}], ids=str)
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_it_is_the_plain_model_bit_for_bit(family, scheme):
    plain = make_model(family)
    model = copy.deepcopy(plain)
    quantize_linears(model, MXFP4RLConfig(**scheme))
    before = logits(model)
    with full_precision(model) as switched:
        assert switched == 14
        assert torch.equal(logits(model), logits(plain))
    assert not torch.equal(before, logits(plain))
    assert torch.equal(logits(model), before)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_mixture_of_experts():
    plain = make_moe()
    model = copy.deepcopy(plain)
    quantize_linears(model, MXFP4RLConfig())
    with torch.no_grad(), full_precision(model):
        assert torch.equal(model(tokens()).logits, plain(tokens()).logits)


def test_adapters_stay_on():
    plain = make_model()
    model = copy.deepcopy(plain)
    quantize_linears(model, MXFP4RLConfig())
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    reference = get_peft_model(plain, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    reference.load_state_dict(adapted.state_dict())
    with full_precision(adapted):
        assert torch.equal(logits(adapted), logits(reference))


def test_an_exception_leaves_nothing_behind():
    model = make_model()
    quantize_linears(model, MXFP4RLConfig())
    layers = [module for module in model.modules() if isinstance(module, MXFP4Linear)]
    own = layers[0].forward
    layers[0].forward = own  # as accelerate's hooks leave it
    before = logits(model)
    with pytest.raises(ZeroDivisionError), full_precision(model):
        raise ZeroDivisionError
    assert layers[0].__dict__["forward"] is own
    assert not any("forward" in layer.__dict__ for layer in layers[1:])
    assert torch.equal(logits(model), before)


def test_contexts_nest():
    model = make_model()
    quantize_linears(model, MXFP4RLConfig())
    before = logits(model)
    with full_precision(model):
        outer = logits(model)
        with full_precision(model):
            assert torch.equal(logits(model), outer)
        assert torch.equal(logits(model), outer)
    assert torch.equal(logits(model), before)


def test_models_that_have_no_full_precision_are_refused():
    with pytest.raises(ValueError, match="has no quantized layer"), full_precision(make_model()):
        pytest.fail("not entered")
    model = make_model()
    quantize_linears(model, MXFP4RLConfig())
    with pytest.raises(ValueError, match="packed layers, whose weights exist in 4 bits only"):
        with full_precision(pack(model)):
            pytest.fail("not entered")
