# SPDX-License-Identifier: Apache-2.0
"""Upload a model to the Hugging Face Hub in one commit, model card included."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import EntryNotFoundError

from .atomic import weight_names
from .card import CARD, choose_card, decoration


if TYPE_CHECKING:
    from transformers import PreTrainedModel


def push(
    model: "PreTrainedModel",
    repo_id: str,
    *,
    private: bool | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: list[str] | None = None,
    variant: str | None = None,
    **options: Any,
) -> CommitInfo:
    """Save ``model`` to a temporary folder and upload it; other ``options`` are those of `save_pretrained`.

    The repository is made first, so that a wrong token is found before anything is written. A card that someone wrote
    on the Hub stays, with ``tags`` added; one that was generated is replaced. Weights of an earlier push that are not
    overwritten are deleted in the same commit: transformers would prefer an old `model.safetensors` to new shards.

    Raises as the Hub's client does; what an interrupted upload did transfer is not sent again.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, variant=variant, **options)
        with decoration():
            choose_card(_remote_card(api, repo_id, revision), Path(folder), tags or [], repo_id).save(
                Path(folder) / CARD
            )
        single, index = weight_names(variant)
        stem = single.removesuffix(".safetensors")
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            delete_patterns=[single, index, f"{stem}-*-of-*.safetensors"],
            commit_message=commit_message or "Upload model",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )


def _remote_card(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    try:
        path = api.hf_hub_download(repo_id, CARD, revision=revision)
    except EntryNotFoundError:
        return None
    return Path(path).read_text(encoding="utf-8")
