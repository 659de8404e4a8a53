# SPDX-License-Identifier: Apache-2.0
"""`recipes/grpo.py` with vLLM colocated; with a server: `test_server.py`."""

import json

import pytest
from harness import tiny_model
from small_recipes import run
from test_training import float32_engine  # noqa: F401 a fixture

from recipes.tasks.tiny_model import build_byte_tokenizer


pytestmark = pytest.mark.vllm


def test_the_recipe_with_vllm_colocated(tmp_path, monkeypatch):
    """The configuration shipped for Qwen2.5-3B, W4A4 with noise, with a small model in its place."""
    tokenizer = build_byte_tokenizer()
    tiny_model("qwen2", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "full")
    tokenizer.save_pretrained(tmp_path / "full")
    options = ["--vllm_max_model_length=64", "--vllm_gpu_memory_utilization=0.1"]
    summary = run("qwen2.5_3b_gsm8k_vllm", tmp_path / "full", tmp_path, monkeypatch, *options)
    assert summary["steps"] == 2 and summary["reloaded"] == {"compared": 4, "identical": 4}
    history = json.loads((tmp_path / "out" / "log_history.json").read_text())
    steps = [entry for entry in history if "sampling/importance_sampling_ratio/mean" in entry]
    assert [entry["step"] for entry in steps] == [1, 2]
    assert [entry["aqn/n_modules"] for entry in steps if entry.get("aqn/sigma")] == [5]
    assert all(entry["sampling/effective_sample_size"] > 0.9 for entry in steps)
