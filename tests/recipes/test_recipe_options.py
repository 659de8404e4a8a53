# SPDX-License-Identifier: Apache-2.0
"""Where the options of a run come from: the command line, a YAML file, the demo, and a preset over them."""

from pathlib import Path

import pytest
import yaml

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.presets import PRESETS
from recipes.ablation import parse as parse_ablation
from recipes.ablations.grid import read_grid
from recipes.common.schemes import preset_of
from recipes.evaluation.arguments import parse as parse_evaluation
from recipes.post_training.arguments import parse


CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
CPU = ["--use_cpu=true", "--bf16=false"]


def of_file(name):
    return ["--config", str(CONFIGS / f"{name}.yaml"), *CPU]


# ---- a preset or mode on the command line is exactly that -----------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("words", [[], of_file("qwen2.5_3b_gsm8k")], ids=["demo", "qwen"])
def test_a_preset_on_the_command_line_is_exactly_that_preset(preset, words, capsys):
    scheme = parse([*words, f"--preset={preset}"])[1]
    assert scheme == MXFP4RLConfig(preset=preset) and preset_of(scheme) == f"exactly the preset {preset}"
    told = capsys.readouterr().out
    assert f"--preset {preset} resets what" in told and "scale_rule=even, macro_block=128" in told


@pytest.mark.parametrize("words", [[], of_file("qwen2.5_3b_gsm8k")], ids=["demo", "qwen"])
def test_another_mode_on_the_command_line_resets_the_scheme_too(words):
    assert parse([*words, "--mode=packed", "--use_peft"])[1] == MXFP4RLConfig(mode="packed")


