# SPDX-License-Identifier: Apache-2.0
"""The recipe under a launcher with two processes (DDP over gloo)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from test_grpo import TINY


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def launch(folder, processes, *options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [str(HERE / "run_and_leave.py"), str(ROOT / "recipes" / "grpo.py")]
    command += [*TINY, "--n_test=13", f"--output_dir={folder}", *options]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        output, _ = job.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)  # the workers too, which outlive their launcher
        raise
    assert job.returncode == 0, output[-3000:]
    assert output.count("left properly") == processes, output[-3000:]
    return json.loads((folder / "summary.json").read_text())


def test_two_processes_train_evaluate_save_and_reload(tmp_path):
    summary = launch(tmp_path / "out", 2, "--save_strategy=steps", "--save_steps=3")
    assert summary["n_quantized"] == 14 and summary["steps"] == 3
    assert summary["reloaded"] == {"compared": 13, "identical": 13}
    # Thirteen problems do not divide by two, and each has its completion.
    lines = (tmp_path / "out" / "completions_after.jsonl").read_text().splitlines()
    assert len({json.loads(line)["prompt"] for line in lines}) == 13
    history = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    noisy = [entry for entry in history if entry.get("aqn/sigma")]
    assert [entry["aqn/n_modules"] for entry in noisy] == [5, 5]
    for metric in ("entropy/effective_temperature", "error/activations/sqnr_db", "gradient_gain/first"):
        assert any(isinstance(entry.get(metric), float) for entry in history), metric
    assert (tmp_path / "out" / "run_report.html").is_file()
    assert all(0.7 < entry["aqn/measured_std"] / entry["aqn/sigma"] < 1.3 for entry in noisy)
