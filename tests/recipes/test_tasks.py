# SPDX-License-Identifier: Apache-2.0
"""Tasks of the recipes: loading and its errors, tokenizers, the tiny model and its warm-up."""

import json
import random
import re
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from hf_mxfp4.recipes.evaluation.generate import Batch, complete_batches, end_with_line
from hf_mxfp4.recipes.tasks import ALPHABET, TaskArguments, build_tokenizer, load_task, problems, tiny_model


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
    train = write(tmp_path / "train.jsonl", ROWS)
    test = write(tmp_path / "test.jsonl", ROWS[:2])
    return {"dataset": str(train), "eval_dataset": test}  # a str and a Path: both are accepted


def test_unknown_names_and_options_are_refused():
    with pytest.raises(ValueError, match="unknown task 'GSM8K': the tasks are .*gsm8k"):
        load_task("GSM8K")
    for task, option in (("arithmetic", "dataset"), ("gsm8k", "prompt_column")):
        with pytest.raises(ValueError, match=f"does not take {option}; for problems of your own use the task 'file'"):
            load_task(task, **{option: "x"})
    assert load_task("arithmetic", dataset=None, n_train=2).name == "arithmetic"  # None is no value


def test_arithmetic_covers_all_pairs_once():
    task = load_task("arithmetic")
    assert (len(task.train), len(task.test)) == (2000, 500)
    assert task.train.column_names == task.test.column_names == ["prompt", "completion", "answer"]
    prompts = list(task.train["prompt"]) + list(task.test["prompt"])
    assert sorted(prompts) == sorted(f"{a}+{b}=" for a in range(50) for b in range(50))
    for row in task.test:
        a, b = row["prompt"].rstrip("=").split("+")
        assert row["completion"] == row["answer"] == str(int(a) + int(b))
    assert list(task.scores) == ["exact_match"]
    assert task.max_completion_length >= 3  # two digits and eos
    [reward] = task.reward_funcs
    assert reward(list(task.test["completion"]), answer=list(task.test["answer"])) == [1] * 500
    assert set("".join(prompts) + "".join(task.train["answer"])) <= set(ALPHABET)


def test_arithmetic_splits_follow_the_seed_only():
    first, again, other = (load_task("arithmetic", seed=seed) for seed in (1, 1, 2))
    assert first.train[:] == again.train[:]
    assert first.test[:] == again.test[:]
    assert set(first.test["prompt"]) != set(other.test["prompt"])
    few = load_task("arithmetic", seed=1, n_train=50, n_test=7)
    assert (len(few.train), len(few.test)) == (50, 7)
    assert set(few.train["prompt"]) < set(first.train["prompt"])
    assert set(few.test["prompt"]) < set(first.test["prompt"])


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("wanted", [0, 2.5])
def test_arithmetic_sizes_are_checked(split, wanted):
    with pytest.raises(ValueError, match=f"arithmetic: the {split} split has .* rows, {wanted} were asked"):
        load_task("arithmetic", **{f"n_{split}": wanted})


def test_gsm8k_from_files(files):
    task = load_task("gsm8k", **files)
    assert (len(task.train), len(task.test)) == (3, 2)
    assert list(task.train["answer"]) == ["7", "1200", "-5"]
    assert list(task.train["completion"]) == ["3+4=7 pears.\n#### 7", "It is $1,200.\n#### 1,200", "3-8=-5\n#### -5"]
    for row, source in zip(task.train, ROWS, strict=True):
        assert source["question"] in row["prompt"]
        assert "#### <number>" in row["prompt"]
        assert row["prompt"].endswith("\nAnswer:")
    assert list(task.scores) == ["strict", "flexible"]
    for score in task.scores.values():
        assert all(score(row["completion"], row["answer"]) for row in task.train)


def test_gsm8k_prompts(files):
    chat = load_task("gsm8k", conversational=True, **files).train[0]["prompt"]
    assert [message["role"] for message in chat] == ["user"]
    assert ROWS[0]["question"] in chat[0]["content"]
    assert "#### <number>" in chat[0]["content"]
    custom = load_task("gsm8k", prompt_template="{{Q}} {question}\nA:", **files)
    assert list(custom.train["prompt"]) == [f"{{Q}} {row['question']}\nA:" for row in ROWS]


