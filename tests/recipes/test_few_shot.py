# SPDX-License-Identifier: Apache-2.0
"""Sums and differences after two solved ones: the problems, and what counts as right."""

import pytest

from recipes.tasks import load_task
from recipes.tasks.few_shot import SHOTS, first_line_reward, is_first_line_correct


def test_problems_are_right_and_splits_have_none_in_common():
    task = load_task("few_shot")
    assert (len(task.test), len(task.train)) == (203, 407)
    prompts = {split: {row["prompt"] for row in rows} for split, rows in (("test", task.test), ("train", task.train))}
    assert len(prompts["test"]) == 203 and len(prompts["train"]) == 407 and not prompts["test"] & prompts["train"]
    for row in task.test:
        assert row["prompt"].startswith("12-5=7\n8+9=17\n") and row["prompt"].endswith("=")
        assert str(eval(row["prompt"].removeprefix(SHOTS)[:-1])) == row["answer"] == row["completion"].strip()
        assert int(row["answer"]) >= 0


def test_a_seed_gives_the_same_problems_and_another_one_others():
    one, again, other = (load_task("few_shot", seed=seed, n_train=20, n_test=10) for seed in (1, 1, 2))
    assert one.train.to_list() == again.train.to_list() != other.train.to_list()
    assert (len(one.train), len(one.test)) == (20, 10)


@pytest.mark.parametrize(
    ("completion", "right"),
    [("23", True), (" 23\n5+5=10", True), ("23 \n", True), ("2", False), ("235", False), ("\n23", False), ("", False)],
)
def test_the_first_line_counts(completion, right):
    assert is_first_line_correct(completion, "23") is right
    assert first_line_reward([completion, [{"role": "assistant", "content": "7\n"}]], ["23", "7"]) == [right, 1.0]


def test_conversations_and_wrong_options():
    task = load_task("few_shot", conversational=True, n_train=1, n_test=1)
    assert task.test[0]["prompt"][0]["content"].startswith(SHOTS)
    with pytest.raises(ValueError, match="'few_shot' generates its problems and does not take problem_count"):
        load_task("few_shot", problem_count=5)
