# SPDX-License-Identifier: Apache-2.0
"""Answer extraction and rewards: literal cases, properties, reference solutions; the guard; answers that math-verify
compares, and the `evaluate` metrics of the recipes."""

import asyncio
import functools
import math
import threading
from decimal import Decimal
from pathlib import Path

import evaluate
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_mxfp4.rl import math_answers, rewards
from hf_mxfp4.rl.rewards import RewardError, extract_flexible, extract_strict, guard_reward, normalize_number


METRICS = Path(__file__).resolve().parents[2] / "recipes" / "metrics"
# Self-written problems in the format of GSM8K: (reference solution, gold answer).
SOLUTIONS = [
    ("Ada packs 6 boxes of 12 pears, 6*12=<<6*12=72>>72 pears.\n#### 72", "72"),
    ("The shed costs $2,400 / 2 = $<<2400/2=1200>>1,200 each.\n#### 1,200", "1200"),
    ("He has 3 - 8 = <<3-8=-5>>-5 points.\n#### -5", "-5"),
    ("A pen costs 3 * .5 = $<<3*.5=1.50>>1.50, so 1.50 + 2 = <<1.5+2=3.5>>3.5 in all.\n#### 3.50", "3.5"),
    ("That is 30/40*100 = <<30/40*100=75>>75% of the rows.\n#### 75%", "75"),
    ("The farm sold 1,250 * 1,000 = <<1250*1000=1250000>>1,250,000 eggs.\n#### $1,250,000", "1250000"),
]

numbers = st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**12), max_value=10**12)


def canonical(value: Decimal) -> str:
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3.", "3"),
        (".5", "0.5"),
        ("-0.00", "0"),
        (" 007 ", "7"),
        ("\uff0d5", "-5"),
        ("1 000", "1000"),
        ("9" * 5000, "9" * 5000),  # longer than int() parses
        ("0.1" + "0" * 40 + "1", "0.1" + "0" * 40 + "1"),  # longer than the default decimal precision
    ],
)
def test_normalize_number(text, expected):
    assert normalize_number(text) == expected
    assert normalize_number(expected) == expected


@pytest.mark.parametrize("text", ["", "ten", ".", "-", "1.2.3", "--5", "1/2", "1e5", "nan", "\u0663", "5 pears"])
def test_normalize_number_rejects(text):
    with pytest.raises(ValueError, match="not a decimal number"):
        normalize_number(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### _-5_", "-5"),
        ("#### $\\boxed{\\$1{,}000}$", "1000"),
        ("#### 18 dollars, not 20", "18"),
        ("#### 3\nThen 5 #### 4\n", "4"),
        ("##### 4", "4"),
        ("the answer is 18", None),
        ("#### x = 18", None),
        ("####\n18", None),
        ("#### 18 #### none", None),  # only the last marker counts
        ("#### 1,2345", None),
        ("#### 1.2.3", None),
        ("", None),
    ],
)
def test_extract_strict(text, expected):
    assert extract_strict(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(-5)", "-5"),
        ("-\u20ac1,000", "-1000"),
        ("8-3", "3"),
        ("pages 3\u20135", "5"),
        ("f(2)-3", "3"),
        ("5% and 0.50%", "0.5"),
        ("\\boxed{-1{,}000}.", "-1000"),
        ("1\\,234", "1234"),
        ("1,234, 5", "5"),
        ("12345,678", "678"),  # not a thousands separator
        ("1,2345", "2345"),
        ("version 1.2.3", "3"),
        ("so x is .5", "0.5"),
        ("-.5", "-0.5"),
        ("that was it.5", "5"),
        ("no digits", None),
        ("\u0663", None),
    ],
)
def test_extract_flexible(text, expected):
    assert extract_flexible(text) == expected


@given(numbers)
def test_plain_commas_dollars_and_decimals_come_back_exactly(value):
    gold = canonical(value)
    sign = "-" if value < 0 else ""
    magnitude = abs(value)
    renderings = [f"{value:f}", f"{value:,f}", f"{sign}${magnitude:,f}", f"${value:,f}", f"{sign}\\${magnitude:f}"]
    renderings += [r.replace("-", "\u2212") for r in renderings]
    if value >= 0:
        renderings.append(f"+{value:,f}")
    for number in renderings:
        assert normalize_number(number) == normalize_number(number.replace("\\", "")) == gold
        for frame in ("#### {}", "we get 3 + 4, so\n#### {}.", "#### **{}**\n", "#### \\boxed{{{}}}", "#### {}%"):
            assert extract_strict(frame.format(number)) == gold
        for frame in ("{}", "12 of them, thus {}.", "x={}", "\\boxed{{{}}}", "**{}%**", "(1,234; {})", "{} pears, ok"):
            assert extract_flexible(frame.format(number)) == gold
        assert rewards.is_strict_correct(f"#### {number}", number)
        assert rewards.is_flexible_correct(f"is {number}", f"{value}000")