@pytest.mark.parametrize("template", ["no field", "{question} {x}", "{question"])
def test_templates_need_the_field_of_the_question_alone(template, files):
    with pytest.raises(ValueError, match="prompt_template"):
        load_task("gsm8k", prompt_template=template, **files)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q", "answer": ', r":3: not a line of JSON"),
        ("[1]", r":3: 'question' must be there and hold a string \(found: no object\)"),
        (
            '{"question": "q", "solution": "#### 1"}',
            r":3: 'answer' must be there and hold a string \(found: 'question', 'solution'\)",
        ),
        ('{"question": "q", "answer": 5}', r":3: 'answer' must be there and hold a string"),
        ('{"question": "q", "answer": "it is 5"}', r":3: no '#### <number>' in the reference solution 'it is 5'"),
    ],
)
def test_gsm8k_bad_lines_are_named(tmp_path, files, line, message):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(ROWS[0]) + "\n\n" + line + "\n")  # the blank line is skipped, and counted
    for key in ("dataset", "eval_dataset"):
        with pytest.raises(ValueError, match="bad.jsonl" + message):
            load_task("gsm8k", **{**files, key: bad})


def test_gsm8k_offline_says_what_to_do(monkeypatch, files):
    monkeypatch.setattr(problems.datasets, "load_dataset", Mock(side_effect=ConnectionError("the Hub is out of reach")))
    assert len(load_task("gsm8k", **files).train) == 3  # files need no Hub
    with pytest.raises(
        RuntimeError, match=r"dataset openai/gsm8k:main: .*out of reach[\s\S]*JSON lines as dataset and eval_dataset"
    ) as info:
        load_task("gsm8k")
    assert isinstance(info.value.__cause__, ConnectionError)


def test_gsm8k_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, config):
        asked.append((name, config))
        return {"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}

    monkeypatch.setattr(problems.datasets, "load_dataset", load_dataset)
    task = load_task("gsm8k")
    assert (len(task.train), len(task.test)) == (3, 1)
    load_task("gsm8k", dataset="me/maths", test_only=True)
    assert asked == [("openai/gsm8k", "main"), ("me/maths", None)]
    other = {"train": Dataset.from_dict({"text": ["a"] * 5})}
    monkeypatch.setattr(problems.datasets, "load_dataset", lambda *a, **k: other)
    with pytest.raises(ValueError, match="train row 0: 'question' must be there"):
        load_task("gsm8k")


CHARS = "0123456789+= <>padeos\n\u00e9\U0001f44d"
CHAR_TOKENIZER = tiny_model.build_char_tokenizer(CHARS)
BYTE_TOKENIZER = tiny_model.build_byte_tokenizer()


@pytest.mark.parametrize("tokenizer", [CHAR_TOKENIZER, BYTE_TOKENIZER], ids=["char", "byte"])
def test_tokenizers_pad_left_save_and_load(tokenizer, tmp_path):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.padding_side) == (0, 1, "left")
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    texts = ["1+2=", "<pad>", "<pad>\n p", "", "\u00e9\U0001f44d"]
    for one in (tokenizer, loaded):
        batch = one(texts, padding=True)
        assert one.batch_decode(batch["input_ids"], skip_special_tokens=True) == texts
        assert batch["attention_mask"][0] == [0] * 4 + [1] * 4
        assert batch["input_ids"][0][:4] == [0] * 4
        assert one.decode([*one("1")["input_ids"], 1], skip_special_tokens=True) == "1"
        assert one.chat_template == tiny_model.CHAT_TEMPLATE
        prompt = one.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False, add_generation_prompt=True)
        assert prompt == "user: 1\nassistant: "


def small_model(tokenizer, **options):
    return tiny_model.build_qwen2(tokenizer, hidden_size=32, num_layers=2, intermediate_size=64, **options)


def same(first, second) -> bool:
    return all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


@pytest.mark.parametrize("conversational", [False, True])
def test_warmup_is_deterministic(conversational):
    task = load_task("arithmetic", n_train=64, n_test=1, conversational=conversational)
    tokenizer = BYTE_TOKENIZER if conversational else CHAR_TOKENIZER
    models = []
    losses = []
    states = []
    for attempt, seed in enumerate((7, 7, 8)):
        torch.manual_seed(attempt)  # whatever came before must not matter
        model = small_model(tokenizer, seed=0).eval()
        options = {"steps": 3, "batch_size": 8, "seed": seed, "progress": False}
        losses.append(tiny_model.supervised_warmup(model, tokenizer, task.train, **options))
        states.append((torch.get_rng_state().tolist(), random.random(), np.random.rand()))
        models.append(model)
        assert not model.training  # as it was
        assert all(parameter.grad is None for parameter in model.parameters())
    assert same(models[0], models[1])
    assert not same(models[0], models[2])
    assert losses[0] == losses[1] != losses[2]
    assert states[0] == states[1] != states[2]
    assert not same(models[0], small_model(tokenizer, seed=0))


