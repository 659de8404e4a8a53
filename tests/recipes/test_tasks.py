# SPDX-License-Identifier: Apache-2.0
"""Tasks of the recipes: loading and its errors, tokenizers, the tiny model and its warm-up."""

import inspect
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from recipes.tasks import TASKS, Task, arithmetic, gsm8k, load_task, sources, tiny_model


ROWS = [
    {"question": "Ada has 3 pears and gets 4. How many?", "answer": "3+4=<<3+4=7>>7 pears.\n#### 7"},
    {"question": "A {shed} costs $2,400; half?", "answer": "It is $<<2400/2=1200>>1,200.\n#### 1,200"},
    {"question": "Cold\u2028day: 3 - 8?", "answer": "3-8=<<3-8=-5>>-5\n#### -5"},
]


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path):
    train, test = write(tmp_path / "train.jsonl", ROWS), write(tmp_path / "test.jsonl", ROWS[:2])
    return {"train_file": str(train), "test_file": test}  # a str and a Path: both are accepted


def no_hub(*args, **kwargs):
    raise ConnectionError("the Hub is out of reach")


# ---- load_task and Task ----


def test_signature_of_load_task():
    parameters = inspect.signature(load_task).parameters
    assert list(parameters) == [
        "name", "train_file", "test_file", "dataset_name", "dataset_config", "seed", "n_train", "n_test",
        "prompt_template", "conversational", "problem_count", "problem_steps", "test_only", "prompt_column",
        "answer_column", "score", "reward",
    ]  # fmt: skip
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "name")


@pytest.mark.parametrize(("name", "guess"), [("arithmatic", "arithmetic"), ("GSM8K", "gsm8k"), ("gsm-8k", "gsm8k")])
def test_unknown_names_get_a_suggestion_and_the_list(name, guess):
    with pytest.raises(ValueError, match=f"unknown task '{name}': did you mean '{guess}'\\? .*'arithmetic', 'gsm8k'"):
        load_task(name)


def test_unknown_names_without_a_near_one_get_the_list():
    with pytest.raises(
        ValueError, match="the tasks are 'arithmetic', 'gsm8k', 'math500', 'file', 'word_problems', 'few_shot'"
    ):
        load_task("zzz")
    assert TASKS == ("arithmetic", "gsm8k", "math500", "file", "word_problems", "few_shot")


def test_a_task_without_rows_columns_or_scores_is_refused():
    good = load_task("arithmetic", n_train=2, n_test=2)
    parts = {field: getattr(good, field) for field in Task.__dataclass_fields__}
    with pytest.raises(ValueError, match="the train split is empty"):
        Task(**{**parts, "train": good.train.select([])})
    with pytest.raises(ValueError, match="the test split has no column completion, answer"):
        Task(**{**parts, "test": Dataset.from_dict({"prompt": ["1+1="]})})
    with pytest.raises(ValueError, match="at least one reward function and one score"):
        Task(**{**parts, "scores": {}})


# ---- arithmetic ----


def test_arithmetic_covers_all_pairs_once():
    task = load_task("arithmetic")
    assert (len(task.train), len(task.test)) == (2000, 500)
    assert task.train.column_names == task.test.column_names == ["prompt", "completion", "answer"]
    prompts = list(task.train["prompt"]) + list(task.test["prompt"])
    assert sorted(prompts) == sorted(f"{a}+{b}=" for a in range(50) for b in range(50))
    for row in task.test:
        a, b = row["prompt"].rstrip("=").split("+")
        assert row["completion"] == row["answer"] == str(int(a) + int(b))
    assert task.headline == "exact_match"
    assert task.max_completion_length >= 3  # two digits and eos
    [reward] = task.reward_funcs
    assert (
        reward(prompts=None, completions=list(task.test["completion"]), answer=list(task.test["answer"])) == [1] * 500
    )
    assert set("".join(prompts) + "".join(task.train["answer"])) <= set(arithmetic.ALPHABET)


def test_arithmetic_splits_follow_the_seed_only():
    first, again, other = (load_task("arithmetic", seed=seed) for seed in (1, 1, 2))
    assert first.train[:] == again.train[:] and first.test[:] == again.test[:]
    assert set(first.test["prompt"]) != set(other.test["prompt"])
    few = load_task("arithmetic", seed=1, n_train=50, n_test=7)
    assert (len(few.train), len(few.test)) == (50, 7)
    assert set(few.train["prompt"]) < set(first.train["prompt"])
    assert set(few.test["prompt"]) < set(first.test["prompt"])


