# SPDX-License-Identifier: Apache-2.0
"""Ablations: what a YAML file says, the arithmetic of the tables, and grids of runs that are finished, killed, failed
or changed, with a stand-in for `grpo.py`."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import processes
import pytest
import yaml

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.recipes.ablation import main, parse
from hf_mxfp4.recipes.ablations.grid import read_grid
from hf_mxfp4.recipes.ablations.results import statistics, table_rows
from hf_mxfp4.recipes.common.reporting import markdown_table
from hf_mxfp4.recipes.tasks import ALPHABET
from hf_mxfp4.recipes.tasks.tiny_model import build_char_tokenizer, build_qwen2


ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipes" / "configs"
SCRIPT = ROOT / "recipes" / "ablation.py"
RECOVERY = CONFIGS / "recovery_smollm2.yaml"
GRIDS = sorted([*CONFIGS.glob("ablation_*.yaml"), *CONFIGS.glob("recovery_*.yaml")])


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


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_cells_of_shipped_grids_are_accepted_and_differ_in_what_they_name(path):
    grid = read_grid(path, seeds=[0])
    runs = {run.cell.name: run for run in grid.runs}
    plain = runs.get("mxfp4", runs["bf16"]).config
    for run in runs.values():
        run.parse()
        different = {name for name, value in run.config.items() if value != plain.get(name)}
        named = {"output_dir", *run.cell.options}
        if run.cell.base:
            named |= {"model_name_or_path", "study"}  # evaluated before training, as another start
        assert different <= named or "preset" in run.cell.options


@pytest.fixture(scope="module")
def recovery():
    """The options of each cell of the recovery grid."""
    grid = read_grid(RECOVERY, seeds=[0], options={"evaluate_n": 8})
    return {run.cell.name: run.parse() for run in grid.runs}


@pytest.mark.parametrize(
    ("cells", "scheme"),
    [
        # What starts from a distilled model has the scheme that it was distilled in.
        (("w4a8", "w4a8_distilled"), MXFP4RLConfig(preset="w4a8")),
        (("w4a4", "w4a4_distilled"), MXFP4RLConfig(preset="w4a4")),
        (("w4a4_h64_distilled",), MXFP4RLConfig(preset="w4a4", fprop={"rotation": "deterministic-64"})),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_cells_of_the_recovery_grid_have_their_schemes(recovery, cells, scheme):
    for cell in cells:
        assert recovery[cell].quantization == scheme


def test_cells_of_the_recovery_grid_do_what_their_names_say(recovery):
    assert recovery["bf16_dithered"].recipe.study.dither_masters
    assert not recovery["bf16"].recipe.study.dither_masters
    assert recovery["sampled_w4a8"].recipe.study.rollout_scheme == "w4a8"
    assert recovery["w4a8_smoothed"].quantization.smooth
    assert not recovery["w4a8_distilled"].quantization.smooth
    assert recovery["mxfp4_delta"].training.delta == 2.0


def test_cells_of_two_points_have_dithered_masters_and_their_schemes():
    grid = read_grid(CONFIGS / "recovery_two_points.yaml", options={"evaluate_n": 8})
    runs = [run for run in grid.runs if run.seed == 0]
    options = {run.cell.name: run.parse() for run in runs}
    assert options["bf16"].recipe.study.dither_masters
    assert options["w4a8_smoothed"].quantization == MXFP4RLConfig(preset="w4a8", smooth=True)
    assert options["bf16"].recipe.study.save_policy
    assert options["bf16_then_gptq"].recipe.gptq
    assert options["bf16_then_gptq"].training.max_steps == 0
    lora = {name: of_cell for name, of_cell in options.items() if "_lora" in name}
    assert all(of_cell.model == options["bf16_lora"].model for of_cell in lora.values())
    smoothed = [name for name, of_cell in lora.items() if of_cell.quantization.smooth and name != "bf16_lora"]
    of_w4a16 = ["w4a16_lora", "w4a16_lora_gptq", "w4a16_lora_distilled"]
    assert smoothed == ["w4a8_lora_smoothed", "w4a8_lora_gptq", *of_w4a16]
    assert options["w4a8_lora"].quantization == MXFP4RLConfig(mode="packed", preset="w4a8")
    assert options["w4a16_lora"].quantization == MXFP4RLConfig(mode="packed", preset="w4a16")
    assert [name for name, of_cell in lora.items() if of_cell.recipe.gptq] == ["w4a8_lora_gptq", "w4a16_lora_gptq"]
    assert not set(grid.seeds) & {100, 101}


def test_a_run_is_the_shared_options_and_its_own(tmp_path):
    grid = read_grid(write(tmp_path / "grid.yaml", train={"learning_rate": 1e-5, "macro_block": 64, "use_cpu": True}))
    runs = list(grid.runs)
    names = ["bf16/seed0", "mxfp4/seed0", "mbs/seed0", "bf16/seed1", "mxfp4/seed1", "mbs/seed1"]
    assert [run.name for run in runs] == names
    mbs = runs[-1]
    expected = {"macro_block": 128, "learning_rate": 1e-5, "seed": 1, "model_name_or_path": "model"}
    assert expected.items() <= mbs.config.items()
    assert mbs.folder == tmp_path / "out" / "cells" / "mbs" / "seed1"
    # One starting point for all seeds: it is evaluated once.
    assert [run.config["study"]["evaluate_before"] for run in runs] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sedes": [0]}, "did you mean 'seeds'"),
        ({"seeds": [0, 0]}, "must be distinct whole numbers"),
        ({"train": {"learnin_rate": 1}}, "train has no option 'learnin_rate'"),
        ({"train": {"seed": 1}}, "train: seed is set for each run"),
        ({"cells": {"bf16": {}, "mxfp4": {"option": {}}}}, "cells.mxfp4 has no option 'option'"),
        ({"reference": "bf61"}, "did you mean 'bf16'"),
        ({"base": {}}, "base needs model_name_or_path"),
        ({"base": None}, "lacks base"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_named(changes, message, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_grid(write(tmp_path / "grid.yaml", **changes))


def test_an_option_that_grpo_refuses_is_named_with_its_cell(tmp_path):
    cells = {"bf16": {}, "mxfp4": {"options": {"preset": "w4"}}}
    path = write(tmp_path / "grid.yaml", cells=cells)
    with pytest.raises(SystemExit, match="mxfp4/seed0: .*preset='w4'"):
        main(["--config", str(path)])


@pytest.mark.parametrize("factors", [{}, {"outlier_fallback": 1.0}])
def test_a_cell_with_a_preset_is_exactly_that_preset(factors, tmp_path):
    cells = {"bf16": {}, "mxfp4": {}, "paper": {"options": {"preset": "paper_a", **factors}}}
    grid = read_grid(write(tmp_path / "grid.yaml", cells=cells), only=["paper"], seeds=[0])
    (run,) = grid.runs
    assert run.parse().quantization == MXFP4RLConfig(preset="paper_a", **factors)


def test_options_for_all_cells_and_another_start(tmp_path):
    path = write(tmp_path / "grid.yaml", launcher="accelerate launch")
    words = ["--config", str(path), "--max_steps", "2", "--model_name_or_path=small", "--launcher", ""]
    config, arguments, options = parse([*words, "--macro_block=64"])
    assert config == str(path)
    grid = read_grid(path, launcher=arguments.launcher, options=options, seeds=[0])
    assert grid.launcher == []
    configs = {run.cell.name: run.config for run in grid.runs}
    assert configs["mxfp4"]["max_steps"] == configs["mbs"]["max_steps"] == 2
    assert configs["mxfp4"]["model_name_or_path"] == "small"
    # In place of a cell's own, too: rates are tuned so.
    assert str(configs["mxfp4"]["macro_block"]) == str(configs["mbs"]["macro_block"]) == "64"


def test_a_preset_for_all_cells_is_exactly_that_preset(tmp_path):
    grid = read_grid(write(tmp_path / "grid.yaml"), options={"preset": "w4a8"}, only=["mbs"], seeds=[0])
    (run,) = grid.runs
    assert run.parse().quantization == MXFP4RLConfig(preset="w4a8")


def test_a_cell_may_start_from_another_checkpoint(tmp_path):
    cells = {"bf16": {"options": {"full_precision": True}}, "mxfp4": {"base": "bf16/seed{seed}/policy"}}
    runs = list(read_grid(write(tmp_path / "grid.yaml", cells=cells)).runs)
    starts = [run.config["model_name_or_path"] for run in runs]
    assert starts == ["model", "bf16/seed0/policy", "model", "bf16/seed1/policy"]
    # Those that start from models of their own are evaluated before, too.
    assert [run.config["study"]["evaluate_before"] for run in runs] == [True, True, False, True]


# ---- tables ----------------------------------------------------------------------------------------------------------


def record(cell, seed, value, **changes):
    return {
        "model": "m", "cell": cell, "label": cell.upper(), "seed": seed, "value": value, "reference": "bf16",
        "paper": {}, "before": None, "n_test": 100, "curves": {}, **changes,
    }  # fmt: skip


#: Mean and variance, in points: BF16 84 and 16, MXFP4 64 and 16, MBS 74 and 28. Welch: the standard error of MBS minus
#: BF16 is sqrt(16/3 + 28/3) = 3.83 with 3.72 degrees of freedom, t(3.72) = 2.860; of MXFP4 3.27 with 4, t(4) = 2.776.
#: Within seeds MBS minus BF16 is -10, -12 and -8: standard deviation 2, t(2) = 4.303.
RECORDS = [
    record("bf16", 0, 0.80, before=0.5, paper={"dense": 82.0, "MoE": 91.51}, curves={"entropy": [[1, 0.5], [2, 0.3]]}),
    record("bf16", 1, 0.84, curves={"sampling/kl": [[1, 2e-13]]}),
    record("bf16", 2, 0.88), record("mxfp4", 0, 0.60, before=0.2, paper={"dense": 60.1, "MoE": 88.8}),
    record("mxfp4", 1, 0.64), record("mxfp4", 2, 0.68), record("mbs", 0, 0.70, paper={"MoE": 90.1}),
    record("mbs", 1, 0.72), record("mbs", 2, 0.80),
]  # fmt: skip


def test_the_table_to_the_letter():
    assert markdown_table(*table_rows(RECORDS)) == (
        "| cell | runs | before RL | after RL | problems ± | minus reference | within seeds | mean of curve | "
        "minus reference | entropy | sampler KL | paper: dense | paper: MoE |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| BF16 | 3 | 50.0 | 84.0 ± 2.3 | 3.7 |  |  |  |  | 0.4 | 2e-13 | 82.0 | 91.5 |\n"
        "| MXFP4 | 3 | 20.0 | 64.0 ± 2.3 | 4.8 | -20.0 [-29.1, -10.9] | -20.0 [-20.0, -20.0] "
        "|  |  |  |  | 60.1 | 88.8 |\n"
        "| MBS | 3 |  | 74.0 ± 3.1 | 4.4 | -10.0 [-21.0, +1.0] | -10.0 [-15.0, -5.0] |  |  |  |  |  | 90.1 |\n"
    )


def test_means_of_curves_are_compared_as_the_ends_are():
    runs = [record(r["cell"], r["seed"], 0.5, mean_of_curve=r["value"]) for r in RECORDS]
    _, _, mbs = statistics(runs)
    assert mbs["curve"] == pytest.approx(0.74)
    assert mbs["curve_difference"]["interval"] == pytest.approx([-0.2095, 0.0095], abs=1e-4)
    assert mbs["difference"]["interval"] == [0, 0]


def test_a_cell_with_other_seeds_than_the_reference_is_compared_by_its_mean():
    runs = [record("bf16", 0, 0.8), record("bf16", 1, 0.84), record("mxfp4", 7, 0.6)]
    _, other = statistics(runs)
    assert other["difference"] == {"mean": pytest.approx(-0.22), "interval": None}
    assert other["paired"] is None


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
    "n_test": 16, "steps": 3, "scheme": "some", "n_quantized": 14,
    "learning_rate": config["learning_rate"], "weight_sqnr_db": None, "seconds": 1.0, "distilled": {"kl_after": 0.5},
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
    assert "runs 4 of 4, 2 at a time" in printed
    assert "4/4 " in printed
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for cell in ("bf16", "mxfp4"):
        assert starts(tmp_path, cell, 0) == starts(tmp_path, cell, 1) == [f" threads={threads}"]
    out = tmp_path / "out"
    config = yaml.safe_load((out / "cells" / "mxfp4" / "seed1" / "config.yaml").read_text())
    assert (config["seed"], config["learning_rate"], config["save_steps"]) == (1, 0.375, 2)
    records = records_in(out)
    assert [(r["cell"], r["seed"], r["value"], r["baseline"]) for r in records] == [
        ("bf16", 0, 0.75, 0.75), ("mxfp4", 0, 0.375, 0.75), ("bf16", 1, 0.76, 0.76), ("mxfp4", 1, 0.385, 0.76),
    ]  # fmt: skip
    assert [r["before"] for r in records] == [0.125, 0.125, None, None]
    assert records[0]["distilled"] == {"kl_after": 0.5}
    assert records[0]["hardware"].endswith(f", {threads} threads")
    assert "| mxfp4 | 2 | 12.5 | 38.0 ± 0.5 |" in (out / "table.md").read_text()

    assert main(["--config", path]) == 0  # all there
    assert "runs 0 of 4, 1 at a time" in capsys.readouterr().out
    assert len(starts(tmp_path, "bf16", 0)) == 1


def test_parts_of_a_grid_are_reported_together(grid, tmp_path):
    path = grid(bf16=0.75, mxfp4=0.375)
    main(["--config", path, "--only", "bf16", "--seeds", "5"])
    main(["--config", path, "--only", "mxfp4", "--seeds", "5"])
    found = [(record["cell"], record["value"], record["baseline"]) for record in records_in(tmp_path / "out")]
    assert found == [("bf16", 0.8, 0.8), ("mxfp4", 0.425, 0.8)]


def test_a_failed_run_is_recorded_and_tried_again(grid, tmp_path, capsys):
    path = grid(bf16=0.75, mxfp4=0.5, mbs=0.375, seeds=[0])
    assert main(["--config", path]) == 1
    printed = capsys.readouterr().out
    assert "FAILED with exit code 1: out of luck" in printed
    assert "failed mxfp4/seed0" in printed
    assert [record["cell"] for record in records_in(tmp_path / "out")] == ["bf16", "mbs"]
    assert main(["--config", path]) == 1
    assert [len(starts(tmp_path, cell, 0)) for cell in ("bf16", "mxfp4", "mbs")] == [1, 2, 1]
    # Repaired, it is run with other options, from the start.
    assert main(["--config", grid(bf16=0.75, mxfp4=0.625, mbs=0.375, seeds=[0])]) == 0
    assert len(starts(tmp_path, "mxfp4", 0)) == 1


@pytest.fixture
def finished_run(grid, tmp_path):
    """A grid that counts the mean of two evaluations, with one run that logged three: its path, the run's folder."""
    path = Path(grid(bf16=0.75, seeds=[0]))
    path.write_text(path.read_text() + "mean_of_last: 2\n")
    with pytest.raises(SystemExit, match="bf16/seed0 was evaluated 0 times"):
        main(["--config", str(path)])
    folder = tmp_path / "out" / "cells" / "bf16" / "seed0"
    logged = [
        {"step": 1, "reward": 0.51239, "loss": 1.0},
        {"step": 1, "greedy/strict": 0.125, "entropy": None},
        {"step": 2, "greedy/strict": 0.25},
        {"step": 3, "greedy/strict": 0.375, "sampling/kl/5-8": 0.01},
    ]
    (folder / "log_history.json").write_text(json.dumps(logged))
    return str(path), folder