def test_warmup_learns_and_stops_at_a_target_loss(capsys):
    rows = Dataset.from_dict({"prompt": ["1=", "2=", "3="], "completion": ["4", "55", "6"]})
    # Batches are larger than the dataset: it is repeated.
    options = {"steps": 60, "batch_size": 8, "learning_rate": 5e-3, "seed": 0}
    models = []
    losses = []
    for target in (None, 0.8, 100.0):
        models.append(small_model(CHAR_TOKENIZER))
        losses.append(tiny_model.supervised_warmup(models[-1], CHAR_TOKENIZER, rows, target_loss=target, **options))
    assert losses[0] < losses[1] <= 0.8 < losses[2]
    assert losses[0] < 0.5
    assert "loss=" in capsys.readouterr().err
    twenty = small_model(CHAR_TOKENIZER)  # the soonest that there is a mean of 20
    assert tiny_model.supervised_warmup(twenty, CHAR_TOKENIZER, rows, **{**options, "steps": 20}) == losses[2]
    assert same(models[2], twenty)
    prompts = CHAR_TOKENIZER(["1=", "2=", "3="], return_tensors="pt")
    output = models[0].eval().generate(**prompts, do_sample=False, max_new_tokens=4)
    assert CHAR_TOKENIZER.batch_decode(output[:, 2:], skip_special_tokens=True) == ["4", "55", "6"]


def test_few_shot_problems_are_right_and_their_first_line_counts():
    task = load_task("few_shot")
    other = load_task("few_shot", seed=1)
    assert (len(task.train), len(task.test)) == (350, 600)
    assert not set(task.train["prompt"]) & set(task.test["prompt"])
    assert other.test["prompt"] != task.test["prompt"]
    for row in task.test:
        shots, question = row["prompt"].removesuffix("=").rsplit("\n", 1)
        assert shots == "12-5=7\n8+9=17"
        assert str(eval(question)) == row["answer"]
        assert row["completion"] == row["answer"] + "\n"
    (score,) = task.scores.values()
    verdicts = {"17\n3+4=7": True, " 17": True, "17": True, "17 apples": False, "1\n17": False, "": False}
    assert {text: score(text, "17") for text in verdicts} == verdicts
    assert task.reward_funcs[0](completions=["17\n1+1=2", "3"], answer=["17", "17"]) == [1.0, 0.0]


def test_no_sum_of_the_few_shot_test_has_its_twin_in_training():
    task = load_task("few_shot")
    train, test = (
        {row["prompt"].removesuffix("=").rsplit("\n", 1)[1] for row in split} for split in (task.train, task.test)
    )
    sums = [question.split("+") for question in test if "+" in question]
    assert len(sums) > 300
    assert not {f"{b}+{a}" for a, b in sums} & train


def test_few_shot_steps_are_sums_of_four_numbers():
    task = load_task("few_shot_steps")
    assert len(task.train) + len(task.test) == 6560
    assert 280 < len(task.test) <= 300
    for row in [*task.train, *task.test]:
        *shot, question = row["prompt"].splitlines()
        assert shot == ["Start with 7, add 2, add 6, add 4.", "7 plus 2 is 9. 9 plus 6 is 15. 15 plus 4 is 19."]
        assert row["completion"] == row["answer"] + "\n"
        a, b, c, d = terms_of(question)
        assert question == f"Start with {a}, add {b}, add {c}, add {d}."
        second = f"{a + b} plus {c} is {a + b + c}."
        third = f"{a + b + c} plus {d} is {a + b + c + d}."
        assert row["answer"] == f"{a} plus {b} is {a + b}. {second} {third}"


