# SPDX-License-Identifier: Apache-2.0
"""The generated model card (`README.md`): what the scheme is, what it cost in accuracy, and what nobody measured."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..._logging import get_logger
from ...config import MXFP4RLConfig
from .auto_class import pipeline_tag
from .sections import (
    HERE,
    Subject,
    card_text,
    evaluation_section,
    perplexity_section,
    replace_evaluation,
    replace_perplexity,
    weight_errors,
)


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


CARD = "README.md"
TAGS = ("mxfp4", "mxfp4_rl", "hf-mxfp4")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SIGNATURE = re.compile(
    r"\n*<!-- written by hf_mxfp4, and renewed with the weights while unedited: ([0-9a-f]{16}) -->\s*$"
)
#: In the card that transformers pushes when it finds none.
_EMPTY_CARD = "This is the model card of a 🤗 transformers model that has been pushed on the Hub."


def make_card(
    model: "PreTrainedModel",
    *,
    state_dict: Mapping[str, "torch.Tensor"] | None = None,
    evaluation: Mapping[str, Any] | None = None,
) -> ModelCard:
    """A card for a quantized model.

    Args:
        state_dict: where the weights are, when not in the model (sharded training).
        evaluation: contents of a `summary.json` of `recipes/grpo.py`.
    """
    config: MXFP4RLConfig = model.hf_quantizer.quantization_config
    packed = config.mode == "packed"
    subject = Subject(
        type(model).__name__,
        config,
        model.quantization_report,
        model.config.name_or_path,
        packed_sqnr_db=model.hf_quantizer.recorded_sqnr_db if packed else None,
        errors=None if packed else weight_errors(model, state_dict),
    )
    return card_of(subject, evaluation)


def card_of(subject: Subject, evaluation: Mapping[str, Any] | None = None) -> ModelCard:
    """Return the text of a checkpoint's card."""
    base_model = base_model_of(subject.source)
    data = ModelCardData(
        base_model=base_model,
        base_model_relation="quantized" if base_model and subject.config.mode == "packed" else None,
        library_name="transformers",
        pipeline_tag=pipeline_tag(subject.architecture),
        tags=[*TAGS, subject.config.mode],
    )
    return _card(data, card_text(subject), evaluation)


def write_card(subject: Subject, folder: Path, *, existing: str | os.PathLike) -> None:
    """Write a card into a new ``folder`` that takes the place of ``existing``, or copy the one there that somebody
    wrote or edited."""
    with decoration():
        keep_or_save(card_of(subject), folder, existing=existing)


def keep_or_save(card: ModelCard, folder: Path, *, existing: str | os.PathLike) -> None:
    """Write ``card`` into a new ``folder`` that takes the place of ``existing``, or copy the one there that somebody
    wrote or edited."""
    found = Path(existing).expanduser() / CARD
    if found.is_file() and not is_generated(found.read_text(encoding="utf-8", errors="replace")):
        shutil.copyfile(found, folder / CARD)
    else:
        card.save(folder / CARD)


def save_card(
    model: "PreTrainedModel",
    folder: str | os.PathLike,
    *,
    existing: str | os.PathLike | None = None,
    state_dict: Mapping[str, "torch.Tensor"] | None = None,
) -> None:
    """Write a card into ``folder``, unless ``existing`` (by default the same) holds one that somebody wrote or
    edited."""
    with decoration():
        _save_card(model, folder, existing, state_dict)


def _save_card(model, folder, existing, state_dict) -> None:
    found = Path(folder if existing is None else existing) / CARD
    if not found.is_file() or is_generated(found.read_text(encoding="utf-8", errors="replace")):
        make_card(model, state_dict=state_dict).save(Path(folder) / CARD)


def add_evaluation(folder: str | os.PathLike, summary: Mapping[str, Any] | str | os.PathLike) -> None:
    """Put the accuracies of a run into the generated card of the policy that it saved.

    Args:
        folder: holds the saved policy and its card.
        summary: what `recipes/grpo.py` wrote to `summary.json`, or the path of that file.

    Raises:
        FileNotFoundError: there is no card.
        ValueError: the card is not a generated one, or was edited.
    """
    if not isinstance(summary, Mapping):
        summary = json.loads(Path(summary).read_text(encoding="utf-8"))
    card = read_generated(folder)
    _card(card.data, _unsigned(card.text), summary).save(Path(folder) / CARD)


