# SPDX-License-Identifier: Apache-2.0
"""The generated model card (`README.md`): the scheme, its error in the weights, and what nobody measured."""

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn

from .._logging import get_logger
from ..config import MXFP4RLConfig
from ..files import replace_file
from ..layers import trainable_matrices
from ..model.layer_names import find_layers
from ..numerics import FULL
from ..report import master_sqnr
from ..utils import share_text


if TYPE_CHECKING:
    from .sources import LayerSource

CARD = "README.md"
TAGS = ("mxfp4", "mxfp4_rl", "hf-mxfp4")
#: Stands for the repository or folder until its name is known.
HERE = "<this repository or folder>"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SIGNATURE = re.compile(
    r"\n*<!-- written by hf_mxfp4, and renewed with the weights while unedited: ([0-9a-f]{16}) -->\s*$"
)
#: How the card that transformers pushes when it finds none begins.
_EMPTY_CARD = "This is the model card of a 🤗 transformers model that has been pushed on the Hub."
_TEXT = """# {architecture}, quantized by hf-mxfp4

{what} with {weights} weights. The files hold {kind}.

## How to load

```python
import hf_mxfp4  # registers the quantization method mxfp4_rl
from transformers import {auto}

model = {auto}.from_pretrained("{here}")
```

hf-mxfp4 has no release yet: install it from a clone of its repository, with `pip install .` in that folder. The import
applies the scheme below. Without it transformers refuses to load the files.

## Scheme

{scheme}

## Quantization error of the weights

{error}

## Evaluation

No evaluation came with these weights when they were saved: nothing is claimed about their quality on any task.

## Not measured

The error of quantized activations on real data, speed, memory in use, and how the model behaves in other engines.
Biases, licence terms and intended uses were not checked; see the base model.

Written by hf_mxfp4 {version} with transformers {transformers}.
"""


def make_card(model: nn.Module) -> ModelCard:
    """Return a card for a quantized model."""
    config = model.hf_quantizer.quantization_config
    report = model.quantization_report
    if config.mode == "packed":
        # The weights that the error was measured against are gone, so it was recorded in the files.
        sqnr_db = model.hf_quantizer.recorded_sqnr_db
    else:
        sqnr_db = _master_sqnr(model)
    rows = _scheme(config, report.n_quantized, report.skipped, report.bits_per_weight)
    has_experts = any(".experts." in name for name in report.quantized)
    return _card(type(model).__name__, config, model.config.name_or_path, sqnr_db, rows, has_experts)


def save_card(model: nn.Module, folder: str | os.PathLike, *, existing: str | os.PathLike | None = None):
    """Write a card into ``folder``, or copy that of ``existing`` (by default the same) if somebody wrote it."""
    if existing is None:
        existing = folder
    with decoration():
        if not _keep_written(Path(folder), existing):
            replace_file(Path(folder) / CARD, str(make_card(model)))


def save_packed_card(source: "LayerSource", sqnr_db: float | None, folder: Path, *, existing: str | os.PathLike):
    """Write into ``folder`` the card that the model would have saved, had it been loaded and packed with an SQNR of
    ``sqnr_db`` decibels; or copy one that somebody wrote from ``existing``, the folder that is replaced."""
    with decoration():
        if _keep_written(folder, existing):
            return
        config = source.config
        _, skipped = find_layers(source.model, config.modules_to_not_convert or (), source.reasons)
        n_quantized = n_weights = n_bytes = 0
        for shape in source.shapes.values():
            n_quantized += len(shape.matrices)
            n_weights += shape.n_weights
            n_bytes += sum(tensor.nbytes for tensor in shape.meta_packed(config.weight_scheme).values())
        rows = _scheme(config, n_quantized, skipped, 8 * n_bytes / n_weights)
        architecture = type(source.model).__name__
        card = _card(architecture, config, str(source.folder.path), sqnr_db, rows, source.has_experts)
        replace_file(folder / CARD, str(card))


