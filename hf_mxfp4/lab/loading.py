# SPDX-License-Identifier: Apache-2.0
"""Load models to measure: in full precision where that exists, with what changes when their files do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import refuse_kernels, remove_scheme
from ..config import QUANT_METHOD, MXFP4RLConfig
from .source import SourceError


@dataclass(frozen=True)
class Loaded:
    """A model in memory.

    Attributes:
        name: last part of the folder's path, or the hub id.
        own: the scheme that its checkpoint was trained under; the model is in full precision, on its master weights.
        stored: its weights are stored quantized; the model is what its files say.
        identity: of its files.
    """

    name: str
    model: nn.Module
    tokenizer: Any
    own: MXFP4RLConfig | None
    stored: bool
    identity: list

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")


def load(model: str, dtype: str = "auto", device: str = "auto", *, as_trained: bool = False) -> Loaded:
    """Load a checkpoint's folder or a model of the Hub.

    Args:
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``; by default that of the checkpoint.
        device: where it computes; by default on a GPU where there is one.
        as_trained: leave a policy quantized as it was trained.

    Raises [`SourceError`] when it cannot be loaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

    path = Path(model).expanduser()
    if path.is_file():
        raise SourceError("a model is loaded from its folder or hub id, with its config and tokenizer, not one file")
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise SourceError(f"{path} holds an adapter, not a model; merge it into its base model first")
    name = str(path) if path.exists() else model
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        refuse_kernels(PreTrainedConfig.get_config_dict(name)[0], name)
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        options = getattr(config, "quantization_config", None)
        own = _own_config(options)
        if own is not None and not as_trained:
            remove_scheme(config)  # the master weights, as they are
        precision = dtype if dtype == "auto" else getattr(torch, dtype)
        loaded = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=precision, trust_remote_code=False)
        loaded, tokenizer = loaded.eval().to(device), AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise SourceError(f"{model} cannot be loaded to run it: {error}") from error
    shown = path.resolve().name if path.exists() else model
    return Loaded(shown, loaded, tokenizer, own, own is None and options is not None, _identity(path, config))


def check_same_tokens(model: Loaded, reference: Loaded) -> None:
    """Raise [`SourceError`] for two models whose predictions are of different tokens."""
    if model.tokenizer.get_vocab() != reference.tokenizer.get_vocab():
        raise SourceError(f"{reference.name} has another vocabulary than {model.name}; they cannot be compared")
    sizes = [each.model.get_output_embeddings().weight.shape[0] for each in (model, reference)]
    if sizes[0] != sizes[1]:
        raise SourceError(f"{model.name} predicts {sizes[0]} tokens and {reference.name} {sizes[1]}")


def _own_config(options: Any) -> MXFP4RLConfig | None:
    """The scheme of a checkpoint of master weights."""
    if options is None:
        return None
    options = options if isinstance(options, dict) else options.to_dict()
    if options.get("quant_method") != QUANT_METHOD or options.get("mode") == "packed":
        return None
    return MXFP4RLConfig.from_dict(options)


def _identity(path: Path, config: Any) -> list:
    """Names, sizes and times of a folder's weights, or the commit of a model on the Hub."""
    if not path.exists():
        return [getattr(config, "_commit_hash", None)]
    files = sorted(file for pattern in ("*.safetensors", "*.bin") for file in path.glob(pattern))
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