@settings(max_examples=15)
@given(st.text())
def test_any_text_is_safe(text):
    for extract in (extract_strict, extract_flexible):
        found = extract(text)
        assert found is None or normalize_number(found) == found
    assert (extract_flexible(text) is None) == (not any(c in "0123456789" for c in text))
    assert extract_strict(text + "#### 5") == "5"


@pytest.mark.parametrize("function", [extract_strict, extract_flexible, normalize_number, rewards.gsm8k_gold])
@pytest.mark.parametrize("value", [None, 5, b"5"])
def test_wrong_types_raise(function, value):
    with pytest.raises(TypeError, match=f"must be a str, got {type(value).__name__}"):
        function(value)


@pytest.mark.parametrize(("solution", "gold"), SOLUTIONS)
def test_reference_solutions_are_right_and_nothing_else_is(solution, gold):
    wrong = str(Decimal(gold) + 1)
    assert rewards.gsm8k_gold(solution) == gold
    for reward in (rewards.gsm8k_strict_reward, rewards.gsm8k_flexible_reward):
        assert reward([solution, solution], [gold, wrong]) == [1.0, 0.0]


def test_gold_names_the_text_without_an_answer():
    with pytest.raises(ValueError, match="the answer is 18"):
        rewards.gsm8k_gold("the answer is 18")


def test_rewards_accept_text_and_conversations_and_ignore_other_columns():
    texts = ["I think 3.\n#### 4", "It is 4", "nothing", ""]
    conversations = [[{"role": "assistant", "content": text}] for text in texts]
    gold = ["4", "4.0", "4", "4"]
    columns = {"prompts": ["p"] * 4, "completion_ids": [[1]] * 4, "trainer_state": None}
    for completions in (texts, conversations):
        assert rewards.gsm8k_strict_reward(completions=completions, answer=gold, **columns) == [1.0, 0.0, 0.0, 0.0]
        assert rewards.gsm8k_flexible_reward(completions=completions, answer=gold, **columns) == [1.0, 1.0, 0.0, 0.0]
    assert rewards.gsm8k_strict_reward([], []) == []


def test_exact_match():
    texts = ["42", " 42\n", "42.0", "042", "4 2", ""]
    assert rewards.exact_match_reward(texts, ["42"] * 6) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert not rewards.is_exact_match("A", "a")


@pytest.mark.parametrize(
    ("conversation", "reward"),
    [
        ([], 0.0),
        ([{"role": "assistant", "content": None, "tool_calls": []}], 0.0),
        ([{"role": "assistant", "content": "#### 1"}, {"role": "assistant", "content": "#### 4"}], 1.0),
        ([{"role": "assistant", "content": "#### 4"}, {"role": "tool", "content": "#### 1"}], 1.0),
        ([{"role": "user", "content": "#### 4"}], 0.0),
        ([{"role": "assistant", "content": [{"type": "text", "text": "#### "}, {"type": "text", "text": "4"}]}], 1.0),
    ],
)
def test_the_last_assistant_message_counts(conversation, reward):
    assert rewards.gsm8k_strict_reward([conversation], ["4"]) == [reward]


@pytest.mark.parametrize(
    ("completions", "answers", "error", "message"),
    [
        (["1", "2"], ["1"], ValueError, "2 completions but 1 answers"),
        ("1", ["1"], TypeError, "one entry per completion"),
        (["1"], "1", TypeError, "one entry per completion"),
        ([None], ["1"], TypeError, "a completion must be a str or a list"),
        (["1"], [1], TypeError, "must be a str, got int"),
        (["no number"], ["ten"], ValueError, "not a decimal number: 'ten'"),
    ],
)
def test_misuse_of_rewards_raises(completions, answers, error, message):
    with pytest.raises(error, match=message):
        rewards.gsm8k_strict_reward(completions, answers)


def length(completions, **kwargs):
    return [len(text) for text in completions]


def test_good_rewards_pass_unchanged_and_the_name_stays():
    guarded = guard_reward(length)
    assert guarded(completions=["a", "bcd"]) == [1.0, 3.0]
    assert guarded.__name__ == "length"
    assert guard_reward(lambda completions, **kwargs: [3.4e38])(completions=["x"]) == [3.4e38]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e39])
