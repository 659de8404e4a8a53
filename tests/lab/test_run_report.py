# SPDX-License-Identifier: Apache-2.0
"""Reports of training runs: what a run writes about itself, what is read back, and what the report makes of it."""

import json

import pytest
from page_reader import PageReader

from hf_mxfp4.lab import RunLogError, health_checks, read_run, write_run_picture
from hf_mxfp4.lab.run_report.charts import CHARTS, draw_charts
from hf_mxfp4.lab.run_report.health import overall, summary
from hf_mxfp4.lab.run_report.log import RunRecord
from hf_mxfp4.lab.run_report.page import render_run
from hf_mxfp4.rl.run_log import PREVIOUS_LOG, RunLog


FACTS = {
    "model": "tiny", "architecture": "Qwen2ForCausalLM", "n_quantized": 14, "n_skipped": 1, "skipped": ["lm_head"],
    "weight_sqnr_db": 17.5, "options": {"aqn": True, "logging_steps": 1}, "changed_options": ["logging_steps"],
}  # fmt: skip


def values(step, **changed):
    return {
        "step": step, "loss": 0.1, "grad_norm": 1.0, "reward": 0.1 + 0.01 * step, "entropy": 1.0, "entropy/alarm": 0,
        "entropy/slope": 0.0, "aqn/sigma": 0.01, "aqn/measured_std": 0.0099, "aqn/n_modules": 5,
        "sampling/importance_sampling_ratio/clipped": 0.001, "frac_reward_zero_std": 0.1,
        "completions/mean_length": 20.0, "completions/clipped_ratio": 0.05, **changed,
    }  # fmt: skip


def moved(total, error, **kinds):
    """What is logged of the movement of quantized weights."""
    measured = {"total": total, **kinds}
    errors = {f"movement_se/{name}": error for name in measured}
    return {**{f"movement/{name}": value for name, value in measured.items()}, **errors, "movement/flipped_share": 0.01}


def started(folder, max_steps=20, facts=FACTS):
    log = RunLog(folder)
    log.start(0, max_steps, facts, [])
    return log


def write_log(folder, count=20, end="finished", **changed):
    log = started(folder)
    for step in range(1, count + 1):
        log.write("log", **values(step, **changed))
    if end:
        log.write("end", step=count, reason=end, error=None)
    return log


def states(record):
    return {check.title: check.state for check in health_checks(record)}


def test_what_is_written_is_read_back(tmp_path):
    write_log(tmp_path)
    record = read_run(tmp_path)
    assert (record.step, record.max_steps, record.end["reason"]) == (20, 20, "finished")
    assert record.values("reward") == [0.1 + 0.01 * step for step in range(1, 21)]
    assert record.facts == FACTS
    assert record.damaged == 0


def test_a_new_run_keeps_the_old_log(tmp_path):
    old = write_log(tmp_path).path.read_bytes()
    write_log(tmp_path, count=3)
    assert read_run(tmp_path).step == 3
    assert (tmp_path / PREVIOUS_LOG).read_bytes() == old


@pytest.mark.usefixtures("blank_pictures")
def test_half_a_line_of_a_killed_process_costs_that_line_alone(tmp_path):
    log = write_log(tmp_path, count=5, end=None)
    content = log.path.read_bytes()
    log.path.write_bytes(content[:-20])
    log.write("log", **values(6))
    record = read_run(tmp_path)
    assert [entry["step"] for entry in record.logs] == [1, 2, 3, 4, 6]
    assert record.damaged == 1
    assert "1 line of run_log.jsonl could not be read" in PageReader(render_run(record)).text


@pytest.mark.usefixtures("blank_pictures")
@pytest.mark.parametrize(
    ("line", "damaged"),
    [
        ("[1]", 1),
        ('{"kind": "log", "step": [3]}', 1),
        ('{"kind": "log", "step": 21, "loss": "x", "entropy": {}}', 0),
        ('{"kind": "gradient_gain", "step": 2}', 1),
        ('{"kind": "evaluation", "step": 1, "when": "now", "scores": {"a": [2, 0]}}', 1),
        ('{"kind": "evaluation", "step": 1, "when": "now", "scores": []}', 1),
    ],
    ids=lambda value: str(value)[:40],
)
def test_lines_of_another_form_are_counted_as_damage_or_their_values_left_out(line, damaged, tmp_path):
    log = write_log(tmp_path)
    log.path.write_bytes(log.path.read_bytes() + line.encode() + b"\n")
    record = read_run(tmp_path)
    assert record.damaged == damaged
    PageReader(render_run(record))


