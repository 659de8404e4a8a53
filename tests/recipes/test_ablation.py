# SPDX-License-Identifier: Apache-2.0
"""Ablations: what a YAML file says, the arithmetic of the tables, and grids of runs that are finished, killed, failed
or changed, with a stand-in for `grpo.py`."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import processes
import pytest
import yaml

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.recipes.ablation import main, parse
from hf_mxfp4.recipes.ablations.grid import check_cells, read_grid
from hf_mxfp4.recipes.ablations.results import statistics, table_rows
from hf_mxfp4.recipes.common.reporting import markdown_table
from hf_mxfp4.recipes.tasks import ALPHABET
from hf_mxfp4.recipes.tasks.tiny_model import build_char_tokenizer, build_qwen2


ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipes" / "configs"
SCRIPT = ROOT / "recipes" / "ablation.py"
RECOVERY = CONFIGS / "recovery_smollm2.yaml"
SHIPPED = [path for path in sorted(CONFIGS.glob("ablation_*.yaml")) if path.stem != "ablation_cells"]


# ---- grids ----------------------------------------------------------------------------------------------------------


def write(path, **changes):
    content = {
        "output_dir": str(path.parent / "out"),
        "seeds": [0, 1],
        "task": {"task": "arithmetic"},
        "base": {"model_name_or_path": "model"},
        "train": {"macro_block": None, "outlier_fallback": None, "aqn": False, "use_cpu": True, "bf16": False},
        "cells": {"bf16": {"options": {"full_precision": True}}, "mxfp4": {}, "mbs": {"options": {"macro_block": 128}}},
        **changes,
    }
    path.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}, sort_keys=False))
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_cells_of_shipped_grids_are_accepted_and_differ_in_what_they_name(path):
    grid = read_grid(path, seeds=[0])
    assert grid.reference == "bf16" and {"bf16", "mxfp4", "mbs", "of", "mbs_of"} <= {cell.name for cell in grid.cells}
    plain = next(run.config for run in grid.runs if run.cell.name == "mxfp4")
    for run in grid.runs:
        run.parse()
        different = {name for name, value in run.config.items() if value != plain.get(name)}
        assert different <= {"output_dir", *run.cell.options} or "preset" in run.cell.options


def test_cells_of_the_recovery_grid_are_accepted():
    grid = read_grid(RECOVERY, options={"evaluate_n": 8})
    assert grid.reference == "bf16" and grid.mean_of_last == 3
    check_cells(grid, {"evaluate_n": 8})
    of = {run.cell.name: run.parse() for run in grid.runs}
    schemes = {name: options.quantization for name, options in of.items() if not options.recipe.full_precision}
    assert of["bf16_dithered"].recipe.study.dither_masters and not of["bf16"].recipe.study.dither_masters
    # What starts from a distilled model has the scheme that it was distilled in (distill_smollm2.yaml, and a preset).
    assert schemes["w4a8"] == schemes["w4a8_distilled"] == schemes["bf16_then_qad"] == MXFP4RLConfig(preset="w4a8")
    assert schemes["w4a4"] == schemes["w4a4_distilled"] == MXFP4RLConfig(preset="w4a4", outlier_fallback=None)
    h64 = MXFP4RLConfig(preset="w4a4", outlier_fallback=None, fprop={"rotation": "deterministic-64"})
    assert schemes["w4a4_h64_distilled"] == schemes["bf16_then_qad_w4a4"] == h64
    assert of["policy"].training.learning_rate == 1e-5 and of["policy"].recipe.study.save_policy
    assert schemes["w4a8_lora"] == MXFP4RLConfig(mode="packed", preset="w4a8")
    assert of["w4a8_lora"].model == of["bf16_lora"].model and of["bf16_lora"].model.use_peft
    afterwards = {"bf16_then_gptq", "bf16_then_gptq_w4a4"}
    assert {name for name, options in of.items() if options.recipe.gptq} == {"w4a8_gptq_lora"} | afterwards
    quantized = {name for name, options in of.items() if options.training.max_steps == 0}
    assert quantized == {"bf16_then_rtn", "bf16_then_qad", "bf16_then_qad_w4a4"} | afterwards
    sampled = {name for name, options in of.items() if options.recipe.study.rollout_scheme}
    assert sampled == {"sampled_w4a8", "sampled_mxfp4"}
    smoothed = {
        name for name, options in of.items() if options.quantization.smooth and not options.recipe.full_precision
    }
    assert smoothed == {"w4a4_smoothed", "w4a8_smoothed", "w4a8_lora", "w4a8_gptq_lora"} | afterwards
    corrections = [of[f"mxfp4_{name}"].training for name in ("off_policy_mask", "delta")]
    assert [args.off_policy_mask_threshold for args in corrections] == [0.5, None]
    assert [args.delta for args in corrections] == [None, 2.0] and corrections[1].num_iterations == 2


def test_a_run_is_the_shared_options_and_its_own(tmp_path):
    grid = read_grid(write(tmp_path / "grid.yaml", train={"learning_rate": 1e-5, "macro_block": 64, "use_cpu": True}))
    runs = list(grid.runs)
    assert [run.name for run in runs] == [f"{c}/seed{s}" for s in (0, 1) for c in ("bf16", "mxfp4", "mbs")]
    mbs = runs[-1]
    assert (mbs.config["macro_block"], mbs.config["learning_rate"], mbs.config["seed"]) == (128, 1e-5, 1)
    assert mbs.config["model_name_or_path"] == "model"
    assert mbs.folder == tmp_path / "out" / "cells" / "mbs" / "seed1"
    # One starting point for all seeds: it is evaluated once.
    assert [run.config["study"]["evaluate_before"] for run in runs] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sedes": [0]}, "has no option 'sedes'; did you mean 'seeds'"),
        ({"seeds": [0, 0]}, "must be distinct whole numbers"),
        ({"train": {"learnin_rate": 1}}, "train has no option 'learnin_rate'; did you mean 'learning_rate'"),
        ({"train": {"seed": 1}}, "train: seed is set for each run and cannot be given"),
        ({"cells": {"bf16": {}, "mxfp4": {"option": {}}}}, "cells.mxfp4 has no option 'option'"),
        ({"reference": "bf61"}, "no option 'bf61'; did you mean 'bf16'"),
        ({"cells": {"bf16": {}, "mxfp4": {"naive": "w4"}}}, "no option 'w4'"),
        ({"base": {}}, "base needs model_name_or_path: a grid makes no model"),
        ({"base": None}, "lacks base"),
        ({"cells": "nowhere.yaml"}, "nowhere.yaml"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_named(changes, message, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_grid(write(tmp_path / "grid.yaml", **changes))


def test_an_option_that_grpo_refuses_is_named_with_its_cell(tmp_path):
    cells = {"bf16": {}, "mxfp4": {"options": {"preset": "w4"}}}
    with pytest.raises(ValueError, match="^mxfp4/seed0: .*preset='w4' is not supported"):
        check_cells(read_grid(write(tmp_path / "grid.yaml", cells=cells)), {})


def test_variables_of_one_cell_do_not_reach_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_A_CELL", "before")
    cells = {"bf16": {}, "mxfp4": {"options": {"env": {"OF_A_CELL": 1}}}}
    grid = read_grid(write(tmp_path / "grid.yaml", cells=cells))
    check_cells(grid, {})
    assert os.environ["OF_A_CELL"] == "before"
    assert [run.config.get("env") for run in grid.runs][:2] == [None, {"OF_A_CELL": 1}]


def schemes_of(grid):
    return {run.cell.name: run.parse().quantization for run in grid.runs}


def test_a_cell_with_a_preset_is_exactly_that_preset(tmp_path, capsys):
    cells = {
        "bf16": {"options": {"full_precision": True}},
        "mxfp4": {},
        "paper": {"options": {"preset": "paper_a"}},
        "of": {"options": {"preset": "paper_a", "outlier_fallback": 1.0}},
    }
    train = {"scale_rule": "rceil", "macro_block": None, "outlier_fallback": None, "use_cpu": True, "bf16": False}
    grid = read_grid(write(tmp_path / "grid.yaml", cells=cells, train=train))
    check_cells(grid, {})
    told = " ".join(capsys.readouterr().out.split())
    assert "cell paper its own preset or mode resets scale_rule=rceil, macro_block=None, outlier_fallback=None" in told
    assert "cell mxfp4" not in told
    schemes = schemes_of(grid)
    assert schemes["paper"] == MXFP4RLConfig(preset="paper_a")
    assert schemes["of"] == MXFP4RLConfig(preset="paper_a", outlier_fallback=1.0)
    assert schemes["mxfp4"] == MXFP4RLConfig(scale_rule="rceil", macro_block=None, outlier_fallback=None)


def test_options_for_all_cells_and_another_start(tmp_path):
    path = write(tmp_path / "grid.yaml", launcher="accelerate launch")
    words = ["--config", str(path), "--max_steps", "2", "--model_name_or_path=small", "--launcher", "", "--report-only"]
    config, arguments, options = parse(words)
    assert config == str(path) and arguments.report_only and options == {"max_steps": 2, "model_name_or_path": "small"}
    grid = read_grid(path, launcher=arguments.launcher, options=options)
    assert grid.launcher == []
    assert {(run.config["max_steps"], run.config["model_name_or_path"]) for run in grid.runs} == {(2, "small")}
    preset = read_grid(path, options={"preset": "paper_a"}, only=["mxfp4"])
    assert set(schemes_of(preset).values()) == {MXFP4RLConfig(preset="paper_a")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_stepz": 2}, "the command line has no option 'max_stepz'; did you mean 'max_steps'"),
        ({"seed": 2}, "the command line: seed is set for each run"),
    ],
)
def test_options_for_all_cells_that_cannot_be(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        check_cells(read_grid(write(tmp_path / "grid.yaml"), options=options), options)


def test_a_cell_keeps_its_own_options(tmp_path, capsys):
    options = {"macro_block": 64}
    grid = read_grid(write(tmp_path / "grid.yaml"), options=options)
    check_cells(grid, options)
    assert "cell mbs keeps its own macro_block=128" in " ".join(capsys.readouterr().out.split())
    assert {run.cell.name: run.config.get("macro_block") for run in grid.runs}["mbs"] == 128


# ---- tables ----------------------------------------------------------------------------------------------------------


def record(cell, seed, value, **changes):
    return {
        "model": "m", "cell": cell, "label": cell.upper(), "seed": seed, "value": value, "reference": "bf16",
        "naive": "mxfp4", "paper": {}, "before": None, "n_test": 100, **changes,
    }  # fmt: skip


#: Deviations of mbs are -4, -2 and 6 points; to bf16 -10, -12 and -8: mean -10, standard deviation 2, t(2) is 4.303.
RECORDS = [
    record("bf16", 0, 0.80, before=0.5, paper={"dense": 82.0, "MoE": 91.51}), record("bf16", 1, 0.84),
    record("bf16", 2, 0.88), record("mxfp4", 0, 0.60, before=0.2, paper={"dense": 60.1, "MoE": 88.8}),
    record("mxfp4", 1, 0.64), record("mxfp4", 2, 0.68), record("mbs", 0, 0.70, paper={"MoE": 90.1}),
    record("mbs", 1, 0.72), record("mbs", 2, 0.80),
]  # fmt: skip


def test_the_table_to_the_letter():
    assert markdown_table(*table_rows(RECORDS)) == (
        "| cell | before RL | after RL | seeds ± | problems ± | minus reference | recovered | paper: dense | "
        "paper: MoE |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| BF16 | 50.0 | 84.0 | 2.3 | 3.7 |  |  | 82.0 | 91.5 |\n"
        "| MXFP4 | 20.0 | 64.0 | 2.3 | 4.8 | -20.0 [-20.0, -20.0] |  | 60.1 | 88.8 |\n"
        "| MBS |  | 74.0 | 3.1 | 4.4 | -10.0 [-15.0, -5.0] | 50 % |  | 90.1 |\n"
    )
    # Nothing was lost: there is nothing to recover.
    no_gap = [record(r["cell"], r["seed"], 0.9 if r["cell"] == "mxfp4" else r["value"]) for r in RECORDS]
    assert [row["recovered"] for row in statistics(no_gap)] == [None] * 3


# ---- runs ------------------------------------------------------------------------------------------------------------


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
summary = {
    "accuracy_before": {"strict": 0.125} if config["study"]["evaluate_before"] else None,
    "accuracy_after": {"strict": value},
    "standard_error_after": {"strict": 0.1}, "n_test": 16, "steps": 3, "scheme": "some", "n_quantized": 14,
    "weight_sqnr_db": None, "seconds": 1.0,
}
(folder / "summary.json").write_text(json.dumps(summary))
"""


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
            "task": {"task": "arithmetic"},
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
    path = grid(bf16=0.75, mxfp4=0.375)
    assert main(["--config", path, "--jobs", "2"]) == 0
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
    assert records[0]["hardware"].endswith(f", {threads} threads")
    assert "| mxfp4 | 12.5 | 38.0 |" in (out / "table.md").read_text()

    assert main(["--config", path]) == 0  # all there
    assert "runs 0 of 4, 1 at a time" in capsys.readouterr().out
    assert len(starts(tmp_path, "bf16", 0)) == 1


