# SPDX-License-Identifier: Apache-2.0
"""Trainers of TRL and transformers on quantized weights, held to the same run of a plain model of the quantized values;
and what the policy of `MXFP4GRPOTrainer` is held to by `beta`."""

import contextlib
import re
from functools import cached_property
from pathlib import Path

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from grpo_runs import quantized
from peft import LoraConfig, PeftModel, get_peft_model
from same_bits import IDS, assert_same, logits, tensors_in, weights
from tiny_models import make_model, make_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, TrainingArguments

from hf_mxfp4 import MXFP4DistillationConfig, MXFP4DistillationTrainer, MXFP4RLConfig
from hf_mxfp4.rl import ExactResumeMixin
from hf_mxfp4.rl.config import count_quantized


TOKENIZER = make_tokenizer("qwen2")
ANSWERS = [{"prompt": f"{i}+2", "completion": f"={i}2"} for i in range(6)]
PAIRS = [{"prompt": f"{i}+2", "chosen": f"={i + 2}", "rejected": f"={i}"} for i in range(6)]
PROMPTS = [{"prompt": f"{i}+2"} for i in range(8)]
TOKENS = [{"input_ids": (IDS[0] + i).tolist(), "labels": (IDS[1] + i).tolist()} for i in range(6)]
#: Gradients are checkpointed, as TRL does by default.
EVERY_RUN = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 4, "learning_rate": 1e-2}
EVERY_RUN |= {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "report_to": "none", "use_cpu": True}
EVERY_RUN |= {"bf16": False, "disable_tqdm": True, "gradient_checkpointing": True}


class ExactTrainer(ExactResumeMixin, Trainer):
    """Also tells layers that draw random numbers the step."""


class ExactRLOO(ExactResumeMixin, trl.RLOOTrainer):
    """Also keeps completions that several steps are trained on."""


DISTILLED = {"report_every": 0, "allow_full_precision": True}
#: Trainer, its config, rows and options.
TRAINERS = {
    "ExactTrainer": (ExactTrainer, TrainingArguments, TOKENS, {}),
    "Trainer": (Trainer, TrainingArguments, TOKENS, {}),
    "SFT": (trl.SFTTrainer, trl.SFTConfig, ANSWERS, {}),
    "DPO": (trl.DPOTrainer, trl.DPOConfig, PAIRS, {}),
    "KTO": (trl.KTOTrainer, trl.KTOConfig, [row | {"label": i % 3 > 0} for i, row in enumerate(ANSWERS)], {}),
    "Reward": (trl.RewardTrainer, trl.RewardConfig, PAIRS, {}),
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig, PROMPTS, {"max_completion_length": 4, "num_generations": 2, "beta": 0.1}),
    "RLOO": (trl.RLOOTrainer, trl.RLOOConfig, PROMPTS, {"max_completion_length": 4, "num_generations": 2, "beta": 0.1}),
    "ExactRLOO": (ExactRLOO, trl.RLOOConfig, PROMPTS, {"max_completion_length": 4, "num_iterations": 3}),
    "Distillation": (trl.DistillationTrainer, trl.DistillationConfig, PROMPTS, {"max_completion_length": 4}),
    "MXFP4Distillation": (MXFP4DistillationTrainer, MXFP4DistillationConfig, ANSWERS, DISTILLED),
}
SCHEMES = {
    "random": MXFP4RLConfig(preset="w4a4g4", dgrad={"grad": "rceil+stochastic"}),
    "packed": MXFP4RLConfig(mode="packed"),
}
CASES = [(name, mode) for name in TRAINERS for mode in ("qat", "packed") if not name.startswith("Exact")]
CASES += [("SFT", "experts")]


def lengths(completions, **kwargs):
    return [len(text) / 4 for text in completions]


