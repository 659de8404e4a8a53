# SPDX-License-Identifier: Apache-2.0
"""A trained adapter is continued, or refused before anything is loaded; it is never replaced by a new one."""

import pytest
import torch
from grpo_runs import trainer_factory
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig


LORA = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
SCHEMES = [MXFP4RLConfig(mode="packed"), MXFP4RLConfig()]


@pytest.fixture(params=SCHEMES, ids=["packed", "qat"])
def trained(request, tmp_path):
    """A function that makes trainers, the folder of an adapter that one of them saved, and one that loads its base."""
    build = trainer_factory(tmp_path)
    trainer = build(scheme=request.param, peft_config=LORA, aqn=False, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))

    def load_base():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=request.param)

    return build, str(tmp_path / "adapter"), load_base


def factors(model):
    return {n.replace(".default", ""): p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_adapter_that_is_loaded_trainable_goes_on(trained, beta):
    build, adapter, load_base = trained
    policy = PeftModel.from_pretrained(load_base(), adapter, is_trainable=True)
    saved = factors(policy)
    trainer = build(policy=policy, aqn=False, max_steps=2, beta=beta)
    begun = factors(trainer.model)
    assert all(torch.equal(begun[name], value) for name, value in saved.items())
    trainer.train()
    assert any(not torch.equal(factors(trainer.model)[name], value) for name, value in saved.items())


def test_an_adapter_that_would_be_replaced_or_stay_frozen_is_refused(trained):
    build, adapter, load_base = trained
    frozen = PeftModel.from_pretrained(load_base(), adapter)
    trainable = PeftModel.from_pretrained(load_base(), adapter, is_trainable=True)
    injected = AutoModelForCausalLM.from_pretrained(adapter)
    for policy, config, words in (
        (adapter, None, "holds an adapter and no model"),
        (adapter, LORA, "holds an adapter and no model"),
        (injected, LORA, "loaded from the folder of an adapter"),
        (trainable, LORA, "peft_config would make another"),
        (frozen, None, "the adapter of the model is frozen"),
    ):
        with pytest.raises(ValueError, match=f"{words}.*is_trainable=True"):
            build(policy=policy, peft_config=config, aqn=False)
