# SPDX-License-Identifier: Apache-2.0
"""The scheme of a checkpoint, in its `config.json` and in the headers of packed files, and their check before loading.

transformers only warns of a quantization method that it does not know, and computes in full precision. So `config.json`
has the key ``transformers_weights``, the file of the weights: transformers refuses a value that is no safetensors file
and prints it. [`MXFP4RLQuantizer`] removes the key first.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..config import FORMAT_VERSION, QUANT_METHOD, MXFP4RLConfig
from ..files import write_json
from .folder import WEIGHTS_KEY, FileHeader, ShardError, read_json, tensors_by_name


TEXT = (
    "none that transformers can use alone. This checkpoint is MXFP4 of the package hf_mxfp4: put `import hf_mxfp4` "
    "before from_pretrained, or run commands such as trl or lm_eval as `hf-mxfp4 run -- COMMAND`. For full precision, "
    "make a copy with `hf-mxfp4 export --format bf16`"
)
#: Key of the record in the metadata of a safetensors file.
RECORD = "mxfp4_rl"
#: No number is longer in JSON: reserves space in a header for one that is not known yet.
WIDEST_FLOAT = -sys.float_info.max


def with_scheme(config: Mapping[str, Any], scheme: MXFP4RLConfig) -> dict[str, Any]:
    """Return a `config.json` with the scheme and the key."""
    return _guarded(config, scheme.to_dict())


def _guarded(config: Mapping[str, Any], scheme: Mapping[str, Any]) -> dict[str, Any]:
    """Add the scheme and the key, also to the configs of the text decoder and of what contains it: of a checkpoint of
    a whole model, the class of a part reads nothing else."""
    parts = {name: _guarded(part, scheme) for name, part in config.items() if _has_text(name, part)}
    return {**config, **parts, "quantization_config": scheme, WEIGHTS_KEY: TEXT}


def _has_text(name: str, part: Any) -> bool:
    """Return whether an entry of a `config.json` is the config of the text decoder, or contains it."""
    if not isinstance(part, Mapping):
        return False
    return name == "text_config" or any(_has_text(key, value) for key, value in part.items())


def without_scheme(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` without the scheme and the key."""
    plain = {}
    for name, value in config.items():
        if name in ("quantization_config", WEIGHTS_KEY):
            continue
        if _has_text(name, value):
            value = without_scheme(value)
        plain[name] = value
    return plain


def stored_scheme(quantization: Any) -> MXFP4RLConfig | None:
    """Return the scheme that a ``quantization_config`` of transformers is (an object, or a dictionary as in
    `config.json`); `None` for another method's, and for none. Raises as [`MXFP4RLConfig.from_dict`] does."""
    if not quantization:
        return None
    options = quantization
    if not isinstance(quantization, dict):
        options = quantization.to_dict()
    if options.get("quant_method") != QUANT_METHOD:
        return None
    return MXFP4RLConfig.from_dict(options)


