# SPDX-License-Identifier: Apache-2.0
"""The recipe on a mixture of experts, stopped and resumed, and in two processes (DDP over gloo); and the evaluation
before RL where FSDP or DeepSpeed leave the model on the CPU."""

import json
import shutil
from pathlib import Path

import processes
import pytest
import torch
from test_grpo import REPORTED, TINY, logged, short_run
from torch import nn
from transformers import AutoConfig

from hf_mxfp4.recipes.post_training import evaluation


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHORT = ("--save_strategy=steps", "--save_steps=3")


def history_of(folder):
    return json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]


def test_a_mixture_of_experts(tmp_path, blank_pictures):
    summary = short_run(tmp_path, "--overwrite", *SHORT, config="tiny_moe_cpu")
    assert summary["steps"] == 3 and summary["n_quantized"] >= 8  # the attention's; experts where they are quantized
    assert summary["model"] == "qwen3_moe made for this run (2 layers, width 32)"
    assert summary["reloaded"] == {"compared": 16, "identical": 16}
    assert [entry["router_replay/coverage"] for entry in history_of(tmp_path) if "loss" in entry] == [1.0] * 3
    config = AutoConfig.from_pretrained(tmp_path / "policy")
    assert (config.model_type, config.num_experts, config.num_experts_per_tok) == ("qwen3_moe", 8, 2)


CHECKPOINTS = ("--save_strategy=steps", "--save_steps=1", "--num_iterations=2", REPORTED)


@pytest.mark.slow
def test_a_resumed_recipe_ends_with_the_same_policy(tmp_path, capsys, blank_pictures):
    out = tmp_path / "out"
    short_run(out, *CHECKPOINTS)
    policy = (out / "policy" / "model.safetensors").read_bytes()
    # As a process leaves it that is killed while it writes the second checkpoint.
    shutil.rmtree(out / "checkpoint-3")
    shutil.rmtree(out / "policy")
    for name in ("trainer_state.json", "mxfp4_manifest.json"):
        (out / "checkpoint-2" / name).unlink()
    weights: Path = out / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    resumed = short_run(out, "--overwrite=false", "--resume_from_checkpoint=true", *CHECKPOINTS)
    assert resumed["steps"] == 3 and [line["step"] for line in logged(out, "start")] == [0, 1]
    assert resumed["accuracy_before"]["exact_match"] >= 0
    assert (out / "policy" / "model.safetensors").read_bytes() == policy
    assert "checkpoint-2 is not resumed from: it has no trainer_state.json" in capsys.readouterr().err


def test_an_evaluation_that_a_stop_cut_short_is_made_when_the_run_goes_on(tmp_path, monkeypatch):
    out, evaluate = tmp_path / "out", evaluation.evaluate_greedy
    options = (*SHORT, "--evaluate_every=2", "--evaluate_before=false", "--reload_check=0", "--save_policy=false")

    def stop(*arguments, title, **named):
        if title == "evaluating":
            raise KeyboardInterrupt
        return evaluate(*arguments, title=title, **named)

    monkeypatch.setattr(evaluation, "evaluate_greedy", stop)
    with pytest.raises(KeyboardInterrupt):
        short_run(out, *options)
    monkeypatch.undo()
    assert short_run(out, "--overwrite=false", "--resume_from_checkpoint=true", *options)["steps"] == 3
    assert [entry["step"] for entry in history_of(out) if "greedy/exact_match" in entry] == [2]


def launch(folder, ranks, *options):
    words = [*TINY, "--n_test=13", f"--output_dir={folder}", *options]
    job = processes.script(HERE / "run_and_leave.py", ROOT / "recipes" / "grpo.py", *words)
    done = processes.run(job, ranks=ranks, timeout=180)
    assert done.returncode == 0, done.output[-3000:]
    assert done.output.count("left properly") == ranks, done.output[-3000:]
    return json.loads((folder / "summary.json").read_text())


def test_two_processes_train_evaluate_save_and_reload(tmp_path):
    summary = launch(tmp_path / "out", 2, REPORTED, *SHORT)
    assert summary["n_quantized"] == 14 and summary["steps"] == 3
    assert summary["reloaded"] == {"compared": 13, "identical": 13}
    # Thirteen problems do not divide by two, and each has its completion.
    lines = (tmp_path / "out" / "completions_after.jsonl").read_text().splitlines()
    assert len({json.loads(line)["prompt"] for line in lines}) == 13
    history = history_of(tmp_path / "out")
    noisy = [entry for entry in history if entry.get("aqn/sigma")]
    assert [entry["aqn/n_modules"] for entry in noisy] == [5, 5]
    for metric in ("error/grid", "error/activations/sqnr_db"):
        assert any(isinstance(entry.get(metric), float) for entry in history), metric
    assert (tmp_path / "out" / "run_report.html").is_file()
    assert all(0.7 < entry["aqn/measured_std"] / entry["aqn/sigma"] < 1.3 for entry in noisy)


# ---- where the model is before RL ------------------------------------------------------------------------------------

GPU = torch.device("cuda:0")


class Model(nn.Linear):
    """A small layer; where it was moved is noted instead of done."""

    def __init__(self):
        super().__init__(10, 10, bias=False)
        self.moves = []

    def to(self, device):
        self.moves.append(torch.device(device).type)
        return self


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)


def test_a_model_is_moved_there_and_back():
    model = Model()
    with pytest.raises(KeyError), evaluation.placed(model, GPU):
        assert model.moves == ["cuda"]
        raise KeyError
    assert model.moves == ["cuda", "cpu"]


def test_a_model_that_does_not_fit_ends_with_a_message():
    model = Model()
    with (
        pytest.raises(SystemExit, match="does not fit on cuda:0, .* --evaluate_before false"),
        evaluation.placed(model, GPU),
    ):
        raise torch.OutOfMemoryError("no memory left")
    assert model.moves == ["cuda", "cpu"]


def test_sharded_and_placed_models_stay():
    partitioned = Model()
    partitioned.weight.ds_id = 3  # as DeepSpeed marks it
    for model, device in ((partitioned, GPU), (Model(), torch.device("cpu"))):
        with evaluation.placed(model, device):
            pass
        assert model.moves == []
