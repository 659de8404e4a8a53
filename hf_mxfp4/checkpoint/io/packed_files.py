# SPDX-License-Identifier: Apache-2.0
"""Check the files of a packed checkpoint against what the model will load, before anything is loaded.

transformers casts a tensor of another dtype, ignores tensors that it has no place for, and fills in what is missing; of
packed weights each of these would make a wrong model.
"""

from collections.abc import Mapping, Sequence

import torch

from ...gemm.storage.packed_weight import PACKED_SUFFIXES
from .reader import AnyFile, ShardError, StoredTensor, is_safetensors, name_of, read_headers, tensors_by_name


Shapes = Mapping[str, tuple[int, ...]]


def check_packed_files(files: Sequence[AnyFile], layers: Mapping[str, Shapes], base_model_prefix: str = "") -> None:
    """Raise `ValueError` unless the packed tensors in ``files`` are those of ``layers``: names, dtypes and shapes.

    Only headers are read. Raises `ShardError`, a `ValueError`, for files that cannot be read.

    Args:
        files: all safetensors files of the checkpoint, or their headers.
        layers: names of the packed layers -> shapes of their uint8 tensors; see [`packed_shapes`]. Experts have those
            of several weights.
        base_model_prefix: what the names in the files may have more, or less, than those of the layers.
    """
    stored = _tensors(files)
    bases = {base for shapes in layers.values() for base in _weights(shapes)}
    extra = tuple(f".{base}{suffix}" for base in bases for suffix in PACKED_SUFFIXES if suffix)
    unclaimed = {name for name in stored if name.endswith(extra)}
    owners = {layer: _name_in_files(layer, shapes, base_model_prefix, stored) for layer, shapes in layers.items()}
    if not any(owners.values()):
        # Names that transformers converts while loading: the check after loading has to do.
        return
    for layer, shapes in layers.items():
        owner = owners[layer]
        if owner is None:
            raise ValueError(f"{layer}.{_weights(shapes)[0]} is in no file of the checkpoint")
        for base in _weights(shapes):
            for suffix in PACKED_SUFFIXES:
                full = f"{owner}.{base}{suffix}"
                _check(stored.get(full), full, shapes.get(f"{base}{suffix}"), is_weight=not suffix)
                unclaimed.discard(full)
    if unclaimed:
        tensor = stored[min(unclaimed)]
        raise ValueError(
            f"{tensor.file.name}: {tensor.name} belongs to no packed layer of the model; config.json does not describe "
            "these weights"
        )


def _tensors(files: Sequence[AnyFile]) -> dict[str, StoredTensor]:
    for file in files:
        if not is_safetensors(file):
            raise ShardError(f"{name_of(file)} is not a safetensors file; packed weights are read from no other format")
    return tensors_by_name(read_headers(files))


def _weights(shapes: Shapes) -> list[str]:
    """The names of the weights that a layer's tensors make up."""
    return [name for name in shapes if not name.endswith(PACKED_SUFFIXES[1:])]


def _name_in_files(layer: str, shapes: Shapes, prefix: str, stored: Mapping[str, StoredTensor]) -> str | None:
    """What a layer is called in the files, which may be those of a base model or of a model with a head."""
    names = (layer, f"{prefix}.{layer}", layer.removeprefix(f"{prefix}.")) if prefix else (layer,)
    return next((name for name in names if any(f"{name}.{own}" in stored for own in shapes)), None)


def _check(tensor: StoredTensor | None, name: str, shape: tuple[int, ...] | None, is_weight: bool) -> None:
    if shape is None:
        if tensor is not None:
            raise ValueError(f"{tensor.file.name}: {name} is not part of the scheme that config.json describes")
        return
    if tensor is None:
        raise ValueError(f"{name} is in no file of the checkpoint; the scheme in config.json needs it")
    if tensor.dtype == torch.uint8 and tensor.shape == tuple(shape):
        return
    advice = ""
    if is_weight and tensor.dtype.is_floating_point:
        advice = "; these weights are not packed: load them with the config they were saved with, then hf_mxfp4.pack"
    raise ValueError(
        f"{tensor.file.name}: {name} is {tensor.dtype} {list(tensor.shape)}; the scheme in config.json needs "
        f"uint8 {list(shape)}{advice}"
    )
