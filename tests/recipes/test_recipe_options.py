# SPDX-License-Identifier: Apache-2.0
"""Where the options of a run come from: the command line, a YAML file, the demo, and a preset over them."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.presets import PRESETS
from hf_mxfp4.recipes import distill, sft
from hf_mxfp4.recipes.common.help import OTHERS, RECIPES, help_file, recipe_help
from hf_mxfp4.recipes.common.options import names
from hf_mxfp4.recipes.common.reporting import TrainingBar
from hf_mxfp4.recipes.evaluation.arguments import parse as parse_evaluation
from hf_mxfp4.recipes.post_training import arguments
from hf_mxfp4.recipes.post_training.arguments import RecipeArguments, TextArguments, parse
from hf_mxfp4.recipes.post_training.policy import find_start, load_weights
from hf_mxfp4.recipes.pretraining.arguments import parse as parse_study


CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
CPU = ["--use_cpu=true", "--bf16=false"]


def of_file(name):
    return ["--config", str(CONFIGS / f"{name}.yaml"), *CPU]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_on_the_command_line_is_exactly_that_preset(preset, tmp_path, capsys):
    (tmp_path / "own.yaml").write_text("scale_rule: mse\nmacro_block: 64\n")
    scheme = parse(["--config", str(tmp_path / "own.yaml"), *CPU, f"--preset={preset}"])[1]
    assert scheme == MXFP4RLConfig(preset=preset)
    told = capsys.readouterr().out
    assert f"--preset {preset} resets what" in told
    assert "scale_rule=mse, macro_block=64" in told


@pytest.mark.parametrize("words", [[], of_file("qwen2.5_3b_gsm8k")], ids=["demo", "qwen"])
def test_another_mode_on_the_command_line_resets_the_scheme_too(words):
    assert parse([*words, "--mode=packed", "--use_peft"])[1] == MXFP4RLConfig(mode="packed")


# The others are those of ablation.py (recovery too).
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("[!ar]*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_parse(path):
    shipped = yaml.safe_load(path.read_text())
    recipe = {"sft": sft, "distill": distill}.get(path.stem.split("_")[0])
    if path.stem.startswith("pretrain"):
        study = parse_study([*of_file(path.stem), "--tf32=false"])
        found = study.options, study.training
        assert [arm.name for arm in study.arms] == shipped["arms"]
    else:
        found = parse(of_file(path.stem), *((recipe.GROUPS, recipe.DEMO) if recipe else ()))
    for name, value in shipped.items():
        owners = [group for group in found if hasattr(group, name)]
        assert owners, name
        if name not in ("use_cpu", "bf16", "tf32", "report_to"):
            kept = getattr(owners[0], name)  # lists and operands as tuples, and "none" as None
            if name == "study":
                assert value.items() <= vars(kept).items()
                continue
            kept = dict(kept) if isinstance(value, dict) else kept
            value = None if value == "none" else value
            assert kept in (value, str(value), tuple(value) if isinstance(value, list) else value), name
    assert recipe is None or found.recipe.learn in recipe.LEARN
    assert recipe is not distill or (found.quantization.mode, found.training.beta) == ("qat", 0.0)


def test_none_empties_a_list_on_the_command_line():
    words = ["--config", str(CONFIGS / "distill_smollm2.yaml"), "--eval_text", "none"]
    assert not parse(words, distill.GROUPS, distill.DEMO).recipe.eval_text


def test_none_is_a_word_for_options_that_cannot_be_without_a_value(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("step_weights: none\nmacro_block: none\nuse_cpu: true\nbf16: false\n")
    _, scheme, training, _ = parse(["--config", str(path), "--scale_rewards=none", "--outlier_fallback=none"])
    assert (training.step_weights, training.scale_rewards) == ("none", "none")
    assert (scheme.macro_block, scheme.outlier_fallback) == (None, None)
    with pytest.raises(ValueError, match="learning-rate: invalid float value: 'none'"):
        parse(["--learning_rate=none"])


def test_yaml_that_is_nested_too_deeply_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("fprop: " + "[" * 5000)
    with pytest.raises(ValueError, match="run.yaml is not valid YAML: it is nested too deeply$"):
        parse(["--config", str(path)])
    with pytest.raises(ValueError, match="fprop=.* is neither YAML nor JSON: it is nested too deeply$"):
        parse(["--fprop", "[" * 5000])


def test_the_demo_is_run_without_a_configuration():
    recipe, _, training, _ = parse(["--max_steps=3"])
    assert training.max_completion_length == 4
    assert training.learning_rate == 1e-4
    assert training.max_steps == 3
    assert recipe.study.sft_steps == 400
    assert training.use_cpu


@pytest.mark.parametrize(
    "words",
    [["--model_name_or_path", "some/model"], ["--task=gsm8k"], ["--task", "file", "--dataset", "x.jsonl"]],
    ids=["model", "task", "file"],
)
def test_options_of_the_demo_are_not_those_of_another_model_or_task(words, capsys):
    _, scheme, training, _ = parse([*words, *CPU])
    assert training.max_completion_length is None
    assert training.learning_rate == 1e-6
    assert training.per_device_train_batch_size == 8
    assert training.max_steps == -1
    assert scheme == MXFP4RLConfig()
    assert "is not the demo's: options that are not named have their defaults" in capsys.readouterr().out


def test_modules_to_leave_out_have_one_name(tmp_path):
    expected = MXFP4RLConfig(modules_to_not_convert=["layers.0", "down_proj"])
    for word in ("--modules_to_not_convert", "--modules-to-not-convert"):
        assert parse([word, "layers.0", "down_proj"])[1] == expected
    path = tmp_path / "run.yaml"
    path.write_text("modules_to_not_converted: [layers.0, down_proj]\n")
    with pytest.raises(ValueError, match="run.yaml has no option .*; did you mean 'modules_to_not_convert'"):
        parse(["--config", str(path), *CPU])
    with pytest.raises(ValueError, match="is given more than once; give all after one"):
        parse(["--modules-to-not-convert", "layers.0", "--modules_to_not_convert", "down_proj"])


def test_masters_are_dithered_in_full_precision_alone():
    assert parse(["--full_precision", "true", "--study", "{dither_masters: true}"])[0].study.dither_masters
    with pytest.raises(ValueError, match="dither_masters is for full_precision"):
        parse(["--study", "{dither_masters: true}"])
    with pytest.raises(ValueError, match="rollout_scheme is for full_precision without use_peft and use_vllm"):
        parse(["--study", "{rollout_scheme: w4a8}"])


@pytest.mark.parametrize("dithers", [True, False])
def test_a_student_is_trained_with_or_without_a_dither_however_it_was_saved(dithers, tmp_path):
    base = tmp_path / "base"
    make_model(dtype=torch.bfloat16).save_pretrained(base)
    saved = MXFP4RLConfig(preset="w4a8", dither_ties=not dithers)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=saved, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "student")
    words = [f"--model_name_or_path={tmp_path / 'student'}", "--preset=w4a8", f"--dither_ties={dithers}", *CPU]
    stored, options = find_start(parse([*words, "--dtype=float32"]))
    report = load_weights(stored, options).quantization_report
    assert (report.dither is not None and report.dither.n_weights > 0) is dithers


@pytest.mark.parametrize("name", RECIPES)
def test_the_written_help_is_that_of_the_options(name):
    written = help_file(name).read_text(encoding="utf-8")
    assert written == recipe_help(name), "write it again: python -m hf_mxfp4.recipes.common.help"
    assert OTHERS not in written, "give each option a heading in recipes/common/help.py"


@pytest.mark.parametrize(("word", "is_shown"), [("--help", False), ("--help-all", True)])
def test_a_script_shows_the_short_help_or_all_options(word, is_shown, capsys):
    with pytest.raises(SystemExit):
        parse([word])
    shown = capsys.readouterr().out
    assert "--rollout_correction" in shown
    assert ("--weight_decay" in shown) is is_shown


@pytest.mark.parametrize(("word", "expected"), [("true", "token_truncate"), ("none", "none"), ("False", "none")])
def test_the_correction_of_rollouts_is_a_mode_or_a_boolean(word, expected):
    assert parse([f"--rollout_correction={word}"]).training.rollout_correction == expected


def test_evaluation_and_training_call_an_option_the_same():
    found = parse_evaluation(["model", "--evaluate-n=9", "--study", "{n_train: 3}"])
    assert (found.evaluate_n, found.study.n_train) == (9, 3)


def test_a_step_without_a_reward_shows_none():
    bar = TrainingBar()
    bar.training_bar = Mock()
    bar.on_log(None, None, None, logs={"loss": 1.0, "reward": None})
    bar.training_bar.set_postfix.assert_called_once_with({"loss": "1"})


def test_there_are_few_options_of_our_own():
    assert len(names((RecipeArguments,))) <= 15
    assert len(names((TextArguments,))) <= 17


def test_words_and_files_with_a_study_are_put_together(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("study: {n_train: 5, sft_steps: 9}\nuse_cpu: true\nbf16: false\n")
    words = ["--config", str(path), "--study", "{n_train: 7}", "--study={reload_check: 3}"]
    study = parse(words).recipe.study
    assert (study.n_train, study.reload_check, study.sft_steps) == (7, 3, 9)


@pytest.mark.parametrize(("slowdown", "is_bfloat16"), [(0.5, True), (1.2, True), (4.0, False)])
def test_without_a_gpu_the_cpu_trains_in_bfloat16_unless_it_is_slow(slowdown, is_bfloat16, monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(arguments, "bfloat16_slowdown", lambda: slowdown)
    training = parse(["--config", "w4a8", "--model_name_or_path", "some/model"]).training
    assert training.use_cpu
    assert training.bf16 is is_bfloat16
    assert f"bfloat16 takes {slowdown:.2f} of the time of float32" in capsys.readouterr().out