def test_arithmetic_options():
    task = load_task("arithmetic", conversational=True, n_test=1, n_train=1)
    [message] = task.test[0]["prompt"]
    assert message["role"] == "user" and message["content"].endswith("=")
    assert len(arithmetic.load(limit=3).test) == 1
    with pytest.raises(ValueError, match="limit must be at least 3"):
        arithmetic.load(limit=2)
    with pytest.raises(ValueError, match="does not take train_file, prompt_template"):
        load_task("arithmetic", train_file="x", prompt_template="{question}")


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    ("wanted", "message"), [(0, "would be empty: 0 rows"), (-1, "-1 rows"), (2001, "2001 were asked")]
)
def test_arithmetic_sizes_are_checked(split, wanted, message):
    with pytest.raises(ValueError, match=f"arithmetic: the {split} split .*{message}"):
        load_task("arithmetic", **{f"n_{split}": wanted})


# ---- gsm8k ----


def test_gsm8k_from_files(files):
    task = load_task("gsm8k", **files)
    assert (len(task.train), len(task.test)) == (3, 2)
    assert list(task.train["answer"]) == ["7", "1200", "-5"]
    assert list(task.train["completion"]) == [
        "3+4=7 pears.\n#### 7",
        "It is $1,200.\n#### 1,200",
        "3-8=-5\n#### -5",
    ]
    for row, source in zip(task.train, ROWS, strict=True):
        assert source["question"] in row["prompt"] and "#### <number>" in row["prompt"]
        assert row["prompt"].endswith("\nAnswer:")
    assert task.headline == "strict" and list(task.scores) == ["strict", "flexible"]
    for reward in task.reward_funcs:
        assert reward(completions=list(task.train["completion"]), answer=list(task.train["answer"])) == [1.0] * 3
    for score in task.scores.values():
        assert all(score(row["completion"], row["answer"]) for row in task.train)


def test_gsm8k_prompts(files):
    chat = load_task("gsm8k", conversational=True, **files).train[0]["prompt"]
    assert [message["role"] for message in chat] == ["user"]
    assert ROWS[0]["question"] in chat[0]["content"] and "#### <number>" in chat[0]["content"]
    custom = load_task("gsm8k", prompt_template="{{Q}} {question}\nA:", **files)
    assert list(custom.train["prompt"]) == [f"{{Q}} {row['question']}\nA:" for row in ROWS]
    for template in ("no field", "{question} {x}", "{}", "{question", "{0} {question}"):
        with pytest.raises(ValueError, match="prompt_template"):
            load_task("gsm8k", prompt_template=template, **files)


def test_gsm8k_subsets_follow_the_seed(files):
    chosen = {seed: tuple(load_task("gsm8k", n_train=2, seed=seed, **files).train["answer"]) for seed in range(8)}
    assert len(set(chosen.values())) > 1 and all(len(rows) == 2 for rows in chosen.values())
    assert chosen[3] == tuple(load_task("gsm8k", n_train=2, seed=3, **files).train["answer"])
    with pytest.raises(ValueError, match="the test split .*test.jsonl.* has 2 rows, 3 were asked for"):
        load_task("gsm8k", n_test=3, **files)
    with pytest.raises(ValueError, match="the train split .*train.jsonl.* would be empty"):
        load_task("gsm8k", n_train=0, **files)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q", "answer": ', r":3: not a line of JSON"),
        ("[1]", r":3: expected a JSON object, got list"),
        ('{"question": "q", "solution": "#### 1"}', r":3: no key 'answer' \(found: 'question', 'solution'\)"),
        ('{"answer": "#### 1"}', r":3: no key 'question'"),
        ('{"question": "q", "answer": 5}', r":3: 'answer' must be a string, got int"),
        ('{"question": "q", "answer": "it is 5"}', r":3: no '#### <number>' in the reference solution 'it is 5'"),
    ],
)
def test_gsm8k_bad_lines_are_named(tmp_path, files, line, message):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(ROWS[0]) + "\n\n" + line + "\n")  # the blank line is skipped, and counted
    for key in ("train_file", "test_file"):
        with pytest.raises(ValueError, match="bad.jsonl" + message):
            load_task("gsm8k", **{**files, key: bad})


