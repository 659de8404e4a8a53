# SPDX-License-Identifier: Apache-2.0
"""`save_pretrained` and `push_to_hub` of quantized models, with checksums of the weights and a model card; and folders
that are replaced whole or not at all, whenever the process is killed."""

import contextlib
import functools
import inspect
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import RemoteEntryNotFoundError
from safetensors import SafetensorError
from torch import nn

from ..config import MXFP4RLConfig
from ..files import one_writer, sync_to_disk, write_json
from .folder import (
    CONFIG,
    WEIGHTS_KEY,
    CheckpointError,
    ShardError,
    checkpoint_step,
    read_header,
    read_index,
    read_json,
    write_metadata,
)
from .manifest import MANIFEST, read_manifest, weight_files, write_manifest
from .scheme import guard_folder, guarded
from .side_files import is_side_folder


#: Arguments of `save_pretrained` that do not say what to write or how to upload it.
_NOT_PUSHED = ("save_directory", "is_main_process", "push_to_hub", "repo_id")
_SET_ASIDE = "_mxfp4_state_dict"
_STAGING = ".saving-"
_SHARD = re.compile(r"(?P<stem>.*?)(?P<tag>-b)?(?P<count>-\d{5}-of-\d{5})\.safetensors")
#: In the names of new weights until they replace the old ones: of a shard that no checkpoint has.
_NEW = "-00000-of-00000"
_PENDING = re.compile(rf"model(?:\.(?P<variant>.+))?{_NEW}\.safetensors(?P<index>\.index\.json)?")


def wrap_saving(cls: type[nn.Module]) -> None:
    """Make saving safe and complete for the quantized models of a class.

    `save_pretrained` then uses its ``state_dict``, replaces an old checkpoint without a moment in which there is none
    ([`staged`]), writes checksums, and adds a model card; `push_to_hub` calls [`push`].
    Models of the class that are not quantized save as ever. Methods of the model itself would be lost in copies.
    """
    if not getattr(cls.save_pretrained, "wraps_saving", False):
        cls.save_pretrained = _wrap_save(cls.save_pretrained)
        cls.push_to_hub = _wrap_push(cls.push_to_hub)


def is_quantized(model: nn.Module) -> bool:
    """Return whether ``model`` was quantized by this package and not made plain again."""
    config = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    return isinstance(config, MXFP4RLConfig)


def take_state_dict(model: nn.Module) -> dict | None:
    """Return the state dict of the `save_pretrained` call in progress, if it was given one.

    transformers replaces it by the quantizer's without passing it on. Under FSDP2 and ZeRO-3 it is the gathered one, so
    it is stored on the model for the quantizer to return.
    """
    return model.__dict__.get(_SET_ASIDE)


def _wrap_save(original):
    """Return a `save_pretrained` that saves quantized models safely, and others as ``original`` does."""
    signature = inspect.signature(original)
    if "state_dict" not in signature.parameters:  # a method of the model's own that passes on what it gets
        from transformers import PreTrainedModel

        signature = inspect.signature(PreTrainedModel.save_pretrained)

    @functools.wraps(original)
    def save_pretrained(self, *args, **kwargs):
        if not is_quantized(self):
            return original(self, *args, **kwargs)
        # All options by name, however they were given.
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        extra = call.arguments.pop("kwargs", {})
        options = {**call.arguments, **extra}
        folder = options["save_directory"]
        if Path(folder).name.startswith(_STAGING):  # a subclass calls the method of its parent
            return original(self, *args, **kwargs)
        self.__dict__[_SET_ASIDE] = options["state_dict"]
        try:
            writes_here = getattr(self, "should_save_on_this_rank", bool)  # not in transformers 5.17
            # No rank can tell when a checkpoint is complete that all of them write together.
            if options.get("distributed_checkpoint") or not writes_here(options["is_main_process"]):
                return original(self, *args, **kwargs)
            with own_names(self, folder):
                _save(self, original, call, options)
        finally:
            self.__dict__.pop(_SET_ASIDE, None)
        if options["push_to_hub"]:
            repo_id = options.get("repo_id") or os.path.basename(os.path.normpath(folder))
            model_parameter = next(iter(signature.parameters))  # "self"
            given = {}
            for name, value in options.items():
                if value is not None and name != model_parameter and name not in _NOT_PUSHED:
                    given[name] = value
            push(self, repo_id, **given)

    save_pretrained.wraps_saving = True  # type: ignore[attr-defined]
    return save_pretrained