class Case:
    """Runs of a trainer on trainable quantized weights, or with adapters on packed ones."""

    def __init__(self, name, mode, root):
        self.name = name
        self.mode = mode
        self.folder = root / f"{name}-{mode}"
        task = "SEQ_CLS" if name == "Reward" else "CAUSAL_LM"
        self.lora = LoraConfig(r=4, target_modules="all-linear", task_type=task) if mode == "packed" else None
        moe = mode in ("experts", "random")
        self.base = root / ("classifier" if name == "Reward" else "experts" if moe else "base")
        self.n_quantized = 4 + 4 * 2 if moe else 7
        self.scheme = SCHEMES.get(mode, MXFP4RLConfig(preset="w4a16", outlier_fallback=None))

    def load(self, folder, quantize=True):
        options = {"quantization_config": self.scheme} if quantize else {}
        cls = AutoModelForSequenceClassification if self.name == "Reward" else AutoModelForCausalLM
        return cls.from_pretrained(folder, dtype=torch.float32, **options)

    def trainer(self, model, out, **options):
        cls, config, rows, own = TRAINERS[self.name]
        rows = Dataset.from_list(rows)
        others = {"processing_class": TOKENIZER, "peft_config": self.lora}
        torch.manual_seed(0)
        if self.name.endswith("Trainer"):
            others = {"data_collator": transformers.default_data_collator}
            model = get_peft_model(model, self.lora) if self.lora else model
        if self.name.endswith(("GRPO", "RLOO")):
            others["reward_funcs"] = lengths
        if "Distillation" in self.name:
            others["teacher_model"] = str(self.base)
        if self.name == "MXFP4Distillation" and self.lora is None:
            own = own | {"train_all": True}
        args = config(str(self.folder / out), **EVERY_RUN | own | options)
        return cls(model=model, args=args, train_dataset=rows, eval_dataset=rows, **others)

    def run(self, model, out, **options):
        """The trainer after its steps, and what it logged in an evaluation before them and in the first of them."""
        trainer = self.trainer(model, out, **options)
        reference = getattr(trainer, "ref_model", None)
        before = logits(trainer.model), reference and logits(reference)
        if out == "run":
            self.before = before
        torch.manual_seed(1)
        evaluated = trainer.evaluate()
        self.train(trainer)
        logged = trainer.state.log_history[0] | evaluated
        times = ("time", "per_second", "weights_per_step")
        return trainer, {name: value for name, value in logged.items() if not name.endswith(times)}

    def train(self, trainer, **options):
        torch.manual_seed(1)
        trainer.train(**options)

    @cached_property
    def trained(self):
        return self.run(self.load(self.base), "run")

    @cached_property
    def twin(self):
        self.load(self.base).dequantize().save_pretrained(self.folder / "dequantized")
        return self.run(self.load(self.folder / "dequantized", quantize=False), "twin", max_steps=1, save_strategy="no")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(name, mode)` gives a case, each once."""
    root = tmp_path_factory.mktemp("trainers")
    cases = {}
    for family, folder in (("qwen2", "base"), ("qwen3_moe", "experts")):
        model = make_model(family, vocab_size=400, layers=1, hidden=32, intermediate=48)
        model.model.norm.weight.data *= 8  # predictions that are far from uniform
        model.save_pretrained(root / folder)
    AutoModelForSequenceClassification.from_pretrained(root / "base", num_labels=1).save_pretrained(root / "classifier")
    return lambda *key: cases.setdefault(key, Case(*key, root))


@pytest.fixture(params=CASES, ids="-".join)
def case(request, made):
    return made(*request.param)


def test_the_first_step_and_an_evaluation_are_those_of_the_dequantized_model(case):
    found = case.trained[1]
    expected = case.twin[1]
    assert {"loss", "grad_norm", "eval_loss"} <= found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert count_quantized(case.trained[0].model) == case.n_quantized


def test_what_was_trained_is_the_same_after_it_was_saved(case):
    trainer, _ = case.trained
    trainer.save_model(str(case.folder / "saved"))
    if case.lora:
        saved = PeftModel.from_pretrained(case.load(case.base), case.folder / "saved")
    else:
        saved = case.load(case.folder / "saved", quantize=False)
    assert count_quantized(saved) == case.n_quantized
    assert torch.equal(logits(saved), logits(trainer.model))
    assert not torch.equal(logits(saved), case.before[0])
    if case.lora:
        with trainer.model.disable_adapter():  # which is the reference
            assert torch.equal(logits(trainer.model), case.before[0])
            assert getattr(trainer, "ref_model", None) is None


def test_a_resumed_run_ends_with_the_weights_of_one_that_was_never_stopped(case):
    trainer, _ = case.trained
    resumed = case.trainer(case.load(case.base), "run", save_strategy="no")
    case.train(resumed, resume_from_checkpoint=str(case.folder / "run" / "checkpoint-2"))
    assert_same(weights(resumed.model), weights(trainer.model))


def test_the_mixin_repeats_random_numbers_and_refuses_a_checkpoint_without_experts(made, monkeypatch):
    case = made("ExactTrainer", "random")
    plain = made("Trainer", "random")
    for each in (case, made("ExactRLOO", "qat")):
        test_a_resumed_run_ends_with_the_weights_of_one_that_was_never_stopped(each)
    monkeypatch.setattr("hf_mxfp4.checkpoint.save.own_names", lambda *_: contextlib.nullcontext())  # an older one
    assert plain.trained
    resumed = case.trainer(case.load(case.base), "run")
    with pytest.raises(ValueError, match=r"no weights for 2 parameters .*mlp\.experts\.gate_up_proj"):
        resumed.train(resume_from_checkpoint=str(plain.folder / "run" / "checkpoint-2"))


@pytest.mark.parametrize("name", ["DPO", "GRPO", "KTO", "RLOO"])
def test_the_reference_has_the_scheme_of_the_policy(made, name):
    case = made(name, "qat")
    trainer, _ = case.trained
    reference = trainer.ref_model.config
    policy = trainer.model.config
    assert count_quantized(trainer.ref_model) == 7
    assert reference.quantization_config == policy.quantization_config
    assert reference.quantization_config is not policy.quantization_config
    assert torch.equal(*case.before)
    assert torch.equal(logits(trainer.ref_model), case.before[0])


def test_a_reference_that_is_given_stays_as_it_is(made):
    case = made("DPO", "qat")
    args = trl.DPOConfig(str(case.folder / "given"), **EVERY_RUN)
    data = {"train_dataset": Dataset.from_list(PAIRS), "processing_class": TOKENIZER}
    trainer = trl.DPOTrainer(case.load(case.base), case.load(case.base, quantize=False), args, **data)
    assert count_quantized(trainer.ref_model) == 0


@pytest.mark.parametrize("name, mode", [("RLOO", "qat"), ("Distillation", "packed")])
def test_pushing_master_weights_to_vllm_is_refused(made, name, mode):
    case = made(name, mode)
    with pytest.raises(ValueError, match=f"trl's {name}Trainer would push the master weights .* set use_vllm=False"):
        case.trainer(case.load(case.base), "vllm", use_vllm=True)


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_the_head_of_a_reward_model_is_trained_in_full_precision_and_saved(made, mode):
    case = made("Reward", mode)
    trainer, _ = case.trained
    folders = case.base, case.folder / "run" / "checkpoint-4"
    before, saved = (t for folder in folders for name, t in tensors_in(folder).items() if name.endswith("score.weight"))
    trained = [p for name, p in trainer.model.named_parameters() if ".score." in f".{name}" and p.requires_grad]
    assert len(trained) == 1
    assert trained[0].dtype == torch.float32
    assert torch.equal(trained[0], saved)
    assert not torch.equal(saved, before)


def test_packed_weights_are_refused_without_adapters(made):
    case = made("Trainer", "packed")
    args = TrainingArguments(str(case.folder / "alone"), use_cpu=True)
    with pytest.raises(ValueError, match="Please attach trainable adapters"):
        Trainer(case.load(case.base), args, train_dataset=TOKENS)


@pytest.mark.slow
def test_the_examples_of_the_docs_run(made, tmp_path, monkeypatch):
    case = made("SFT", "qat")
    TOKENIZER.save_pretrained(case.base)
    text = (Path(__file__).parents[2] / "docs" / "trl.md").read_text()
    first, *examples = re.findall(r"```python\n(.*?)```", text, re.S)
    first, n_names = re.subn(r"^name = .*", f"name = {str(case.base)!r}", first, flags=re.M)
    assert n_names == 1
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in (first, *examples):
        exec(block, names)
    made = ("distilled", "dpo", "dpo-lora", "grpo", "sft")
    assert {folder.parent.name for folder in (tmp_path / "outputs").glob("*/checkpoint-2")} == set(made)
    assert count_quantized(case.load("outputs/sft/policy", quantize=False)) == 7


def test_a_reference_that_could_not_be_quantized_is_refused(build, tmp_path):
    """A policy quantized in place does not say by which scheme its checkpoint is to be loaded."""
    policy = quantized(layers=2, hidden=32, intermediate=48)
    build()  # leaves its checkpoint, in full precision
    policy.config._name_or_path = str(tmp_path / "base")
    with pytest.raises(ValueError, match="the reference policy has 0 MXFP4 weight matrices and the policy 14"):
        build(policy=policy, beta=0.1)
