# SPDX-License-Identifier: Apache-2.0
"""What the YAML of an ablation says: models, cells, and that cells differ in nothing but what they name."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from recipes.ablations.base import base_settings, describe_base
from recipes.ablations.grid import OPTIONS, Run, check_cells, read_grid


CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
SHIPPED = [CONFIGS / f"ablation_{name}.yaml" for name in ("cpu", "h200", "qwen")]
#: The rows of the paper's tables, and what is beyond them.
CELLS = (
    "bf16 mxfp4 mbs of mbs_of aqn aqn_mbs aqn_mbs_of mbs_of1 best best_aqn floor w4a16 w4a16_mbs aqn_low aqn_high"
).split()


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
def test_shipped_grids_parse_and_their_cells_differ_in_what_they_name(path):
    grid = read_grid(path)
    check_cells(grid)
    assert len(grid.seeds) >= 3 and grid.reference == "bf16"
    for model in grid.models:
        names = [cell.name for cell in model.cells]
        assert names[: len(CELLS)] == CELLS
        assert (names[len(CELLS) :] == ["mxfp4_free", "mbs_of_free"]) == (model.key == "moe")
        by_name = {cell.name: cell for cell in model.cells}
        assert not by_name["mxfp4"].options and by_name["aqn_mbs_of"].paper == {"dense": 81.3, "MoE": 91.1}
        for run in (Run(grid, model, cell, grid.seeds[0]) for cell in model.cells):
            assert set(run.config) <= set(OPTIONS)
            same = {name: value for name, value in run.config.items() if name not in run.cell.options}
            plain = Run(grid, model, by_name["mxfp4"], grid.seeds[0]).config
            assert {**same, "output_dir": 0} == {
                **{name: value for name, value in plain.items() if name in same},
                "output_dir": 0,
            }


@pytest.mark.parametrize(("model", "millions", "architecture"), [(0, 25.58, "qwen2"), (1, 82.26, "qwen3_moe")])
def test_models_that_are_made_on_the_spot_have_the_size_that_is_told(model, millions, architecture):
    told = describe_base(read_grid(SHIPPED[1]).models[model])
    assert told.startswith(f"{millions:.2f} M-parameter {architecture} (hidden_size=512")


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


def test_one_starting_point_for_each_seed(tmp_path):
    base = {"architecture": "qwen2", "pretraining": {"max_steps": 2}, "per_seed": True}
    grid = read_grid(write(tmp_path / "grid.yaml", base=base))
    first, last = list(grid.runs)[0], list(grid.runs)[-1]
    assert (first.base_folder.name, last.base_folder.name) == ("seed0", "seed1")
    assert all(run.config["evaluate_before"] for run in grid.runs)
    assert [base_settings(grid.models[0], seed)["seed"] for seed in (0, 1)] == [0, 1]


def test_seeds_cells_and_models_can_be_chosen(tmp_path):
    path = write(
        tmp_path / "grid.yaml",
        base=None,
        models={"dense": {"base": {"model_name_or_path": "a"}}, "moe": {"base": {"model_name_or_path": "b"}}},
        extra_cells={"free": {"models": ["moe"], "options": {"router_replay": False}}},
    )
    assert [len(model.cells) for model in read_grid(path).models] == [3, 4]
    grid = read_grid(path, seeds=[7], only=["mxfp4", "free"], models=["moe"], output=tmp_path / "other")
    assert [run.name for run in grid.runs] == ["moe/mxfp4/seed7", "moe/free/seed7"]
    assert next(grid.runs).folder == tmp_path / "other" / "moe" / "cells" / "mxfp4" / "seed7"
    assert next(grid.runs).config["model_name_or_path"] == "b"


def test_models_without_a_chosen_cell_are_left_out():
    path = CONFIGS / "ablation_h200.yaml"
    assert [model.key for model in read_grid(path, only=["mxfp4_free"]).models] == ["moe"]
    with pytest.raises(ValueError, match="none of the cells mxfp4_free is run on dense"):
        read_grid(path, only=["mxfp4_free"], models=["dense"])


def test_options_that_a_cell_does_not_name_must_be_equal(tmp_path, monkeypatch):
    grid = read_grid(write(tmp_path / "grid.yaml"))
    check_cells(grid)
    honest = Run.config.fget

    def confounded(run):
        return {**honest(run), **({"learning_rate": 1e-3} if run.cell.name == "mbs" else {})}

    monkeypatch.setattr(Run, "config", property(confounded))
    with pytest.raises(ValueError, match="^mbs and bf16 differ in learning_rate, which neither names"):
        check_cells(grid)
    # The same difference is fine once it is declared.
    (model,) = grid.models
    cells = tuple(replace(cell, options={**cell.options, "learning_rate": 1e-3}) for cell in model.cells)
    check_cells(replace(grid, models=(replace(model, cells=cells),)))


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
        ({"base": {"architecture": "gpt"}}, "base.architecture='gpt' must be one of qwen2, qwen3_moe"),
        ({"base": {"architecture": "qwen2", "sizes": {"width": 1}, "pretraining": {}}}, "sizes has no option 'width'"),
        ({"base": {"architecture": "qwen2", "pretraining": {"maxsteps": 1}}}, "pretraining has no option 'maxsteps'"),
        ({"base": {"architecture": "qwen2"}}, "base.pretraining must hold"),
        ({"base": {"model_name_or_path": "a", "seed": 1}}, "base has no option 'seed'"),
        ({"base": None}, "needs either base, or models"),
        ({"extra_cells": {"x": {"models": ["moe"]}}}, "models has no option 'moe'"),
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
        check_cells(read_grid(write(tmp_path / "grid.yaml", cells=cells)))


def test_the_weights_of_a_checkpoint_are_part_of_what_a_run_depends_on(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"one")
    model = read_grid(write(tmp_path / "grid.yaml", base={"model_name_or_path": str(folder)})).models[0]
    first = base_settings(model, 0)
    assert first == base_settings(model, 1)
    (folder / "model.safetensors").write_bytes(b"another")
    assert base_settings(model, 0) != first