def test_gsm8k_encodings(tmp_path, files):
    path = tmp_path / "bytes.jsonl"
    row = json.dumps(ROWS[2], ensure_ascii=False).encode()
    path.write_bytes(b"\xef\xbb\xbf" + row + b"\r\n" + row)  # a byte order mark, CRLF, no last newline
    assert len(load_task("gsm8k", **{**files, "train_file": path}).train) == 2
    path.write_bytes(row + b"\n" + row.replace(b"Cold", b"\xff"))
    with pytest.raises(ValueError, match=r"bytes.jsonl:2: not a line of JSON"):
        load_task("gsm8k", **{**files, "train_file": path})


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_gsm8k_empty_and_missing_files(tmp_path, files, content):
    empty = tmp_path / "empty.jsonl"
    empty.write_text(content)
    with pytest.raises(ValueError, match="empty.jsonl is empty"):
        load_task("gsm8k", **{**files, "test_file": empty})
    with pytest.raises(FileNotFoundError, match="absent.jsonl"):
        load_task("gsm8k", **{**files, "train_file": tmp_path / "absent.jsonl"})


def test_gsm8k_offline_says_what_to_do(monkeypatch, files):
    monkeypatch.setattr(sources.datasets, "load_dataset", no_hub)
    assert len(load_task("gsm8k", **files).train) == 3  # files need no Hub
    with pytest.raises(
        RuntimeError, match=r"train split of openai/gsm8k \(main\).*out of reach[\s\S]*train_file"
    ) as info:
        load_task("gsm8k")
    assert isinstance(info.value.__cause__, ConnectionError)
    assert all(word in str(info.value) for word in ("test_file", "JSON lines", "`question`", "`answer`"))
    with pytest.raises(RuntimeError, match="test split of me/maths"):
        load_task("gsm8k", train_file=files["train_file"], dataset_name="me/maths")


def test_gsm8k_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return Dataset.from_list(ROWS if split == "train" else ROWS[:1])

    monkeypatch.setattr(sources.datasets, "load_dataset", load_dataset)
    task = load_task("gsm8k")
    assert (len(task.train), len(task.test)) == (3, 1)
    load_task("gsm8k", dataset_name="me/maths", dataset_config="hard", n_train=1)
    load_task("gsm8k", dataset_name="me/maths")
    names = [("openai/gsm8k", "main"), ("me/maths", "hard"), ("me/maths", None)]
    assert asked == [(*name, split) for name in names for split in ("train", "test")]

    monkeypatch.setattr(
        sources.datasets, "load_dataset", lambda *a, **k: Dataset.from_dict({"question": [], "answer": []})
    )
    with pytest.raises(ValueError, match=r"the train split of openai/gsm8k \(main\) is empty"):
        load_task("gsm8k")
    monkeypatch.setattr(sources.datasets, "load_dataset", lambda *a, **k: Dataset.from_dict({"text": ["a"]}))
    with pytest.raises(ValueError, match="has no column question, answer"):
        load_task("gsm8k")


def test_annotations():
    assert gsm8k.strip_annotations("48/2 = <<48/2=24>>24, 2*3=<<2*3=6>>6") == "48/2 = 24, 2*3=6"
    assert gsm8k.strip_annotations("a << b\nc >> d, 1 < 2") == "a << b\nc >> d, 1 < 2"


@pytest.mark.skipif("GSM8K_DIR" not in os.environ, reason="set GSM8K_DIR to a folder with train.jsonl and test.jsonl")
def test_the_real_gsm8k():
    folder = Path(os.environ["GSM8K_DIR"])
    task = load_task("gsm8k", train_file=folder / "train.jsonl", test_file=folder / "test.jsonl")
    assert (len(task.train), len(task.test)) == (7473, 1319)
    for split in (task.train, task.test):
        for completion, answer in zip(split["completion"], split["answer"], strict=True):
            assert "<<" not in completion and ">>" not in completion
            assert all(score(completion, answer) for score in task.scores.values())


# ---- tokenizers ----

CHARS = "0123456789+= <>padeos\n\u00e9\U0001f44d"


@given(st.text(alphabet=CHARS))
def test_char_tokenizer_round_trip(text):
    tokenizer = CHAR_TOKENIZER
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text
    assert not {tokenizer.pad_token_id, tokenizer.eos_token_id} & set(ids)


