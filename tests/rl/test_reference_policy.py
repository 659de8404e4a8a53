# SPDX-License-Identifier: Apache-2.0
"""What the policy is held to by `beta`: a reference under the same scheme, or one that is said to differ."""

import pytest
import torch
from factors import factors_config
from grpo_runs import logged
from peft import LoraConfig
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.rl.checks import count_quantized


def test_the_reference_shares_the_scheme(build):
    trainer = build(beta=0.1, aqn=False, max_steps=2)
    assert count_quantized(trainer.ref_model) == trainer.n_quantized == 14
    assert trainer.ref_model.config.quantization_config == trainer.model.config.quantization_config
    trainer.train()
    first, second = logged(trainer, "kl").values()
    assert abs(first) < 1e-6 < second  # one policy at the first step


def test_a_reference_that_could_not_be_quantized_is_refused(build, tmp_path):
    """A policy quantized in place does not say by which scheme its checkpoint is to be loaded."""
    policy = make_model(layers=2, hidden=32, intermediate=48)
    quantize_linears(policy, factors_config())
    build()  # leaves its checkpoint, in full precision
    policy.config._name_or_path = str(tmp_path / "base")
    with pytest.raises(ValueError, match="the reference policy has 0 MXFP4 weight matrices and the policy 14"):
        build(policy=policy, beta=0.1)


def test_adapters_are_their_own_reference(build):
    adapters = {"peft_config": LoraConfig(target_modules="all-linear", r=2), "beta": 0.1, "aqn": False}
    trainer = build(**adapters, max_steps=2)
    assert trainer.ref_model is None
    trainer.train()
    first, second = logged(trainer, "kl").values()
    assert abs(first) < 1e-6 < second


def test_full_precision_has_a_reference_in_full_precision(build, tmp_path):
    build()
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trainer = build(policy=policy, beta=0.1, allow_full_precision=True)
    assert count_quantized(trainer.ref_model) == trainer.n_quantized == 0


def test_a_synchronized_reference_follows_the_masters(build):
    """`sync_ref_model` mixes master weights; what the reference computes with follows."""
    trainer = build(
        beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=0.5, ref_model_sync_steps=2, max_steps=2, aqn=False
    )
    before = {name: value.clone() for name, value in trainer.ref_model.named_parameters()}
    trainer.train()
    ids = torch.tensor([[2, 3, 4, 5]])
    for name, value in trainer.model.named_parameters():
        mixed = 0.5 * value + 0.5 * before[name]
        assert torch.allclose(trainer.ref_model.get_parameter(name), mixed, atol=1e-6), name
    with torch.no_grad():
        found = trainer.ref_model(ids).logits
        trainer.model.load_state_dict(trainer.ref_model.state_dict())
        assert torch.allclose(trainer.model.eval()(ids).logits, found, atol=1e-5)