def test_an_accuracy_may_be_the_mean_of_the_last_evaluations(finished_run, tmp_path):
    path, _ = finished_run
    assert main(["--config", path]) == 0
    (record,) = records_in(tmp_path / "out")
    assert record["value"] == 0.3125
    assert record["mean_of_curve"] == 0.25
    assert record["shape"] == "16 problems, 3 GRPO steps"
    assert record["standard_error"] == pytest.approx(0.11588, abs=1e-5)  # sqrt(.3125 * .6875 / 16)
    greedy = [[1, 0.125], [2, 0.25], [3, 0.375]]
    assert record["curves"] == {"reward": [[1, 0.5124]], "greedy/strict": greedy, "sampling/kl/5-8": [[3, 0.01]]}


def test_evaluations_while_a_run_trained_may_be_on_fewer_problems(finished_run, tmp_path):
    path, folder = finished_run
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["study"]["evaluate_every_n"] = 4
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["--config", path, "--study={evaluate_every_n: 4}"]) == 0
    (record,) = records_in(tmp_path / "out")
    assert record["n_test"] == 4
    assert record["standard_error"] == pytest.approx(0.23175, abs=1e-5)


def test_a_run_without_steps_has_one_accuracy(finished_run, tmp_path):
    path, folder = finished_run
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "steps": 0}))
    assert main(["--config", path]) == 0
    assert records_in(tmp_path / "out")[0]["value"] == 0.75


