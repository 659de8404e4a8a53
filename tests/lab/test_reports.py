# SPDX-License-Identifier: Apache-2.0
"""Reports and figures of an analysis: complete, valid, self-contained, and what is drawn is what was measured; what a
run writes about itself, what is read back, and what the report makes of it."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import hf_mxfp4
from hf_mxfp4 import lab
from hf_mxfp4.checkpoint import Problem
from hf_mxfp4.lab import ErrorStatistics, RunLogError, health_checks, read_run, write_run_picture
from hf_mxfp4.lab.errors.layers import natural_key
from hf_mxfp4.lab.errors.weights import least_error
from hf_mxfp4.lab.run_report.charts import CHARTS, draw_charts
from hf_mxfp4.lab.run_report.health import overall, summary
from hf_mxfp4.lab.run_report.log import RunRecord
from hf_mxfp4.lab.run_report.page import render_run
from hf_mxfp4.numerics import parse_scheme
from hf_mxfp4.rl.run_log import PREVIOUS_LOG, RunLog


class PageReader(HTMLParser):
    """Checks that tags are closed in order, and collects tags, texts and references: what a page could load."""

    VOID = {"meta", "img", "br", "hr", "link"}

    def __init__(self, text):
        super().__init__()
        self.open, self.references, self.tags, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


SCHEMES = [parse_scheme(text) for text in ("rceil", "floor", "rceil+mbs128-static+of0.5")]
SOURCE = {"kind": "folder", "architecture": "Qwen2ForCausalLM", "files": 1}


@pytest.fixture(scope="module")
def analysis(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    names = [f"model.layers.{i}.mlp.{kind}.weight" for i in range(12) for kind in ("up", "down")]
    tensors = {name: torch.randn(64, 128) for name in names}
    tensors["model.layers.3.mlp.zero.weight"] = torch.zeros(64, 128)
    tensors["model.embed_tokens.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors")
    analysis = lab.analyze_weights(lab.open_source(str(folder)), SCHEMES, lab.Selection())
    analysis.model = "my <model>"
    analysis.problems.append(Problem("model-00002.safetensors", "it is <broken>"))
    return analysis


@pytest.fixture(scope="module")
def written(analysis, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return folder, lab.write_analysis(analysis, SOURCE, folder)


def test_json_is_valid_and_complete(analysis, written):
    report = json.loads((written[0] / "report.json").read_text())
    assert (report["format"], report["hf_mxfp4"], report["model"]) == (1, hf_mxfp4.__version__, "my <model>")
    assert report["schemes"] == [str(scheme) for scheme in SCHEMES]
    assert len(report["tensors"]) == 25
    names = [tensor["name"] for tensor in report["tensors"]]
    assert names == sorted(names, key=natural_key)
    first = report["tensors"][0]
    assert (first["layer_type"], first["depth"], first["shape"]) == ("mlp.down", 0, [64, 128])
    zero = next(tensor for tensor in report["tensors"] if "zero" in tensor["name"])
    assert zero["schemes"]["mxfp4+rceil"]["relative_mse"] is None
    weight = report["kinds"]["weight"]
    assert weight["tensors"] == 25 and list(weight["by_depth"]["mxfp4+floor"]) == [str(i) for i in range(12)]
    assert len(weight["worst"]["mxfp4+rceil"]) == 20
    assert weight["worst"]["mxfp4+rceil"][0]["relative_mse"] >= weight["worst"]["mxfp4+rceil"][19]["relative_mse"]
    assert sum(weight["total"]["mxfp4+rceil"]["delta_histogram"]) == 24 * 64 * 4
    assert report["skipped"] == {"embedding": {"count": 1, "names": ["model.embed_tokens.weight"]}}
    assert report["problems"] == [{"where": "model-00002.safetensors", "reason": "it is <broken>"}]


def test_html_is_one_file_for_any_screen(written):
    page = Path(written[1][2]).read_text()
    parsed = PageReader(page)
    assert parsed.tags.count("img") == 4
    assert all(reference.startswith("data:image/png;base64,") for reference in parsed.references)
    assert not {"script", "link", "iframe"} & set(parsed.tags)
    assert "http" not in page and "url(" not in page and "@import" not in page
    assert '<meta name="viewport" content="width=device-width,initial-scale=1">' in page
    assert "my &lt;model&gt;" in page and "<model>" not in page
    assert "it is &lt;broken&gt;" in page
    assert "Verdict, least error: at 4.25 bits an element mxfp4+" in page


def statistics(text, seed=0):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(seed))
    return lab.error_statistics(x, parse_scheme(text))


def test_the_ranking_names_the_best_at_each_number_of_bits():
    texts = ("rceil", "even", "rceil+mbs128-static", "rceil+of0.5")
    found = {text: statistics(text) for text in texts}
    rceil, even, macro, fallback = (f"{found[text].sqnr_db:.2f}" for text in texts)
    assert least_error(found) == (
        f"Verdict, least error: at 4.25 bits an element even (SQNR {even} dB, next is rceil with {rceil}); at 4.31 "
        f"bits an element rceil+mbs128-static (SQNR {macro} dB); at 8.50 bits an element rceil+of0.5 (SQNR "
        f"{fallback} dB)."
    )
    assert found["even"].sqnr_db > found["rceil"].sqnr_db
    assert least_error({"rceil": ErrorStatistics()}) == ""


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_histograms_are_densities():
    shown = {"rceil": statistics("rceil"), "even": statistics("even"), "none": ErrorStatistics()}
    [axes] = lab.delta_figure(shown).axes
    assert len(axes.patches) == 2
    for patch, s in zip(axes.patches, shown.values(), strict=False):
        values, edges, _ = patch.get_data()
        assert (values * (edges[1:] - edges[:-1])).sum() == pytest.approx(1)
        assert (values > 0).tolist() == [count > 0 for count in s.histogram]
    low, high = axes.get_xlim()
    assert low < -0.2 and 1.0 < high < 1.3


def test_ratios_side_by_side():
    groups = {scheme: {i: statistics(scheme, i) for i in range(3)} for scheme in ("rceil", "floor")}
    first, second = lab.ratio_figure(groups, "depth").axes
    assert (first.get_title(), second.get_title(), first.get_xlabel()) == ("rceil", "floor", "depth")
    assert legend(first) == ["scale bias", "deadzone", "grid noise", "whole error"]
    whole = second.get_lines()[3]
    assert list(whole.get_xdata()) == [0, 1, 2]
    assert list(whole.get_ydata()) == [100 * s.relative_mse for s in groups["floor"].values()]
    named = lab.ratio_figure({"rceil": {"mlp.up": statistics("rceil"), "zero": ErrorStatistics()}}, "layer type")
    assert [label.get_text() for label in named.axes[0].get_xticklabels()] == ["mlp.up", "zero"]


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


def test_what_is_written_is_read_back_and_a_new_run_keeps_the_old_log(tmp_path):
    old = write_log(tmp_path).path.read_bytes()
    record = read_run(tmp_path)
    assert (record.step, record.max_steps, record.end["reason"]) == (20, 20, "finished")
    assert record.values("reward") == [0.1 + 0.01 * step for step in range(1, 21)]
    assert record.facts == FACTS and record.damaged == 0
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
        ('{"kind": "evaluation", "step": 1, "when": "now", "scores": {"a": {"accuracy": 2, "n": 4}}}', 1),
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
    assert "\x1b" not in page and "a\\x1b[31mb" in page


def test_long_runs_are_drawn_by_their_extremes(tmp_path):
    spikes = {1234: 9.0, 7001: -9.0}
    record = RunRecord(tmp_path, "log", [{"step": step, "grad_norm": spikes.get(step, 1.0)} for step in range(10_000)])
    (figure,) = [figure for chart, figure in draw_charts(record)[0] if chart.title == "Gradient norm"]
    (line,) = figure.axes[0].get_lines()
    steps, drawn = line.get_xdata().tolist(), line.get_ydata().tolist()
    assert len(drawn) <= 2002 and steps == sorted(steps) and (steps[0], steps[-1]) == (0, 9999)
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
    assert record.step == 5 and record.facts == FACTS


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
    assert check.state == state and words in f"{check.finding} {check.advice}"


def test_the_kl_of_rewards_is_not_that_of_a_distillation(tmp_path):
    log = started(tmp_path)
    for step in range(3):
        log.write("log", step=step, eval_kl=0.1 * (step + 1))
    assert "Held-out KL" not in states(read_run(tmp_path))


@pytest.mark.usefixtures("blank_pictures")
def test_how_a_run_ended(tmp_path):
    log = write_log(tmp_path, end=None)
    assert "was killed or is still running" in health_checks(read_run(tmp_path))[0].finding
    log.write("end", step=20, reason="stopped by an error", error="RewardError: reward <b> failed")
    record = read_run(tmp_path)
    assert health_checks(record)[0].state == "red"
    assert "by RewardError: reward <b> failed" in PageReader(render_run(record)).text


@pytest.mark.parametrize(("after", "state"), [(0.5, "green"), (0.22, "amber"), (0.05, "red")])
def test_accuracy_is_judged_against_its_interval(tmp_path, after, state):
    log = write_log(tmp_path)
    # A run that is resumed when it had finished evaluates its start last.
    for when, step, accuracy in (("after RL", 20, after), ("before RL", 0, 0.2)):
        scores = {"exact": {"accuracy": accuracy, "standard_error": 0.02, "n": 400}}
        log.write("evaluation", when=when, step=step, scores=scores)
    assert states(read_run(tmp_path))["Accuracy"] == state


def everything(step):
    keys = {key for chart in CHARTS for key, _ in chart.lines}
    return {**dict.fromkeys(keys, 0.5), **moved(1.0, 0.1), **values(step)}


@pytest.mark.usefixtures("blank_pictures")
def test_the_page_is_well_formed_and_needs_nothing_from_outside(tmp_path):
    write_log(tmp_path, **{"entropy/alarm": 1})
    page = PageReader(render_run(read_run(tmp_path)))
    assert "script" not in page.tags and "link" not in page.tags and "(NO)" not in page.text
    assert page.references and all(reference.startswith("data:image/png;base64,") for reference in page.references)
    assert "Not measured" in page.text and "error_every (needs master weights" in page.text


@pytest.mark.usefixtures("blank_pictures")
def test_every_chart_is_drawn_when_its_values_are_there(tmp_path):
    log = started(tmp_path, 3)
    for step in (1, 2, 3):
        log.write("log", **everything(step))
    scores = {"exact": {"accuracy": 0.2, "standard_error": 0.02, "n": 400}}
    log.write("evaluation", when="before RL", step=0, scores=scores)
    record = read_run(tmp_path)
    page = PageReader(render_run(record))
    assert page.tags.count("img") == len(CHARTS) and record.damaged == 0
    assert "Not measured" not in page.text
    assert all(chart.reading in page.text for chart in CHARTS)


def test_the_picture(tmp_path):
    log = started(tmp_path, 2)
    for step in (1, 2):
        log.write("log", **everything(step))
    assert write_run_picture(tmp_path, tmp_path / "new" / "run.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to plot"):
        started(tmp_path / "empty", 1, {}).write("log", step=1, other=1.0)
        write_run_picture(tmp_path / "empty", tmp_path / "empty.png")