def test_a_preset_in_the_file_keeps_the_options_beside_it(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("preset: paper_a\noutlier_fallback: null\n")
    scheme = parse(["--config", str(path), *CPU])[1]
    assert scheme == MXFP4RLConfig(preset="paper_a", outlier_fallback=None)
    assert preset_of(scheme) == "the preset paper_a but for outlier_fallback=None (not 0.5)"


def test_options_that_make_up_another_preset_are_called_that():
    scheme = parse(["--scale_rule=rceil", "--macro_search=static", "--outlier_fallback=0.5"])[1]
    assert preset_of(scheme) == "exactly the preset paper_a (written as w4a4)"
    assert preset_of(MXFP4RLConfig(mode="packed")) == "exactly the preset w4a16"
    assert "wgrad=" in preset_of(MXFP4RLConfig(preset="paper_b", wgrad={"rotation": "none"}))


def grid_of(path, **changes):
    content = {
        "output_dir": str(path.parent / "out"),
        "seeds": [0],
        "task": {"task": "arithmetic"},
        "base": {"model_name_or_path": "model"},
        "train": {"scale_rule": "rceil", "macro_block": None, "outlier_fallback": None, "use_cpu": True, "bf16": False},
        "cells": {
            "bf16": {"options": {"full_precision": True}},
            "mxfp4": {},
            "paper": {"options": {"preset": "paper_a"}},
            "of": {"options": {"preset": "paper_a", "outlier_fallback": 1.0}},
        },
        **changes,
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def schemes_of(grid):
    return {run.cell.name: run.parse().quantization for run in grid.runs}


def test_a_cell_with_a_preset_is_exactly_that_preset(tmp_path, capsys):
    grid = read_grid(grid_of(tmp_path / "grid.yaml"))
    told = " ".join(capsys.readouterr().out.split())
    assert "cell paper its own preset or mode resets scale_rule=rceil, macro_block=None, outlier_fallback=None" in told
    assert "cell mxfp4" not in told
    schemes = schemes_of(grid)
    assert schemes["paper"] == MXFP4RLConfig(preset="paper_a")
    assert schemes["of"] == MXFP4RLConfig(preset="paper_a", outlier_fallback=1.0)
    assert schemes["mxfp4"] == MXFP4RLConfig(scale_rule="rceil", macro_block=None, outlier_fallback=None)


# ---- options of grpo.py for a whole grid, in place of a rehearsal ---------------------------------------------------


def test_options_for_all_cells_and_another_start(tmp_path):
    path = grid_of(tmp_path / "grid.yaml", launcher="accelerate launch")
    words = ["--config", str(path), "--max_steps", "2", "--model_name_or_path=small", "--launcher", "", "--report-only"]
    config, arguments, options = parse_ablation(words)
    assert config == str(path) and arguments.report_only and options == {"max_steps": 2, "model_name_or_path": "small"}
    grid = read_grid(path, launcher=arguments.launcher, options=options)
    assert grid.launcher == []
    assert {(run.config["max_steps"], run.config["model_name_or_path"]) for run in grid.runs} == {(2, "small")}
    preset = read_grid(path, options={"preset": "paper_a"}, only=["mxfp4"])
    assert schemes_of(preset) == {"mxfp4": MXFP4RLConfig(preset="paper_a")}
    assert next(preset.runs).folder == tmp_path / "out" / "cells" / "mxfp4" / "seed0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_stepz": 2}, "the command line has no option 'max_stepz'; did you mean 'max_steps'"),
        ({"outlier_fallback": 1.0}, "the cell of has outlier_fallback of its own"),
        ({"seed": 2}, "the command line: seed is set for each run"),
    ],
)
def test_options_for_all_cells_that_cannot_be(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_grid(grid_of(tmp_path / "grid.yaml"), options=options)


# ---- without a configuration ----------------------------------------------------------------------------------------


def test_the_demo_is_run_without_a_configuration():
    recipe, _, training, _ = parse(["--max_steps=3"])
    assert training.max_completion_length == 4 and training.learning_rate == 1e-4 and training.max_steps == 3
    assert recipe.sft_steps == 400 and training.use_cpu


@pytest.mark.parametrize(
    "words",
    [["--model_name_or_path", "some/model"], ["--task=gsm8k"], ["--task", "file", "--train-file", "x.jsonl"]],
    ids=["model", "task", "file"],
)
def test_options_of_the_demo_are_not_those_of_another_model_or_task(words, capsys):
    _, scheme, training, _ = parse([*words, *CPU])
    assert training.max_completion_length is None and training.learning_rate == 1e-6
    assert training.per_device_train_batch_size == 8 and training.max_steps == -1
    assert scheme == MXFP4RLConfig()
    assert "is not the demo's: options that are not named have their defaults" in capsys.readouterr().out


# ---- spellings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--overwrite"], ["--overwrite", "true"], ["--overwrite=True"]])
def test_a_flag_may_have_a_value_or_none(words):
    assert parse(words)[0].overwrite is True
    assert parse_evaluation(["model", *words]).overwrite is True


def test_modules_to_leave_out_have_one_name_and_earlier_ones_warn(tmp_path, capsys):
    expected = MXFP4RLConfig(modules_to_not_convert=["layers.0", "down_proj"])
    for word in ("--modules_to_not_convert", "--modules-to-not-convert"):
        assert parse([word, "layers.0", "down_proj"])[1] == expected
    assert "warning" not in capsys.readouterr().out
    path = tmp_path / "run.yaml"
    path.write_text("exclude: [layers.0, down_proj]\n")
    for words in (["--skip", "layers.0", "down_proj"], ["--config", str(path), *CPU]):
        assert parse(words)[1] == expected
        assert "is called" in capsys.readouterr().out
    with pytest.raises(ValueError, match="is given more than once; give all modules after one"):
        parse(["--modules-to-not-convert", "layers.0", "--modules_to_not_convert", "down_proj"])


def test_options_that_are_gone_are_read_from_files_with_the_value_that_they_have_now(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("sft_target_loss: 0.55\nsft_learning_rate: 5.0e-4\n")
    assert parse(["--config", str(path), *CPU])[0].sft_steps == 400
    path.write_text("sft_target_loss: 0.4\n")
    with pytest.raises(ValueError, match="sft_target_loss is gone: .* bound them by sft_steps"):
        parse(["--config", str(path), *CPU])


def test_evaluation_and_training_call_an_option_the_same_and_earlier_names_are_read(capsys):
    found = parse_evaluation(["model", "--limit=9", "--data-seed", "3"])
    assert (found.n_test, found.data_seed_split) == (9, 3)
    assert "--limit is called --n_test here" in capsys.readouterr().out
