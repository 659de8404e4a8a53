# SPDX-License-Identifier: Apache-2.0
"""Tensors that are not quantized, on their way into a GGUF file and back into those of the model.

In the file vectors and routers are float32, as llama.cpp wants them; embeddings, the head and what else is a matrix
keep 16 bits.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...io.folder import CheckpointError
from ...io.writer import OtherTensor
from .hyperparameters import ROPE_FREQUENCIES, rope_frequencies
from .names import ALL, Rows, TensorNames


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_HEAD = "lm_head.weight"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def tensors_for(
    names: TensorNames, config: "PreTrainedConfig", tensors: Sequence[OtherTensor], dtype: torch.dtype
) -> list[OtherTensor]:
    """The tensors of the file for those of a model in ``dtype``.

    Raises [`CheckpointError`] for one that llama.cpp has no place for.
    """
    found = []
    for tensor in tensors:
        if tensor.name == _HEAD and config.tie_word_embeddings:
            continue  # the embedding, which llama.cpp takes for it
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(f"{tensor.name} is {tensor.dtype}, which GGUF files of llama.cpp do not hold")
        transposed = _is_transposed(names, tensor.name, tensor.shape)
        places = names.places(tensor.name, _n_rows(tensor.name, tensor.shape, transposed))
        found += [_part(tensor, name, rows, transposed, len(places), dtype) for name, rows in places.items()]
    if (frequencies := rope_frequencies(config)) is not None:
        shape = tuple(frequencies.shape)
        found.append(OtherTensor(ROPE_FREQUENCIES, torch.float32, shape, 0, lambda: iter([frequencies])))
    return found


def model_tensors_of(
    names: TensorNames,
    model: "PreTrainedModel",
    tensors: Sequence[OtherTensor],
    in_file: Collection[str],
    dtype: torch.dtype,
) -> list[OtherTensor]:
    """The tensors of ``model``, in ``dtype``, that ``tensors`` of a file make up; all others in it are quantized.

    Those that the file has in float32 get the model's dtype again where that changes no value.

    Raises [`CheckpointError`] where the file lacks a tensor of the model, or has one that it has no place for.
    """
    left = {tensor.name: tensor for tensor in tensors if tensor.name != ROPE_FREQUENCIES}
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    found = []
    for name, parameter in model.state_dict().items():
        shape = tuple(parameter.shape)
        transposed = _is_transposed(names, name, shape)
        places = names.places(name, _n_rows(name, shape, transposed))
        if name in tied and not in_file & places.keys():
            continue
        if missing := sorted(places.keys() - set(in_file)):
            raise CheckpointError(f"the file has no {missing[0]}, which is {name} of {type(model).__name__}")
        if places.keys() <= left.keys():
            parts = {rows_name: left.pop(rows_name) for rows_name in places}
            found.append(_narrowed(_whole(name, shape, places, parts, transposed), dtype))
    if left:
        raise CheckpointError(f"the file has {min(left)}, for which {type(model).__name__} has no place")
    return found


def _is_transposed(names: TensorNames, name: str, shape: tuple[int, ...]) -> bool:
    """Whether the model has this weight of experts as ``[experts, in, out]``."""
    return names.architecture.gate_up_alternate and len(shape) == 3 and ".experts." in name


def _n_rows(name: str, shape: tuple[int, ...], transposed: bool) -> int:
    """Output features, those of one expert."""
    if ".experts." not in name:
        return shape[0]
    return shape[-1] if transposed or len(shape) == 2 else shape[-2]


def _part(
    tensor: OtherTensor, name: str, rows: Rows, transposed: bool, n_parts: int, dtype: torch.dtype
) -> OtherTensor:
    shape = (*tensor.shape[:-2], *tensor.shape[:-3:-1]) if transposed else tensor.shape
    experts = ".experts." in tensor.name
    count = shape[1] // n_parts if experts else shape[0]
    size = (shape[0], count, *shape[2:]) if experts else shape
    stays = tensor.dtype != dtype or tensor.dtype == torch.float16
    wide = len(size) == 1 or name.endswith(".bias") or ".ffn_gate_inp." in name
    kind = torch.float32 if wide else tensor.dtype if stays else torch.bfloat16
    parts = partial(_selected, tensor, rows, transposed, experts, kind)
    return OtherTensor(name, kind, size, tensor.nbytes // n_parts, parts)


def _selected(
    tensor: OtherTensor, rows: Rows, transposed: bool, experts: bool, kind: torch.dtype
) -> Iterator[torch.Tensor]:
    parts = (part.mT if transposed else part for part in tensor.parts())
    if not experts and not _is_all(rows):
        parts = iter([torch.cat(list(parts))[rows]])
    for part in parts:
        yield (part[:, rows] if experts else part).to(kind)


def _whole(
    name: str,
    shape: tuple[int, ...],
    places: Mapping[str, Rows],
    tensors: Mapping[str, OtherTensor],
    transposed: bool,
) -> OtherTensor:
    first = next(iter(tensors.values()))
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    if len(places) == 1 and not transposed and _is_all(next(iter(places.values()))):
        return replace(first, name=name, shape=shape)
    parts = partial(_joined, places, tensors, ".experts." in name, transposed)
    return OtherTensor(name, first.dtype, shape, nbytes, parts)


def _joined(
    places: Mapping[str, Rows], tensors: Mapping[str, OtherTensor], experts: bool, transposed: bool
) -> Iterator[torch.Tensor]:
    if not experts:
        ((name, rows),) = places.items()
        part = torch.cat(list(tensors[name].parts()))
        whole = torch.empty_like(part)
        whole[rows] = part
        yield whole
        return
    for parts in zip(*(tensors[name].parts() for name in places), strict=True):
        count = sum(part.shape[1] for part in parts)
        whole = parts[0].new_empty(parts[0].shape[0], count, *parts[0].shape[2:])
        for rows, part in zip(places.values(), parts, strict=True):
            whole[:, rows] = part
        yield whole.mT if transposed else whole


def _narrowed(tensor: OtherTensor, dtype: torch.dtype) -> OtherTensor:
    if tensor.dtype != torch.float32 or dtype not in (torch.bfloat16, torch.float16):
        return tensor
    exact = all(torch.equal(part.to(dtype).float(), part) for part in tensor.parts())
    return tensor.cast(torch.float32, dtype) if exact else tensor


def _is_all(rows: Rows) -> bool:
    return not isinstance(rows, torch.Tensor) and rows == ALL
