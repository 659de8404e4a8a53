# SPDX-License-Identifier: Apache-2.0
"""Check the files of a quantized checkpoint, by their headers alone, before transformers loads them.

transformers only warns of tensors that are missing or have no place, casts other dtypes, and knows nothing of what
packed bytes mean. Which tensor goes where is transformers' decision, see [`hf_mxfp4.checkpoint.io.tensor_names`]. Each
file says in its header under which scheme it was written; that record is checked too. Changes inside the data of a
tensor are found by `hf-mxfp4 verify`.
"""

import copy
import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...config import FORMAT_VERSION, MXFP4RLConfig
from ...gemm import PACKED_SUFFIXES
from .folder import model_class
from .reader import (
    AnyFile,
    FileHeader,
    ShardError,
    StoredTensor,
    is_safetensors,
    name_of,
    read_headers,
    tensors_by_name,
)
from .tensor_names import FileNames


#: Where the record stands in the metadata of a safetensors file.
RECORD = "mxfp4_rl"
#: No number is longer in JSON: keeps room in a header for one that is not known yet.
WIDEST_FLOAT = -sys.float_info.max

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")

Stored = Mapping[str, StoredTensor]


def make_record(config: MXFP4RLConfig, sqnr_db: float | None) -> dict[str, str]:
    """Metadata for the files of a checkpoint: how the bytes of packed weights are to be read, and their SQNR in
    decibels, where it was measured. None for master weights, which mean the same under any scheme: their files are
    those of the plain model."""
    if config.mode == "qat":
        return {}
    record = {"format_version": FORMAT_VERSION, "meaning": _meaning(config), "weight_sqnr_db": sqnr_db}
    return {RECORD: json.dumps(record)}


def check_checkpoint(
    files: Sequence[AnyFile], model: nn.Module, config: MXFP4RLConfig, quantized: Collection[str] = ()
) -> dict[str, Any]:
    """Raise `ValueError` (file and tensor are named) unless ``files`` hold the tensors of ``model`` under ``config``.

    Args:
        files: all weight files of the checkpoint, or their headers.
        model: with its quantized layers in place and not loaded yet (meta tensors).
        config: the scheme that `config.json` gives.
        quantized: names of the quantized modules, whose weights must be in the files of a model of another class too.

    Returns:
        The record that [`make_record`] left, empty for files written by something else.
    """
    for file in files:
        if not is_safetensors(file):
            raise ShardError(
                f"{name_of(file)} is not a safetensors file; a checkpoint of quant_method={config.quant_method!r} is "
                "read from no other format"
            )
    headers = read_headers(files)
    stored = tensors_by_name(headers)
    if not stored:
        raise ShardError(f"{headers[0].file.name} holds no tensors")
    names = FileNames(model, stored)
    _check_tensors(stored, names, model)
    _check_names(stored, names, model, quantized)
    _check_experts(stored, model)
    return _check_record(headers, config)


def check_unquantized(files: Sequence[AnyFile]) -> None:
    """Raise `ValueError` for files of packed weights that are about to be loaded as if they were in full precision."""
    for header in files:
        record = header.metadata.get(RECORD) if isinstance(header, FileHeader) else None
        if record is not None and '"packed"' in record:
            raise ValueError(
                f"{header.file.name} holds packed weights, but config.json has no quantization_config; restore the "
                "config.json that they were saved with, and pass no quantization_config"
            )


def _check_record(headers: Sequence[FileHeader], config: MXFP4RLConfig) -> dict[str, Any]:
    records = {header.file.name: header.metadata.get(RECORD) for header in headers}
    first, *_ = records
    for file, text in records.items():
        if text != records[first]:
            raise ValueError(f"{file} and {first} were not written together: their headers describe different weights")
    if records[first] is None:
        return {}
    try:
        record = json.loads(records[first])
        version, meaning = record["format_version"], record["meaning"]
        record["weight_sqnr_db"]
    except (ValueError, KeyError, TypeError) as error:
        raise ShardError(f"{first} is damaged: what its header says about the scheme cannot be read") from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{first} was written in format version {version}, this hf_mxfp4 reads version {FORMAT_VERSION}; install a "
            "newer hf_mxfp4 to load it"
        )
    if meaning != _meaning(config):
        raise ValueError(
            f"{first} holds weights written as {_spell(meaning)}, but config.json describes "
            f"{_spell(_meaning(config))}; restore the quantization_config that the weights were saved with"
        )
    return record


