# SPDX-License-Identifier: Apache-2.0
"""The recipe on a mixture of experts made on the spot, in one process and in two."""

import json
from pathlib import Path

import pytest
from test_grpo import TINY
from transformers import AutoConfig

from recipes.grpo import main


CONFIG = ["--config", str(Path(__file__).resolve().parents[2] / "recipes" / "configs" / "tiny_moe_cpu.yaml")]
SHORT = ["--save_strategy=steps", "--save_steps=3"]


def history_of(folder):
    state = json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


def check_routing(folder):
    history = history_of(folder)
    assert [entry["router_replay/coverage"] for entry in history] == [1.0] * 3


def test_the_whole_recipe(tmp_path, no_figures):
    folder = tmp_path / "out"
    summary = main([*CONFIG, *TINY, *SHORT, "--n_test=16", f"--output_dir={folder}"])
    assert summary["steps"] == 3 and summary["n_quantized"] >= 8  # the attention's; experts where they are quantized
    assert summary["model"] == "qwen3_moe made for this run (2 layers, width 32)"
    assert summary["reloaded"] == {"compared": 16, "identical": 16}
    assert summary["aqn_sigma_logged"] == pytest.approx({"largest": 1e-2, "last": 1e-3})
    check_routing(folder)
    config = AutoConfig.from_pretrained(folder / "policy")
    assert (config.model_type, config.num_experts, config.num_experts_per_tok) == ("qwen3_moe", 8, 2)