@pytest.mark.usefixtures("blank_pictures")
def test_a_page_has_no_control_characters_of_the_files(tmp_path):
    log = RunLog(tmp_path)
    log.start(0, 20, {**FACTS, "model": "a\x1b[31mb"}, [])
    log.write("log", **values(1))
    page = render_run(read_run(tmp_path))
    assert "\x1b" not in page
    assert "a\\x1b[31mb" in page


def test_long_runs_are_drawn_by_their_extremes(tmp_path):
    spikes = {1234: 9.0, 7001: -9.0}
    record = RunRecord(tmp_path, "log", [{"step": step, "grad_norm": spikes.get(step, 1.0)} for step in range(10_000)])
    (figure,) = [figure for chart, figure in draw_charts(record)[0] if chart.title == "Gradient norm"]
    (line,) = figure.axes[0].get_lines()
    steps = line.get_xdata().tolist()
    drawn = line.get_ydata().tolist()
    assert len(drawn) <= 2002
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 9999)
    assert {step: value for step, value in zip(steps, drawn, strict=True) if value != 1.0} == spikes


def test_a_resumed_run_replaces_what_it_does_again(tmp_path):
    write_log(tmp_path, count=7, end=None, reward=0.1)
    log = RunLog(tmp_path)
    log.start(4, 20, FACTS, [values(step) for step in range(1, 5)])
    for step in (5, 6):
        log.write("log", **values(step, reward=0.9))
    record = read_run(tmp_path)
    assert [entry["step"] for entry in record.logs] == [1, 2, 3, 4, 5, 6]
    assert record.values("reward") == [0.1] * 4 + [0.9] * 2
    assert len(record.starts) == 2
    assert "resumed once" in health_checks(record)[0].finding


def test_a_resume_into_an_empty_folder_takes_the_history_of_the_checkpoint(tmp_path):
    log = RunLog(tmp_path / "new")
    log.start(4, 20, FACTS, [values(step) for step in range(1, 5)])
    log.write("log", **values(5))
    assert [entry["step"] for entry in read_run(tmp_path / "new").logs] == [1, 2, 3, 4, 5]


def write_checkpoint(folder, step):
    folder.mkdir(parents=True)
    state = {"global_step": step, "max_steps": 20, "log_history": [values(s) for s in range(1, step + 1)]}
    (folder / "trainer_state.json").write_text(json.dumps(state))


@pytest.mark.usefixtures("blank_pictures")
def test_without_a_log_the_newest_whole_checkpoint_is_read(tmp_path):
    write_checkpoint(tmp_path / "checkpoint-5", 5)
    write_checkpoint(tmp_path / "checkpoint-10", 10)
    (tmp_path / "checkpoint-15").mkdir()  # as if saving had been cut off
    record = read_run(tmp_path)
    assert (record.source, record.step, record.max_steps) == ("checkpoint-10/trainer_state.json", 10, 20)
    assert "options, versions and machine are not known" in PageReader(render_run(record)).text


def test_a_checkpoint_has_the_history_until_it_was_saved_and_the_facts_beside_it(tmp_path):
    write_log(tmp_path, count=10)
    write_checkpoint(tmp_path / "checkpoint-5", 5)
    record = read_run(tmp_path / "checkpoint-5")
    assert record.step == 5
    assert record.facts == FACTS


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "there is no folder"),
        (lambda folder: folder.mkdir(), "holds neither run_log.jsonl .* nor a whole checkpoint"),
        (lambda folder: RunLog(folder).start(0, 20, FACTS, []), "has no logged value yet"),
        (lambda folder: (folder / "checkpoint-3").mkdir(parents=True), "nor a whole checkpoint"),
    ],
    ids=["missing", "empty", "no-value", "half-a-checkpoint"],
)
def test_nothing_to_report_is_said(tmp_path, prepare, message):
    prepare(tmp_path / "run")
    with pytest.raises(RunLogError, match=message):
        read_run(tmp_path / "run")


