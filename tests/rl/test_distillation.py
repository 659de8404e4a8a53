# SPDX-License-Identifier: Apache-2.0
"""Distillation of quantized students: the loss, what is shared with the teacher, memory, data, and resuming."""

import contextlib
import json
import math
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
import trl
from datasets import Dataset
from grpo_runs import logged
from peft import LoraConfig
from same_bits import assert_same, weights
from tiny_models import make_model, make_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.kernels import chunked_divergence, chunked_logprob

from hf_mxfp4 import MXFP4DistillationConfig, MXFP4DistillationTrainer, MXFP4RLConfig
from hf_mxfp4.rl import StepMovementCallback, distillation


TOKENIZER = make_tokenizer("qwen2")
STORIES = ["Natalia sold clips to 48 of her friends in April", "The quick brown fox", "half as many clips", "48/2 = 24"]
IDS = [[5 + (7 * row + 3 * column) % 390 for column in range(9 + row)] for row in range(8)]
ROWS = [{"input_ids": ids} for ids in IDS]
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
QAT = {"mode": "qat"}


@pytest.fixture
def build(tmp_path):
    """`build(rows, **options)` makes a trainer of a student under ``scheme`` (`None`: in full precision)."""
    base = tmp_path / "base"

    def make(
        rows=ROWS, scheme=QAT, evaluated=None, *, teacher=None, peft_config=None, student=None, tokenizer=TOKENIZER,
        **options,
    ):  # fmt: skip
        if not base.exists():
            model = make_model(vocab_size=400, tie=True, max_position_embeddings=128)
            model.model.norm.weight.data *= 8  # predictions that are far from uniform
            model.save_pretrained(base)
        if student is None:
            quantization = {"quantization_config": MXFP4RLConfig(**scheme)} if scheme else {}
            student = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **quantization)
        settings = {"output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 4, "max_steps": 2}
        settings |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False}
        settings |= {"gradient_checkpointing": False, "disable_tqdm": True, "report_every": 0, "learning_rate": 1e-3}
        args = MXFP4DistillationConfig(**(settings | options))
        data = {"train_dataset": Dataset.from_list(rows)}
        data["eval_dataset"] = Dataset.from_list(evaluated) if evaluated else None
        others = {"processing_class": tokenizer, "peft_config": peft_config}
        return MXFP4DistillationTrainer(student, teacher, args, **data, **others)

    return make


def loss_of(trainer, rows):
    trainer.model.train()
    return trainer.compute_loss(trainer.model, trainer._generate_and_score_completions(rows))


def divergence(student, teacher, rows):
    """KL(teacher || student) per token by PyTorch's own function, on whole logits of one row at a time."""
    total = count = 0
    for ids in rows:
        with torch.no_grad():
            own, other = (model(input_ids=torch.tensor([ids])).logits[0, :-1].double() for model in (student, teacher))
        logs = F.log_softmax(own, -1), F.log_softmax(other, -1)
        total += F.kl_div(*logs, log_target=True, reduction="sum").item()
        count += len(ids) - 1
    return total / count


@torch.no_grad()
def perplexity(model):
    total = count = 0
    for ids in IDS:
        tokens = torch.tensor([ids])
        total += model(input_ids=tokens, labels=tokens).loss.item() * (len(ids) - 1)
        count += len(ids) - 1
    return math.exp(total / count)


def test_the_loss_is_the_divergence_that_torch_computes(build):
    trainer = build(evaluated=ROWS, per_device_eval_batch_size=3)
    expected = divergence(trainer.model.eval(), trainer.teacher_model, IDS)
    assert expected > 1e-3
    assert loss_of(trainer, ROWS).item() == pytest.approx(expected, rel=1e-4)
    assert trainer.tokens_distilled == 92  # one token less than each row has
    evaluated = trainer.evaluate()
    assert evaluated["eval_kl"] == pytest.approx(expected, rel=1e-4)
    assert evaluated["eval_perplexity"] == pytest.approx(perplexity(trainer.model), rel=1e-4)
    assert evaluated["eval_teacher_perplexity"] == pytest.approx(perplexity(trainer.teacher_model), rel=1e-4)