def test_runs_with_other_options_are_refused(grid, tmp_path):
    main(["--config", grid(bf16=0.75, mxfp4=0.375, seeds=[0])])
    changed = grid(bf16=0.75, mxfp4=0.3125, seeds=[0])
    for only in ("bf16", "mxfp4"):
        with pytest.raises(SystemExit, match="mxfp4/seed0 was run with other learning_rate"):
            main(["--config", changed, "--only", only])
    assert len(starts(tmp_path, "mxfp4", 0)) == 1
    assert main(["--config", changed, "--out", str(tmp_path / "another")]) == 0


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_a_killed_run_goes_on_from_its_checkpoint_or_from_the_start(grid, tmp_path, with_checkpoint):
    path = grid(bf16=0.75, mxfp4=0.375, seeds=[0])
    main(["--config", path])
    folder = tmp_path / "out" / "cells" / "mxfp4" / "seed0"
    (folder / "summary.json").write_text('{"accuracy_af')  # as if killed while it was writing
    if with_checkpoint:
        leave_checkpoint(folder)
    assert main(["--config", path]) == 0
    first, second = starts(tmp_path, "mxfp4", 0)
    assert "resume" not in first
    assert ("--resume_from_checkpoint true" in second) == with_checkpoint
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3


def leave_checkpoint(folder):
    (folder / "checkpoint-2").mkdir()
    (folder / "checkpoint-2" / "trainer_state.json").write_text('{"global_step": 2}')


