# SPDX-License-Identifier: Apache-2.0
"""The recipe, stopped and resumed, writes the policy of a run that was never stopped."""

import shutil
from pathlib import Path

import pytest
from test_grpo import REPORTED, logged, short_run


CHECKPOINTS = ("--save_strategy=steps", "--save_steps=1", "--num_iterations=2", REPORTED)


@pytest.mark.slow
def test_a_resumed_recipe_ends_with_the_same_policy(tmp_path, capsys, no_figures):
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
