# SPDX-License-Identifier: Apache-2.0
"""The recipe in two processes, as under a launcher (DDP over gloo)."""

import json
from pathlib import Path

import processes
from test_grpo import REPORTED, TINY


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def launch(folder, ranks, *options):
    words = [*TINY, "--n_test=13", f"--output_dir={folder}", *options]
    job = processes.script(HERE / "run_and_leave.py", ROOT / "recipes" / "grpo.py", *words)
    done = processes.run(job, ranks=ranks, timeout=180)
    assert done.returncode == 0, done.output[-3000:]
    assert done.output.count("left properly") == ranks, done.output[-3000:]
    return json.loads((folder / "summary.json").read_text())


def test_two_processes_train_evaluate_save_and_reload(tmp_path):
    summary = launch(tmp_path / "out", 2, REPORTED, "--save_strategy=steps", "--save_steps=3")
    assert summary["n_quantized"] == 14 and summary["steps"] == 3
    assert summary["reloaded"] == {"compared": 13, "identical": 13}
    # Thirteen problems do not divide by two, and each has its completion.
    lines = (tmp_path / "out" / "completions_after.jsonl").read_text().splitlines()
    assert len({json.loads(line)["prompt"] for line in lines}) == 13
    history = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    noisy = [entry for entry in history if entry.get("aqn/sigma")]
    assert [entry["aqn/n_modules"] for entry in noisy] == [5, 5]
    for metric in ("error/grid", "error/activations/sqnr_db"):
        assert any(isinstance(entry.get(metric), float) for entry in history), metric
    assert (tmp_path / "out" / "run_report.html").is_file()
    assert all(0.7 < entry["aqn/measured_std"] / entry["aqn/sigma"] < 1.3 for entry in noisy)