def test_a_reward_that_is_no_finite_float32_names_function_and_completion(value):
    def broken(completions, **kwargs):
        return [3.4e38, value]

    with pytest.raises(RewardError, match="'broken' returned .* for completion 1: 'x{199}$"):
        guard_reward(broken)(completions=["first", "x" * 300])


def test_integers_beyond_floats_are_no_finite_rewards():
    with pytest.raises(RewardError, match="returned -inf"):
        guard_reward(lambda completions, **kwargs: [-(10**5000)])(completions=["x"])


@pytest.mark.parametrize("value", [3.0, ["high"], [[1.0]], None], ids=["scalar", "text", "nested", "none"])
def test_what_is_no_list_of_numbers_is_an_error(value):
    with pytest.raises(RewardError, match="one number"):
        guard_reward(lambda completions, **kwargs: value)(completions=["x"])


def test_reward_models_and_names_are_left_alone():
    model = nn.Linear(1, 1)
    assert guard_reward(model) is model
    assert guard_reward("org/reward-model") == "org/reward-model"


def test_partials_have_the_name_of_their_function_and_stay_async():
    async def judged(completions, scale, **kwargs):
        return [scale * len(text) for text in completions]

    twice = functools.partial(functools.partial(judged, scale=2.0))
    assert guard_reward(twice).__name__ == "judged"
    assert asyncio.iscoroutinefunction(guard_reward(twice))
    assert asyncio.run(guard_reward(twice)(completions=["abc"])) == [6.0]

    class Judge:
        async def __call__(self, completions, scale, **kwargs):
            return [math.nan]

    guarded = guard_reward(functools.partial(Judge(), scale=1.0))
    with pytest.raises(RewardError, match="'Judge' returned nan"):
        asyncio.run(guarded(completions=["x"]))


def test_number_answer_gives_shares_and_verdicts():
    number_answer = evaluate.load(str(METRICS / "answer"), "number", keep_in_memory=True)
    texts = ["#### 1", "2", "three", "#### 5"]
    golds = ["1", "2", "3", "4"]
    assert number_answer.compute(predictions=texts, references=golds, verdicts=True) == {
        "strict": 0.25,
        "flexible": 0.5,
        "verdicts": {"strict": [True, False, False, False], "flexible": [True, True, False, False]},
    }
    with pytest.raises(ValueError, match="not a decimal number"):
        number_answer.compute(predictions=["1"], references=["one"])
    with pytest.raises(ValueError, match="name a configuration"):
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
    texts = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{2}"]
    found = []

    def judge():
        found.extend(math_answers.is_math_correct(text, "2") for text in texts)

    thread = threading.Thread(target=judge)
    thread.start()
    thread.join(60)
    assert found == [False, True]


def test_rewards_after_an_interrupt_belong_to_their_own_completions(monkeypatch):
    pytest.importorskip("math_verify")
    completions = [r"\boxed{1}", r"\boxed{7}"] * 2
    answers = ["1", "2"] * 2
    rewards.math_reward(completions, answers)

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(math_answers.select, "select", interrupt)  # where a reply is waited for
        rewards.math_reward(completions, answers)
    assert rewards.math_reward(completions, answers) == [1.0, 0.0, 1.0, 0.0]


def test_endless_comparisons_of_a_batch_share_their_time(monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr(math_answers, "ANSWER_SECONDS", 1.0)
    asked = []

    def ask(worker, answer, text, seconds):
        asked.append((text, seconds))
        return None if "^" in text else text == rf"\boxed{{{answer}}}"

    math_answers.check_math_answer("2")
    monkeypatch.setattr(math_answers._Worker, "ask", ask)
    endless = [rf"\boxed{{9^{{9^{{9^{n}}}}}}}" for n in range(4)]
    assert rewards.math_reward([*endless, r"\boxed{2}", endless[0]], ["2"] * 6) == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    again = [seconds for text, seconds in asked[5:]]
    assert [text for text, _ in asked] == [*endless, r"\boxed{2}", *endless]
    assert again[0] == pytest.approx(0.25, abs=0.01)
    assert again[-1] == pytest.approx(1.0, abs=0.01)


def test_a_process_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(math_answers, "_START_SECONDS", 0)
    with pytest.raises(RuntimeError, match="math-verify cannot be run"):
        math_answers._Worker().ask("1", "1", 1.0)


def test_without_math_verify_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    math_answers._is_readable.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hf-mxfp4\[eval\]'"):
        math_answers.is_math_correct("1", "1")
