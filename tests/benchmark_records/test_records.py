# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: their options, what every record says of where and when it was made, and the documents,
whose numbers are those of the committed records."""

import datetime
import json
import re
import shutil
import subprocess

import pytest
import torch

from benchmarks import decode_model, write_docs
from benchmarks.pretrain_study import record
from benchmarks.records import RESULTS, made, option_parser, records, write


def test_every_record_says_machine_versions_command_date_and_commit(monkeypatch):
    found = made("python -m benchmarks.x", ("torch", "no-such-package"), "a machine")
    assert list(found) == ["hardware", "versions", "command", "date", "commit"]
    assert found["hardware"] == "a machine"
    assert found["command"] == "python -m benchmarks.x"
    assert list(found["versions"]) == ["torch"]
    assert found["versions"]["torch"].startswith(torch.__version__[:3])
    assert found["date"] == datetime.date.today().isoformat()
    assert f"{torch.get_num_threads()} threads" in made("x", ())["hardware"]
    assert made("x", (), commit="1cb9b60e")["commit"] == "1cb9b60e"
    monkeypatch.setenv("PATH", "")  # without git
    assert made("x", (), "a machine")["commit"] == "unknown"


def test_records_go_to_the_file_that_is_named_or_nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert option_parser("What it is.\n\nMore.", "memory").parse_args([]).out == str(RESULTS / "memory.json")
    assert option_parser("What it is.").format_help().count("--out") == 0
    write([{"value": 1}], "-")
    assert not list(tmp_path.iterdir())
    write([{"value": 1}], tmp_path / "found")
    assert json.loads((tmp_path / "found").read_text()) == [{"value": 1}]


@pytest.mark.parametrize("path", write_docs.documents(), ids=lambda path: path.stem)
def test_the_tables_are_those_of_the_records(path):
    text = path.read_text()
    assert write_docs.filled(text) == text, "run `python -m benchmarks.write_docs`"


def test_a_changed_number_is_noticed():
    text = (write_docs.ROOT / "README.md").read_text()
    changed = text.replace("| 4.25 | FP8 | FP4 | 1.1", "| 4.25 | FP8 | FP4 | 1.2", 1)
    assert changed != text
    assert write_docs.filled(changed) == text


def test_every_table_is_shown_somewhere():
    shown = {match[2] for path in write_docs.documents() for match in write_docs.MARKED.finditer(path.read_text())}
    assert shown == set(write_docs.TABLES)


def test_every_plot_is_linked_and_exists():
    pages = [write_docs.ROOT / "README.md", *sorted((write_docs.ROOT / "docs").glob("*.md"))]
    linked = {
        (page.parent / link).resolve()
        for page in pages
        for link in re.findall(r"\]\(([^)]*plots/[^)]*)\)", page.read_text())
    }
    assert linked == {path.resolve() for path in write_docs.PLOTS.iterdir()}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_records_say_what_made_them(path):
    records = json.loads(path.read_text())
    assert records
    for entry in records:
        for key in ("name", "shape", "value", "unit", "hardware", "versions", "command", "date"):
            assert entry.get(key) is not None, (key, entry)
        assert re.fullmatch("[0-9a-f]{8,}", entry.get("commit", "")), entry
        assert {"baseline", "ratio", "ceiling_fraction"} <= entry.keys()


def test_gpu_commands_exist_at_their_commit():
    def git(*words, **options):
        return subprocess.run(["git", *words], cwd=RESULTS, capture_output=True, text=True, **options).stdout

    if shutil.which("git") is None or git("rev-parse", "--is-shallow-repository") != "false\n":
        pytest.skip("no history of git")
    wanted = set()
    for path in RESULTS.glob("*.json"):
        for entry in json.loads(path.read_text()):
            if entry["hardware"].startswith("NVIDIA"):
                program = re.match(r"python (?:-m )?(\S+)", entry["command"])[1]
                module = {"benchmarks.gpu": "benchmarks.gpu.__main__"}.get(program, program.removesuffix(".py"))
                wanted.add(f"{entry['commit']}:{module.replace('.', '/')}.py")
    assert wanted
    assert "missing" not in git("cat-file", "--batch-check", input="\n".join(sorted(wanted)))


def study(mean):
    arm = {
        "overhead": {"by_seed": [], "n": 2, "n_finite": 2, "sd": 0.1, "interval": None, "mean": mean},
        "gap": {"mean": 0.01, "interval": None},
        "curve": [[[0, 4.0]]],
    }
    return {
        "baseline": "full precision (float32)", "parameters": 800_000, "steps": 420, "tokens_per_step": 1024,
        "entropy": 1.2, "budget_tokens": 307200, "target_fraction": 0.9, "arms": {"all": arm},
    }  # fmt: skip


@pytest.mark.parametrize("mean, value, ratio", [(0.25, 0.25, 0.8), (None, "not reached", None)])
def test_the_record_of_a_pretraining_study_says_what_its_summary_says(mean, value, ratio):
    entry = record("all", study(mean), "command", "machine")
    assert (entry["value"], entry["unit"], entry["ratio"]) == (value, "token overhead", ratio)
    assert entry["shape"] == "0.80 M parameters, 420 steps of 1024 tokens"
    assert entry["paper"] == "26-27 %"
    assert entry["command"] == "command"
    assert entry["hardware"] == "machine"


def test_modelled_decoding_products_meet_the_one_that_was_not_fitted():
    fixed, packed, _ = decode_model.measured()
    one_row = [record for record in records("gpu_decode") if record["name"] == "decode / 1 rows"]
    (measured,) = [record for record in one_row if record["shape"] == [4096, 14336]]
    assert fixed + 4096 * 14336 * decode_model.PACKED_BYTES / packed == pytest.approx(measured["seconds"], rel=0.01)


def test_joined_products_of_a_step_save_the_fixed_time_of_three_launches_a_layer():
    times = decode_model.step_seconds(decode_model.MODELS["1.5B"])
    fixed, _, _ = decode_model.measured()
    assert times["packed"] - times["packed, joined"] == pytest.approx(3 * 28 * fixed)
