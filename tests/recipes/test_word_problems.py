# SPDX-License-Identifier: Apache-2.0
"""Generated word problems and the tokenizer of their words."""

import json
import re

import pytest
from transformers import AutoTokenizer

from recipes.tasks import build_tokenizer, load_task, tiny_model
from recipes.tasks.word_problems import LARGEST, load
from recipes.tasks.word_tokenizer import build_word_tokenizer


def test_every_solution_is_the_arithmetic_of_its_problem():
    task = load(size=600, steps=(1, 5), seed=3)
    assert (len(task.test), len(task.train)) == (60, 540)
    words = {"gives": "-", "loses": "-", "sells": "-", "buys": "+", "finds": "+", "gets": "+"}
    kinds = set()
    for row in [*task.train, *task.test]:
        sentences = row["prompt"].split(". ")
        value = int(re.search(r"has (\d+)", sentences[0])[1])
        *steps, final = row["completion"].split(" ")[1:-1]
        assert final == "####" and len(steps) == len(sentences) - 2
        for sentence, step in zip(sentences[1:-1], steps, strict=True):
            verb = sentence.split()[1]
            kinds.add(verb)
            if verb in ("doubles", "triples"):
                n = 2 if verb == "doubles" else 3
                expected, after = f"{value}*{n}", value * n
            else:
                n = int(re.search(r"\d+", sentence)[0])
                after = value + n if words[verb] == "+" else value - n
                expected = f"{value}{words[verb]}{n}"
            value = after
            assert step == f"{expected}={value}" and 0 <= value <= LARGEST
        assert row["answer"] == str(value) and row["completion"].endswith(f" #### {value}")
        assert all(score(row["completion"], row["answer"]) for score in task.scores.values())
    assert kinds == {*words, "doubles", "triples"}


def test_splits_are_disjoint_and_follow_the_seed():
    first, again, other = (load(size=200, seed=seed) for seed in (0, 0, 1))
    assert first.train["prompt"] == again.train["prompt"] != other.train["prompt"]
    assert not set(first.train["prompt"]) & set(first.test["prompt"])
    few = load_task("word_problems", problem_count=200, problem_steps=[2, 4], n_test=5)
    assert set(few.test["prompt"]) < set(first.test["prompt"]) and len(few.test) == 5
    assert load(size=20, conversational=True).train[0]["prompt"][0]["role"] == "user"


def test_lengths_are_within_the_hint_for_completions():
    tokenizer = build_tokenizer("word_problems")
    task = load(size=2000, steps=(4, 4))
    longest = max(len(tokenizer(text)["input_ids"]) for text in task.train["completion"])
    assert longest + 1 <= task.max_completion_length


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"problem_steps": [0, 2]}, "fewest, at least 1"),
        ({"problem_steps": [3, 2]}, "fewest, at least 1"),
        ({"problem_steps": [3]}, "fewest, at least 1"),
        ({"problem_steps": 3}, "problem_steps=3 must be the fewest and the most steps"),
        ({"problem_steps": "24"}, "problem_steps='24' must be the fewest and the most steps"),
        ({"problem_steps": [2, 2.5]}, r"problem_steps=\[2, 2.5\] must be"),
        ({"problem_count": "many"}, "problem_count='many' must be a whole number"),
        ({"n_test": True}, "n_test=True must be a whole number"),
        ({"problem_count": 9}, "size must be at least 10"),
        ({"train_file": "x"}, "generates its problems and does not take train_file"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        load_task("word_problems", **options)


@pytest.mark.parametrize(("task", "does"), [("arithmetic", "generates"), ("gsm8k", "reads")])
def test_other_tasks_do_not_take_the_size_of_problems(task, does):
    with pytest.raises(ValueError, match=f"{does} its problems and does not take problem_steps"):
        load_task(task, problem_steps=[2, 3])


def test_the_tokenizer_knows_every_word_of_every_problem():
    tokenizer = build_tokenizer("word_problems")
    assert tokenizer.get_vocab() == build_tokenizer("word_problems").get_vocab()
    task = load(size=1000, steps=(1, 6), seed=7)
    texts = [row[column] for row in [*task.train, *task.test] for column in ("prompt", "completion")]
    assert tokenizer.batch_decode(tokenizer(texts)["input_ids"]) == texts
    words = {word for text in texts for word in re.findall(r" ?[A-Za-z]+", text)}
    assert all(len(tokenizer.tokenize(word)) == 1 for word in words)
    assert tokenizer.tokenize("12+7=19 #### 19", split_special_tokens=True) == [
        "1", "2", "+", "7", "=", "1", "9", "Ġ", "#", "#", "#", "#", "Ġ", "1", "9",
    ]  # fmt: skip


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe", "llama"])
def test_auto_tokenizer_reads_problems_as_the_saved_tokenizer_does(tmp_path, model_type):
    # For some architectures AutoTokenizer takes that architecture's class, whatever was saved.
    saved = build_tokenizer("word_problems")
    saved.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = [row["prompt"] + row["completion"] for row in load(size=60).train]
    assert loaded(texts)["input_ids"] == saved(texts)["input_ids"]
    assert loaded.batch_decode(loaded(texts)["input_ids"]) == texts
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.padding_side) == (0, 1, "left")


def test_unknown_words_round_trip_and_special_tokens_are_text():
    tokenizer = build_word_tokenizer(["a bc 1"])
    assert tokenizer.convert_ids_to_tokens([0, 1]) == ["<pad>", "<|endoftext|>"]
    assert len(tokenizer.tokenize("a bc 1")) == 4
    for text in ("a zebra 1", "<pad>", "naïve\n☃"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text and 0 not in ids
    assert tokenizer(["a", "a bc"], padding=True)["input_ids"][0][0] == 0
    with pytest.raises(ValueError, match="needs texts"):
        build_word_tokenizer([])


@pytest.mark.parametrize("family", sorted(tiny_model.TINY_MODELS))
@pytest.mark.parametrize("task", ["word_problems", "arithmetic", "gsm8k"])
def test_a_saved_tokenizer_splits_as_before_beside_a_model_of_any_family(family, task, tmp_path):
    """`AutoTokenizer` takes the family's own tokenizer for Qwen2, which would drop every word of another kind."""
    tokenizer = build_tokenizer(task)
    tiny_model.TINY_MODELS[family](tokenizer, hidden_size=32, num_layers=1).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = {
        "word_problems": "Ann has 23 apples. How many apples does Ann have? 23+1=24 #### 24",
        "arithmetic": "12+3=15",
        "gsm8k": "Any text, na\u00efve too.\n#### 7",
    }
    loaded = AutoTokenizer.from_pretrained(tmp_path, padding_side="left")
    ids = loaded(texts[task])["input_ids"]
    assert ids == tokenizer(texts[task])["input_ids"] and loaded.decode(ids) == texts[task]
    assert loaded.padding_side == "left" and (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