def test_results_of_another_grid_are_not_replaced(grid, tmp_path):
    path = Path(grid(bf16=0.75, mxfp4=0.375, seeds=[0]))
    main(["--config", str(path)])
    results = (tmp_path / "out" / "ablation.json").read_bytes()
    other = path.rename(path.with_name("other.yaml"))
    for words in ([], ["--report-only"]):
        with pytest.raises(SystemExit, match="out has the results of the grid 'grid'; choose another --out"):
            main(["--config", str(other), *words])
    assert (tmp_path / "out" / "ablation.json").read_bytes() == results
    assert main(["--config", str(other), "--out", str(tmp_path / "another")]) == 0


def test_parts_of_a_grid_are_reported_together(grid, tmp_path):
    path, other = grid(bf16=0.75, mxfp4=0.375), tmp_path / "other"
    main(["--config", path, "--only", "bf16", "--seeds", "5"])
    main(["--config", path, "--out", str(other), "--only", "mxfp4", "--seeds", "5"])  # on another machine
    shutil.copytree(tmp_path / "out" / "cells", other / "cells", dirs_exist_ok=True)
    assert main(["--config", path, "--out", str(other), "--report-only"]) == 0
    assert [(r["cell"], r["value"], r["baseline"]) for r in records_in(other)] == [
        ("bf16", 0.8, 0.8), ("mxfp4", 0.425, 0.8),
    ]  # fmt: skip


