# SPDX-License-Identifier: Apache-2.0
"""Check the files of a quantized checkpoint, by their headers alone, before transformers loads them.

transformers only warns of tensors that are missing or have no place, casts other dtypes, and knows nothing of what
packed bytes mean. Each file says in its header under which scheme it was written; that record is checked too. Changes
inside the data of a tensor are found by `hf-mxfp4 verify`.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...config import FORMAT_VERSION, MXFP4RLConfig
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
    files: Sequence[AnyFile], model: nn.Module, config: MXFP4RLConfig, heads: Iterable[str] = ()
) -> dict[str, Any]:
    """Raise `ValueError` (file and tensor are named) unless ``files`` are an undamaged checkpoint of ``model``.

    Args:
        files: all weight files of the checkpoint, or their headers.
        model: with its quantized layers in place and not loaded yet (meta tensors).
        config: the scheme that `config.json` gives.
        heads: plain layers that a checkpoint of another class may lack, such as the pooler of a classifier.

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
    _check_index(headers, stored)
    _check_tensors(stored, model)
    _check_names(stored, model, heads)
    _check_experts(stored, model)
    return _check_record(headers, config)


def _check_index(headers: Sequence[FileHeader], stored: Stored) -> None:
    names = {header.file.name for header in headers}
    for index in headers[0].file.parent.glob("*.safetensors.index*.json"):
        try:
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError):
            continue  # transformers read an index that is whole
        if not isinstance(places, dict) or set(places.values()) != names:
            continue
        for name, file in places.items():
            if name not in stored or stored[name].file.name != file:
                raise ValueError(f"{file} has no tensor {name}, which {index.name} places there")
        for name in stored.keys() - places.keys():
            raise ValueError(f"{stored[name].file.name} has the tensor {name}, which {index.name} does not list")


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


def _check_names(stored: Stored, model: nn.Module, heads: Iterable[str] = ()) -> None:
    """That the files hold every tensor of the model and no other, or of its base model, if they are of another
    class."""
    experts = tuple(
        f"{name}." for name, module in model.named_modules() if any(p.dim() == 3 for p in module.parameters(False))
    )
    prefix = getattr(model, "base_model_prefix", "")
    architectures = getattr(model.config, "architectures", None) or []
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    expected, found = set(model.state_dict()) - tied, set(stored)
    if type(model).__name__ not in architectures and prefix:
        inner = hasattr(model, prefix)
        expected = {name for name in expected if not inner or name.startswith(f"{prefix}.")}
        expected = {name.removeprefix(f"{prefix}.") for name in expected}
        found = {name.removeprefix(f"{prefix}.") for name in found if name.startswith(f"{prefix}.")} or found
        new = {f"{head.removeprefix(f'{prefix}.')}.{own}" for head in heads for own in ("weight", "bias")}
        expected -= new - found
    missing = {name for name in expected - found if not name.startswith(experts)}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    unexpected = {
        name
        for name in found - expected - tied
        if not name.startswith(experts) and not any(re.search(pattern, name) for pattern in ignored)
    }
    if missing and unexpected and _renames(model):
        return  # names that transformers translates while it loads: what is missing is found afterwards
    if missing:
        raise ValueError(
            f"{_where(stored)} has no tensor {min(missing)} ({len(missing)} missing in all), which a "
            f"{type(model).__name__} of this config.json needs"
        )
    if unexpected:
        raise ValueError(
            f"{_where(stored)} has the tensor {min(unexpected)} ({len(unexpected)} such in all), for which a "
            f"{type(model).__name__} of this config.json has no place"
        )


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


def _check_tensors(stored: Stored, model: nn.Module) -> None:
    for name, parameter in model.state_dict().items():
        tensor = stored.get(name)
        if tensor is None:
            continue
        what = f"{tensor.file.name}: {name} is {tensor.dtype} {list(tensor.shape)}"
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


def _renames(model: nn.Module) -> bool:
    """Whether transformers translates the names in checkpoints of this architecture."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return bool(get_checkpoint_conversion_mapping(getattr(model.config, "model_type", "")))
