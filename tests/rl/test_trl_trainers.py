# SPDX-License-Identifier: Apache-2.0
"""Trainers of TRL on quantized models, and what the policy of `MXFP4GRPOTrainer` is held to by `beta`."""

import pytest
import torch
import trl
from datasets import Dataset
from factors import factors_config
from peft import LoraConfig, PeftModel
from tiny_models import make_model, make_tokenizer
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.rl.config import count_quantized


IDS = torch.arange(2, 14).view(2, 6)
PAIRS = Dataset.from_list([{"prompt": "1+2", "chosen": "=3", "rejected": "=4"}] * 4)
TEXTS = Dataset.from_list([{"prompt": "1+2", "completion": "=3"}] * 4)
EVERY_RUN = {"per_device_train_batch_size": 2, "max_steps": 2, "report_to": "none", "use_cpu": True, "bf16": False}
EVERY_RUN |= {"save_strategy": "no", "gradient_checkpointing": False, "disable_tqdm": True}
TOKENIZER = make_tokenizer("qwen2")


@pytest.fixture
def base(tmp_path):
    make_model(vocab_size=400).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def load(folder, **scheme):
    options = {"quantization_config": MXFP4RLConfig(**scheme)} if scheme else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def dpo(policy, tmp_path, **options):
    args = trl.DPOConfig(output_dir=str(tmp_path / "dpo"), logging_steps=1, **EVERY_RUN)
    return trl.DPOTrainer(policy, args=args, train_dataset=PAIRS, processing_class=TOKENIZER, **options)


def test_the_reference_of_dpo_has_the_scheme_of_the_policy(base, tmp_path):
    policy = load(base, mode="qat", preset="w4a16", scale_rule="rceil")
    trainer = dpo(policy, tmp_path)
    assert count_quantized(trainer.ref_model) == count_quantized(policy) == 14
    assert trainer.ref_model.config.quantization_config == policy.config.quantization_config
    assert trainer.ref_model.config.quantization_config is not policy.config.quantization_config
    assert torch.equal(logits(trainer.ref_model), logits(trainer.model))
    trainer.train()
    first = next(entry for entry in trainer.state.log_history if "rewards/chosen" in entry)
    assert abs(first["rewards/chosen"]) < 1e-6  # one policy at the first step


def test_a_reference_that_is_given_stays_as_it_is(base, tmp_path):
    reference = load(base)
    trainer = dpo(load(base, mode="qat"), tmp_path, ref_model=reference)
    assert count_quantized(trainer.ref_model) == 0


def sft(policy, out, **options):
    args = trl.SFTConfig(output_dir=str(out), learning_rate=1e-2, **EVERY_RUN)
    trainer = trl.SFTTrainer(policy, args=args, train_dataset=TEXTS, processing_class=TOKENIZER, **options)
    trainer.train()
    trainer.save_model()
    return trainer


def test_a_policy_of_sft_is_the_same_after_it_was_saved(base, tmp_path):
    policy = load(base, mode="qat")
    before = logits(policy)
    trainer = sft(policy, tmp_path / "sft")
    saved = load(tmp_path / "sft")
    assert count_quantized(saved) == 14
    assert torch.equal(logits(saved), logits(trainer.model))
    assert not torch.equal(logits(saved), before)


def test_an_adapter_of_sft_on_packed_weights_is_the_same_after_it_was_saved(base, tmp_path):
    before = logits(load(base, mode="packed"))
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = sft(load(base, mode="packed"), tmp_path / "sft", peft_config=lora)
    saved = PeftModel.from_pretrained(load(base, mode="packed"), tmp_path / "sft")
    assert torch.equal(logits(saved), logits(trainer.model))
    assert not torch.equal(logits(saved), before)


def test_a_reference_that_could_not_be_quantized_is_refused(build, tmp_path):
    """A policy quantized in place does not say by which scheme its checkpoint is to be loaded."""
    policy = make_model(layers=2, hidden=32, intermediate=48)
    quantize_linears(policy, factors_config())
    build()  # leaves its checkpoint, in full precision
    policy.config._name_or_path = str(tmp_path / "base")
    with pytest.raises(ValueError, match="the reference policy has 0 MXFP4 weight matrices and the policy 14"):
        build(policy=policy, beta=0.1)


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