def test_a_failed_run_is_recorded_and_tried_again(grid, tmp_path, capsys):
    path = grid(bf16=0.75, mxfp4=0.5, mbs=0.375, seeds=[0])
    assert main(["--config", path]) == 1
    printed = capsys.readouterr().out
    assert "FAILED with exit code 1: out of luck" in printed and "failed mxfp4/seed0" in printed
    state = json.loads((tmp_path / "out" / "cells" / "mxfp4" / "seed0" / "cell.json").read_text())
    assert state["exit_code"] == 1
    records = records_in(tmp_path / "out")
    assert [record["cell"] for record in records] == ["bf16", "mbs"]
    assert main(["--config", path]) == 1
    assert [len(starts(tmp_path, cell, 0)) for cell in ("bf16", "mxfp4", "mbs")] == [1, 2, 1]
    # Repaired, it is run although its settings are others.
    assert main(["--config", grid(bf16=0.75, mxfp4=0.625, mbs=0.375, seeds=[0])]) == 0


def test_an_accuracy_may_be_the_mean_of_the_last_evaluations(grid, tmp_path):
    path = Path(grid(bf16=0.75, seeds=[0]))
    path.write_text(path.read_text() + "mean_of_last: 2\nnaive: bf16\n")
    with pytest.raises(SystemExit, match="bf16/seed0 was evaluated 0 times while it trained, not mean_of_last=2"):
        main(["--config", str(path)])
    logged = [
        {"step": 1, "reward": 0.51239, "loss": 1.0},
        *({"step": s, "greedy/strict": s / 8, "entropy": None} for s in (1, 2, 3)),
    ]
    (tmp_path / "out" / "cells" / "bf16" / "seed0" / "log_history.json").write_text(json.dumps(logged))
    assert main(["--config", str(path)]) == 0
    (found,) = records_in(tmp_path / "out")
    assert found["value"] == 0.3125  # of 2/8 and 3/8
    assert (found["n_test"], found["shape"]) == (16, "16 problems, 3 GRPO steps")
    assert found["standard_error"] == pytest.approx(0.11588, abs=1e-5)  # sqrt(.3125 * .6875 / 16)
    assert found["curves"] == {"reward": [[1, 0.5124]], "greedy/strict": [[1, 0.125], [2, 0.25], [3, 0.375]]}
    # Evaluations while it trained may be on fewer problems.
    folder, fewer = tmp_path / "out" / "cells" / "bf16" / "seed0", tmp_path / "fewer"
    shutil.copytree(folder, fewer / "cells" / "bf16" / "seed0")
    state = json.loads((folder / "cell.json").read_text())
    state["settings"]["evaluate_every_n"] = 4
    (fewer / "cells" / "bf16" / "seed0" / "cell.json").write_text(json.dumps(state))
    assert main(["--config", str(path), "--out", str(fewer), "--study={evaluate_every_n: 4}", "--report-only"]) == 0
    (found,) = records_in(fewer)
    assert (found["n_test"], found["shape"]) == (4, "4 problems, 3 GRPO steps")
    assert found["standard_error"] == pytest.approx(0.23175, abs=1e-5)
    assert "| bf16 | 12.5 | 31.2 |  | 23.2 |" in (fewer / "table.md").read_text()
    # A run without steps has but one accuracy.
    file = tmp_path / "out" / "cells" / "bf16" / "seed0" / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"steps": 0}))
    assert main(["--config", str(path)]) == 0 and records_in(tmp_path / "out")[0]["value"] == 0.75


