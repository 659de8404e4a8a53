# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 costs` as a user meets it: tables, files, a suggestion that loads, messages, exit codes, resumption."""

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_mxfp4
from hf_mxfp4.analysis.perplexity import trials
from hf_mxfp4.cli import app
from hf_mxfp4.layers import MXFP4Linear
from recipes.tasks.tiny_model import build_char_tokenizer


BUDGET = ("--budget", 7, "--scheme", "w4a16:rceil", "--scheme", "w4a16:rceil+of1.0@0.1")


def run(*arguments):
    return CliRunner().invoke(app, ["costs", *map(str, arguments)])


@pytest.fixture
def model(checkpoint):
    folder = Path(checkpoint("llama"))
    network = AutoModelForCausalLM.from_pretrained(folder)
    network.lm_head.weight.data *= 20  # predictions that differ
    network.save_pretrained(folder)
    build_char_tokenizer("0123456789+= ?\n").save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path):
    rows = [{"question": f"{i}+{i}?", "answer": f"{i}+{i}={2 * i}"} for i in range(100, 112)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "sums.jsonl"


def test_the_types_of_a_model(model, text, tmp_path):
    done = run(model, "--text", text, "--by", "type", "--scheme", "even", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert "7 parts, a pass over the texts each, about 0.0 minutes" in done.stderr
    report = json.loads((tmp_path / "out" / "costs.json").read_text())
    # All texts, since nothing is chosen by them.
    assert (report["texts"], report["scheme"], report["unit"], report["bits"]) == (12, "even", "type", 4.25)
    assert {cost["part"] for cost in report["costs"]} == {
        *(f"self_attn.{side}_proj" for side in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    }
    assert {cost["layers"] for cost in report["costs"]} == {2} and "suggestion" not in report
    gains = [cost["gain"]["value"] for cost in report["costs"]]
    assert gains == sorted(gains, reverse=True) and "under even (4.2500 bits), 12 texts" in done.stdout
    assert json.loads(run(model, "--text", text, "--by", "type", "--out", tmp_path / "own", "--json").stdout)["costs"]


def test_a_suggestion_is_measured_on_other_texts_and_can_be_loaded(model, text, tmp_path, monkeypatch):
    done = run(model, "--text", text, "--out", tmp_path / "out", *BUDGET)
    assert done.exit_code == 0, done.stderr
    report = json.loads((tmp_path / "out" / "costs.json").read_text())
    assert report["texts"] == 3 and report["held_out"]["texts"] == 9 and len(report["costs"]) == 14
    assert "parts in full precision: " in done.stderr and "measured on the other 9 texts" in done.stdout
    rows = {row["name"]: row for row in report["held_out"]["rows"]}
    assert list(rows) == ["full precision", "w4a16:rceil", "w4a16:rceil+of1.0@0.1", report["suggestion"]["name"]]
    own = rows[report["suggestion"]["name"]]
    assert own["bits"] == report["suggestion"]["bits"] <= 7
    differences = report["held_out"]["kl_differences"]
    assert list(differences) == ["w4a16:rceil", "w4a16:rceil+of1.0@0.1"]
    expected = own["kl"]["value"] - rows["w4a16:rceil"]["kl"]["value"]
    assert differences["w4a16:rceil"]["value"] == pytest.approx(expected)
    # The snippet is a config, of the bits that it says.
    start = done.stdout.index("# ")
    options = yaml.safe_load(done.stdout[start : done.stdout.index("measured on")])
    assert options == report["suggestion"]["config"]
    config = hf_mxfp4.MXFP4RLConfig.from_dict(options)
    loaded = AutoModelForCausalLM.from_pretrained(model, quantization_config=config)
    share = sum(m.weight.numel() for m in loaded.modules() if isinstance(m, MXFP4Linear)) / 61440
    assert own["bits"] == pytest.approx(4.25 * share + 16 * (1 - share))
    packed = hf_mxfp4.MXFP4RLConfig.from_dict({**options, "mode": "packed"})
    assert packed.weight_scheme == config.weight_scheme and packed.activation_scheme is None
    # The same command again measures nothing.
    monkeypatch.setattr(trials, "score", None)
    again = run(model, "--text", text, "--out", tmp_path / "out", *BUDGET, "--json")
    assert again.exit_code == 0, again.stderr
    assert {**json.loads(again.stdout), "seconds": 0} == {**report, "seconds": 0}
    assert "14 parts, a pass over the texts each\n" in again.stderr


def test_an_interrupted_run_resumes(model, text, tmp_path, monkeypatch):
    measure, passes, stop = trials.score, [0], [None]

    def counted(*arguments):
        if passes[0] == stop[0]:
            raise KeyboardInterrupt
        passes[0] += 1
        return measure(*arguments)

    monkeypatch.setattr(trials, "score", counted)
    expected, whole = run(model, "--text", text, "--out", tmp_path / "whole", *BUDGET), passes[0]
    passes[0], stop[0] = 0, 7
    stopped = run(model, "--text", text, "--out", tmp_path / "out", *BUDGET)
    assert stopped.exit_code == 130 and "the same command resumes where it stopped" in stopped.stderr
    stop[0] = None
    resumed = run(model, "--text", text, "--out", tmp_path / "out", *BUDGET)
    assert resumed.exit_code == 0 and resumed.stdout == expected.stdout
    assert passes[0] == whole > 15
    other = run(model, "--text", text, "--max-length", 4, "--out", tmp_path / "out", *BUDGET)
    assert other.exit_code == 2 and "--overwrite" in other.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--budget", 4), "a budget of 4 bits is below the 4.2500 that w4a16:rceil takes by itself"),
        (("--budget", 4.3), "has no room for any part in full precision"),
        (("--budget", 5, "--samples", 4), "4 texts are too few to choose by some and measure on others"),
        (("--scheme", "w4a16:rcell"), "no scale rule 'rcell'"),
    ],
    ids=str,
)
def test_what_cannot_be_done_says_why(model, text, tmp_path, arguments, message):
    done = run(model, "--text", text, "--out", tmp_path / "out", "--scheme", "w4a16:rceil", *arguments)
    assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_packed_weights_have_no_full_precision(model, text, tmp_path):
    packed = AutoModelForCausalLM.from_pretrained(model, quantization_config=hf_mxfp4.MXFP4RLConfig(mode="packed"))
    packed.save_pretrained(tmp_path / "packed")
    build_char_tokenizer("0123456789+= ?\n").save_pretrained(tmp_path / "packed")
    done = run(tmp_path / "packed", "--text", text, "--out", tmp_path / "out")
    assert done.exit_code == 2 and "of which there is no full precision; give the original" in done.stderr