def add_evaluation(folder: str | os.PathLike, summary: Mapping[str, Any] | str | os.PathLike) -> None:
    """Put the accuracies of a run into the generated card of the policy that it saved in ``folder``. ``summary`` is
    what `recipes/grpo.py` wrote to `summary.json`, or the path of that file.

    Raises `FileNotFoundError` without a card, and `ValueError` when it is not a generated one, or was edited.
    """
    if isinstance(summary, Mapping):
        run = summary
    else:
        run = json.loads(Path(summary).read_text(encoding="utf-8"))
    card = read_generated(folder)
    data = card.data
    task = run["task"]
    n_test = run["n_test"]
    before = run["accuracy_before"]
    after = run["accuracy_after"]
    # The metadata, which the Hub shows as evaluation results.
    data.model_name = data.model_name or Path(str(run.get("saved", "policy"))).name
    data.eval_results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=str(task),
            dataset_name=str(task),
            metric_type="accuracy",
            metric_name=f"{name}, greedy, n = {n_test}",
            metric_value=round(value, 4),
        )
        for name, value in after.items()
    ]
    # The section of the text.
    rows = [f"| {name} | {share_text(before[name], n_test)} | {share_text(after[name], n_test)} |\n" for name in after]
    section = (
        f"Greedy accuracy on {n_test} held-out problems of `{task}` (in brackets the 95 % interval), before and after "
        f"{run['steps']} steps of GRPO, seed {run['seed']}, both under the scheme {run['scheme']}. One "
        f"run: it says nothing about other seeds.\n\n| score | before RL | after RL |\n|---|---|---|\n{''.join(rows)}"
    )
    replace_file(Path(folder) / CARD, str(with_section(card, "Evaluation", section)))


def read_generated(folder: str | os.PathLike) -> ModelCard:
    """Return the card of a saved checkpoint, which can be added to. Raises as [`add_evaluation`] does."""
    path = Path(folder) / CARD
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; save_pretrained of a quantized model writes it")
    text = path.read_text(encoding="utf-8")
    if not is_generated(text):
        raise ValueError(f"{path} was written or edited by somebody; the evaluation is not added to it")
    return ModelCard(text)


def is_generated(text: str) -> bool:
    """Return whether a card was generated by this package and not edited since, its metadata apart."""
    card = read_card(text)
    if card is None:
        return False
    signature = _SIGNATURE.search(card.text)
    if signature is None:
        return False
    return signature[1] == _digest(card.text[: signature.start()])


def choose_card(remote: str | None, folder: Path, tags: list[str], repo_id: str) -> ModelCard:
    """Return the card to upload with a checkpoint: the one on the Hub if somebody wrote it, else the local one."""
    local = folder / CARD
    is_written_by_hand = remote is not None and not _is_empty(remote) and not is_generated(remote)
    if is_written_by_hand or not local.is_file():
        card = ModelCard(remote or f"---\nlibrary_name: transformers\ntags: {json.dumps(TAGS)}\n---\n")
    else:
        text = local.read_text(encoding="utf-8")
        card = ModelCard(text)
        if is_generated(text):
            card = signed_card(card.data, _unsigned(card.text).replace(HERE, repo_id))
    if card.data.base_model == repo_id:  # it was loaded from there, and no model is its own base
        card.data.base_model = card.data.base_model_relation = None
    card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *tags]))
    return card


def _is_empty(text: str) -> bool:
    """Return whether a card is the one that transformers pushes when it finds none, and nobody filled it in."""
    if _EMPTY_CARD not in text:
        return False
    template = set(ModelCard.from_template(ModelCardData()).text.splitlines())
    return all(line in template or line.startswith(_EMPTY_CARD) for line in ModelCard(text).text.splitlines())


def signed_card(data: ModelCardData, body: str) -> ModelCard:
    """Return a card that [`is_generated`] recognizes until somebody edits it."""
    body = body.strip()
    signature = f"<!-- written by hf_mxfp4, and renewed with the weights while unedited: {_digest(body)} -->"
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n\n{signature}\n")


def base_model_of(name: str) -> Any:
    """Return the Hub's name of what the weights came from; for a local checkpoint, the one that its card names."""
    if name and Path(name).exists():
        file = Path(name) / CARD
        if not file.is_file():
            return None
        card = read_card(file.read_text(encoding="utf-8", errors="replace"))
        if card is None:
            return None
        name = card.data.base_model
    # A card may name several base models in a list.
    if isinstance(name, str) and _HUB_ID.fullmatch(name):
        return name
    return None


def read_card(text: str) -> ModelCard | None:
    """Return a card, or `None` if its front matter cannot be read: it is no card of ours."""
    try:
        return ModelCard(text, ignore_metadata_errors=True)
    except Exception:  # what YAML and huggingface_hub raise has no common class
        return None


@contextlib.contextmanager
def decoration() -> Iterator[None]:
    """Turn whatever fails while a card is made into a warning: no checkpoint is lost for its card."""
    try:
        yield
    except Exception as error:
        get_logger().warning("no model card was written: %s: %s", type(error).__name__, error)