def test_a_cell_may_start_from_another_checkpoint(tmp_path):
    cells = {"bf16": {"options": {"full_precision": True}}, "mxfp4": {"base": "bf16/seed{seed}/policy"}}
    grid = read_grid(write(tmp_path / "grid.yaml", cells=cells))
    starts = {run.name: run.config["model_name_or_path"] for run in grid.runs}
    assert starts == {
        "bf16/seed0": "model", "mxfp4/seed0": "bf16/seed0/policy",
        "bf16/seed1": "model", "mxfp4/seed1": "bf16/seed1/policy",
    }  # fmt: skip
    measured = {run.name for run in grid.runs if run.config["study"]["evaluate_before"]}
    assert measured == {"bf16/seed0", "mxfp4/seed0", "mxfp4/seed1"}  # those that start from models of their own
    for name in ("seed0", "seed7", "seed7.old"):
        (tmp_path / "out" / "cells" / "mxfp4" / name).mkdir(parents=True)
    assert grid.with_stored_seeds().seeds == [0, 1, 7]


def test_a_run_that_keeps_its_policy_is_the_same_run(grid, tmp_path):
    path = grid(bf16=0.75, mxfp4=0.375, seeds=[0])
    main(["--config", path, "--only", "bf16", "--study={save_policy: true}"])
    main(["--config", path])
    saved = {cell: tmp_path / "out" / "cells" / cell / "seed0" / "config.yaml" for cell in ("bf16", "mxfp4")}
    assert [yaml.safe_load(file.read_text())["study"]["save_policy"] for file in saved.values()] == [True, False]
    assert len(starts(tmp_path, "bf16", 0)) == 1 and len(records_in(tmp_path / "out")) == 2
    main(["--config", path, "--only", "mxfp4", "--study={save_policy: true}"])  # it has none yet
    assert len(starts(tmp_path, "mxfp4", 0)) == 2