def guarded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` with the key if it has a scheme, and without it otherwise."""
    scheme = config.get("quantization_config")
    if scheme:
        return _guarded(config, scheme)
    return {name: value for name, value in config.items() if name != WEIGHTS_KEY}


def guard_folder(folder: Path) -> None:
    """Put the key into the `config.json` that transformers has written there with the scheme."""
    write_json(folder / "config.json", guarded(read_json(folder / "config.json")), sort_keys=True)


def remove_scheme(config: Any) -> None:
    """Make a config of transformers that was read from such a file one of a plain model, with the master weights."""
    config.__dict__.pop("quantization_config", None)
    unguard(config)


def unguard(config: Any) -> None:
    """Remove the key from a config of transformers that was read from such a file, and all of it from its parts."""
    if not str(getattr(config, WEIGHTS_KEY, ".json")).endswith((".safetensors", ".json")):
        delattr(config, WEIGHTS_KEY)
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        if part is not None and hasattr(part, WEIGHTS_KEY):
            remove_scheme(part)


def make_record(config: MXFP4RLConfig, sqnr_db: float | None) -> dict[str, str]:
    """Return metadata for packed files, none for master weights: how bytes are read, and their SQNR in decibels."""
    if config.mode == "qat":
        return {}
    record = {"format_version": FORMAT_VERSION, "meaning": _meaning(config), "weight_sqnr_db": sqnr_db}
    return {RECORD: json.dumps(record)}


def check_checkpoint(files: Sequence[str], headers: Sequence[FileHeader], config: MXFP4RLConfig) -> dict[str, Any]:
    """Return the record that [`make_record`] left, empty for files written by something else.

    Raises `ValueError` unless the files were written under the scheme ``config`` of their `config.json`: transformers
    would round other numbers to bytes without a word. Names and shapes of tensors are left to it.
    """
    unread = set(map(Path, files)) - {header.file for header in headers}
    if unread:
        raise ShardError(
            f"{min(unread).name} is not a safetensors file; a checkpoint of quant_method={config.quant_method!r} is "
            "read from no other format"
        )
    tensors = {}
    if config.mode == "packed":
        tensors = tensors_by_name(headers)
    scales = [name for name in tensors if name.endswith(("weight_scale", "proj_scale"))]
    for name in [*scales, *(name.removesuffix("_scale") for name in scales)]:
        if name in tensors and tensors[name].dtype != torch.uint8:
            raise ValueError(
                f"{tensors[name].file.name}: {name} is {tensors[name].dtype}, and packed weights are uint8; pack the "
                "full-precision model again with hf-mxfp4 pack"
            )
    return read_record(headers, config)


def check_unquantized(headers: Sequence[FileHeader]) -> None:
    """Raise `ValueError` for files of packed weights that are about to be loaded as if they were in full precision."""
    for header in headers:
        record = header.metadata.get(RECORD)
        if record is not None and '"packed"' in record:
            raise ValueError(
                f"{header.file.name} holds packed weights, but config.json has no quantization_config; restore the "
                "config.json that they were saved with, and pass no quantization_config"
            )


def read_record(headers: Sequence[FileHeader], config: MXFP4RLConfig) -> dict[str, Any]:
    """Return the record that [`make_record`] left, empty for files without one.

    Raises `ValueError` unless all files have the same record, and it is of the scheme ``config``.
    """
    first = headers[0].file.name
    text = headers[0].metadata.get(RECORD)
    for header in headers:
        if header.metadata.get(RECORD) != text:
            file = header.file.name
            raise ValueError(f"{file} and {first} were not written together: their headers describe different weights")
    if text is None:
        return {}
    try:
        record = json.loads(text)
        version = record["format_version"]
        meaning = record["meaning"]
        record["weight_sqnr_db"]  # an error if it is missing
    except (ValueError, KeyError, TypeError) as error:
        raise ShardError(f"{first} is damaged: the scheme in its header cannot be read") from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{first} was written in format version {version}, this hf_mxfp4 reads version {FORMAT_VERSION}; install a "
            "newer hf_mxfp4 to load it"
        )
    if meaning != _meaning(config):
        raise ValueError(
            f"{first} holds weights written as {meaning}, but config.json describes {_meaning(config)}; restore the "
            "quantization_config that the weights were saved with"
        )
    return record


def _meaning(config: MXFP4RLConfig) -> dict[str, Any]:
    """Return what decides how stored bytes are read; nothing else of the scheme matters once a weight is packed."""
    scheme = config.weight_scheme
    meaning: dict[str, Any] = {}
    if config.weight_rotation is not None:
        meaning["rotation"] = str(config.weight_rotation)
    return meaning | {
        "mode": config.mode,
        "macro_block": scheme.macro_block,
        "blockwise": scheme.mantissas > 0,
        "outlier_fallback": scheme.outlier_fallback,
    }