def auto_class(architecture: str) -> str:
    """Return the name of a class of transformers that loads an ``architecture`` with its head."""
    names = (f"AutoModelFor{architecture.rpartition('For')[2]}", architecture)
    return next((name for name in names if hasattr(transformers, name)), "AutoModel")


def _card(
    architecture: str,
    config: MXFP4RLConfig,
    source: str,
    sqnr_db: float | None,
    rows: Mapping[str, Any],
    has_experts: bool,
) -> ModelCard:
    """Return the card of a checkpoint that came from ``source``, a Hub name, a folder or nothing."""
    import hf_mxfp4

    is_packed = config.mode == "packed"
    base_model = base_model_of(source)
    weights = config.gemms().fprop.right
    kind = "packed weights"
    if not is_packed:
        kind = "full-precision master weights, to which the scheme below is applied in every forward pass"
    body = _TEXT.format(
        architecture=architecture,
        what="Linear layers and experts" if has_experts else "Linear layers",
        weights="full-precision" if weights is FULL else str(weights).partition("+")[0].upper(),
        kind=kind,
        auto=auto_class(architecture),
        here=HERE,
        scheme=table(rows),
        error=_error(sqnr_db, is_packed),
        version=hf_mxfp4.__version__,
        transformers=transformers.__version__,
    )
    data = ModelCardData(
        base_model=base_model,
        base_model_relation="quantized" if base_model and is_packed else None,
        library_name="transformers",
        tags=[*TAGS, config.mode],
    )
    return signed_card(data, body)


def _scheme(
    config: MXFP4RLConfig, n_quantized: int, skipped: Collection[str], bits_per_weight: float | None
) -> dict[str, Any]:
    """Return the rows of the table about the scheme."""
    in_full_precision = str(len(skipped))
    if 0 < len(skipped) <= 4:
        in_full_precision += f" ({', '.join(skipped)})"
    rows = {
        "mode": f"`{config.mode}`",
        "preset": f"`{config.preset}`",
        "scheme": f"`{config.describe()}`".replace("|", "\\|"),
        "quantized layers": n_quantized,
        "linear layers in full precision": in_full_precision,
    }
    if bits_per_weight is not None:
        rows["bits per quantized weight"] = f"{bits_per_weight:.4g}"
    return rows


def _error(sqnr_db: float | None, is_packed: bool) -> str:
    """Return the sentence about the error of the weights."""
    if sqnr_db is None or math.isnan(sqnr_db):
        return "Not measured."
    when = "on these master weights"
    if is_packed:
        when = "when the weights were packed, against what was packed"
    return f"Signal to quantization noise ratio {sqnr_db:.2f} dB, measured {when} (evenly spaced rows of every layer)."


def table(rows: Mapping[str, Any]) -> str:
    """Return a table of two columns."""
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def with_section(card: ModelCard, title: str, text: str) -> ModelCard:
    """Return a card with a section of this title, in place of the old one or before the evaluation."""
    body = re.sub(rf"## {title}\n\n.*?\n\n(?=## )", "", _unsigned(card.text), flags=re.DOTALL)
    # Other sections come before the evaluation, and the evaluation before what was not measured.
    next_title = "## Not measured" if title == "Evaluation" else "## Evaluation"
    before, mark, after = body.partition(next_title)
    return signed_card(card.data, f"{before}## {title}\n\n{text.strip()}\n\n{mark}{after}")


def _keep_written(folder: Path, existing: str | os.PathLike) -> bool:
    """Copy the card of ``existing`` into ``folder`` if somebody wrote it, and return whether that is so."""
    card = Path(existing).expanduser() / CARD
    if not card.is_file() or is_generated(card.read_text(encoding="utf-8", errors="replace")):
        return False
    if card.resolve() != (folder / CARD).resolve():
        replace_file(folder / CARD, card.read_bytes())
    return True


def _master_sqnr(model: nn.Module) -> float | None:
    """Return the SQNR of the master weights in decibels; `None` if they are sharded or not finite."""
    weights = [matrix.master.detach() for matrix in trainable_matrices(model)]
    if any(type(weight) is not torch.Tensor or weight.is_meta or weight.dim() < 2 for weight in weights):
        return None
    return master_sqnr(model)


def _unsigned(body: str) -> str:
    """Return the text of a card without its signature."""
    return _SIGNATURE.sub("", body)


def _digest(body: str) -> str:
    """Return a checksum of a card's words: other line breaks or spaces are no edit."""
    return hashlib.sha256(" ".join(body.split()).encode()).hexdigest()[:16]