def test_other_settings_are_refused(grid, tmp_path, capsys):
    main(["--config", grid(bf16=0.75, mxfp4=0.375, seeds=[0])])
    changed = grid(bf16=0.75, mxfp4=0.25 + 0.125 / 2, seeds=[0])
    with pytest.raises(SystemExit, match="mxfp4/seed0 was run with other learning_rate; .*remove that folder"):
        main(["--config", changed])
    capsys.readouterr()
    assert main(["--config", changed, "--report-only"]) == 0
    assert "left out run with other settings: mxfp4/seed0" in capsys.readouterr().out
    assert [r["cell"] for r in records_in(tmp_path / "out")] == ["bf16"]
    shutil.rmtree(tmp_path / "out" / "cells" / "mxfp4" / "seed0")
    assert main(["--config", changed]) == 0
    assert records_in(tmp_path / "out")[1]["value"] == 0.3125 and len(starts(tmp_path, "bf16", 0)) == 1


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_a_killed_run_goes_on_from_its_checkpoint_or_from_the_start(grid, tmp_path, with_checkpoint):
    path = grid(bf16=0.75, mxfp4=0.375, seeds=[0])
    main(["--config", path])
    folder = tmp_path / "out" / "cells" / "mxfp4" / "seed0"
    (folder / "summary.json").write_text('{"accuracy_af')  # as if killed while it was writing
    if with_checkpoint:
        (folder / "checkpoint-2").mkdir()
        (folder / "checkpoint-2" / "trainer_state.json").write_text('{"global_step": 2}')
    assert main(["--config", path]) == 0
    first, second = starts(tmp_path, "mxfp4", 0)
    assert ("--resume_from_checkpoint true" in second) == with_checkpoint and "resume" not in first
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3


