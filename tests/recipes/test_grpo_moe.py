# SPDX-License-Identifier: Apache-2.0
"""The recipe on a mixture of experts made on the spot, in one process and in two."""

import json
import math
from pathlib import Path

import pytest
import torch
from test_grpo import TINY
from test_grpo_two_processes import launch
from transformers import AutoConfig

from hf_mxfp4.moe import find_routers
from recipes.grpo import main
from recipes.post_training.arguments import parse
from recipes.tasks.tiny_model import build_byte_tokenizer, build_char_tokenizer, build_qwen3_moe


CONFIG = ["--config", str(Path(__file__).resolve().parents[2] / "recipes" / "configs" / "tiny_moe_cpu.yaml")]
SHORT = ["--router_every=2", "--save_strategy=steps", "--save_steps=3"]


def history_of(folder):
    state = json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


def check_routing(folder):
    history = history_of(folder)
    assert [entry["router_replay/coverage"] for entry in history] == [1.0] * 3
    # Two layers after steps 2 and 3, written by one process.
    rows = [json.loads(line) for line in (folder / "routers.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 2, 3, 3]
    assert history[-1]["router/agreement"] == pytest.approx((rows[2]["agreement"] + rows[3]["agreement"]) / 2)


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


def test_two_processes(tmp_path):
    launch(tmp_path / "out", 2, *CONFIG, *SHORT)
    check_routing(tmp_path / "out")


def test_the_model_depends_on_its_arguments_alone():
    tokenizer = build_char_tokenizer("0123456789+=")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = build_qwen3_moe(tokenizer, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    second = build_qwen3_moe(tokenizer, seed=3)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))
    other = build_qwen3_moe(tokenizer)
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)
    assert first.num_parameters() == 992_128 and first.dtype == torch.float32
    assert len(find_routers(first)) == 4
    assert all(0 < float(router.weight.detach().std()) < math.inf for router in find_routers(first).values())
    assert first.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 30}, "hidden_size must be divisible by num_heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_qwen3_moe(build_byte_tokenizer(), **options)


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match="tiny_architecture='gpt9' must be one of qwen2, qwen3_moe"):
        parse([*CONFIG, "--tiny_architecture=gpt9"])
