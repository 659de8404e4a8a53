# SPDX-License-Identifier: Apache-2.0
"""The generated model card (`README.md`): the scheme, its error in the weights, and what nobody measured."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn

from .._logging import get_logger
from ..experts_layout import matrix_names
from ..layers import trainable_matrices
from ..module_names import find_layers
from ..report import QuantizationReport, master_sqnr
from .card_text import HERE, Subject, card_text, pipeline_tag, with_evaluation, with_perplexity
from .layers import quantizable_layers


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .sources import LayerSource

CARD = "README.md"
TAGS = ("mxfp4", "mxfp4_rl", "hf-mxfp4")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SIGNATURE = re.compile(
    r"\n*<!-- written by hf_mxfp4, and renewed with the weights while unedited: ([0-9a-f]{16}) -->\s*$"
)
#: In the card that transformers pushes when it finds none.
_EMPTY_CARD = "This is the model card of a 🤗 transformers model that has been pushed on the Hub."


def make_card(model: "PreTrainedModel") -> ModelCard:
    """Return a card for a quantized model."""
    config = model.hf_quantizer.quantization_config
    sqnr_db = model.hf_quantizer.recorded_sqnr_db if config.mode == "packed" else _master_sqnr(model)
    return _card_of(
        Subject(type(model).__name__, config, model.quantization_report, model.config.name_or_path, sqnr_db)
    )


def save_card(model: "PreTrainedModel", folder: str | os.PathLike, *, existing: str | os.PathLike | None = None):
    """Write a card into ``folder``, or copy that of ``existing`` (by default the same) if somebody wrote or edited
    it."""
    with decoration():
        _keep_or_save(make_card(model), Path(folder), folder if existing is None else existing)


def write_packed_card(source: "LayerSource", sqnr_db: float | None, folder: Path, *, existing: str | os.PathLike):
    """Write into ``folder`` the card that the model would have saved, had it been loaded and packed.

    Args:
        source: what was packed.
        sqnr_db: what was measured of the weights as they were packed, in decibels.
        existing: the folder that is replaced; a card there that somebody wrote is kept.
    """
    with decoration():
        model, config = source.model, source.config
        names = [
            name
            for place, layer in quantizable_layers(model, config).items()
            for name in ([place] if isinstance(layer, nn.Linear) else matrix_names(place, layer))
        ]
        packed = [shape.meta_packed(config.weight_scheme) for shape in source.shapes.values()]
        report = QuantizationReport(
            scheme=config.describe(),
            quantized=tuple(names),
            skipped=tuple(find_layers(model, config.modules_to_not_convert or ())[1]),
            sqnr_db=sqnr_db,
            n_weights=sum(shape.n_weights for shape in source.shapes.values()),
            packed_bytes=sum(tensor.nbytes for fields in packed for tensor in fields.values()),
        )
        subject = Subject(type(model).__name__, config, report, str(source.folder.path), sqnr_db)
        _keep_or_save(_card_of(subject), folder, existing)


def add_evaluation(folder: str | os.PathLike, summary: Mapping[str, Any] | str | os.PathLike) -> None:
    """Put the accuracies of a run into the generated card of the policy that it saved.

    Args:
        folder: holds the saved policy and its card.
        summary: what `recipes/grpo.py` wrote to `summary.json`, or the path of that file.

    Raises:
        FileNotFoundError: there is no card.
        ValueError: the card is not a generated one, or was edited.
    """
    summary, card = _read(summary), read_generated(folder)
    data = card.data
    data.model_name = data.model_name or Path(str(summary.get("saved", "policy"))).name
    data.eval_results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=str(summary["task"]),
            dataset_name=str(summary["task"]),
            metric_type="accuracy",
            metric_name=f"{name}, greedy, n = {summary['n_test']}",
            metric_value=round(value, 4),
        )
        for name, value in summary["accuracy_after"].items()
    ]
    signed_card(data, with_evaluation(_unsigned(card.text), summary)).save(Path(folder) / CARD)


def add_perplexity(folder: str | os.PathLike, evaluation: Mapping[str, Any] | str | os.PathLike) -> None:
    """Put perplexity and divergence into the generated card of a saved checkpoint, replacing earlier ones.

    Args:
        folder: holds the checkpoint and its card.
        evaluation: what `hf-mxfp4 eval` wrote to `evaluation.json` for the checkpoint's own scheme (``--scheme own``,
            or a packed checkpoint), or the path of that file.

    Raises:
        FileNotFoundError: there is no card.
        ValueError: the card is not a generated one, or was edited; or the checkpoint's own scheme was not evaluated.
    """
    card = read_generated(folder)
    signed_card(card.data, with_perplexity(_unsigned(card.text), _read(evaluation))).save(Path(folder) / CARD)


def read_generated(folder: str | os.PathLike) -> ModelCard:
    """Return the card of a saved checkpoint, which can be added to.

    Raises `FileNotFoundError` and `ValueError` as [`add_evaluation`] does.
    """
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
    body = "" if card is None else card.text
    match = _SIGNATURE.search(body)
    return match is not None and match[1] == _digest(body[: match.start()])


def choose_card(remote: str | None, folder: Path, tags: list[str], repo_id: str) -> ModelCard:
    """Return the card to upload with the checkpoint in ``folder``: the one on the Hub if somebody wrote it, else the
    local one."""
    local = folder / CARD
    written = remote is not None and _EMPTY_CARD not in remote and not is_generated(remote)
    if written or not local.is_file():
        card = ModelCard(remote or f"---\nlibrary_name: transformers\ntags: {json.dumps(TAGS)}\n---\n")
    else:
        text = local.read_text(encoding="utf-8")
        card = ModelCard(text)
        if is_generated(text):
            card = signed_card(card.data, _unsigned(card.text).replace(HERE, repo_id))
    if card.data.base_model == repo_id:
        card.data.base_model = card.data.base_model_relation = None
    card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *tags]))
    return card


def signed_card(data: ModelCardData, body: str) -> ModelCard:
    """Return a card that [`is_generated`] recognizes until somebody edits it."""
    body = body.strip()
    signature = f"<!-- written by hf_mxfp4, and renewed with the weights while unedited: {_digest(body)} -->"
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n\n{signature}\n")


def base_model_of(name: str) -> Any:
    """Return the Hub's name of what the weights came from; for a local checkpoint, the one that its card names."""
    if not name:
        return None
    if not Path(name).exists():
        return name if _HUB_ID.fullmatch(name) else None
    card = Path(name) / CARD
    found = read_card(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    name = None if found is None else found.data.base_model
    return name if isinstance(name, str) and _HUB_ID.fullmatch(name) else None


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


def _card_of(subject: Subject) -> ModelCard:
    base_model = base_model_of(subject.source)
    data = ModelCardData(
        base_model=base_model,
        base_model_relation="quantized" if base_model and subject.is_packed else None,
        library_name="transformers",
        pipeline_tag=pipeline_tag(subject.architecture),
        tags=[*TAGS, subject.config.mode],
    )
    return signed_card(data, card_text(subject))


def _keep_or_save(card: ModelCard, folder: Path, existing: str | os.PathLike) -> None:
    found = Path(existing).expanduser() / CARD
    if not found.is_file() or is_generated(found.read_text(encoding="utf-8", errors="replace")):
        card.save(folder / CARD)
    elif found.resolve() != (folder / CARD).resolve():
        shutil.copyfile(found, folder / CARD)


def _master_sqnr(model: nn.Module) -> float | None:
    """Return the SQNR of the master weights in decibels; `None` if they are sharded or not finite."""
    weights = [getattr(matrix.layer, matrix.parameter).detach() for matrix in trainable_matrices(model)]
    if any(type(weight) is not torch.Tensor or weight.is_meta or weight.dim() < 2 for weight in weights):
        return None
    return master_sqnr(model)


def _read(found: Mapping[str, Any] | str | os.PathLike) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else json.loads(Path(found).read_text(encoding="utf-8"))


def _unsigned(body: str) -> str:
    return _SIGNATURE.sub("", body)


def _digest(body: str) -> str:
    return hashlib.sha256(" ".join(body.split()).encode()).hexdigest()[:16]