def test_a_healthy_run_is_green(tmp_path):
    write_log(tmp_path)
    record = read_run(tmp_path)
    checks = health_checks(record)
    assert {check.state for check in checks} == {"green"}
    assert overall(checks) == "green"
    assert "looks healthy: 20 of 20 steps" in summary(record, checks)


@pytest.mark.parametrize(
    ("changed", "title", "state", "words"),
    [
        ({"entropy": 0.01, "entropy/alarm": -1}, "Entropy", "red", "stopped exploring"),
        ({"entropy": 9.0, "entropy/alarm": 1}, "Entropy", "red", "losing its shape"),
        ({"aqn/measured_std": 0.0}, "Noise", "red", "did not reach the policy"),
        ({"aqn/measured_std": 0.0075}, "Noise", "amber", "differs from what was set"),
        ({"aqn/sigma": 0.0}, "Noise", "none", "noise-free"),
        ({"sampling/importance_sampling_ratio/clipped": 0.05}, "Importance weights", "amber", "aqn_sigma_start"),
        ({"sampling/importance_sampling_ratio/clipped": 0.5}, "Importance weights", "red", "aqn_sigma_start"),
        ({"sampling/effective_sample_size": 0.3}, "Effective sample size", "red", "Few tokens"),
        ({"sampling/effective_sample_size": 0.71}, "Effective sample size", "green", "71.0% on average"),
        ({"frac_reward_zero_std": 0.95}, "Learning signal", "red", "num_generations"),
        ({"completions/clipped_ratio": 0.4}, "Response length", "amber", "max_completion_length"),
        (moved(2224.0, 12.0), "Step movement", "red", "dither_ties"),
        (moved(8.0, 2.6), "Step movement", "amber", "8 ± 5.2 (step 1)"),
        (moved(8.0, 3.3), "Step movement", "green", "8 ± 6.6 (step 1)"),
        (moved(2.0, 0.2), "Step movement", "amber", "ties of a 16-bit checkpoint"),
        (moved(0.0, 0.2), "Step movement", "amber", "quantized before"),
        (moved(0.6, 0.3), "Step movement", "green", "where training assumes 1"),
        ({"grad_norm": float("nan")}, "Finite numbers", "red", "NaN or infinite in 20 logged steps, first at step 1"),
        ({"reward": 0.3}, "Reward", "amber", "chance"),
    ],
    ids=lambda value: "" if isinstance(value, (dict, str)) else None,
)
def test_what_is_wrong_is_said_with_advice(tmp_path, changed, title, state, words):
    write_log(tmp_path, **changed)
    (check,) = [check for check in health_checks(read_run(tmp_path)) if check.title == title]
    assert check.state == state
    assert words in f"{check.finding} {check.advice}"


def test_a_falling_reward_and_falling_sqnr_are_seen(tmp_path):
    log = started(tmp_path)
    for step in range(1, 21):
        log.write("log", **values(step, reward=1 - 0.02 * step, **{"error/sqnr_db": 20 - 0.1 * step}))
    record = read_run(tmp_path)
    assert states(record)["Reward"] == "red"
    assert states(record)["Quantization error"] == "amber"
    assert "(1 BAD, 2 LOOK)" in summary(record, health_checks(record))


@pytest.mark.parametrize(
    ("kl", "state", "words"),
    [
        ({"eval_kl": (0.215, 0.3, 0.518)}, "red", "held-out text 0.215 to 0.518 nats per token. Distillation made"),
        ({"eval_kl": (0.215, 0.3, 0.108)}, "green", "held-out text 0.215 to 0.108 nats per token."),
        ({"eval_kl": (0.215, 0.1, 0.21)}, "amber", "Nothing was gained"),
        ({"eval_kl": (0.215, 0.1, float("nan"))}, "red", "NaN or infinite"),
        (
            {"eval_a_kl": (0.2, 0.1), "eval_b_kl": (0.2, 0.3)},
            "amber",
            "a 0.2 to 0.1, b 0.2 to 0.3 nats per token. A rise",
        ),
        ({"eval_a_kl": (0.2, 0.4), "eval_b_kl": (0.2, 0.3)}, "red", "made the student worse"),
    ],
    ids=["worse", "better", "equal", "nan", "forgotten", "both-worse"],
)
def test_a_distillation_is_judged_by_held_out_texts(tmp_path, kl, state, words):
    log = started(tmp_path)
    for key, found in kl.items():
        for step, value in enumerate(found):
            log.write("log", step=step, **{key: value, key.replace("_kl", "_teacher_perplexity"): 6.0})
    (check,) = [check for check in health_checks(read_run(tmp_path)) if check.title == "Held-out KL"]
    assert check.state == state
    assert words in f"{check.finding} {check.advice}"


