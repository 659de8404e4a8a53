# SPDX-License-Identifier: Apache-2.0
"""The `evaluate` metrics of the recipes."""

import threading
from pathlib import Path

import evaluate
import pytest

from hf_mxfp4.rl import math_answers


METRICS = Path(__file__).resolve().parents[2] / "recipes" / "metrics"


def test_number_answer_gives_shares_and_verdicts():
    number_answer = evaluate.load(str(METRICS / "answer"), "number", keep_in_memory=True)
    texts, golds = ["#### 1", "2", "three", "#### 5"], ["1", "2", "3", "4"]
    assert number_answer.compute(predictions=texts, references=golds, verdicts=True) == {
        "strict": 0.25,
        "flexible": 0.5,
        "verdicts": {"strict": [True, False, False, False], "flexible": [True, True, False, False]},
    }
    with pytest.raises(ValueError, match="not a decimal number"):
        number_answer.compute(predictions=["1"], references=["one"])
    with pytest.raises(ValueError, match="name a configuration: .*'number' or 'math'"):
        evaluate.load(str(METRICS / "answer"))


@pytest.mark.parametrize(
    ("text", "gold", "boxed", "flexible"),
    [
        (r"so \boxed{\frac12}", r"\frac{1}{2}", True, True),
        (r"it is $\frac{14}{3}$.", r"\frac{14}{3}", False, True),
        (r"\boxed{(3,\pi/2)}", r"\left( 3, \frac{\pi}{2} \right)", True, True),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", True, True),
        (r"\boxed{Evelyn}", r"\text{Evelyn}", True, True),
        (r"\boxed{1}, no: \boxed{2}", "1", False, False),
        (r"\boxed{\frac{1}{2}} and more}", r"\frac{1}{2}", True, True),
        ("", "5", False, False),
    ],
)
def test_math_answer_compares_mathematically(text, gold, boxed, flexible):
    pytest.importorskip("math_verify")
    metric = evaluate.load(str(METRICS / "answer"), "math", keep_in_memory=True)
    assert metric.compute(predictions=[text], references=[gold], verdicts=True)["verdicts"] == {
        "boxed": [boxed],
        "flexible": [flexible],
    }


def test_unreadable_gold_answers_raise_and_cut_off_completions_are_wrong():
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="math-verify finds no answer in ' '"):
        math_answers.is_boxed_correct(r"\boxed{1}", " ")
    assert not math_answers.is_boxed_correct(r"\boxed{1} \boxed{1", "1")


def test_a_completion_that_would_take_hours_counts_as_wrong_in_a_thread_too(monkeypatch):
    pytest.importorskip("math_verify")
    math_answers.check_math_answer("2")  # the process is running
    monkeypatch.setattr(math_answers, "ANSWER_SECONDS", 4.0)
    texts, found = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{2}"], []

    def judge():
        found.extend(math_answers.is_math_correct(text, "2") for text in texts)

    thread = threading.Thread(target=judge)
    thread.start()
    thread.join(60)
    assert found == [False, True]


def test_a_process_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(math_answers, "_START_SECONDS", 0)
    with pytest.raises(RuntimeError, match="math-verify cannot be run"):
        math_answers._Worker().ask("1", "1", 1.0)


def test_without_math_verify_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    math_answers._is_readable.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hf-mxfp4\[eval\]'"):
        math_answers.is_math_correct("1", "1")
