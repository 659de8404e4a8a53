# SPDX-License-Identifier: Apache-2.0
"""Rehearsals of grids: what is shortened, what is refused, what is noticed; and whole ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import yaml

from benchmarks.documents.ablation_tables import ablation as documented
from recipes.ablation import main
from recipes.ablations.grid import read_grid
from recipes.ablations.rehearsal.checks import check_launcher, check_run
from recipes.ablations.rehearsal.run import rehearse
from recipes.ablations.rehearsal.shorten import on_the_cpu, shorten
from recipes.ablations.rehearsal.stand_ins import architecture_of, make_problems, problem_files
from recipes.tasks import load_task


ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipes" / "configs"
REAL = [CONFIGS / "ablation_h200.yaml", CONFIGS / "ablation_qwen.yaml"]

GRID = {
    "output_dir": "never",
    "seeds": [0],
    "label": "a large model",
    "launcher": "accelerate launch --num_processes 2",
    "task": {"task": "gsm8k", "dataset_name": "openai/gsm8k"},
    "evaluation": {"greedy_batch_size": 64, "evaluate_every": 20},
    "base": {
        "model_name_or_path": "nobody/large-3B", "architecture": "qwen2", "sizes": {"tie_word_embeddings": True},
    },
    "train": {
        "macro_block": None, "macro_search": "static", "outlier_fallback": None, "aqn": False, "dtype": "float32",
        "per_device_train_batch_size": 16, "gradient_accumulation_steps": 32, "num_generations": 8,
        "max_completion_length": 512, "num_train_epochs": 2, "learning_rate": 1.0e-4, "save_strategy": "steps",
        "save_steps": 20, "save_total_limit": 1, "bf16": True, "gradient_checkpointing": True, "report_every": 0,
    },
    "cells": {"bf16": {"options": {"full_precision": True}}, "mxfp4": {}, "best": {"options": {"aqn": True}}},
}  # fmt: skip


@pytest.fixture
def grid(tmp_path):
    """`grid(**changes)` writes `GRID` with other sections; its path."""

    def write(**changes):
        path = tmp_path / "grid.yaml"
        path.write_text(yaml.safe_dump({**GRID, **changes}, sort_keys=False))
        return path

    return write


# ---- what is shortened -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_cells_keep_all_options_but_those_that_are_listed(path, tmp_path):
    grid = read_grid(path)
    short = shorten(grid, tmp_path, grid.seeds[:1])
    listed = {change.option for change in short.changes}
    assert {"max_steps", "use_cpu", "n_train", "evaluate_every", "save_steps"} <= listed
    for model, own in zip(grid.models, short.grid.models, strict=True):
        assert [cell.name for cell in own.cells] == [cell.name for cell in model.cells]
        differing = {name for name in {*model.shared, *own.shared} if model.shared.get(name) != own.shared.get(name)}
        assert differing <= listed
        for cell, shortened in zip(model.cells, own.cells, strict=True):
            assert dict(shortened.options).items() - {("report_every", 0)} == dict(cell.options).items()
        # The last cell writes the report of its run.
        assert ["report_every" in cell.options for cell in own.cells] == [True] * (len(own.cells) - 1) + [False]
        batch = own.shared["per_device_train_batch_size"] * own.shared.get("gradient_accumulation_steps", 1)
        assert batch % own.shared["num_generations"] == 0 and own.launcher == ()
        assert own.shared["bf16"] and own.shared["dtype"] == "float32"  # kept: a CPU can


def test_what_is_short_already_stays(grid, tmp_path):
    path = grid(train={**GRID["train"], "num_generations": 2, "save_total_limit": None, "overlong_buffer": 64})
    (model,) = shorten(read_grid(path), tmp_path, [0]).grid.models
    assert (model.shared["num_generations"], model.shared["save_total_limit"]) == (2, None)
    assert (model.shared["overlong_buffer"], model.shared["max_completion_length"]) == (4, 16)


def test_what_a_cpu_cannot_run_is_named_and_left_out():
    options = {
        "attn_implementation": "flash_attention_2", "tf32": True, "use_vllm": True, "vllm_mode": "server",
        "fsdp": "full_shard", "optim": "adamw_torch_fused", "bf16": True, "deepspeed": None, "learning_rate": 1.0,
    }  # fmt: skip
    kept, left_out = on_the_cpu(options, "dense")
    assert kept == {"attn_implementation": "sdpa", "bf16": True, "learning_rate": 1.0}
    assert left_out == [
        "attn_implementation=flash_attention_2 (dense): sdpa in its place",
        "tf32=True (dense)",
        "use_vllm=True (dense)",
        "vllm_mode=server (dense)",
        "fsdp=full_shard (dense)",
        "optim=adamw_torch_fused (dense)",
    ]
    assert on_the_cpu({"attn_implementation": "eager", "tf32": False}, "x") == (
        {"attn_implementation": "eager", "tf32": False}, [],
    )  # fmt: skip


def test_the_report_names_launchers_checkpoints_and_data(tmp_path):
    left_out = "\n".join(shorten(read_grid(REAL[1]), tmp_path, [0, 1]).left_out)
    for text in (
        "Qwen/Qwen2.5-3B: its weights and tokenizer; a tiny qwen2 is in its place",
        "Qwen/Qwen3-30B-A3B-Base: its weights and tokenizer; a tiny qwen3_moe",
        "reading openai/gsm8k",
        "`accelerate launch --config_file recipes/accelerate/fsdp2.yaml`",
        "rollout_weights=auto",
        "seeds beside 0, 1 of 0, 1, 2",
    ):
        assert text in left_out


def test_pretraining_is_shortened_too(tmp_path):
    short = shorten(read_grid(REAL[0]), tmp_path, [0])
    assert "tf32=True (moe, pretraining)" in short.left_out
    base = short.grid.models[1].base
    assert base["sizes"]["max_positions"] == 512 and base["sizes"]["num_experts"] == 4
    assert base["pretraining"]["bf16"] and base["pretraining"]["use_cpu"] and "tf32" not in base["pretraining"]
    assert base["pretraining"]["max_steps"] == 120 and base["pretraining"]["weight_decay"] == 0.01


@pytest.mark.parametrize(("task", "answers"), [("gsm8k", "#### {}"), ("math500", "$\\boxed{{{}}}$")])
def test_problems_that_stand_in_for_a_dataset_are_read_by_its_task(tmp_path, task, answers):
    files = problem_files(tmp_path, "dense")
    make_problems(task, files)
    found = load_task(task, **{name: str(path) for name, path in files.items()})
    assert found.train["answer"] == ["3", "4"] * 2 == found.test["answer"]
    assert found.train["completion"][0] == answers.format(3) and "Ann has 3 apples." in found.train["prompt"][0]
    assert not set(found.train["prompt"]) & set(found.test["prompt"])
    assert found.reward_funcs[0]([answers.format(3), answers.format(4)], answer=["3", "3"]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="no problems for the task 'file'; give it a train_file"):
        make_problems("file", files)


def test_the_architecture_of_a_checkpoint(grid, tmp_path):
    folder = tmp_path / "local"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (model,) = read_grid(grid(base={"model_name_or_path": str(folder)})).models
    assert architecture_of(model) == "qwen3_moe"
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="give `architecture` beside .* qwen2, qwen3_moe, not 'gpt2'"):
        architecture_of(model)
    with pytest.raises(ValueError, match="base.architecture='gpt' must be one of"):
        read_grid(grid(base={"model_name_or_path": "a", "architecture": "gpt"}))
    with pytest.raises(ValueError, match="base.sizes has no option 'width'"):
        read_grid(grid(base={"model_name_or_path": "a", "architecture": "qwen2", "sizes": {"width": 1}}))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ("accelerate launch --num_procesess 2", "unrecognized arguments: --num_procesess"),
        ("accelerate launch --config_file recipes/accelerate/none.yaml", "there is no file recipes/accelerate/none"),
        ("no-such-program -n 2", "there is no program no-such-program"),
    ],
)
def test_a_launcher_that_cannot_be(grid, launcher, message):
    (model,) = read_grid(grid(launcher=launcher)).models
    with pytest.raises(ValueError, match=message):
        check_launcher(model)


def test_launchers_of_the_real_grids_are_read(monkeypatch):
    monkeypatch.chdir(ROOT)
    for path in REAL:
        for model in read_grid(path).models:
            check_launcher(model)


def test_a_used_folder_and_other_evidence_are_refused(grid, tmp_path):
    with pytest.raises(SystemExit, match="is not empty; a rehearsal needs a folder of its own"):
        main(["--config", str(grid()), "--rehearse", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="give --rehearse alone"):
        main(["--config", str(grid()), "--rehearse", "--report-only"])


def test_records_of_a_rehearsal_are_no_evidence(grid, tmp_path):
    records = [{"name": "rehearsal of x/mxfp4/seed0", "kind": "rehearsal", "model": "m"}]
    (tmp_path / "ablation_x.json").write_text(json.dumps(records))
    with pytest.raises(ValueError, match=r"ablation_x.json holds the record of a rehearsal \(rehearsal of x/mxfp4"):
        documented(tmp_path)
    with pytest.raises(SystemExit, match="holds the record of a rehearsal"):
        main(["--config", str(grid()), "--report-only", "--records", str(tmp_path / "ablation_x.json")])


# ---- what is noticed -------------------------------------------------------------------------------------------------


class StandIn:
    """A starter that finishes at once, with a summary and a log in the place of `grpo.py`'s; `changes` go into the
    summary, `logged` into each step, for the runs of a cell or of all."""

    def __init__(self, cell="", changes=None, logged=None, code=0):
        self.cell, self.changes, self.logged, self.code = cell, changes or {}, logged or {}, code
        self.commands = []

    def __call__(self, command, log, environment, lock):
        self.commands.append(command)
        config = yaml.safe_load(Path(command[command.index("--config") + 1]).read_text())
        folder = Path(config["output_dir"])
        resumed = "--resume_from_checkpoint" in command
        ours = self.cell in ("all", folder.parent.name)
        quantized = 0 if config.get("full_precision") else 14
        summary = {
            "accuracy_before": {"strict": 0.5} if config["evaluate_before"] else None,
            "accuracy_after": {"strict": 0.5}, "standard_error_after": {"strict": 0.1}, "n_test": 4,
            "steps": config["max_steps"], "entropy_first": 1.0, "entropy_last": 0.5, "entropy_alarms": [],
            "scheme": "some", "n_quantized": quantized, "weight_sqnr_db": None, "seconds": 1.0,
        }  # fmt: skip
        entry = {"loss": 0.5, "reward": 0.5, "entropy": 0.5, "grad_norm": 1.0, "aqn/sigma": 0.01}
        history = [{"step": step, **entry, **(self.logged if ours else {})} for step in (1, 2)]
        history += [{"step": 2, "greedy/strict": 0.5}]
        if ours and self.changes.get("resumed_loss") and resumed:
            history[1]["loss"] = self.changes["resumed_loss"]
        for step in (1, 2):
            (folder / f"checkpoint-{step}").mkdir(exist_ok=True)
            (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        (folder / "log_history.json").write_text(json.dumps(history))
        (folder / "resolved_config.yaml").write_text(f"resume_from_checkpoint: {'true' if resumed else None!r}\n")
        self.returncode = self.code if ours else 0
        if not self.returncode:
            (folder / "summary.json").write_text(json.dumps(summary | (self.changes if ours else {})))
        return self

    def poll(self):
        return self.returncode

    def wait(self):
        return self.returncode

    def terminate(self):
        raise AssertionError("it has ended")


@pytest.fixture
def rehearsed(grid, tmp_path, monkeypatch):
    """`rehearsed(starter, **changes)` is what was wrong in a rehearsal whose runs a stand-in makes."""
    monkeypatch.setattr("recipes.ablations.runner._POLL_SECONDS", 0.0)
    monkeypatch.setattr("recipes.ablations.report.draw_all", lambda records, model: {})
    monkeypatch.setattr("recipes.ablations.rehearsal.run.make_stand_in", lambda *args: 1000)
    monkeypatch.setattr("recipes.ablations.rehearsal.run.check_cells", lambda grid: None)

    def run(starter, **changes):
        return rehearse(read_grid(grid(**changes)), str(tmp_path / "out"), "made so", starter=starter)

    return run


def test_every_cell_runs_the_baselines_twice_and_one_is_resumed(rehearsed, tmp_path, capsys):
    starter = StandIn()
    assert rehearsed(starter, seeds=[3, 4, 5]) == []
    ran = ["/".join(Path(command[-1]).parts[-3:-1]) for command in starter.commands if "--resume" not in str(command)]
    assert ran == ["bf16/seed3", "mxfp4/seed3", "best/seed3", "bf16/seed4", "mxfp4/seed4"]
    (resumed,) = [command for command in starter.commands if command[-2:] == ["--resume_from_checkpoint", "true"]]
    assert "mxfp4/seed3" in str(resumed)
    records = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert len(records) == 5 and all(record["kind"] == "rehearsal" for record in records)
    assert {record["model"] for record in records} == {"a large model (rehearsal)"}
    assert not list((tmp_path / "out").rglob("checkpoint-*"))
    told = " ".join(capsys.readouterr().out.split())
    assert "5 of 5 runs" in told and "nothing went wrong. No figure of it means anything" in told
    assert "not rehearsed: reading openai/gsm8k" in told and "max_completion_length" in told


@pytest.mark.parametrize(
    ("starter", "message"),
    [
        (StandIn("best", code=1), "best/seed0: failed, see its log.txt"),
        (StandIn("mxfp4", {"n_quantized": 0}), "mxfp4/seed0: no layer is quantized"),
        (StandIn("bf16", {"n_quantized": 3}), "bf16/seed0: 3 layers are quantized in full precision"),
        (StandIn("best", {"steps": 1}), "best/seed0: 1 steps, not 2"),
        (StandIn("best", logged={"aqn/sigma": 0.0}), "best/seed0: no noise"),
        (StandIn("best", logged={"grad_norm": float("nan")}), "best/seed0: grad_norm is not finite: [nan, nan]"),
        (StandIn("all", logged={"grad_norm": 0.0}), "a large model (rehearsal): rewards never differed"),
        (StandIn("mxfp4", {"resumed_loss": 0.25}), "mxfp4/seed0: came out otherwise when it was resumed: "),
    ],
    ids=lambda value: value.split(": ", 1)[1][:20] if isinstance(value, str) else "",
)
def test_what_went_wrong_is_said(rehearsed, starter, message, capsys):
    (problem,) = rehearsed(starter)
    assert problem.startswith(message)
    assert "PROBLEM" in capsys.readouterr().out


def test_replay_and_evaluations_that_did_not_happen_are_noticed(grid, tmp_path):
    grid = shorten(read_grid(grid(train={**GRID["train"], "router_replay": True})), tmp_path, [0]).grid
    run = next(run for run in grid.runs if run.cell.name == "mxfp4")
    run.folder.mkdir(parents=True)
    (run.folder / "summary.json").write_text(
        json.dumps({"n_quantized": 1, "steps": 2, "accuracy_before": None, "accuracy_after": {"strict": 0.0}})
    )
    (run.folder / "log_history.json").write_text('[{"loss": 0.5, "entropy": 0.5}]')
    assert check_run(run) == [
        f"{run.name}: {text}"
        for text in (
            "not evaluated while it trained", "not evaluated before RL", "no routes were replayed",
            "grad_norm was not logged",
        )
    ]  # fmt: skip


# ---- whole ones ------------------------------------------------------------------------------------------------------

#: With processes that are forked where new ones would be spawned, and no figure drawn.
FORKED = """
import multiprocessing, sys
from undrawn import leave_figures_undrawn
from recipes import ablation
leave_figures_undrawn()
forks = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda kind: forks
sys.exit(ablation.main(sys.argv[1:]))
"""


def test_a_whole_rehearsal(grid, tmp_path):
    """Two cells on a stand-in for a checkpoint: made, scored, trained, resumed, reported."""
    job = processes.code(FORKED, "--config", grid(), "--rehearse", "--only", "mxfp4,best", "--out", tmp_path / "out")
    done = processes.run(job, cwd=ROOT)
    assert done.returncode == 0, done.output[-4000:]
    plain, noisy = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert plain["n_quantized"] == noisy["n_quantized"] == 14 and plain["steps"] == 2
    assert plain["metrics"]["grad_norm"] > 0 and noisy["metrics"]["aqn/sigma"] > 0
    assert plain["before"] is not None and plain["kind"] == "rehearsal"
    told = " ".join(done.stdout.split())
    assert "stand-in qwen2 of" in told and "resuming mxfp4/seed0 from its first step" in told
    assert "2 of 2 runs" in told and "nothing went wrong" in told


@pytest.mark.large
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_the_real_grids_rehearsed(path, tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "recipes/ablation.py", "--config", path, "--rehearse", "--out", tmp_path / "out"]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    records = json.loads((tmp_path / "out" / "ablation.json").read_text())
    # 16 cells and two more of the mixture, and three of each model with a second seed.
    assert len(records) == 16 + 18 + 2 * 3 and "nothing went wrong" in " ".join(done.stdout.split())
    grid = read_grid(path)
    for model in grid.models:
        ours = {r["cell"]: r for r in records if r["model"] == f"{model.label} (rehearsal)" and r["seed"] == 0}
        assert list(ours) == [cell.name for cell in model.cells]
        assert ours["bf16"]["n_quantized"] == 0 and ours["mxfp4"]["n_quantized"] == (24 if model.key == "moe" else 14)
        replayed = {c for c, r in ours.items() if any(key.startswith("router_replay/") for key in r["metrics"])}
        assert replayed == ({*ours} - {"mxfp4_free", "mbs_of_free"} if model.key == "moe" else set())
        assert {cell for cell, r in ours.items() if r["metrics"].get("aqn/sigma")} == {c for c in ours if "aqn" in c}
        # Rewards differed, so there was something to learn.
        assert sum(record["metrics"]["grad_norm"] > 0 for record in ours.values()) > len(ours) / 2
    assert len(list((tmp_path / "out" / "plots").iterdir())) == 10