@contextlib.contextmanager
def own_names(model: nn.Module, folder: str | os.PathLike | None) -> Iterator[None]:
    """Keep the names of parameters in a Trainer's checkpoint, by which it is resumed: those of the Hub's files would
    leave out fused experts."""
    conversions = getattr(model, "_weight_conversions", None)
    if not conversions or folder is None or checkpoint_step(folder) is None:
        yield
        return
    model._weight_conversions = []
    try:
        yield
    finally:
        model._weight_conversions = conversions


def _save(model: nn.Module, original, call: inspect.BoundArguments, options: dict[str, Any]) -> None:
    """Write a checkpoint through [`staged`], with the scheme in `config.json` and a model card."""
    from .card import save_card

    folder = options["save_directory"]
    with staged(folder, options.get("variant")) as staging:
        # Only the parameters of the method: other options are those of an upload.
        local = {name: value for name, value in options.items() if name in call.signature.parameters}
        local |= {"save_directory": str(staging), "push_to_hub": False}
        model_argument = local.pop(next(iter(call.signature.parameters)))
        original(model_argument, **local)
        if getattr(model, "_hf_peft_config_loaded", False):
            return  # adapters alone: files and card are PEFT's
        guard_folder(staging)
        if hasattr(model, "quantization_report"):
            save_card(model, staging, existing=folder)


def _wrap_push(original):
    """Return a `push_to_hub` that calls [`push`] for quantized models."""

    @functools.wraps(original)
    def push_to_hub(self, repo_id: str, *args, max_shard_size: int | str = "50GB", **options):
        if not is_quantized(self) or args:
            return original(self, repo_id, *args, max_shard_size=max_shard_size, **options)
        return push(self, repo_id, max_shard_size=max_shard_size, **options)

    return push_to_hub


def push(
    model: nn.Module,
    repo_id: str,
    *,
    token: bool | str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    tags: list[str] | str | None = None,
    variant: str | None = None,
    **options: Any,
) -> CommitInfo:
    """Save ``model`` to a temporary folder and upload it in one commit; other ``options`` are those of `push_to_hub`.

    A card that someone wrote on the Hub stays, with ``tags`` added; one that was generated is replaced, and one that
    cannot be read stays as it is. Weights delete those of an earlier push that they do not overwrite: transformers
    would prefer an old `model.safetensors` to shards. Adapters delete nothing.
    """
    from .card import CARD, choose_card, decoration

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    upload = {name: options.pop(name, None) for name in ("commit_message", "commit_description", "create_pr")}
    upload["commit_message"] = upload["commit_message"] or "Upload model"
    if isinstance(tags, str):
        tags = [tags]
    tags = [*(model.model_tags or []), *(tags or [])]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, variant=variant, **options)
        card = Path(folder) / CARD
        with decoration():
            try:
                remote = _remote_card(api, repo_id, revision)
                choose_card(remote, card.parent, tags, repo_id).save(card)
            except Exception:
                card.unlink(missing_ok=True)  # the one on the Hub stays
                raise
        old_weights = None
        if _weights_in(card.parent, variant):
            single, index = weight_names(variant)
            old_weights = [single, index, f"{single.removesuffix('.safetensors')}-*-of-*.safetensors"]
        return api.upload_folder(
            repo_id=repo_id, folder_path=folder, delete_patterns=old_weights, revision=revision, **upload
        )