def _check_names(stored: Stored, names: FileNames, model: nn.Module, quantized: Collection[str]) -> None:
    """Check that the files hold what the class that was saved needs, and the quantized layers of ``model``, which may
    be of another class with a new head. They must hold nothing else, or nothing packed if the class is another."""
    kind, saved = type(model).__name__, _saved_class(model)
    packed = {name for name, tensor in model.state_dict().items() if tensor.dtype == torch.uint8}
    missing, unwanted = set(names.missing), names.unwanted()
    if saved is not type(model):
        layers = tuple(f"{name}." for name in quantized)
        missing = {name for name in missing if name in packed or name.startswith(layers)}
        bases = tuple(f".{name.rpartition('.')[2]}" for name in packed)
        unwanted = {name for name in unwanted if name.endswith(bases) and not name.endswith(".weight")}
        if saved is not None and not missing:
            with torch.device("meta"):
                missing = FileNames(saved(copy.deepcopy(model.config)), stored).missing
            kind = saved.__name__
    extra = f"{stored[min(unwanted)].file.name} has the tensor {min(unwanted)}" if unwanted else ""
    if missing:
        advice = "complete the files, or pack the weights again"
        if not missing & packed:
            advice = (
                "complete the files, or, to initialize such tensors randomly, add patterns of their names to "
                f"{kind}._keys_to_ignore_on_load_missing"
            )
        raise ValueError(
            f"{_where(stored)} has no tensor {min(missing)} ({len(missing)} missing in all), which a {kind} of this "
            f"config.json needs{f' ({extra}, for which it has no place)' if extra else ''}; {advice}"
        )
    if unwanted:
        advice = "restore the config.json that was saved with these packed weights"
        if not any(name.endswith(PACKED_SUFFIXES[1:]) for name in unwanted):
            advice = (
                "restore the config.json that was saved with the files, or, to ignore such tensors, add patterns of "
                f"their names to {kind}._keys_to_ignore_on_load_unexpected"
            )
        raise ValueError(
            f"{extra} ({len(unwanted)} such in all), for which a {kind} of this config.json has no place; {advice}"
        )


def _saved_class(model: nn.Module) -> type[nn.Module] | None:
    """Return the class of the model that the checkpoint was saved from; `None` if transformers has it not."""
    named = (getattr(model.config, "architectures", None) or [None])[0]
    return type(model) if type(model).__name__ == named else model_class(named)


def _check_experts(stored: Stored, model: nn.Module) -> None:
    """That of experts which the model joins and the files hold one by one, none is missing."""
    counts = {p.shape[0] for p in model.parameters() if p.dim() == 3}
    groups: dict[tuple[str, str], set[int]] = {}
    for name in stored:
        if counts and (match := _EXPERT.fullmatch(name)):
            groups.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (layer, tensor), found in groups.items():
        # Where the model has layers of several sizes, at least the numbers must be without gaps.
        expected = range(counts.copy().pop() if len(counts) == 1 else max(found) + 1)
        for number in sorted(set(expected) ^ found):
            problem = "has no tensor" if number not in found else "has the tensor"
            raise ValueError(
                f"{_where(stored)} {problem} {layer}.{number}.{tensor}; config.json describes {len(expected)} experts"
            )


def _check_tensors(stored: Stored, names: FileNames, model: nn.Module) -> None:
    for name, parameter in model.state_dict().items():
        tensor = stored.get(names.stored.get(name, ""))
        if tensor is None:
            continue
        what = f"{tensor.file.name}: {tensor.name} is {tensor.dtype} {list(tensor.shape)}"
        # Floating-point tensors are converted to the dtype that the user asks for, by transformers.
        both_float = parameter.is_floating_point() and tensor.dtype.is_floating_point
        if not both_float and tensor.dtype != parameter.dtype:
            unpacked = parameter.dtype == torch.uint8 and tensor.dtype.is_floating_point
            advice = "; these are not packed: load them as they were saved, then hf_mxfp4.pack" if unpacked else ""
            raise ValueError(f"{what}, but config.json describes a model that needs {parameter.dtype}{advice}")
        if tensor.shape != tuple(parameter.shape):
            raise ValueError(f"{what}, but config.json describes a model where it is {list(parameter.shape)}")


def _meaning(config: MXFP4RLConfig) -> dict[str, Any]:
    """What decides how stored bytes are read; nothing else of the scheme matters once a weight is packed."""
    scheme, rotation = config.weight_scheme, config.weight_rotation
    rotated = {} if rotation is None else {"rotation": str(rotation)}  # left out elsewhere, as in older files
    return {
        **rotated,
        "mode": config.mode,
        "macro_block": scheme.macro_block,
        "blockwise": scheme.macro_search == "blockwise",
        "outlier_fallback": scheme.outlier_fallback,
    }


def _spell(meaning: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in meaning.items()) if isinstance(meaning, dict) else str(meaning)


def _where(stored: Stored) -> str:
    files = sorted({tensor.file.name for tensor in stored.values()})
    return files[0] if len(files) == 1 else f"the checkpoint ({files[0]} to {files[-1]})"
