# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 plan`: what it prints, and how it fails."""

import json

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from hf_mxfp4.cli import app


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    ).save_pretrained(folder)
    return folder


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def planned(*arguments):
    """What is printed as JSON."""
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_json(model):
    data = planned(model, "--gpus", 2, "--saved-activations", "mxfp4", "--beta", 0.1)
    assert data["usable_bytes_per_gpu"] == pytest.approx(72e9) and data["would_fit"] == []
    assert [each["name"] for each in data["strategies"]] == [
        "DDP", "FSDP2", "ZeRO-2", "ZeRO-3", "packed+LoRA, DDP", "packed+LoRA, FSDP2",
    ]  # fmt: skip
    ddp = data["strategies"][0]
    assert ddp["recipe"] == "recipes/accelerate/ddp.yaml" and ddp["fits"] and ddp["largest_batch"] == 4096
    assert ddp["peak_bytes"] == max(sum(ddp["training_bytes"].values()), sum(ddp["rollout_bytes"].values()))
    assert ddp["training_bytes"]["reference model"] > 0


def test_the_table(model):
    done = run(model / "config.json", "--mode", "packed", "--vllm-server")
    assert done.exit_code == 0, done.output
    assert "packed+LoRA, DDP" in done.stdout and "FSDP2" not in done.stdout and "rollouts" not in done.stdout
    rows = [[cell.strip() for cell in line.split("│")] for line in done.stdout.splitlines() if "│" in line]
    assert rows and all(any(row) for row in rows)
    assert "IN A TRAINING STEP" in done.stdout and "WHILE ROLLOUTS" not in done.stdout
    for part in ("weights", "optimizer", "saved activations", "logits", "largest batch per GPU", "fits 72.0 GB"):
        assert part in done.stdout


def test_both_halves_of_the_table_have_a_name_and_their_sum(model):
    done = run(model, "--gpu-memory", 0.1)
    data = planned(model, "--gpu-memory", 0.1)["strategies"][0]
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in done.stdout.splitlines() if "│" in line]
    found = dict(rows)
    assert found["IN A TRAINING STEP"] == f"{sum(data['training_bytes'].values()) / 1e9:.2f}"
    assert found["WHILE ROLLOUTS ARE SAMPLED"] == f"{sum(data['rollout_bytes'].values()) / 1e9:.2f}"
    names = [name for name, _ in rows]
    halves = names.index("IN A TRAINING STEP"), names.index("WHILE ROLLOUTS ARE SAMPLED"), names.index("fits 0.1 GB")
    assert set(names[halves[0] + 1 : halves[1]]) == set(data["training_bytes"])
    assert set(names[halves[1] + 1 : halves[2]]) == set(data["rollout_bytes"])
    assert "" not in names


def test_full_precision_has_no_quantized_weights(model):
    ddp = planned(model, "--mode", "full")["strategies"][0]
    assert ddp["training_bytes"]["quantized weights"] == ddp["rollout_bytes"]["quantized weights"] == 0


def test_rollouts_without_kept_copies(model):
    sizes = [
        planned(model, "--gpus", 2, *flags)["strategies"][1]["rollout_bytes"]
        for flags in ([], ["--no-cache-rollout-weights"])
    ]
    matrices = 2 * 32 * 32, 2 * 32 * 16, 3 * 32 * 64
    assert [size["quantized weights"] for size in sizes] == [2 * sum(matrices), 2 * 32 * 64]


def test_nothing_fits(model):
    done = run(model, "--gpu-memory", 0.00015, "--prompt-length", 32, "--completion-length", 32, "--json")
    assert done.exit_code == 1
    assert "error: nothing fits into 0.0 GB per GPU; what would: " in done.stderr
    assert not any(each["fits"] for each in json.loads(done.stdout)["strategies"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "w4a4g4", "--saved-activations", "mxfp4"], "wgrad does not reuse the x of fprop"),
        (["--preset", "w4a5"], "preset='w4a5' is not supported"),
    ],
)
def test_mistakes(model, arguments, message):
    done = run(model, *arguments)
    assert done.exit_code == 2 and message in done.stderr


def test_no_such_model(tmp_path):
    done = run(tmp_path)
    assert done.exit_code == 2 and "has no config.json" in done.stderr