def add_perplexity(folder: str | os.PathLike, evaluation: Mapping[str, Any] | str | os.PathLike) -> None:
    """Put perplexity and divergence into the generated card of a saved checkpoint, beside the error of its weights, in
    the place of what was there.

    Args:
        folder: holds the checkpoint and its card.
        evaluation: what `hf-mxfp4 eval` wrote to `evaluation.json` for the checkpoint's own scheme (``--scheme own``,
            or a packed checkpoint), or the path of that file.

    Raises:
        FileNotFoundError: there is no card.
        ValueError: the card is not a generated one, or was edited; or the checkpoint's own scheme was not evaluated.
    """
    if not isinstance(evaluation, Mapping):
        evaluation = json.loads(Path(evaluation).read_text(encoding="utf-8"))
    card = read_generated(folder)
    body = replace_perplexity(_unsigned(card.text), perplexity_section(evaluation))
    signed_card(card.data, body).save(Path(folder) / CARD)


def read_generated(folder: str | os.PathLike) -> ModelCard:
    """The card of a saved checkpoint, which can be added to.

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
    """Whether a card was generated by this package and not edited since, its metadata apart."""
    card = read_card(text)
    body = "" if card is None else card.text
    match = _SIGNATURE.search(body)
    return match is not None and match[1] == _digest(body[: match.start()])


def choose_card(remote: str | None, folder: Path, tags: list[str], repo_id: str) -> ModelCard:
    """The card to upload with the checkpoint in ``folder``: the one on the Hub where somebody wrote it, else the
    local."""
    local = folder / CARD
    written = remote is not None and _EMPTY_CARD not in remote and not is_generated(remote)
    if written or not local.is_file():
        card = ModelCard(remote or f"---\nlibrary_name: transformers\ntags: {json.dumps(TAGS)}\n---\n")
    else:
        text = local.read_text(encoding="utf-8")
        card = ModelCard(text)
        if is_generated(text):
            card = _card(card.data, _unsigned(card.text).replace(HERE, repo_id))
    if card.data.base_model == repo_id:
        card.data.base_model = card.data.base_model_relation = None
    card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *tags]))
    return card


def _card(data: ModelCardData, body: str, evaluation: Mapping[str, Any] | None = None) -> ModelCard:
    if evaluation is not None:
        body = replace_evaluation(body, evaluation_section(evaluation))
        data.model_name = data.model_name or Path(str(evaluation.get("saved", "policy"))).name
        data.eval_results = [
            EvalResult(
                task_type="text-generation",
                dataset_type=str(evaluation["task"]),
                dataset_name=str(evaluation["task"]),
                metric_type="accuracy",
                metric_name=f"{name}, greedy, n = {evaluation['n_test']}",
                metric_value=round(value, 4),
            )
            for name, value in evaluation["accuracy_after"].items()
        ]
    return signed_card(data, body)


def signed_card(data: ModelCardData, body: str) -> ModelCard:
    """Return a card that [`is_generated`] knows for one until somebody edits it."""
    body = body.strip()
    signature = f"<!-- written by hf_mxfp4, and renewed with the weights while unedited: {_digest(body)} -->"
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n\n{signature}\n")


def _unsigned(body: str) -> str:
    return _SIGNATURE.sub("", body)


def _digest(body: str) -> str:
    return hashlib.sha256(" ".join(body.split()).encode()).hexdigest()[:16]


def base_model_of(name: str) -> Any:
    """The Hub's name of what the weights came from; through a local checkpoint, what its card names."""
    if not name:
        return None
    if not Path(name).exists():
        return name if _HUB_ID.fullmatch(name) else None
    card = Path(name) / CARD
    if not card.is_file():
        return None
    found = read_card(card.read_text(encoding="utf-8", errors="replace"))
    name = None if found is None else found.data.base_model
    return name if isinstance(name, str) and _HUB_ID.fullmatch(name) else None


def read_card(text: str) -> ModelCard | None:
    """Return a card, or `None` where its front matter cannot be read: it is no card of ours."""
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