@given(st.text())
def test_byte_tokenizer_round_trip(text):
    ids = BYTE_TOKENIZER(text)["input_ids"]
    assert ids == [byte + 2 for byte in text.encode()]
    assert BYTE_TOKENIZER.decode(ids) == BYTE_TOKENIZER.decode(ids, skip_special_tokens=True) == text


CHAR_TOKENIZER = tiny_model.build_char_tokenizer(CHARS)
BYTE_TOKENIZER = tiny_model.build_byte_tokenizer()


@pytest.mark.parametrize("tokenizer", [CHAR_TOKENIZER, BYTE_TOKENIZER], ids=["char", "byte"])
def test_tokenizers_pad_left_save_and_load(tokenizer, tmp_path):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.padding_side) == (0, 1, "left")
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    texts = ["1+2=", "<pad>", "<pad>\n p", ""]
    for one in (tokenizer, loaded):
        batch = one(texts, padding=True)
        assert one.batch_decode(batch["input_ids"], skip_special_tokens=True) == texts
        assert batch["attention_mask"][0] == [0] * 4 + [1] * 4 and batch["input_ids"][0][:4] == [0] * 4
        assert one.decode([*one("1")["input_ids"], 1], skip_special_tokens=True) == "1"
        assert one.chat_template == tiny_model.CHAT_TEMPLATE
        prompt = one.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False, add_generation_prompt=True)
        assert prompt == "user: 1\nassistant: "


def test_char_tokenizer_refuses_what_it_cannot_represent():
    with pytest.raises(Exception, match="UNK"):
        CHAR_TOKENIZER("x")
    for alphabet in ("", "aa"):
        with pytest.raises(ValueError, match="distinct characters"):
            tiny_model.build_char_tokenizer(alphabet)


def test_byte_tokenizer_covers_all_bytes():
    assert len(BYTE_TOKENIZER) == 258
    everything = "".join(map(chr, [*range(0x20), *range(0x80, 0x100), 0x2028, 0xFFFD, 0x10FFFF]))
    assert BYTE_TOKENIZER.decode(BYTE_TOKENIZER(everything)["input_ids"]) == everything


# ---- the model and its warm-up ----


def small_model(tokenizer, **options):
    return tiny_model.build_qwen2(tokenizer, hidden_size=32, num_layers=2, intermediate_size=64, **options)


def same(first, second) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_build_qwen2():
    tokenizer = tiny_model.build_char_tokenizer(arithmetic.ALPHABET)
    model = tiny_model.build_qwen2(tokenizer)
    assert 500_000 < model.num_parameters() < 700_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.get_output_embeddings().weight.shape == (len(tokenizer), 128)
    config, generation = model.config, model.generation_config
    assert (generation.pad_token_id, generation.eos_token_id, generation.bos_token_id) == (0, 1, None)
    assert (config.pad_token_id, config.eos_token_id, config.max_position_embeddings) == (0, 1, 512)
    tied = tiny_model.build_qwen2(tokenizer, tie_word_embeddings=True)
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    with pytest.raises(ValueError, match="divisible"):
        tiny_model.build_qwen2(tokenizer, hidden_size=30)