@pytest.mark.parametrize("scheme, peft_config", [(QAT, None), ({"mode": "packed"}, LORA)])
def test_the_teacher_shares_what_is_frozen(build, caplog, scheme, peft_config):
    caplog.set_level("INFO", "hf_mxfp4")
    trainer = build(scheme=scheme, peft_config=peft_config)
    student = trainer.model.get_base_model() if peft_config else trainer.model
    own = {name.replace(".base_layer", ""): p for name, p in student.named_parameters()}
    teacher = dict(trainer.teacher_model.named_parameters())
    shared = {name for name in teacher if name in own and teacher[name].data_ptr() == own[name].data_ptr()}
    frozen = ("norm.weight", "embed_tokens.weight", *(["bias"] if peft_config else []))
    assert shared == {name for name in teacher if name.endswith(frozen)}
    biases = 2 * (64 + 2 * 32) if peft_config else 0
    assert trainer.shared == (len(shared), 4 * (400 * 64 + 5 * 64 + biases))
    assert f"{len(shared)} tensors (0.1 MB) are shared with the teacher" in caplog.text
    assert trainer.teacher_model.lm_head.weight is own["model.embed_tokens.weight"]
    assert not any(p.requires_grad for p in teacher.values())


def test_a_teacher_in_16_bits_shares_float32_tensors_under_autocast(build, tmp_path):
    build().teacher_model.bfloat16().save_pretrained(tmp_path / "base")
    trainer = build(bf16=True)
    dtypes = {name: p.dtype for name, p in trainer.teacher_model.named_parameters()}
    assert trainer.shared == (6, 4 * (400 * 64 + 5 * 64))
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert dtypes["model.norm.weight"] == dtypes["model.embed_tokens.weight"] == torch.float32
    with trainer.accelerator.autocast():
        expected = divergence(trainer.model.eval(), trainer.teacher_model, IDS)
    seen = set()
    for model in (trainer.model, trainer.teacher_model):
        model.model.layers[0].mlp.up_proj.register_forward_hook(lambda layer, read, out: seen.add(out.dtype))
    assert loss_of(trainer, ROWS).item() == pytest.approx(expected, rel=0.05)
    trainer.train()
    assert seen == {torch.bfloat16}  # products, where TRL alone computes in float32


#: Of each option of ours: a value that is not the default, and where it shows.
EFFECTS = {
    "learning_rate": (2e-4, lambda trainer: trainer.args.learning_rate),
    "beta": (0.5, lambda trainer: loss_of(trainer, ROWS[:4]).item()),
    "max_length": (8, lambda trainer: loss_of(trainer, ROWS[:4]).item()),
    "train_all": (True, lambda trainer: trainer.model.model.embed_tokens.weight.requires_grad),
    "report_every": (5, lambda trainer: trainer.run_log is None),
}


def test_every_option_has_an_effect(build):
    own = set(MXFP4DistillationConfig.__annotations__)
    assert own == {*EFFECTS, "generate_with", "allow_full_precision"}  # those have tests of their own
    default = build(learning_rate=1e-4)
    for name, (value, observe) in EFFECTS.items():
        assert observe(build(**{"learning_rate": 1e-4, name: value})) != observe(default), name


@pytest.mark.parametrize(
    "scheme, peft_config, rate, left", [(QAT, None, 3e-4, 0.5), ({"mode": "packed"}, LORA, 1e-2, 0.7)]
)
def test_what_is_trained_comes_nearer_and_the_rest_stays(build, scheme, peft_config, rate, left):
    options = {"max_steps": 12, "per_device_train_batch_size": 8, "learning_rate": rate}
    trainer = build(ROWS, scheme, ROWS, peft_config=peft_config, **options)
    before = trainer.evaluate()["eval_kl"]
    embedded = trainer.model.get_input_embeddings().weight.clone()
    trainer.train()
    assert trainer.evaluate()["eval_kl"] < left * before
    assert torch.equal(trainer.model.get_input_embeddings().weight, embedded)
    assert set(logged(trainer, "quantization/weights_per_step").values()) == (set() if peft_config else {14.0})
    assert trainer.tokens_distilled == 12 * sum(len(ids) - 1 for ids in IDS)