def test_a_killed_run_does_not_go_on_from_a_checkpoint_of_other_settings(grid, tmp_path):
    main(["--config", grid(bf16=0.75, mxfp4=0.375, seeds=[0])])
    folder = tmp_path / "out" / "cells" / "mxfp4" / "seed0"
    (folder / "checkpoint-2").mkdir()
    (folder / "checkpoint-2" / "trainer_state.json").write_text('{"global_step": 2}')
    (folder / "cell.json").unlink()  # of that run; the next one is killed before it removes the checkpoint
    (folder / "summary.json").unlink()
    for _ in range(2):
        assert main(["--config", grid(bf16=0.75, mxfp4=0.5, seeds=[0])]) == 1
    assert len(starts(tmp_path, "mxfp4", 0)) == 3
    assert not any("resume" in line for line in starts(tmp_path, "mxfp4", 0))


def test_ending_the_runner_ends_its_runs_and_frees_the_folder(grid, tmp_path):
    path = grid(bf16=0.25, mxfp4=0.75, seeds=[0])
    runner = processes.start(processes.script(SCRIPT, "--config", path))
    folder = tmp_path / "out" / "cells" / "bf16" / "seed0"
    deadline = time.monotonic() + 120
    while not (folder / "starts").is_file():
        assert runner.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(SystemExit, match="another process is at work in"):
        main(["--config", path])
    runner.send_signal(signal.SIGTERM)
    assert runner.wait().returncode == 128 + signal.SIGTERM
    (folder / "go").touch()
    assert main(["--config", path]) == 0  # the lock is free, so no run is alive; started again
    assert len(starts(tmp_path, "bf16", 0)) == 2


def test_nothing_to_report_and_no_jobs_are_errors(grid):
    path = grid(bf16=0.75, mxfp4=0.375)
    with pytest.raises(SystemExit, match="no run has finished"):
        main(["--config", path, "--report-only"])
    with pytest.raises(SystemExit, match="jobs=0 must be at least 1"):
        main(["--config", path, "--jobs", "0"])
    with pytest.raises(SystemExit, match="nowhere.yaml"):
        main(["--config", "nowhere.yaml"])


def test_a_whole_grid(tmp_path):
    """Two cells, one seed, two steps: from a checkpoint to the table."""
    tokenizer = build_char_tokenizer(ALPHABET)
    sizes = {"hidden_size": 32, "num_layers": 2, "intermediate_size": 64, "max_positions": 32}
    build_qwen2(tokenizer, **sizes).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    options = {
        "max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "logging_steps": 1, "report_every": 0,
        "gradient_checkpointing": False, "dataloader_pin_memory": False, "evaluate_n": 4, "evaluate_every": 1,
    }  # fmt: skip
    train = {"macro_block": None, "use_cpu": True, "bf16": False, **options}
    cells = {"bf16": {"options": {"full_precision": True}}, "mxfp4": {"label": "MXFP4", "paper": {"dense": 60.1}}}
    base = {"model_name_or_path": str(tmp_path / "base")}
    changes = {"train": train, "cells": cells, "base": base, "seeds": [0], "launcher": " ".join(processes.FORKED)}
    path = write(tmp_path / "grid.yaml", **changes)
    process = processes.run(processes.script(SCRIPT, "--config", path))
    assert process.returncode == 0, process.output[-4000:]
    full, plain = records_in(tmp_path / "out")
    assert full["scheme"] == "full precision" and full["n_quantized"] == 0
    assert plain["scheme"] == "w4a8 [weights mxfp4+even, activations fp8]" and plain["n_quantized"] == 14
    assert plain["steps"] == 2 and plain["n_test"] == 4 and plain["before"] is not None
    # Runs start from the saved model, and keep none of their own.
    *_, run = read_grid(path).runs
    assert not list(run.folder.rglob("*.safetensors"))
    assert json.loads((run.folder / "summary.json").read_text())["model"] == run.grid.start
