# SPDX-License-Identifier: Apache-2.0
"""Load models: in full precision where that exists, with what changes when their files do; and rewrite them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn

from ...checkpoint import atomic_folder, open_checkpoint, remove_scheme, stored_scheme, weight_files, write_manifest
from ...checkpoint.folder import (
    CONFIG,
    check_complete,
    check_holds_model,
    model_class,
    read_json,
    read_model_config,
    refuse_kernels,
    weights_name,
)
from ...checkpoint.manifest import record_of
from ...checkpoint.save import writing_to
from ...checkpoint.side_files import SIDE_FILES, copy_side_files, find_side_files
from ...config import MXFP4RLConfig
from ...utils import warn_of_slow_bfloat16
from ..errors.source import SourceError, check_hub_id, local_path
from .texts import TextOptions


Result = TypeVar("Result")


@dataclass(frozen=True)
class Loaded:
    """A model in memory.

    Attributes:
        name: last part of the folder's path, or the hub id.
        own: the scheme that its checkpoint was trained under; the model is in full precision, on its master weights.
        stored: its weights are stored quantized; the model is what its files say.
        folder: where its files are; `None` for a model on the Hub.
    """

    name: str
    model: nn.Module
    tokenizer: Any
    own: MXFP4RLConfig | None
    stored: bool
    folder: Path | None

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def identity(self) -> list:
        """Read the files again and return the checksums of config and weights, or the commit of a model on the Hub."""
        if self.folder is None:
            return [getattr(self.model.config, "_commit_hash", None)]
        pickles = sorted(file.name for file in self.folder.glob("*.bin") if file.is_file())
        names = [CONFIG, *weight_files(self.folder), *pickles]
        return [[name, record_of(self.folder / name).xxh3_128] for name in names]


def load(model: str, dtype: str = "auto", device: str = "auto") -> Loaded:
    """Load a checkpoint's folder or a model of the Hub.

    Args:
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``; by default that of the checkpoint.
        device: where it computes; by default on a GPU where there is one.

    Raises [`SourceError`] when it cannot be loaded, and as [`open_checkpoint`] does.
    """
    from transformers import AutoTokenizer, PreTrainedConfig

    path = Path(model).expanduser()
    _check_path(model, path)
    name = model
    if path.exists():
        name = str(path)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    precision = dtype
    if dtype != "auto":
        precision = getattr(torch, dtype)
    try:
        options, _ = PreTrainedConfig.get_config_dict(name)
        refuse_kernels(options, name)
        config = read_model_config(name, options, trust_remote_code=False)
        kind = model_class(options, name)  # the auto classes drop the vision tower of some
        if config.is_encoder_decoder or not kind.can_generate():
            raise ValueError(f"{kind.__name__} does not predict the next token")
        quantization = getattr(config, "quantization_config", None)
        own = stored_scheme(quantization)
        if own is not None and own.mode == "packed":
            own = None
        elif own is not None:
            remove_scheme(config)  # the master weights, as they are
        loaded, info = kind.from_pretrained(
            name, config=config, dtype=precision, trust_remote_code=False, output_loading_info=True
        )
        check_complete(info["missing_keys"], name)
        if loaded.dtype == torch.bfloat16 and device == "cpu":
            warn_of_slow_bfloat16()
        loaded = loaded.eval().to(device)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise SourceError(f"{model} cannot be loaded to run it: {error}") from error
    stored = own is None and quantization is not None
    if path.exists():
        return Loaded(path.resolve().name, loaded, tokenizer, own, stored, path)
    return Loaded(model, loaded, tokenizer, own, stored, None)


def _check_path(model: str, path: Path) -> None:
    """Raise an error for what is no checkpoint of a whole model, nor can be on the Hub."""
    if path.is_file():
        raise SourceError("a model is loaded from its folder or hub id, with its config and tokenizer, not one file")
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise SourceError(f"{path} holds an adapter, not a model; merge it into its base model first")
    if path.is_dir():
        check_holds_model(path)
        if weights_name(path, read_json(path / CONFIG)) is not None:
            open_checkpoint(path)  # names files that are damaged, which transformers does not
    else:
        check_hub_id(model)


def rewrite_checkpoint(
    model: str | os.PathLike,
    out: str | os.PathLike,
    options: TextOptions | None,
    change: Callable[[nn.Module, Sequence[torch.Tensor] | None], Result],
    *,
    device: str = "auto",
    overwrite: bool = False,
) -> Result:
    """Load a model, change it, and save it in its own dtype, with its tokenizer, processors and the like, into a folder
    that appears whole.

    Args:
        model: a folder, or a model on the Hub; all of it is loaded.
        out: the new folder.
        options: which texts activations are measured on, if on any.
        change: what is done with the model, in place, on the token ids of the texts.
        overwrite: replace a checkpoint that is there.

    Returns:
        What ``change`` does.

    Raises:
        SourceError: the model or texts cannot be read, or it is quantized.
        ValueError: as ``change`` does.
        FolderError: ``out`` cannot be written.
    """
    # What is wrong with texts is known before a model is loaded.
    texts = None
    if options is not None:
        texts = options.read()
    with atomic_folder(Path(out).expanduser().resolve(), overwrite=overwrite) as folder:
        loaded = load(str(model), "auto", device)
        if loaded.stored or loaded.own is not None:
            raise SourceError(f"{model} is quantized; take the original, and quantize what comes out")
        source = local_path(str(model), SIDE_FILES)[0]
        side_files = find_side_files(source)
        batches = None
        if options is not None:
            batches = options.tokens(loaded.tokenizer, texts)
        result = change(loaded.model, batches)
        with writing_to(Path(out)):
            loaded.model.save_pretrained(folder)
            write_manifest(folder, weight_files(folder))
            copy_side_files(side_files, source, folder)
    return result


def check_same_tokens(model: Loaded, reference: Loaded) -> None:
    """Raise [`SourceError`] for two models whose predictions are of different tokens."""
    if model.tokenizer.get_vocab() != reference.tokenizer.get_vocab():
        raise SourceError(f"{reference.name} has another vocabulary than {model.name}; they cannot be compared")
    size = model.model.get_output_embeddings().weight.shape[0]
    reference_size = reference.model.get_output_embeddings().weight.shape[0]
    if size != reference_size:
        raise SourceError(f"{model.name} predicts {size} tokens and {reference.name} {reference_size}")