class Largest(TorchDispatchMode):
    """Keeps the most elements of a tensor that an operator made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [out] if isinstance(out, torch.Tensor) else out if isinstance(out, (tuple, list)) else ()
        self.elements = max([self.elements, *(t.numel() for t in made if isinstance(t, torch.Tensor))])
        return out


@pytest.mark.parametrize("training", [True, False])
def test_memory_does_not_grow_with_vocabulary_times_tokens(build, monkeypatch, training):
    monkeypatch.setattr(chunked_divergence, "TOKEN_CHUNK_SIZE", 16)
    monkeypatch.setattr(chunked_divergence, "VOCAB_CHUNK_SIZE", 64)
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", 16)
    monkeypatch.setattr(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 64)
    trainer = build()
    rows = [{"input_ids": (IDS[7] * 5)[:65]}] * 4
    trainer.model.train(training)
    inputs = trainer._generate_and_score_completions(rows)
    with Largest() as largest, contextlib.nullcontext() if training else torch.no_grad():
        loss = trainer.compute_loss(trainer.model, inputs)
        if training:
            loss.backward()
    assert 16 * 64 <= largest.elements < 256 * 400 / 2  # all logits are 256 x 400


def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(build):
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    options |= {"per_device_train_batch_size": 2, "report_every": 100}
    whole = build(**options)
    resumed = build(**options)
    whole.train()
    stop = TrainerCallback()
    stop.on_substep_end = Mock(side_effect=[KeyboardInterrupt, None, None])
    resumed.add_callback(stop)
    with pytest.raises(KeyboardInterrupt):  # between two micro-batches
        resumed.train(f"{whole.args.output_dir}/checkpoint-3")
    resumed.train(f"{whole.args.output_dir}/checkpoint-3")
    assert_same(weights(resumed.model), weights(whole.model))
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert resumed.tokens_distilled == whole.tokens_distilled


CHAT = [{"role": "user", "content": "48"}, {"role": "assistant", "content": " clips"}]


def test_tokens_beyond_max_length_are_cut():
    row = {"input_ids": [5, 6, 7, 8, 9, 10]}
    assert distillation._tokens_of(row, TOKENIZER, 4, {}) == ([5], [6, 7, 8])


TOOLS = [{"type": "function", "function": {"name": "half", "description": "Halve.", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    "row",
    [
        {"text": "48 clips"},
        {"text": f"48 clips{TOKENIZER.eos_token}"},
        {"prompt": "48 cl", "completion": "ips"},
        {"input_ids": [7, 8, 9, 10], "labels": [-100, -100, 9, 10]},
        {"conversations": [{"from": "user", "value": "48"}, {"from": "assistant", "value": " clips"}]},
        *[
            {**chat, **more}
            for chat in ({"messages": CHAT}, {"prompt": CHAT[:1], "completion": CHAT[1:]})
            for more in ({"tools": TOOLS}, {"tools": json.dumps(TOOLS)}, {"chat_template_kwargs": {"mark": "24"}})
        ],
    ],
)
def test_given_tokens_are_those_of_supervised_training(build, tmp_path, row):
    tokenizer = make_tokenizer("qwen2", begins=True)
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ mark }}" + tokenizer.chat_template
    )
    model = make_model(vocab_size=400, tie=True, max_position_embeddings=128)
    args = trl.SFTConfig(str(tmp_path / "sft"), use_cpu=True, bf16=False, report_to="none")
    data = Dataset.from_list([row])
    expected = trl.SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer).train_dataset[0]
    batch = build([row], tokenizer=tokenizer)._generate_and_score_completions([row])
    read = batch["prompt_ids"][0].tolist()
    learned = batch["completion_ids"][0].tolist()
    assert read + learned == expected["input_ids"]
    assert [-100] * (len(read) - 1) + learned == expected["labels"][1:]


def test_options_of_the_trainer_reach_given_conversations(build):
    tokenizer = make_tokenizer("qwen2")
    tokenizer.chat_template = "{{ mark }}" + tokenizer.chat_template
    trainer = build([{"messages": CHAT}], tokenizer=tokenizer, chat_template_kwargs={"mark": "24"})
    rows = [{"messages": CHAT}, {"messages": CHAT, "chat_template_kwargs": {"mark": "48"}}]
    batch = trainer._generate_and_score_completions(rows)
    whole = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    plain = tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert whole.tolist() == [TOKENIZER(mark)["input_ids"] + plain for mark in ("24", "48")]


@pytest.mark.parametrize(
    "row", [{"input_ids": [4]}, {"text": ""}, {"prompt": "a b c d e f g h i j", "completion": "1"}]
)
def test_rows_without_a_token_to_learn_are_refused(row):
    with pytest.raises(ValueError, match="no token of the row '.*' is left to learn within max_length=8"):
        distillation._tokens_of(row, TOKENIZER, 8, {})


def test_labels_with_holes_are_refused(build):
    with pytest.raises(ValueError, match="can only leave out the beginning of a row"):
        build()._generate_and_score_completions([{"input_ids": [7, 8, 9, 10], "labels": [-100, 8, -100, 10]}])


def test_a_batch_has_completions_or_none(build):
    with pytest.raises(ValueError, match="a batch has rows with and without a completion"):
        build()._generate_and_score_completions([{"prompt": "1", "completion": text} for text in (None, "2")])


def test_given_completions_alone_are_learned(build):
    trainer = build([{"prompt": story, "completion": " = 24"} for story in STORIES], max_steps=1, report_every=1)
    trainer.add_callback(StepMovementCallback())
    trainer.train()
    assert '"movement/total"' in (Path(trainer.args.output_dir) / "run_log.jsonl").read_text()
    given = len(TOKENIZER(" = 24")["input_ids"]) + 1
    assert trainer.tokens_distilled == 4 * given
    assert not any(key.startswith("completions/") for line in trainer.state.log_history for key in line)


@pytest.mark.parametrize("sampler", ["student", "teacher"])
def test_completions_are_sampled_from_whom_was_asked(build, sampler):
    trainer = build([{"prompt": story} for story in STORIES], generate_with=sampler, max_completion_length=8, top_k=1)
    for p in trainer.teacher_model.get_submodule("model.layers.1").parameters():
        p.data = p.data * 3  # another model, also in its likeliest tokens
    found = trainer._generate_and_score_completions([{"prompt": STORIES[1]}])["completion_ids"]
    ids = torch.tensor([TOKENIZER(STORIES[1])["input_ids"]])
    greedy = {
        name: model.eval().generate(ids, max_new_tokens=8, do_sample=False)[:, ids.shape[1] :]
        for name, model in (("student", trainer.model), ("teacher", trainer.teacher_model))
    }
    assert not torch.equal(greedy["student"], greedy["teacher"])
    assert torch.equal(found, greedy[sampler])
    trainer.train()
    assert 1 <= logged(trainer, "completions/mean_length")[2] <= 8


@pytest.mark.parametrize(
    "options, message",
    [
        ({"scheme": None}, "has no MXFP4 layer.*allow_full_precision=True"),
        ({"scheme": {"mode": "packed"}, "peft_config": LORA, "train_all": True}, "train_all=True has no effect"),
        ({"scheme": {"mode": "packed"}}, "attach trainable adapters"),
        ({"generate_with": "me"}, "generate_with='me'"),
        ({"use_vllm": True}, "use_vllm=True would sample"),
        ({"teacher": make_model(vocab_size=32)}, "a vocabulary of 32 tokens and the student of 400"),
    ],
)
def test_what_cannot_be_distilled_is_refused(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_a_quantized_teacher_is_refused(build, tmp_path):
    build().model.save_pretrained(tmp_path / "saved")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    with pytest.raises(ValueError, match="the teacher is quantized; name the original"):
        build(student=student)
    assert build(student=student, teacher=str(tmp_path / "base")).shared[0] == 6