def terms_of(question: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", question)]


def test_no_sum_of_few_shot_steps_is_in_training_in_another_order():
    task = load_task("few_shot_steps")
    train, test = (
        {tuple(sorted(terms_of(row["prompt"].splitlines()[-1]))) for row in split} for split in (task.train, task.test)
    )
    assert test
    assert not train & test


def test_few_shot_steps_are_rewarded_for_the_steps_before_the_first_wrong_one():
    task = load_task("few_shot_steps")
    answer = "4 plus 2 is 6. 6 plus 3 is 9. 9 plus 5 is 14."
    verdicts = {  # the last word, all steps, the reward
        answer + "\nStart with 1": (True, True, 1.0),
        "4 plus 2 is 7. 6 plus 3 is 9. 9 plus 5 is 14.": (True, False, 0.0),
        "4 plus 2 is 6. 9 plus 5 is 14.": (True, False, 1 / 3),
        "4 plus 2 is 6. 6 plus 3 is 9. 9 plus 5 is 15.": (False, False, 2 / 3),
        "4 plus 2 is 6. 6 plus 3 is 9. 9 plus 5 is 14": (False, False, 2 / 3),  # cut off, perhaps
        answer + " 14 plus 1 is 15.": (False, False, 2 / 3),
        "4 plus 2 is 6.\n14.": (False, False, 0.0),
        "": (False, False, 0.0),
    }
    assert list(task.scores) == ["last_word", "all_steps"]
    (reward,) = task.reward_funcs
    for text, expected in verdicts.items():
        found = (*(score(text, answer) for score in task.scores.values()), *reward([text], [answer]))
        assert found == pytest.approx(expected), text


def test_completions_end_with_their_line():
    tokenizer = tiny_model.build_char_tokenizer("ab\n")
    model = small_model(tokenizer).eval()
    head = torch.zeros_like(model.lm_head.weight)
    model.lm_head.weight = torch.nn.Parameter(head)  # all tokens are as likely
    model.lm_head.bias = torch.nn.Parameter(torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]))  # but for the line break
    problem = Dataset.from_dict({"prompt": ["ab"], "answer": ["a"]})
    generated = partial(complete_batches, model, tokenizer, problem, {}, [Batch((0,))], max_new_tokens=3)
    ((whole,),) = generated()
    assert end_with_line(model, tokenizer) == 1
    assert model.generation_config.eos_token_id == [1, 4]
    ((line,),) = generated()
    assert (whole.completion, whole.n_tokens, whole.truncated) == ("\n\n\n", 3, True)
    assert (line.completion, line.n_tokens, line.truncated) == ("\n", 1, False)


def test_a_tokenizer_without_a_line_break_cannot_end_with_a_line():
    tokenizer = build_tokenizer("arithmetic")
    with pytest.raises(ValueError, match="the tokenizer has no line break"):
        end_with_line(small_model(tokenizer), tokenizer)


@pytest.mark.parametrize("family", sorted(tiny_model.TINY_MODELS))
@pytest.mark.parametrize("task", ["arithmetic", "gsm8k"])
def test_a_saved_tokenizer_splits_as_before_beside_a_model_of_any_family(family, task, tmp_path):
    """`AutoTokenizer` takes the family's own tokenizer for Qwen2, which would drop every word of another kind."""
    tokenizer = build_tokenizer(task)
    tiny_model.TINY_MODELS[family](tokenizer, hidden_size=32, num_layers=1).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = {"arithmetic": "12+3=15", "gsm8k": "Any text, na\u00efve too.\n#### 7"}
    loaded = AutoTokenizer.from_pretrained(tmp_path, padding_side="left")
    ids = loaded(texts[task])["input_ids"]
    assert ids == tokenizer(texts[task])["input_ids"]
    assert loaded.decode(ids) == texts[task]
    assert loaded.padding_side == "left"
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)


FUNCTIONS = """
import numpy

def ends(completion, answer):
    return completion.strip().endswith(answer)

def by_numpy(completion, answer):
    return numpy.bool_(completion == answer)

def length(completions, answer, **kwargs):
    assert set(kwargs) >= {"prompts", "completion_ids", "trainer_state", "log_extra", "log_metric", "level"}
    return [float(len(text if isinstance(text, str) else text[0]["content"])) for text in completions]

async def later(completions, **kwargs):
    return [None for _ in completions]

def positional(texts, golds):
    return [0.0] * len(texts)

def one(completions, **kwargs):
    return 1.0

def failing(completions, **kwargs):
    return [completions[7]]

def number(completion, answer):
    return 0.5

def alone(completion):
    return True
"""


