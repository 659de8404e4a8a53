# SPDX-License-Identifier: Apache-2.0
"""The pretraining recipe as a whole."""

import json
import shutil

import pytest
import transformers

from recipes import pretrain
from recipes.pretrain import main


def short_study(folder, *words):
    small = {
        "max_steps": 4, "extra_tokens": 0.5, "eval_steps": 2, "logging_steps": 2, "warmup_steps": 1,
        "sequence_length": 32, "per_device_train_batch_size": 4, "validation_sequences": 4,
        "hidden_size": 32, "num_layers": 1, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 2,
    }  # fmt: skip
    options = [f"--{name}={value}" for name, value in small.items()]
    return main([*options, f"--output_dir={folder}", *words])


def test_a_study_end_to_end_continued_and_extended(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "study"
    summary = short_study(folder, "--arms", "baseline", "all_sr")
    assert summary["baseline"] == "full precision (float32)" and summary["budget_tokens"] == 4 * 4 * 32
    assert summary["arms"]["baseline"]["n_quantized"] == 0 and summary["arms"]["all_sr"]["n_quantized"] == 7
    assert set(summary["arms"]["all_sr"]["quantized_operands"].values()) == {7}
    stored = json.loads((folder / "study.json").read_text())
    first, second = stored["runs"]
    assert first["parameters"] == second["parameters"]
    assert [tokens for tokens, _ in first["curve"]] == [0, 256, 512, 768]
    # The same weights before the first step, then another loss.
    assert first["curve"][0][1] == pytest.approx(second["curve"][0][1], rel=0.02)
    assert first["curve"][-1] != second["curve"][-1]
    assert json.loads((folder / "summary.json").read_text()) == summary
    for figure in ("curves.png", "overheads.png"):
        assert (folder / figure).read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "2 of 2 are missing" in out and "token overhead" in out and "dgrad.grad:7" in out

    # Nothing of it is trained again; an arm that is new is.
    trained, train_arm = [], pretrain.train_arm

    def note_and_train(study, arm, *rest):
        trained.append(arm.name)
        return train_arm(study, arm, *rest)

    monkeypatch.setattr(pretrain, "train_arm", note_and_train)
    assert short_study(folder, "--arms", "baseline", "all_sr") == summary and not trained
    more = short_study(folder, "--arms", "baseline", "all_sr", "fprop")
    assert trained == ["fprop"] and set(more["arms"]) == {"baseline", "all_sr", "fprop"}


def test_a_run_that_was_killed_goes_on_from_its_checkpoint(tmp_path, monkeypatch, no_figures):
    words = ("--arms", "baseline", "all_sr", "--save_strategy", "steps", "--save_steps", "2", "--save_only_model=false")
    short_study(tmp_path, *words)
    path = tmp_path / "study.json"
    stored = json.loads(path.read_text())
    whole = stored["runs"].pop()
    path.write_text(json.dumps(stored))
    shutil.rmtree(tmp_path / "runs" / "all_sr-seed0" / "checkpoint-6")
    trained, training_step = [], transformers.Trainer.training_step
    monkeypatch.setattr(
        transformers.Trainer, "training_step", lambda *arguments: trained.append(1) or training_step(*arguments)
    )
    short_study(tmp_path, *words)
    resumed = json.loads(path.read_text())["runs"][1]
    assert resumed["steps"] == 6 and len(trained) == 2  # those after checkpoint-4
    assert resumed["curve"] == whole["curve"] and len(whole["curve"]) == 4


def test_messages(tmp_path, no_figures):
    with pytest.raises(SystemExit, match="error: .*did you mean 'max_steps'"):
        main(["--max_step=3"])
    with pytest.raises(SystemExit, match="no configuration file nowhere.yaml"):
        main(["--config", "nowhere.yaml"])
    short_study(tmp_path, "--arms", "baseline")
    with pytest.raises(SystemExit, match="holds a study with max_steps=4"):
        short_study(tmp_path, "--arms", "baseline", "--max_steps=6")
    words = ("--arms", "baseline", "all", "--scale_rule")
    short_study(tmp_path, *words, "floor")
    with pytest.raises(SystemExit, match="arm 'all' with the scheme .*floor.* give the arm another name"):
        short_study(tmp_path, *words, "even")
