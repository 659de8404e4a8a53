# SPDX-License-Identifier: Apache-2.0
"""The starting point of a grid: a small model pretrained in full precision on the task's reference completions."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from hf_mxfp4 import files
from hf_mxfp4.checkpoint import last_complete_checkpoint
from hf_mxfp4.rl import ExactResumeMixin
from recipes.common.progress import TrainingBar
from recipes.evaluation.policy import folder_digest
from recipes.post_training.arguments import TASK_OPTIONS
from recipes.tasks import build_tokenizer, load_task
from recipes.tasks.tiny_model import TINY_MODELS, encode_example

from .grid import Grid, Model, base_folder, changed, fingerprint


_RECORD = "base.json"


class _Pretrainer(ExactResumeMixin, Trainer):
    """A Trainer that a killed run continues from exactly."""


def base_settings(model: Model, seed: int) -> dict[str, Any]:
    """Everything that the weights of the starting point depend on."""
    if "model_name_or_path" in model.base:
        name = model.base["model_name_or_path"]
        return {"model_name_or_path": name, "weights": folder_digest(Path(name)) if Path(name).is_dir() else None}
    seed = seed if model.base.get("per_seed") else model.base.get("seed", 0)
    # The test split is held out whatever part of it is evaluated.
    task = {name: value for name, value in task_options(model).items() if name != "n_test"}
    architecture = {name: model.base.get(name) for name in ("architecture", "sizes", "pretraining")}
    return {**architecture, "seed": seed, "task": task}


def task_options(model: Model) -> dict[str, Any]:
    """The arguments of `load_task` that a model's shared options stand for."""
    return {ours: model.shared[name] for name, ours in TASK_OPTIONS.items() if name in model.shared}


def describe_base(model: Model) -> str:
    """Architecture, sizes and number of parameters; the name of a checkpoint."""
    if "model_name_or_path" in model.base:
        return str(model.base["model_name_or_path"])
    sizes = model.base.get("sizes") or {}
    with torch.device("meta"):
        policy = TINY_MODELS[model.base["architecture"]](build_tokenizer(model.shared["task"]), **sizes)
    steps = model.base["pretraining"].get("max_steps")
    told = ", ".join(f"{name}={value}" for name, value in sizes.items())
    return f"{policy.num_parameters() / 1e6:.2f} M-parameter {model.base['architecture']} ({told}), {steps} steps"


def stored_base(grid: Grid, model: Model, seed: int, *, rerun: bool = False) -> dict[str, Any] | None:
    """The record of the starting point, `None` where it is still to be made.

    Raises `ValueError` when there is one of other settings, unless `rerun`, which makes it anew.
    """
    settings = base_settings(model, seed)
    if "model_name_or_path" in model.base:
        return {"fingerprint": fingerprint(settings), "parameters": None}
    folder = base_folder(grid, model, seed)
    if not (folder / _RECORD).is_file():
        return None
    record = json.loads((folder / _RECORD).read_text())
    differences = changed(record["settings"], settings)
    if not differences:
        return record
    if not rerun:
        raise ValueError(
            f"{folder} was made with other {', '.join(differences)}; choose another --out, or make it again with "
            "--rerun"
        )
    return None


def make_base(grid: Grid, model: Model, seed: int) -> dict[str, Any]:
    """Pretrain and save the starting point, from the newest checkpoint of the same settings if there is one.

    The folder holds the model, its tokenizer and `base.json`, which is written last.

    Raises `ValueError` when a sequence is longer than the model's positions, `RuntimeError` when the saved tokenizer
    does not read like the one that the model was trained with.
    """
    started = time.monotonic()
    folder = base_folder(grid, model, seed)
    settings = base_settings(model, seed)
    identity = fingerprint(settings)
    (folder / _RECORD).unlink(missing_ok=True)
    checkpoints = folder / f"checkpoints-{identity[:12]}"
    options = task_options(model)
    task = load_task(options.pop("name"), **options)
    tokenizer = build_tokenizer(task.name)
    policy = TINY_MODELS[settings["architecture"]](tokenizer, **settings["sizes"] or {}, seed=settings["seed"])
    if model.base.get("attn_implementation"):
        policy.set_attn_implementation(model.base["attn_implementation"])
    rows = []
    for row in task.train:
        ids, labels = encode_example(tokenizer, row["prompt"], row["completion"])
        rows.append({"input_ids": ids, "labels": labels})
    longest, limit = max(len(row["input_ids"]) for row in rows), policy.config.max_position_embeddings
    if longest > limit:
        raise ValueError(f"the longest sequence has {longest} tokens, the model has {limit} positions")
    training = TrainingArguments(
        **{
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 20,
            **settings["pretraining"],
            "output_dir": str(checkpoints),
            "seed": settings["seed"],
        }
    )
    trainer = _Pretrainer(
        policy, training, train_dataset=rows, data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100)
    )
    TrainingBar.install(trainer, title=f"pretraining {model.label}", shown={"loss": "loss"})
    resume = last_complete_checkpoint(checkpoints)
    trainer.train(resume_from_checkpoint=resume)
    policy = policy.to("cpu")
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _check_tokenizer(folder, task.train[0]["completion"], tokenizer)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    record = {
        "fingerprint": identity,
        "settings": settings,
        "parameters": policy.num_parameters(),
        "steps": trainer.state.global_step,
        "loss": losses[-1] if losses else None,
        "resumed": resume is not None,
        "seconds": round(time.monotonic() - started, 1),
    }
    write_json(folder / _RECORD, record)
    shutil.rmtree(checkpoints, ignore_errors=True)
    return record


def _check_tokenizer(folder: Path, text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """`AutoTokenizer` goes by the model's family more than by the files, and runs load what it makes of them."""
    if AutoTokenizer.from_pretrained(folder)(text)["input_ids"] != tokenizer(text)["input_ids"]:
        raise RuntimeError(f"the tokenizer in {folder} splits {text!r} in another way than the one it was saved from")


def write_json(path: Path, value: Mapping[str, Any] | list) -> None:
    """Write a file that is whole or not there; of a list, each item on a line."""
    if isinstance(value, list):
        files.replace_file(path, "[\n" + ",\n".join(map(json.dumps, value)) + "\n]\n")
    else:
        files.write_json(path, value, indent=1)