def _remote_card(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    """Return the card on the Hub; `None` if there is none."""
    try:
        # Without it, the Hub's silence would be answered with an older card from the cache.
        path = api.hf_hub_download(repo_id, "README.md", revision=revision, force_download=True)
    except RemoteEntryNotFoundError:
        return None
    return Path(path).read_text(encoding="utf-8")


# ---- folders --------------------------------------------------------------------------------------------------------


class FolderError(ValueError):
    """A folder cannot be written where the user asked; the message says what to do instead."""


@contextlib.contextmanager
def writing_to(target: Path) -> Iterator[None]:
    """Raise [`FolderError`] for errors of writing, such as a full disk."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise FolderError(f"{target} could not be written: {error}") from error


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new folder next to ``path`` to write into, which replaces ``path`` when the context ends without error.

    Its files are on the disk (fsync) before it gets its name. After an exception ``path`` is unchanged. A killed
    process leaves ``.<name>.partial-<random>``, or what it was replacing as ``.<name>.replaced-<random>``.

    Raises [`FolderError`] when ``path`` is a file, or a folder that is not empty and may not be replaced: without
    ``overwrite``, or when it holds other subfolders than a checkpoint has, or no `config.json`.
    """
    target = Path(path).expanduser().resolve()  # a link stays, and what it points to is replaced
    _check_replaceable(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(8)
    partial = target.with_name(f".{target.name}.partial-{mark}")
    old = target.with_name(f".{target.name}.replaced-{mark}")
    partial.mkdir()
    try:
        yield partial
        for file in (*partial.rglob("*"), partial):
            sync_to_disk(file)
        _check_replaceable(target, overwrite)
        if target.exists():
            target.rename(old)
        partial.rename(target)
        sync_to_disk(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        if old.exists() and not target.exists():  # an error, or Ctrl-C, between the two
            old.rename(target)
        shutil.rmtree(partial, ignore_errors=True)


def _check_replaceable(target: Path, overwrite: bool) -> None:
    """Raise [`FolderError`] as [`atomic_folder`] says."""
    if target.is_file():
        raise FolderError(f"{target} is a file; give a folder")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not overwrite:
        raise FolderError(f"{target} is not empty; give a new folder, or overwrite=True (--overwrite)")
    folders = [entry.name for entry in target.iterdir() if entry.is_dir()]
    subfolders = sorted(name for name in folders if not is_side_folder(name))
    if subfolders:
        raise FolderError(f"{target} is not replaced because it holds the folder {subfolders[0]}; give a new one")
    if not (target / CONFIG).is_file():
        raise FolderError(f"{target} is not replaced because it has no config.json, so it is no checkpoint")


@contextlib.contextmanager
def staged(folder: str | os.PathLike, variant: str | None = None) -> Iterator[Path]:
    """Yield a new folder inside ``folder`` to save a checkpoint into; when the context ends without error its files
    move up, with a manifest of the weights.

    ``folder`` may hold other files, so it is not replaced as a whole. The step from the old checkpoint to the new one
    is the replacement of `config.json`: it names the new weights, which have a name of their own until the old ones are
    gone (``transformers_weights``, which transformers follows). So a process killed at any moment leaves the old
    checkpoint or the new one; what else it leaves (``.saving-*``, weights that nothing names) is removed by the next
    save. After an exception ``folder`` is unchanged.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f"{_STAGING}{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        with one_writer(folder):
            staging.mkdir()
            stack.callback(shutil.rmtree, staging, ignore_errors=True)
            stack.enter_context(one_writer(staging))  # others see that it is in use
        # The folder is not locked while the context lasts: several ranks may have to save together.
        yield staging
        with one_writer(folder):
            _move_in(staging, folder, variant)
            for left in folder.glob(f"{_STAGING}*"):
                with one_writer(left, wait=False) as is_unused:
                    if is_unused:
                        shutil.rmtree(left, ignore_errors=True)


def weight_names(variant: str | None = None) -> tuple[str, str]:
    """Return the names that transformers has for the file of all weights and for the index of shards."""
    infix = ""
    if variant is not None:
        infix = f".{variant}"
    return f"model{infix}.safetensors", f"model.safetensors.index{infix}.json"


def _weights_in(folder: Path, variant: str | None) -> set[str]:
    """Return the names in a folder of all weights of a variant: the file, the index, and shards old and new."""
    single, index = weight_names(variant)
    stem = single.removesuffix(".safetensors")
    names = {single, index, f"{stem}{_NEW}.safetensors.index.json"}
    weights = set()
    for path in folder.iterdir():
        shard = _SHARD.fullmatch(path.name)
        is_shard = shard is not None and shard["stem"] == stem
        if is_shard or path.name in names:
            weights.add(path.name)
    return weights


def _move_in(staging: Path, folder: Path, variant: str | None) -> None:
    """Move the files of a new checkpoint up, in an order that leaves the old one or the new one at any moment."""
    _finish(folder, staging)  # a save that was killed

    # Complete the new files, and put them on the disk.
    single, index = weight_names(variant)
    if (staging / index).is_file():
        _rename_shards(staging, index, _shards_of(folder / index))
    new = _weights_in(staging, variant)
    for file in staging.glob("*.safetensors"):
        metadata = read_header(file).metadata
        if metadata:
            write_metadata(file, metadata)
    if new:
        _record_weights(staging, folder, replaced=_weights_in(folder, variant))
    files = [path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file()]
    for name in files:
        sync_to_disk(staging / name)

    # First shards, whose names the old checkpoint does not use, and files other than weights.
    weights = index if index in new else single
    for name in files:
        if name not in (weights, CONFIG, MANIFEST):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / name, folder / name)
    # Then the step from the old checkpoint to the new one.
    if weights in files:
        if CONFIG in files and (folder / CONFIG).is_file():
            pending = f"{single.removesuffix('.safetensors')}{_NEW}.safetensors"
            if weights == index:
                pending += ".index.json"
            os.replace(staging / weights, folder / pending)
            write_json(staging / CONFIG, {**read_json(staging / CONFIG), WEIGHTS_KEY: pending}, sort_keys=True)
            os.replace(staging / CONFIG, folder / CONFIG)
            _finish(folder, staging)
        else:
            os.replace(staging / weights, folder / weights)
    # Then what is left of the old one, the index that names shards before these.
    if new:
        stale = _weights_in(folder, variant) - new
        for name in sorted(stale, key=lambda name: name != index):
            (folder / name).unlink()
    for name in (CONFIG, MANIFEST):
        if (staging / name).is_file():
            os.replace(staging / name, folder / name)
    sync_to_disk(folder)


def _record_weights(staging: Path, folder: Path, replaced: set[str]) -> None:
    """Write the manifest of new weights, with what the old one records of files that stay, and remove the old one."""
    kept = {}
    with contextlib.suppress(ShardError):
        kept = read_manifest(folder)
    kept = {name: kept[name] for name in kept.keys() - replaced if not (staging / name).exists()}
    write_manifest(staging, weight_files(staging), kept)
    (folder / MANIFEST).unlink(missing_ok=True)


def _finish(folder: Path, scratch: Path) -> None:
    """Give new weights that `config.json` points to their usual name; do nothing if it points to none.

    The old weights are replaced while `config.json` points to the new ones, which then have both names.
    """
    try:
        config = read_json(folder / CONFIG)
    except CheckpointError:  # there is none, or it is damaged
        return
    pending = _PENDING.fullmatch(str(config.get(WEIGHTS_KEY)))
    if pending is None or not (folder / pending[0]).is_file():
        return
    single, index = weight_names(pending["variant"])
    usual = index if pending["index"] else single
    other = single if pending["index"] else index
    second = scratch / "second_name"
    try:
        os.link(folder / pending[0], second)
    except OSError:  # a file system without hard links
        shutil.copyfile(folder / pending[0], second)
        sync_to_disk(second)
    (folder / other).unlink(missing_ok=True)
    os.replace(second, folder / usual)
    second.unlink(missing_ok=True)  # is left if both are the same file already
    finished = scratch / "finished_config"
    write_json(finished, guarded(config), sort_keys=True)
    os.replace(finished, folder / CONFIG)
    (folder / pending[0]).unlink()


def _rename_shards(staging: Path, index: str, taken: set[str]) -> None:
    """Give the new shards names that the old index does not use; there are two sets of names, and it uses one."""
    shards = _shards_of(staging / index)
    if not shards & taken:
        return
    renamed = {name: _SHARD.sub(r"\g<stem>-b\g<count>.safetensors", name) for name in shards}
    content = json.loads((staging / index).read_text(encoding="utf-8"))
    content["weight_map"] = {tensor: renamed[name] for tensor, name in content["weight_map"].items()}
    for name, new in renamed.items():
        os.replace(staging / name, staging / new)
    write_json(staging / index, content, sort_keys=True)


def _shards_of(index: Path) -> set[str]:
    """Return the files that an index names; none for one that is missing or damaged."""
    with contextlib.suppress(ShardError):
        return set(read_index(index).values())
    return set()
