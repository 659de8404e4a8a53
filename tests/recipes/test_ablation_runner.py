# SPDX-License-Identifier: Apache-2.0
"""Grids of runs that are finished, killed, failed or changed, with a stand-in for `grpo.py`; and one real grid."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import processes
import pytest
import torch
import yaml
from matplotlib.figure import Figure
from safetensors.torch import load_file

from recipes.ablation import main
from recipes.ablations.grid import read_grid
from recipes.ablations.runner import make_base, stored_base


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPT = ROOT / "recipes" / "ablation.py"

#: Does what its configuration's `learning_rate` says: 0.5 fails, 0.25 waits to be killed, others are the accuracy.
STAND_IN = """
import json, os, sys, time, yaml
from pathlib import Path
config = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
folder = Path(config["output_dir"])
with (folder / "starts").open("a") as file:
    file.write(" ".join(sys.argv[4:]) + " threads=" + os.environ["OMP_NUM_THREADS"] + "\\n")
if config["learning_rate"] == 0.5:
    sys.exit("out of luck")
while config["learning_rate"] == 0.25 and not (folder / "go").exists():
    time.sleep(0.02)
value = config["learning_rate"] + 0.01 * config["seed"]
history = [{"step": i, "reward": value * i, "entropy": 1 / i, "sampling/ess": 0.5} for i in (1, 2, 3)]
history += [{"step": 2, "greedy/strict": value / 2, "greedy/flexible": value}]
(folder / "log_history.json").write_text(json.dumps(history))
summary = {
    "accuracy_before": {"strict": 0.125} if config["evaluate_before"] else None, "accuracy_after": {"strict": value},
    "standard_error_after": {"strict": 0.1}, "n_test": 16, "steps": 3, "entropy_first": 1.0, "entropy_last": 0.5,
    "entropy_alarms": [], "scheme": "some", "n_quantized": 14, "weight_sqnr_db": None, "seconds": 1.0,
}
(folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def ablation(monkeypatch):
    """`ablation(argv)` is the exit code of `recipes/ablation.py`, without plots, which take most of the time."""
    monkeypatch.setattr("recipes.ablation.draw_accuracy", lambda records, model: Figure())
    return main


@pytest.fixture
def grid(tmp_path):
    """`grid(**cells)` writes a grid on the stand-in, each cell given by its learning rate; its path."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")

    def write(seeds=(0, 1), **cells):
        content = {
            "output_dir": str(tmp_path / "out"),
            "seeds": list(seeds),
            "label": "stand-in",
            "launcher": f"{sys.executable} {tmp_path / 'stand_in.py'}",
            "task": {"task": "word_problems", "problem_count": 100},
            "base": {"model_name_or_path": str(tmp_path / "model")},
            "train": {"use_cpu": True, "bf16": False, "learning_rate": 0.5, "save_steps": 2},
            "cells": {name: {"options": {"learning_rate": rate}} for name, rate in cells.items()},
        }
        (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        return str(tmp_path / "grid.yaml")

    return write


def starts(tmp_path, cell, seed):
    return (tmp_path / "out" / "cells" / cell / f"seed{seed}" / "starts").read_text().splitlines()


def records_in(folder):
    return json.loads((folder / "ablation.json").read_text())


def test_every_cell_and_seed_is_run_once_and_reported(grid, tmp_path, capsys):
    path, ablation = grid(bf16=0.75, mxfp4=0.375), main
    assert ablation(["--config", path, "--jobs", "2"]) == 0
    printed = capsys.readouterr().out
    assert "runs 4 of 4, 2 at a time" in printed and "4/4 " in printed
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert all(starts(tmp_path, cell, seed) == [f" threads={threads}"] for cell in ("bf16", "mxfp4") for seed in (0, 1))
    out = tmp_path / "out"
    config = yaml.safe_load((out / "cells" / "mxfp4" / "seed1" / "config.yaml").read_text())
    assert (config["seed"], config["learning_rate"], config["save_steps"]) == (1, 0.375, 2)
    records = records_in(out)
    assert [(r["cell"], r["seed"], r["value"], r["baseline"]) for r in records] == [
        ("bf16", 0, 0.75, 0.75), ("mxfp4", 0, 0.375, 0.75), ("bf16", 1, 0.76, 0.76), ("mxfp4", 1, 0.385, 0.76),
    ]  # fmt: skip
    assert [r["before"] for r in records] == [0.125, 0.125, None, None]
    assert records[0]["metrics"] == {"reward": 1.5, "entropy": pytest.approx(11 / 18, rel=1e-5), "sampling/ess": 0.5}
    assert records[0]["hardware"].endswith(f", {threads} threads")
    assert "| mxfp4 | 12.5 | 38.0 |" in (out / "table.md").read_text()
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")

    assert ablation(["--config", path]) == 0  # all there
    assert "runs 0 of 4, 1 at a time" in capsys.readouterr().out
    assert len(starts(tmp_path, "bf16", 0)) == 1


def test_parts_of_a_grid_are_reported_together(ablation, grid, tmp_path):
    path, other = grid(bf16=0.75, mxfp4=0.375), tmp_path / "other"
    ablation(["--config", path, "--only", "bf16", "--seeds", "5"])
    ablation(["--config", path, "--out", str(other), "--only", "mxfp4", "--seeds", "5"])  # on another machine
    shutil.copytree(tmp_path / "out" / "cells", other / "cells", dirs_exist_ok=True)
    assert ablation(["--config", path, "--out", str(other), "--report-only"]) == 0
    assert [(r["cell"], r["value"], r["baseline"]) for r in records_in(other)] == [
        ("bf16", 0.8, 0.8), ("mxfp4", 0.425, 0.8),
    ]  # fmt: skip


def test_a_failed_run_is_recorded_and_tried_again(ablation, grid, tmp_path, capsys):
    path = grid(bf16=0.75, mxfp4=0.5, mbs=0.375, seeds=[0])
    assert ablation(["--config", path]) == 1
    printed = capsys.readouterr().out
    assert "FAILED with exit code 1: out of luck" in printed and "failed mxfp4/seed0" in printed
    state = json.loads((tmp_path / "out" / "cells" / "mxfp4" / "seed0" / "cell.json").read_text())
    assert state["exit_code"] == 1
    records = records_in(tmp_path / "out")
    assert [record["cell"] for record in records] == ["bf16", "mbs"]
    assert ablation(["--config", path]) == 1
    assert [len(starts(tmp_path, cell, 0)) for cell in ("bf16", "mxfp4", "mbs")] == [1, 2, 1]
    # Repaired, it is run although its settings are others.
    assert ablation(["--config", grid(bf16=0.75, mxfp4=0.625, mbs=0.375, seeds=[0])]) == 0


def test_other_settings_are_refused(ablation, grid, tmp_path, capsys):
    ablation(["--config", grid(bf16=0.75, mxfp4=0.375, seeds=[0])])
    changed = grid(bf16=0.75, mxfp4=0.25 + 0.125 / 2, seeds=[0])
    with pytest.raises(SystemExit, match="mxfp4/seed0 was run with other learning_rate; .*remove that folder"):
        ablation(["--config", changed])
    capsys.readouterr()
    assert ablation(["--config", changed, "--report-only"]) == 0
    assert "left out run with other settings: mxfp4/seed0" in capsys.readouterr().out
    assert [r["cell"] for r in records_in(tmp_path / "out")] == ["bf16"]
    shutil.rmtree(tmp_path / "out" / "cells" / "mxfp4" / "seed0")
    assert ablation(["--config", changed]) == 0
    assert records_in(tmp_path / "out")[1]["value"] == 0.3125 and len(starts(tmp_path, "bf16", 0)) == 1


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_a_killed_run_goes_on_from_its_checkpoint_or_from_the_start(ablation, grid, tmp_path, with_checkpoint):
    path = grid(bf16=0.75, mxfp4=0.375, seeds=[0])
    ablation(["--config", path])
    folder = tmp_path / "out" / "cells" / "mxfp4" / "seed0"
    (folder / "summary.json").write_text('{"accuracy_af')  # as if killed while it was writing
    if with_checkpoint:
        (folder / "checkpoint-2").mkdir()
        (folder / "checkpoint-2" / "trainer_state.json").write_text('{"global_step": 2}')
    assert ablation(["--config", path]) == 0
    first, second = starts(tmp_path, "mxfp4", 0)
    assert ("--resume_from_checkpoint true" in second) == with_checkpoint and "resume" not in first
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3


def test_ending_the_runner_ends_its_runs_and_frees_the_folder(grid, tmp_path, ablation):
    path = grid(bf16=0.25, mxfp4=0.75, seeds=[0])
    runner = processes.start(processes.script(SCRIPT, "--config", path))
    folder = tmp_path / "out" / "cells" / "bf16" / "seed0"
    deadline = time.monotonic() + 120
    while not (folder / "starts").is_file():
        assert runner.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(SystemExit, match="another process is at work in"):
        ablation(["--config", path])
    runner.send_signal(signal.SIGTERM)
    assert runner.wait().returncode == 128 + signal.SIGTERM
    (folder / "go").touch()
    assert ablation(["--config", path]) == 0  # the lock is free, so no run is alive; started again
    assert len(starts(tmp_path, "bf16", 0)) == 2


def test_nothing_to_report_and_no_jobs_are_errors(ablation, grid):
    path = grid(bf16=0.75, mxfp4=0.375)
    with pytest.raises(SystemExit, match="no run has finished"):
        ablation(["--config", path, "--report-only"])
    with pytest.raises(SystemExit, match="jobs=0 must be at least 1"):
        ablation(["--config", path, "--jobs", "0"])
    with pytest.raises(SystemExit, match="no file .*nowhere.yaml"):
        ablation(["--config", "nowhere.yaml"])


# ---- the starting point ----------------------------------------------------------------------------------------------

TINY = {
    "seeds": [0],
    "label": "tiny",
    "task": {"task": "word_problems", "problem_count": 60, "problem_steps": [1, 2]},
    "evaluation": {"n_test": 4, "greedy_batch_size": 4, "evaluate_every": 1, "evaluate_every_n": 2},
    "base": {
        "architecture": "qwen2",
        "sizes": {"hidden_size": 32, "num_layers": 2, "intermediate_size": 64, "max_positions": 96},
        "attn_implementation": "eager",
        "pretraining": {
            "max_steps": 4, "per_device_train_batch_size": 4, "use_cpu": True, "bf16": True, "logging_steps": 2,
            "save_strategy": "steps", "save_steps": 2, "dataloader_pin_memory": False,
        },
    },
    "train": {
        "macro_block": None, "outlier_fallback": None, "aqn": False, "max_steps": 2, "max_completion_length": None,
        "per_device_train_batch_size": 8, "num_generations": 4, "logging_steps": 1, "error_every": 1, "report_every": 0,
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False,
    },
    "cells": {"bf16": {"options": {"full_precision": True}}, "mxfp4": {"label": "MXFP4", "paper": {"dense": 60.1}}},
}  # fmt: skip


def tiny(tmp_path, **changes):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, "output_dir": str(tmp_path / "out"), **changes}, sort_keys=False))
    return path


def test_a_killed_pretraining_goes_on_and_gives_the_same_weights(tmp_path, monkeypatch):
    model = read_grid(tiny(tmp_path))
    monkeypatch.setattr("recipes.ablations.runner.shutil.rmtree", lambda *args, **kwargs: None)
    assert stored_base(model) is None
    make_base(model)
    folder = tmp_path / "out" / "base"
    weights = load_file(folder / "model.safetensors")
    whole = stored_base(model)
    monkeypatch.undo()
    shutil.rmtree(folder / "checkpoints" / "checkpoint-4")
    (folder / "base.json").unlink()
    make_base(model)
    assert stored_base(model)["settings"] == whole["settings"] and not (folder / "checkpoints").exists()
    again = load_file(folder / "model.safetensors")
    # How much of the test split is evaluated makes no other model, and another task does.
    assert stored_base(read_grid(tiny(tmp_path, evaluation={"n_test": 2})))
    other = read_grid(tiny(tmp_path, task={**TINY["task"], "problem_count": 61}))
    with pytest.raises(ValueError, match="was made with other task; .*remove that folder"):
        stored_base(other)
    small = {**TINY["base"], "sizes": {**TINY["base"]["sizes"], "max_positions": 16}}
    with pytest.raises(ValueError, match="the longest sequence has .* tokens, the model has 16 positions"):
        make_base(read_grid(tiny(tmp_path, base=small)))
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)


# ---- the real thing --------------------------------------------------------------------------------------------------


#: With processes that are forked where new ones would be spawned.
FORKED = """
import multiprocessing, sys
from recipes import ablation
forks = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda kind: forks
sys.exit(ablation.main(sys.argv[1:]))
"""


def test_a_whole_grid(tmp_path):
    """Two cells, one seed, two steps: from random weights to the table."""
    job = processes.code(FORKED, "--config", tiny(tmp_path, launcher=" ".join(processes.FORKED)))
    process = processes.run(job)
    assert process.returncode == 0, process.output[-4000:]
    full, plain = records_in(tmp_path / "out")
    assert full["scheme"] == "full precision" and full["n_quantized"] == 0
    assert plain["scheme"] == "w4a4 [weights mxfp4+even, activations mxfp4+even]" and plain["n_quantized"] == 14
    assert plain["steps"] == 2 and plain["n_test"] == 4 and plain["before"] is not None
    assert plain["metrics"]["error/grid"] > 0 and (tmp_path / "out" / "accuracy.png").is_file()
    # Runs start from the saved model, and keep none of their own.
    *_, run = read_grid(tmp_path / "tiny.yaml").runs
    assert not list(run.folder.rglob("*.safetensors"))
    assert json.loads((run.folder / "summary.json").read_text())["model"] == run.grid.start