def test_a_killed_run_does_not_go_on_from_a_checkpoint_of_other_options(grid, tmp_path):
    main(["--config", grid(bf16=0.75, mxfp4=0.375, seeds=[0])])
    folder = tmp_path / "out" / "cells" / "mxfp4" / "seed0"
    leave_checkpoint(folder)
    (folder / "summary.json").unlink()
    assert main(["--config", grid(bf16=0.75, mxfp4=0.5, seeds=[0])]) == 1
    assert not (folder / "checkpoint-2").exists()
    assert "resume" not in starts(tmp_path, "mxfp4", 0)[-1]


def test_ending_the_runner_ends_its_runs_and_frees_the_folder(grid, tmp_path):
    path = grid(bf16=0.25, mxfp4=0.75, seeds=[0])
    runner = processes.start(processes.script(SCRIPT, "--config", path))
    folder = tmp_path / "out" / "cells" / "bf16" / "seed0"
    deadline = time.monotonic() + 120
    while not (folder / "starts").is_file():
        assert runner.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(SystemExit, match="another process is at work in"):
        main(["--config", path])
    runner.send_signal(signal.SIGTERM)
    assert runner.wait().returncode == 128 + signal.SIGTERM
    (folder / "go").touch()
    assert main(["--config", path]) == 0  # started again
    assert len(starts(tmp_path, "bf16", 0)) == 2


def test_nothing_to_report_and_no_jobs_are_errors(grid):
    path = grid(bf16=0.5, mxfp4=0.5)
    with pytest.raises(SystemExit, match="no run has finished"):
        main(["--config", path])
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
    changes = {"train": train, "cells": cells, "base": base, "seeds": [0], "launcher": sys.executable}
    path = write(tmp_path / "grid.yaml", **changes)
    process = processes.run(processes.script(SCRIPT, "--config", path))
    assert process.returncode == 0, process.output[-4000:]
    full, plain = records_in(tmp_path / "out")
    assert full["scheme"] == "full precision"
    assert full["n_quantized"] == 0
    assert plain["scheme"] == "w4a8 [weights mxfp4+even, activations fp8]"
    assert plain["n_quantized"] == 14
    assert plain["steps"] == 2
    assert plain["n_test"] == 4
    assert plain["before"] is not None
    # Runs start from the saved model, and keep none of their own.
    *_, run = read_grid(path).runs
    assert not list(run.folder.rglob("*.safetensors"))
    assert json.loads((run.folder / "summary.json").read_text())["model"] == run.grid.start
