# SPDX-License-Identifier: Apache-2.0
"""`save_pretrained` and `push_to_hub` of quantized models: nothing half-written, checksums of the weights, and a model
card."""

import functools
import inspect
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import EntryNotFoundError

from ..config import MXFP4RLConfig
from .atomic import is_staging, staged, weight_names
from .scheme import guard_folder


if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: Arguments of `save_pretrained` that say how to upload, not what to write.
_UPLOAD_OPTIONS = ("commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")
_SET_ASIDE = "_mxfp4_state_dict"


def wrap_saving(cls: type["PreTrainedModel"]) -> None:
    """Make saving safe and complete for the quantized models of a class.

    `save_pretrained` then uses its ``state_dict``, replaces an old checkpoint without a moment in which there is none
    ([`hf_mxfp4.checkpoint.atomic.staged`]), writes checksums, and adds a model card; `push_to_hub` calls [`push`].
    Models of the class that are not quantized save as ever. Methods of the model itself would be lost in copies.
    """
    if not getattr(cls.save_pretrained, "wraps_saving", False):
        cls.save_pretrained = _wrap_save(cls.save_pretrained)
        cls.push_to_hub = _wrap_push(cls.push_to_hub)


def is_quantized(model: "PreTrainedModel") -> bool:
    """Return whether ``model`` was quantized by this package and not made plain again."""
    config = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    return isinstance(config, MXFP4RLConfig)


def take_state_dict(model: "PreTrainedModel") -> dict | None:
    """Return the state dict of the `save_pretrained` call in progress, if it was given one.

    transformers replaces it by the quantizer's without passing it on. Under FSDP2 and ZeRO-3 it is the gathered one, so
    it is stored on the model for the quantizer to return.
    """
    return model.__dict__.get(_SET_ASIDE)


def _wrap_save(original):
    signature = inspect.signature(original)
    if "state_dict" not in signature.parameters:  # a method of the model's own that passes on what it gets
        from transformers import PreTrainedModel

        signature = inspect.signature(PreTrainedModel.save_pretrained)

    @functools.wraps(original)
    def save_pretrained(self, *args, **kwargs):
        if not is_quantized(self):
            return original(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        extra = call.arguments.pop("kwargs", {})
        options = {**call.arguments, **extra}
        folder = options["save_directory"]
        if is_staging(folder):  # the save of a subclass, within which that of its parent class is called
            return original(self, *args, **kwargs)
        self.__dict__[_SET_ASIDE] = options["state_dict"]
        try:
            # Of a checkpoint that all ranks write together, none can tell when it is complete.
            if options.get("distributed_checkpoint") or not _writes(self, options["is_main_process"]):
                return original(self, *args, **kwargs)
            _save(self, original, call, options)
        finally:
            self.__dict__.pop(_SET_ASIDE, None)
        if options["push_to_hub"]:
            names = (*_UPLOAD_OPTIONS, "state_dict", "max_shard_size", "variant")
            given = {name: options[name] for name in names if options.get(name) is not None}
            push(self, options.get("repo_id") or os.path.basename(os.path.normpath(folder)), **given)

    save_pretrained.wraps_saving = True
    return save_pretrained


def _save(model: "PreTrainedModel", original, call: inspect.BoundArguments, options: dict[str, Any]) -> None:
    from .card import save_card

    folder = options["save_directory"]
    with staged(folder, options.get("variant")) as staging:
        local = {name: value for name, value in options.items() if name in call.signature.parameters}
        local |= {"save_directory": str(staging), "push_to_hub": False}
        model_argument = local.pop(next(iter(call.signature.parameters)))
        original(model_argument, **local)
        if getattr(model, "_hf_peft_config_loaded", False):
            return  # adapters alone: files and card are PEFT's
        guard_folder(staging)
        if hasattr(model, "quantization_report"):
            save_card(model, staging, existing=folder)


def _writes(model: "PreTrainedModel", is_main_process: bool) -> bool:
    """Whether transformers would write files in this process."""
    decide = getattr(model, "should_save_on_this_rank", None)  # not in transformers 5.17
    return bool(is_main_process) if decide is None else decide(is_main_process)


def _wrap_push(original):
    @functools.wraps(original)
    def push_to_hub(self, repo_id: str, *args, max_shard_size: int | str = "50GB", **options):
        if not is_quantized(self) or args:
            return original(self, repo_id, *args, max_shard_size=max_shard_size, **options)
        tags = options.pop("tags", None) or []
        tags = [tags] if isinstance(tags, str) else list(tags)
        return push(self, repo_id, max_shard_size=max_shard_size, tags=[*(self.model_tags or []), *tags], **options)

    return push_to_hub


def push(
    model: "PreTrainedModel",
    repo_id: str,
    *,
    token: bool | str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    tags: list[str] | None = None,
    variant: str | None = None,
    **options: Any,
) -> CommitInfo:
    """Save ``model`` to a temporary folder and upload it in one commit; other ``options`` are those of `push_to_hub`.

    A card that someone wrote on the Hub stays, with ``tags`` added; one that was generated is replaced. Weights of an
    earlier push that are not overwritten are deleted: transformers would prefer an old `model.safetensors` to shards.
    """
    from .card import CARD, choose_card, decoration

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    upload = {name: options.pop(name, None) for name in ("commit_message", "commit_description", "create_pr")}
    upload["commit_message"] = upload["commit_message"] or "Upload model"
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, variant=variant, **options)
        with decoration():
            card = choose_card(_remote_card(api, repo_id, revision), Path(folder), tags or [], repo_id)
            card.save(Path(folder) / CARD)
        single, index = weight_names(variant)
        stem = single.removesuffix(".safetensors")
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            delete_patterns=[single, index, f"{stem}-*-of-*.safetensors"],
            revision=revision,
            **upload,
        )


def _remote_card(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    try:
        path = api.hf_hub_download(repo_id, "README.md", revision=revision)
    except EntryNotFoundError:
        return None
    return Path(path).read_text(encoding="utf-8")
