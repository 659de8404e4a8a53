# SPDX-License-Identifier: Apache-2.0
"""What the YAML of an ablation says: models, cells and runs."""

from pathlib import Path

import pytest
import yaml

from recipes.ablations.grid import read_grid


CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
SHIPPED = [
    path for path in sorted(CONFIGS.glob("ablation_*.yaml")) if path.stem not in ("ablation_cells", "ablation_smollm2")
]
#: The rows of the paper's tables, and what is beyond them.
CELLS = [
    "bf16",
    "mxfp4",
    "mbs",
    "of",
    "mbs_of",
    "aqn",
    "aqn_mbs",
    "aqn_mbs_of",
    "mbs_of1",
    "best",
    "best_aqn",
    "floor",
    "w4a16",
    "w4a16_mbs",
    "aqn_low",
    "aqn_high",
]


def write(path, **changes):
    content = {
        "output_dir": str(path.parent / "out"),
        "seeds": [0, 1],
        "task": {"task": "word_problems", "problem_count": 100},
        "base": {"architecture": "qwen2", "sizes": {"hidden_size": 32}, "pretraining": {"max_steps": 2}},
        "train": {"macro_block": None, "outlier_fallback": None, "aqn": False, "use_cpu": True, "bf16": False},
        "cells": {"bf16": {"options": {"full_precision": True}}, "mxfp4": {}, "mbs": {"options": {"macro_block": 128}}},
        **changes,
    }
    path.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}, sort_keys=False))
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_cells_of_shipped_grids_are_accepted_and_differ_in_what_they_name(path):
    grid = read_grid(path, seeds=[0])
    assert grid.reference == "bf16"
    more = ["mxfp4_free", "mbs_of_free"] if path.stem.endswith("moe") else []
    assert [cell.name for cell in grid.cells] == [*CELLS, *more]
    plain = next(run.config for run in grid.runs if run.cell.name == "mxfp4")
    for run in grid.runs:
        run.parse()
        different = {name for name, value in run.config.items() if value != plain.get(name)}
        assert different <= {"output_dir", *run.cell.options}


def test_a_run_is_the_shared_options_and_its_own(tmp_path):
    grid = read_grid(write(tmp_path / "grid.yaml", train={"learning_rate": 1e-5, "macro_block": 64, "use_cpu": True}))
    runs = list(grid.runs)
    assert [run.name for run in runs] == [f"{c}/seed{s}" for s in (0, 1) for c in ("bf16", "mxfp4", "mbs")]
    mbs = runs[-1]
    assert (mbs.config["macro_block"], mbs.config["learning_rate"], mbs.config["seed"]) == (128, 1e-5, 1)
    assert mbs.config["model_name_or_path"] == str(tmp_path / "out" / "base")
    assert mbs.folder == tmp_path / "out" / "cells" / "mbs" / "seed1"
    # One starting point for all seeds: it is evaluated once.
    assert [run.config["evaluate_before"] for run in runs] == [True] * 3 + [False] * 3


def test_seeds_and_cells_can_be_chosen(tmp_path):
    path = write(tmp_path / "grid.yaml", extra_cells={"free": {"options": {"router_replay": False}}})
    grid = read_grid(path, seeds=[7], only=["mxfp4", "free"], output=tmp_path / "other")
    assert [run.name for run in grid.runs] == ["mxfp4/seed7", "free/seed7"]
    assert next(grid.runs).folder == tmp_path / "other" / "cells" / "mxfp4" / "seed7"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sedes": [0]}, "has no option 'sedes'; did you mean 'seeds'"),
        ({"seeds": [0, 0]}, "must be distinct whole numbers"),
        ({"seeds": []}, "at least one"),
        ({"train": {"learnin_rate": 1}}, "train has no option 'learnin_rate'; did you mean 'learning_rate'"),
        ({"train": {"seed": 1}}, "train: seed is set for each run and cannot be given"),
        ({"cells": {"bf16": {}, "mxfp4": {"option": {}}}}, "cells.mxfp4 has no option 'option'"),
        ({"cells": {"bf16": {"options": {"presett": 1}}}}, "cells.bf16.options has no option 'presett'"),
        ({"reference": "bf61"}, "no option 'bf61'; did you mean 'bf16'"),
        ({"cells": {"bf16": {}, "mxfp4": {"naive": "w4"}}}, "no option 'w4'"),
        ({"base": {"architecture": "gpt"}}, "base: architecture='gpt' must be one of qwen2, qwen3_moe"),
        ({"base": {"architecture": "qwen2", "per_seed": True}}, "base has no option 'per_seed'"),
        ({"base": None}, "lacks base"),
        ({"models": {"moe": {}}}, "models is gone: write a file for each model"),
        ({"cells": None}, "lacks cells"),
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
        list(run.parse() for run in read_grid(write(tmp_path / "grid.yaml", cells=cells)).runs)