def test_build_qwen2_depends_on_its_seed_only():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = small_model(BYTE_TOKENIZER, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    assert same(first, small_model(BYTE_TOKENIZER, seed=1))
    assert not same(first, small_model(BYTE_TOKENIZER, seed=2))


def test_labels_cover_the_completion_and_eos():
    ids, labels = tiny_model.encode_example(CHAR_TOKENIZER, "1+2=", "3")
    assert CHAR_TOKENIZER.decode(ids) == "1+2=3<|endoftext|>"
    assert labels == [-100] * 4 + ids[4:]
    ids, labels = tiny_model.encode_example(BYTE_TOKENIZER, [{"role": "user", "content": "h\u00e9"}], "ok")
    assert BYTE_TOKENIZER.decode(ids) == "user: h\u00e9\nassistant: ok<|endoftext|>"
    assert [label for label in labels if label != -100] == ids[-3:] and len(labels) == len(ids)


def test_padding_does_not_change_the_loss():
    model = small_model(CHAR_TOKENIZER)
    examples = [tiny_model.encode_example(CHAR_TOKENIZER, p, c) for p, c in (("1+2=", "3"), ("10+20=", "30"))]
    together = model(**tiny_model._collate(examples, 0, model.device)).loss
    alone = [model(**tiny_model._collate([example], 0, model.device)).loss for example in examples]
    torch.testing.assert_close(together, (2 * alone[0] + 3 * alone[1]) / 5)


@pytest.mark.parametrize("conversational", [False, True])
def test_warmup_is_deterministic(conversational):
    task = load_task("arithmetic", n_train=64, n_test=1, conversational=conversational)
    tokenizer = BYTE_TOKENIZER if conversational else CHAR_TOKENIZER
    models, losses, states = [], [], []
    for attempt, seed in enumerate((7, 7, 8)):
        torch.manual_seed(attempt)  # whatever came before must not matter
        model = small_model(tokenizer, seed=0).eval()
        losses.append(
            tiny_model.supervised_warmup(
                model, tokenizer, task.train, steps=3, batch_size=8, learning_rate=1e-3, seed=seed, progress=False
            )
        )
        states.append((torch.get_rng_state().tolist(), random.random(), np.random.rand()))
        models.append(model)
        assert not model.training  # as it was
        assert all(parameter.grad is None for parameter in model.parameters())
    assert same(models[0], models[1]) and not same(models[0], models[2])
    assert losses[0] == losses[1] != losses[2]
    assert states[0] == states[1] != states[2]
    assert not same(models[0], small_model(tokenizer, seed=0))


def test_warmup_learns_and_shows_its_loss(capsys):
    rows = Dataset.from_dict({"prompt": ["1=", "2=", "3="], "completion": ["4", "55", "6"], "answer": ["4", "55", "6"]})
    model = small_model(CHAR_TOKENIZER)
    options = {"batch_size": 8, "learning_rate": 5e-3, "seed": 0}  # batches larger than the dataset: it is repeated
    first = tiny_model.supervised_warmup(model, CHAR_TOKENIZER, rows, steps=1, **options)
    last = tiny_model.supervised_warmup(model, CHAR_TOKENIZER, rows, steps=60, **options)
    assert first > 2 and last < 0.5
    assert "loss=" in capsys.readouterr().err
    prompts = CHAR_TOKENIZER(["1=", "2=", "3="], return_tensors="pt")
    output = model.eval().generate(**prompts, do_sample=False, max_new_tokens=4)
    assert CHAR_TOKENIZER.batch_decode(output[:, 2:], skip_special_tokens=True) == ["4", "55", "6"]


def test_warmup_stops_at_a_target_loss():
    rows = Dataset.from_dict({"prompt": ["1=", "2="], "completion": ["4", "55"], "answer": ["4", "55"]})
    options = {"steps": 60, "batch_size": 8, "learning_rate": 5e-3, "seed": 0, "progress": False}
    models, losses = [], []
    for target in (None, 0.0, 0.8, 100.0):
        models.append(small_model(CHAR_TOKENIZER))
        losses.append(tiny_model.supervised_warmup(models[-1], CHAR_TOKENIZER, rows, target_loss=target, **options))
    assert same(models[0], models[1]) and losses[0] == losses[1]  # never reached: all the steps
    assert losses[0] < losses[2] <= 0.8 < losses[3]
    twenty = small_model(CHAR_TOKENIZER)  # the soonest that there is a mean of 20
    assert tiny_model.supervised_warmup(twenty, CHAR_TOKENIZER, rows, **{**options, "steps": 20}) == losses[3]
    assert same(models[3], twenty)


def test_warmup_refuses_bad_arguments():
    task = load_task("arithmetic", n_train=4, n_test=1)
    options = {"steps": 1, "batch_size": 2, "learning_rate": 1e-3, "seed": 0, "progress": False}
    model = small_model(CHAR_TOKENIZER, max_positions=5)
    for change, message in (
        ({"steps": 0}, "at least 1"),
        ({"batch_size": 0}, "at least 1"),
        ({"schedule": "linear"}, "'cosine' or 'constant'"),
        ({}, "tokens, the model has 5 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_model.supervised_warmup(model, CHAR_TOKENIZER, task.train, **{**options, **change})
    with pytest.raises(ValueError, match="empty dataset"):
        tiny_model.supervised_warmup(model, CHAR_TOKENIZER, task.train.select([]), **options)
