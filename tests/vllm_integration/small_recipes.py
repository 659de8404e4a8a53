# SPDX-License-Identifier: Apache-2.0
"""Shipped configurations of `recipes/grpo.py`, cut down to a small model and some steps."""

import json
from pathlib import Path

from undrawn import leave_figures_undrawn

from recipes.grpo import main


CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"

SMALL = [
    "--use_cpu=true", "--bf16=false", "--gradient_checkpointing=false", "--per_device_train_batch_size=8",
    "--gradient_accumulation_steps=1", "--num_generations=4", "--max_completion_length=8", "--max_steps=2",
    "--warmup_steps=0", "--learning_rate=1e-3", "--overlong_buffer=0", "--error_every=1", "--aqn_num_stages=2",
    "--save_strategy=no", "--report_every=0", "--greedy_batch_size=8", "--reload_check=4", "--n_test=4",
]  # fmt: skip


def run(name: str, model: Path, folder: Path, monkeypatch, *options: str) -> dict:
    """Run the configuration ``name`` on ``model``, with problems in the form of GSM8K's: its summary. What it writes is
    in ``folder / "out"``; figures, which need matplotlib, are left out."""
    leave_figures_undrawn(monkeypatch.setattr)
    problems = folder / "problems.jsonl"
    rows = [{"question": f"{i}+{i}?", "answer": f"{i} and {i} are #### {2 * i}"} for i in range(16)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"--train_file={problems}", f"--test_file={problems}", f"--output_dir={folder / 'out'}"]
    choices = [f"--model_name_or_path={model}", "--prompt_template=Q: {question} A:", *options]
    return main(["--config", str(CONFIGS / f"{name}.yaml"), *SMALL, *files, *choices])
