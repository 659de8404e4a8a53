# SPDX-License-Identifier: Apache-2.0
"""Problems in columns of one's own, with scores and rewards from a file of one's own."""

import json

import pytest

from recipes.post_training.arguments import load_task_or_exit, parse
from recipes.tasks import load_task


FUNCTIONS = """
import numpy

def ends(completion, answer):
    return completion.strip().endswith(answer)

def by_numpy(completion, answer):
    return numpy.bool_(completion == answer)

def length(completions, answer, **kwargs):
    assert set(kwargs) >= {"prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"}
    return [float(len(text if isinstance(text, str) else text[0]["content"])) for text in completions]

async def later(completions, **kwargs):
    return [None for _ in completions]

def as_array(completions, **kwargs):
    return numpy.ones(len(completions))

def positional(texts, golds):
    return [0.0] * len(texts)

def one(completions, **kwargs):
    return 1.0

def too_few(completions, **kwargs):
    return [1.0]

def word(completions, **kwargs):
    return ["good" for _ in completions]

def infinite(completions, **kwargs):
    return [float("inf") for _ in completions]

def failing(completions, **kwargs):
    return [completions[7]]

def number(completion, answer):
    return 0.5

def alone(completion):
    return True
"""


@pytest.fixture
def files(tmp_path):
    """`files(**options)` loads the task `file` with problems in columns `q` and `a`; functions are in `f.py`."""
    rows = [{"q": f"{n} and 1?", "a": str(n + 1)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "f.py").write_text(FUNCTIONS)

    def load(score=None, reward=None, **options):
        path = str(tmp_path / "rows.jsonl")
        own = {"score": score, "reward": reward}
        own = {name: value and value.replace("f.py", str(tmp_path / "f.py")) for name, value in own.items()}
        columns = {"prompt_column": "q", "answer_column": "a"}
        return load_task("file", train_file=path, test_file=path, **columns, **own, **options)

    return load


def test_a_score_of_ones_own_is_the_reward_too(files):
    task = files(score="f.py:ends")
    assert list(task.scores) == ["ends"] and task.scores["ends"]("it is 3", "3")
    (reward,) = task.reward_funcs
    assert reward(["is 3", "4"], answer=["3", "3"]) == [1.0, 0.0] and reward.__name__ == "ends"
    assert list(files(score="f.py:by_numpy").scores) == ["by_numpy"]


@pytest.mark.parametrize("name", ["length", "later", "as_array"])
@pytest.mark.parametrize("conversational", [False, True])
def test_a_reward_of_ones_own_takes_the_place_of_the_tasks(files, name, conversational):
    task = files(reward=f"f.py:{name}", conversational=conversational)
    assert [reward.__name__ for reward in task.reward_funcs] == [name] and list(task.scores) == ["exact_match"]


def test_a_reward_for_another_task(tmp_path):
    (tmp_path / "f.py").write_text(FUNCTIONS)
    task = load_task("arithmetic", reward=f"{tmp_path}/f.py:length")
    assert task.reward_funcs[0].__name__ == "length" and list(task.scores) == ["exact_match"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"reward": "f.py:positional"}, r"positional\(texts, golds\), and must be callable as f\(completions, answer"),
        ({"reward": "f.py:one"}, r"must be f\(completions, answer, \*\*kwargs\) -> list\[float\], and gave 1.0"),
        ({"reward": "f.py:too_few"}, "gave 1 rewards for 2 completions, not one for each"),
        ({"reward": "f.py:word"}, "must give finite numbers or None, and gave 'good' for '1'"),
        ({"reward": "f.py:infinite"}, "must give finite numbers or None, and gave inf"),
        ({"reward": "f.py:failing"}, "failed on problems of the task: IndexError"),
        ({"reward": "f.py:nothing"}, "has no function 'nothing'; it has ends, by_numpy, length"),
        ({"reward": "length"}, "reward='length' must be FILE.py:function"),
        ({"reward": "nowhere.py:f"}, "there is no file nowhere.py"),
        ({"score": "f.py:number"}, r"must be f\(completion, answer\) -> bool, and gave 0.5 for '1'"),
        ({"score": "f.py:alone"}, r"alone\(completion\), and must be callable as f\(completion, answer\)"),
        ({"score": "exact"}, "unknown score 'exact': did you mean 'exact_match'"),
        ({"dataset_config": "x", "score": "f.py:nothing"}, "has no function 'nothing'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(reversed(value.values())),
)
def test_functions_that_cannot_be_are_named_when_the_task_is_loaded(files, option, message):
    with pytest.raises((ValueError, OSError), match=message):
        files(**option)


def test_a_file_that_cannot_be_run(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    with pytest.raises(ValueError, match="broken.py cannot be run: ModuleNotFoundError: No module named"):
        load_task("arithmetic", reward=f"{tmp_path}/broken.py:f")


def test_they_are_options_of_training_and_end_with_a_message(files, tmp_path):
    rows = tmp_path / "rows.jsonl"
    words = ["--task=file", f"--train_file={rows}", f"--test_file={rows}", "--prompt_column=q", "--use_cpu"]
    recipe, _, training, _ = parse(
        [*words, "--answer_column=a", f"--score={tmp_path}/f.py:ends", f"--reward={tmp_path}/f.py:length"]
    )
    task = load_task_or_exit(recipe, training)
    assert list(task.scores) == ["ends"] and task.reward_funcs[0].__name__ == "length"
    assert task.train["prompt"][0] == "0 and 1?" and task.train["answer"][0] == "1"
    assert training.max_completion_length == task.max_completion_length
    recipe, _, training, _ = parse([*words, "--answer_column=a", f"--reward={tmp_path}/f.py:one"])
    with pytest.raises(SystemExit, match="^error: reward='.*f.py:one' must be f"):
        load_task_or_exit(recipe, training)


def test_a_dataset_of_the_hub_in_columns_of_ones_own(monkeypatch):
    asked = []

    def read(name, config, split, columns):
        asked.append((name, config, split, columns))
        return [("row 0", {"q": "1+1?", "a": "2"})]

    monkeypatch.setattr("recipes.tasks.sources.read_hub", read)
    columns = {"prompt_column": "q", "answer_column": "a"}
    task = load_task("file", dataset_name="me/sums", dataset_config="main", **columns)
    assert asked == [("me/sums", "main", split, ("q", "a")) for split in ("train", "test")]
    assert task.test["prompt"] == ["1+1?"]


def test_other_tasks_say_which_one_is_for_problems_of_ones_own():
    with pytest.raises(ValueError, match="does not take train_file; for your own problems use the task 'file'"):
        load_task("arithmetic", train_file="x.jsonl")
    with pytest.raises(ValueError, match="does not take prompt_column; for your own problems use the task 'file'"):
        load_task("gsm8k", prompt_column="q")
