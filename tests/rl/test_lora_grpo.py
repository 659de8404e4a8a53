# SPDX-License-Identifier: Apache-2.0
"""GRPO with LoRA on a packed policy: what trains, the noise, what a sampler is given; adapters that go on."""

import pytest
import torch
from grpo_runs import logged, prompts, trainer_factory, with_simulated_vllm
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.peft import policy_parameters


PACKED = MXFP4RLConfig(mode="packed")


def lora(**options):
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options}
    return LoraConfig(task_type="CAUSAL_LM", **settings)


@pytest.fixture
def build(tmp_path):
    factory = trainer_factory(tmp_path)

    def build(scheme=PACKED, peft_config=None, **options):
        return factory(scheme=scheme, peft_config=peft_config or lora(), **options)

    return build


def stored(model, adapters=False):
    return {n: p.detach().clone() for n, p in model.named_parameters() if ("lora_" in n) == adapters}


@pytest.mark.parametrize("scheme", [PACKED, MXFP4RLConfig()], ids=["packed", "qat"])
def test_a_target_that_the_policy_has_not_is_an_error(build, scheme):
    with pytest.raises(ValueError, match="'up_porj', the name of no module"):
        build(scheme=scheme, peft_config=lora(target_modules=["q_proj", "up_porj"]))


