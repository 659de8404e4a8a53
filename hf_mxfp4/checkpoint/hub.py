# SPDX-License-Identifier: Apache-2.0
"""Upload a saved checkpoint to the Hugging Face Hub in one commit, model card included."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import EntryNotFoundError

from .atomic import is_shard, weight_names
from .card import CARD, choose_card, decoration


if TYPE_CHECKING:
    from transformers import PreTrainedModel


def push(
    model: "PreTrainedModel",
    repo_id: str,
    *,
    max_shard_size: int | str = "50GB",
    private: bool | None = None,
    **options: Any,
) -> CommitInfo:
    """Save ``model`` to a temporary folder and upload it; other ``options`` are those of [`upload_saved`].

    The repository is made first, so that a wrong token is found out before anything is written. Raises as the Hub's
    client does; what an interrupted upload did transfer is not sent again.
    """
    repo_id = HfApi(token=options.get("token")).create_repo(repo_id, private=private, exist_ok=True).repo_id
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        names = [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()]
        return upload_saved(folder, repo_id, names, **options)


def create_and_upload(
    folder: str | os.PathLike, repo_id: str, names: Sequence[str], *, private: bool | None = None, **options: Any
) -> CommitInfo:
    """[`upload_saved`] to a repository that is made if it does not exist."""
    repo_id = HfApi(token=options.get("token")).create_repo(repo_id, private=private, exist_ok=True).repo_id
    return upload_saved(folder, repo_id, names, **options)


def upload_saved(
    folder: str | os.PathLike,
    repo_id: str,
    names: Sequence[str],
    *,
    variant: str | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: list[str] | None = None,
) -> CommitInfo:
    """Upload the files ``names`` of a saved checkpoint and its card to an existing repository; nothing else that is in
    ``folder``.

    A card that someone wrote on the Hub stays, with ``tags`` added; one that was generated is replaced. Weights of an
    earlier push that are not overwritten are deleted in the same commit: transformers would prefer an old
    `model.safetensors` to new shards.
    """
    api = HfApi(token=token)
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    files = [name for name in names if name != CARD]
    with tempfile.TemporaryDirectory() as cards:
        uploads = {name: Path(folder) / name for name in files}
        with decoration():
            card = choose_card(_remote_card(api, repo_id, revision), Path(folder), tags or [], repo_id)
            card.save(Path(cards) / CARD)
            uploads[CARD] = Path(cards) / CARD
        return _commit(
            api,
            repo_id,
            uploads,
            weight_names(variant),
            commit_message=commit_message or "Upload model",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )


def _commit(api: HfApi, repo_id: str, files: dict[str, Path], names: tuple[str, str], **options: Any) -> CommitInfo:
    stale = [
        path
        for path in api.list_repo_files(repo_id, revision=options["revision"])
        if path not in files and (path in names or is_shard(path, names[0]))
    ]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [CommitOperationDelete(path) for path in stale]
    operations += [CommitOperationAdd(name, str(path)) for name, path in files.items()]
    return api.create_commit(repo_id, operations, **options)


def _remote_card(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    try:
        path = api.hf_hub_download(repo_id, CARD, revision=revision)
    except EntryNotFoundError:
        return None
    return Path(path).read_text(encoding="utf-8")