@pytest.fixture
def own(tmp_path):
    """`own(**options)` loads the task `file` with problems in columns `q` and `a`; functions are in `f.py`."""
    rows = [{"q": f"{n} and 1?", "a": str(n + 1), "level": n} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "f.py").write_text(FUNCTIONS)

    def load(score=None, reward=None, **options):
        path = str(tmp_path / "rows.jsonl")
        own = {"score": score, "reward": reward}
        own = {name: value and value.replace("f.py", str(tmp_path / "f.py")) for name, value in own.items()}
        columns = {"prompt_column": "q", "answer_column": "a"}
        return load_task("file", dataset=path, eval_dataset=path, **columns, **own, **options)

    return load


def test_a_score_of_ones_own_is_the_reward_too(own):
    task = own(score="f.py:ends")
    assert list(task.scores) == ["ends"]
    assert task.scores["ends"]("it is 3", "3")
    (reward,) = task.reward_funcs
    assert reward(["is 3", "4"], answer=["3", "3"]) == [1.0, 0.0]
    assert reward.__name__ == "ends"
    assert list(own(score="f.py:by_numpy").scores) == ["by_numpy"]


@pytest.mark.parametrize("name", ["length", "later"])
@pytest.mark.parametrize("conversational", [False, True])
def test_a_reward_of_ones_own_takes_the_place_of_the_tasks(own, name, conversational):
    task = own(reward=f"f.py:{name}", conversational=conversational)
    assert [reward.__name__ for reward in task.reward_funcs] == [name]
    assert list(task.scores) == ["exact_match"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"reward": "f.py:positional"}, r"signature \(texts, golds\), failed .* callable as f\(completions, answer"),
        ({"reward": "f.py:one"}, "must return one number .* per completion, got 1.0"),
        ({"reward": "f.py:failing"}, "failed on problems of the task: .* raised IndexError"),
        ({"reward": "f.py:nothing"}, "f.py has no function 'nothing'"),
        ({"reward": "length"}, "reward='length' must be FILE.py:function"),
        ({"reward": "nowhere.py:f"}, "there is no file nowhere.py"),
        ({"score": "f.py:number"}, r"must be f\(completion, answer\) -> bool, and gave 0.5 for '1'"),
        ({"score": "f.py:alone"}, r"signature \(completion\), failed .* callable as f\(completion, answer\)"),
        ({"score": "exact"}, "unknown score 'exact': the scores are exact_match, number, math"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(reversed(value.values())),
)
def test_functions_that_cannot_be_are_named_when_the_task_is_loaded(own, option, message):
    with pytest.raises((ValueError, OSError), match=message):
        own(**option)


def test_of_one_file_a_fifth_is_held_out_by_the_seed(tmp_path, capsys):
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(20)]
    source = str(write(tmp_path / "own.jsonl", rows))
    task = load_task("file", dataset=source)
    evaluated = load_task("file", dataset=source, test_only=True)
    assert (len(task.train), len(task.test)) == (16, 4)
    assert {*task.train["prompt"]}.isdisjoint(task.test["prompt"])
    assert evaluated.train is None
    assert evaluated.test[:] == task.test[:]
    assert f"held out 4 of the 20 rows of {source}" in capsys.readouterr().out
    assert load_task("file", dataset=source, seed=1).test[:] != task.test[:]
    assert len(load_task("file", dataset=source, n_test=300).test) == 4
    with pytest.raises(ValueError, match="has 4 rows, too few to hold some out; name an eval_dataset"):
        load_task("file", dataset=str(write(tmp_path / "few.jsonl", rows[:4])))
    with pytest.raises(ValueError, match="the task 'file' needs a dataset"):
        load_task("file")


def test_prompts_that_are_read_are_messages_where_the_tokenizer_has_a_template(tmp_path):
    source = str(write(tmp_path / "own.jsonl", [{"prompt": f"{n}?", "answer": str(n)} for n in range(5)]))
    plain = Mock(chat_template=None)
    for arguments, tokenizer, is_chat in (
        (TaskArguments(dataset=source), CHAR_TOKENIZER, True),
        (TaskArguments(dataset=source), plain, False),
        (TaskArguments(dataset=source, study="{conversational: false}"), CHAR_TOKENIZER, False),
        (TaskArguments(), CHAR_TOKENIZER, False),  # sums go on where the prompt ends
    ):
        assert isinstance(arguments.load_task(tokenizer).test[0]["prompt"], list) is is_chat