#: Noise in the second half of a run, a reference policy, and checkpointing.
RUN = {"beta": 0.1, "aqn_num_stages": 2, "aqn_sigma_start": 0.1, "aqn_sigma_end": 0.1, "error_every": 2}
RUN |= {"gradient_checkpointing": True}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer after four steps of adapters on a packed policy of quantized activations, and the parameters before."""
    scheme = MXFP4RLConfig(mode="packed", preset="w4a4", outlier_fallback=0.5)
    trainer = trainer_factory(tmp_path_factory.mktemp("lora"))(scheme=scheme, peft_config=lora(), **RUN)
    before = stored(trainer.model) | stored(trainer.model, adapters=True)
    trainer.train()
    return trainer, before


def test_adapters_train_and_the_base_keeps_every_bit(trained):
    trainer, before = trained
    assert trainer.n_quantized == 14
    assert trainer.error_callback is None
    assert all(torch.equal(value, before[name]) for name, value in stored(trainer.model).items())
    moved = [n for n, value in stored(trainer.model, adapters=True).items() if not torch.equal(value, before[n])]
    assert len(moved) == 28
    assert trainer.ref_model is None  # the base is the reference
    assert list(logged(trainer, "kl")) == [1, 2, 3, 4]


def test_noise_is_on_each_norm_of_the_base_once_and_the_mismatch_is_corrected(trained):
    trainer, before = trained
    names = list(trainer.noise.norms)
    assert len(names) == 5
    assert all("lora_" not in name for name in names)
    assert list(logged(trainer, "aqn/sigma").values()) == [0.0, 0.0, 0.1, 0.1]
    assert list(logged(trainer, "aqn/n_modules").values()) == [0, 0, 5, 5]
    assert all(torch.equal(m.weight, before[f"{name}.weight"]) for name, m in trainer.noise.norms.items())
    ratios = logged(trainer, "sampling/importance_sampling_ratio/mean")
    for step in (3, 4):
        assert logged(trainer, "aqn/measured_std")[step] == pytest.approx(0.1, rel=0.2)
        assert 0.5 < ratios[step] < 2
        assert abs(ratios[step] - 1) > 1e-4


def sampling_kl(trainer):
    trainer.train()
    return logged(trainer, "sampling/kl")[1]


@pytest.mark.parametrize("scheme", [PACKED, MXFP4RLConfig()], ids=["packed", "qat"])
def test_rollouts_compute_in_the_dtype_of_training(build, tmp_path, scheme):
    """In bfloat16 without noise the policies differ by roundings alone, of which adapters add none to speak of: new
    ones are zero. In the dtype of the parameters it was 7 to 35 times as much."""
    options = {"bf16": True, "aqn": False, "max_steps": 1}
    options |= {"per_device_train_batch_size": 128, "dataset": prompts(32), "max_completion_length": 8}
    plain = sampling_kl(trainer_factory(tmp_path)(scheme=MXFP4RLConfig(), **options))
    adapted = sampling_kl(build(scheme, **options))
    assert 0 < plain < 1e-6
    assert adapted < 2 * plain


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_rollouts_run_without_dropout(build, training):
    def sampled(dropout):
        torch.manual_seed(0)
        config = lora(init_lora_weights=False, lora_dropout=dropout, lora_alpha=32)
        trainer = build(peft_config=config, gradient_checkpointing=True)
        trainer.model.train(training)
        trainer.model.gradient_checkpointing_enable()
        modes = [module.training for module in trainer.model.modules()]
        torch.manual_seed(1)
        found = trainer._generate(["1+1=", "22+2=", "3+=", "4+4="])
        assert [module.training for module in trainer.model.modules()] == modes
        assert trainer.model.is_gradient_checkpointing
        return found[1], found[4]  # tokens and, in training, their log-probabilities

    tokens, log_probs = sampled(0.0)
    assert sampled(0.5) == (tokens, log_probs)
    assert (log_probs is not None) == training
    assert len(tokens) == 4


def test_training_keeps_its_dropout(build):
    trainer = build(peft_config=lora(lora_dropout=0.5), max_steps=1)
    modes = []
    dropout = next(m for name, m in trainer.model.named_modules() if name.endswith("lora_dropout.default"))
    dropout.register_forward_pre_hook(lambda module, _: modes.append((torch.is_grad_enabled(), module.training)))
    trainer.train()
    assert set(modes) == {(False, False), (True, True)}


def test_the_trainer_pushes_the_packed_policy_without_merging(build):
    """Against the interface of TRL's `VLLMGeneration`: vLLM itself does not run here."""
    trainer = build(peft_config=lora(init_lora_weights=False))
    pushed = with_simulated_vllm(trainer, walk=False)
    trainer.model.train()
    before = stored(trainer.model)
    trainer.state.global_step = 3
    trainer.state.max_steps = 4
    trainer._generate(["1+1="])
    trainer.model.eval()
    trainer._last_loaded_step = -1
    trainer._generate(["1+1="])
    noisy, last = pushed
    clean = {**noisy, **last}  # what is inside of vLLM
    expected = dict(policy_parameters(trainer.model))
    assert noisy.keys() == expected.keys()
    adapted = {name for name in expected if name.endswith("_proj.weight")}
    assert last.keys() == adapted | {name for name in expected if "norm" in name}
    assert all(torch.equal(clean[name], expected[name]) for name in expected)
    changed = [name for name in clean if not torch.equal(clean[name], noisy[name])]
    assert len(changed) == 5
    assert all("norm" in name for name in changed)
    assert trainer._metrics["train"]["aqn/n_modules"] == [5]
    assert all(torch.equal(value, before[name]) for name, value in stored(trainer.model).items())
    assert not any(p.dtype == torch.uint8 for p in clean.values())


LORA = lora(init_lora_weights=False)


@pytest.fixture(params=[PACKED, MXFP4RLConfig()], ids=["packed", "qat"])
def saved(request, tmp_path):
    """A function that makes trainers, the folder of an adapter that one of them left, and one that loads its base."""
    build = trainer_factory(tmp_path)
    trainer = build(scheme=request.param, peft_config=LORA, aqn=False, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))

    def load_base():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=request.param)

    return build, str(tmp_path / "adapter"), load_base


def test_an_adapter_that_is_loaded_trainable_goes_on(saved):
    build, adapter, load_base = saved
    policy = PeftModel.from_pretrained(load_base(), adapter, is_trainable=True)
    before = stored(policy, adapters=True)
    trainer = build(policy=policy, aqn=False, max_steps=2, beta=0.1)
    begun = stored(trainer.model, adapters=True)
    assert all(torch.equal(begun[name], value) for name, value in before.items())
    trainer.train()
    ended = stored(trainer.model, adapters=True)
    assert any(not torch.equal(ended[name], value) for name, value in before.items())


def test_an_adapter_that_would_be_replaced_or_stay_frozen_is_refused(saved):
    build, adapter, load_base = saved
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
