# SPDX-License-Identifier: Apache-2.0
"""What stands in for checkpoints and datasets in a rehearsal: tiny models of the same architecture, a few problems."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from recipes.ablations.base import task_options
from recipes.ablations.grid import Model
from recipes.tasks import load_task
from recipes.tasks.tiny_model import TINY_MODELS, supervised_warmup
from recipes.tasks.word_tokenizer import build_word_tokenizer


#: Tasks that make their problems themselves.
GENERATED = ("arithmetic", "word_problems")
#: Of a model that is made on the spot: all dimensions hold whole blocks of 32, and some half a macro block of 128.
_SIZES = {
    "hidden_size": 64,
    "num_layers": 2,
    "intermediate_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_experts": 4,
    "experts_per_token": 2,
}
#: Columns of datasets by task.
_FORMS = {
    "gsm8k": {"question": "{question}", "answer": "#### {n}"},
    "math500": {"problem": "{question}", "solution": "$\\boxed{{{n}}}$", "answer": "{n}"},
}
#: Their answers are few, so that a tiny model meets some of them by chance.
_NAMES, _ITEMS, _ANSWERS = ("Ann", "Ben", "Cleo", "Dan"), ("apples", "books"), (3, 4)
_WARM_UP_STEPS = 40


def tiny_sizes(architecture: str, written: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a rehearsal for one of `TINY_MODELS`; those that make nothing larger are as ``written``."""
    known = inspect.signature(TINY_MODELS[architecture]).parameters
    return {**written, **{name: value for name, value in _SIZES.items() if name in known}}


def architecture_of(model: Model) -> str:
    """The one of `TINY_MODELS` that has the architecture of a checkpoint: what the grid says, or the `config.json` of a
    local folder. The Hub is not asked.

    Raises `ValueError` where neither says, or names one that is not there.
    """
    name = model.base["model_name_or_path"]
    found = model.base.get("architecture")
    config = Path(name) / "config.json"
    if found is None and config.is_file():
        found = json.loads(config.read_text()).get("model_type")
    if found not in TINY_MODELS:
        raise ValueError(
            f"{model.label}: a rehearsal needs the architecture of {name}; give `architecture` beside "
            f"`model_name_or_path`, one of {', '.join(TINY_MODELS)}" + (f", not {found!r}" if found else "")
        )
    return found


def stand_in_folder(output: Path, key: str) -> Path:
    """Where the model that stands in for a checkpoint is."""
    return output / key / "stand_in"


def problem_files(output: Path, key: str) -> dict[str, Path]:
    """The files of the problems that stand in for a dataset, by the option that names them."""
    folder = output / key / "problems"
    return {"train_file": folder / "train.jsonl", "test_file": folder / "test.jsonl"}


def make_problems(task: str, files: Mapping[str, Path]) -> None:
    """Write a few problems in the form of a task's dataset: 4 to train on, 4 others to evaluate.

    Raises `ValueError` for a task whose form is not known here.
    """
    if task not in _FORMS:
        raise ValueError(f"a rehearsal has no problems for the task {task!r}; give it a train_file and a test_file")
    questions = [(name, item) for name in _NAMES for item in _ITEMS]
    rows = []
    for place, (name, item) in enumerate(questions):
        number = _ANSWERS[place % len(_ANSWERS)]
        question = f"{name} has {number} {item}. How many {item} does {name} have?"
        rows.append({column: text.format(question=question, n=number) for column, text in _FORMS[task].items()})
    for path, part in ((files["train_file"], rows[:4]), (files["test_file"], rows[4:])):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in part))


def make_stand_in(model: Model, architecture: str, sizes: Mapping[str, Any], folder: Path) -> int:
    """Make and save a tiny model and its tokenizer, after a few supervised steps on the problems of a rehearsal; its
    number of parameters.

    Weights are saved in bfloat16, as most of the Hub are. Tokens are whole words of the problems.

    Args:
        model: as it is rehearsed.
        architecture, sizes: one of `TINY_MODELS`, and what the real model has beside the sizes of a rehearsal.
        folder: where the model is written.
    """
    options = task_options(model)
    rows = load_task(options.pop("name"), **options).train
    tokenizer = build_word_tokenizer([*map(str, rows["prompt"]), *rows["completion"]])
    policy = TINY_MODELS[architecture](tokenizer, **tiny_sizes(architecture, {"max_positions": 4096, **sizes}))
    supervised_warmup(policy, tokenizer, rows, steps=_WARM_UP_STEPS, batch_size=8, learning_rate=3e-3, progress=False)
    policy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return policy.num_parameters()