def test_the_kl_of_rewards_is_not_that_of_a_distillation(tmp_path):
    log = started(tmp_path)
    for step in range(3):
        log.write("log", step=step, eval_kl=0.1 * (step + 1))
    assert "Held-out KL" not in states(read_run(tmp_path))


def test_a_run_that_was_killed(tmp_path):
    write_log(tmp_path, end=None)
    assert "was killed or is still running" in health_checks(read_run(tmp_path))[0].finding


@pytest.mark.usefixtures("blank_pictures")
def test_a_run_that_ended_by_an_error(tmp_path):
    log = write_log(tmp_path, end=None)
    log.write("end", step=20, reason="stopped by an error", error="RewardError: reward <b> failed")
    record = read_run(tmp_path)
    assert health_checks(record)[0].state == "red"
    assert "by RewardError: reward <b> failed" in PageReader(render_run(record)).text


@pytest.mark.parametrize(
    ("after", "state"),
    [(200, "green"), (95, "green"), (82, "amber"), (65, "red"), (20, "red")],
)
def test_accuracy_is_judged_by_problems_that_changed(tmp_path, after, state):
    """Of 400 problems 80 are solved before; independent ones would make 95 and 65 no difference."""
    log = write_log(tmp_path)
    # A run that is resumed when it had finished evaluates its start last.
    for when, step, solved in (("after RL", 20, after), ("before RL", 0, 80)):
        log.write("evaluation", when=when, step=step, scores={"exact": [1] * solved + [0] * (400 - solved)})
    assert states(read_run(tmp_path))["Accuracy"] == state


def test_accuracies_on_other_problems_are_not_compared(tmp_path):
    log = write_log(tmp_path)
    for when, step, count in (("before RL", 0, 8), ("after RL", 20, 4)):
        log.write("evaluation", when=when, step=step, scores={"exact": [1] * count})
    assert states(read_run(tmp_path))["Accuracy"] == "none"


def everything(step):
    keys = {key for chart in CHARTS for key, _ in chart.lines}
    return {**dict.fromkeys(keys, 0.5), **moved(1.0, 0.1), **values(step)}


@pytest.mark.usefixtures("blank_pictures")
def test_the_page_needs_nothing_from_outside_and_names_what_was_not_measured(tmp_path):
    write_log(tmp_path, **{"entropy/alarm": 1})
    page = PageReader(render_run(read_run(tmp_path)))
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    assert "error_every (needs master weights" in page.text


@pytest.mark.usefixtures("blank_pictures")
def test_every_chart_is_drawn_when_its_values_are_there(tmp_path):
    log = started(tmp_path, 3)
    for step in (1, 2, 3):
        log.write("log", **everything(step))
    log.write("evaluation", when="before RL", step=0, scores={"exact": [1, 0, 0, 0]})
    page = PageReader(render_run(read_run(tmp_path)))
    assert page.tags.count("img") == len(CHARTS)
    assert "Not measured" not in page.text
    assert all(chart.reading in page.text for chart in CHARTS)


def test_the_picture(tmp_path):
    write_log(tmp_path, count=2)
    picture = write_run_picture(tmp_path, tmp_path / "new" / "run")
    assert picture == tmp_path / "new" / "run.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_nothing(tmp_path):
    started(tmp_path).write("log", step=1, other=1.0)
    with pytest.raises(ValueError, match="nothing to plot"):
        write_run_picture(tmp_path, tmp_path / "empty.png")
