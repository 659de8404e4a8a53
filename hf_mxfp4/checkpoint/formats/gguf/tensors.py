# SPDX-License-Identifier: Apache-2.0
"""Tensors of a model as tensors of a GGUF file, and back.

GGML's `block_mxfp4` has 17 bytes for 32 elements: a scale byte and the codes, with no arithmetic either way. Byte ``j``
has element ``j`` in the low nibble and ``j + 16`` in the high one, where this package has ``2j`` and ``2j + 1``. GGML
reads the codes as integers, twice the E2M1 values, and halves the scale. Byte 255, NaN here, is 2^128 there.

Of the tensors that are not quantized, vectors and routers are float32 in the file, as llama.cpp wants them; embeddings,
the head and other matrices keep 16 bits.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ....numerics import BLOCK_SIZE
from ...folder import CheckpointError
from ...tensors import NewTensor
from .layout import ROPE_FREQUENCIES, Rows, TensorNames, rope_frequencies


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_HALF = BLOCK_SIZE // 2
_BLOCK_BYTES = 1 + _HALF
_HEAD = "lm_head.weight"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def to_blocks(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return codes ``[..., K/2]`` and scale bytes ``[..., K/32]`` as rows of blocks ``[..., K/32 * 17]``, all uint8."""
    first, second = codes.unflatten(-1, (-1, 2, _HALF // 2)).unbind(-2)
    even, odd = first & 15 | second << 4, first >> 4 | second & 0xF0
    return torch.cat([scale[..., None], torch.stack([even, odd], dim=-1).flatten(-2)], dim=-1).flatten(-2)


def from_blocks(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes ``[..., K/2]`` and scale bytes ``[..., K/32]`` of rows of blocks."""
    split = blocks.unflatten(-1, (-1, _BLOCK_BYTES))
    even, odd = split[..., 1::2], split[..., 2::2]
    codes = torch.cat([even & 15 | odd << 4, even >> 4 | odd & 0xF0], dim=-1)
    return codes.flatten(-2), split[..., 0].contiguous()


def row_bytes(columns: int) -> int:
    """Return the bytes of a row of ``columns`` elements, a multiple of 32."""
    return columns // BLOCK_SIZE * _BLOCK_BYTES


def tensors_for(
    names: TensorNames, config: "PreTrainedConfig", tensors: Sequence[NewTensor], dtype: torch.dtype
) -> list[NewTensor]:
    """Return the tensors of the file for those of a model in ``dtype`` that are not quantized.

    Raises [`CheckpointError`] for one that llama.cpp has no place for.
    """
    found = []
    for tensor in tensors:
        if tensor.name == _HEAD and config.tie_word_embeddings:
            continue  # the embedding, which llama.cpp uses for it
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(f"{tensor.name} is {tensor.dtype}, which GGUF files of llama.cpp do not hold")
        found += [_part(names, tensor, *place, dtype) for place in _places(names, tensor.name, tensor.shape).items()]
    if (frequencies := rope_frequencies(config)) is not None:
        found.append(NewTensor(ROPE_FREQUENCIES, torch.float32, tuple(frequencies.shape), lambda: frequencies))
    return found


def model_tensors_of(
    names: TensorNames,
    model: "PreTrainedModel",
    tensors: Sequence[NewTensor],
    in_file: Collection[str],
    dtype: torch.dtype,
) -> list[NewTensor]:
    """Return the tensors of ``model``, in ``dtype``, that ``tensors`` of a file make up; all others in it are
    quantized. Those that the file has in float32 get the model's dtype again if that changes no value.

    Raises [`CheckpointError`] if the file lacks a tensor of the model, or has one that the model has no place for.
    """
    left = {tensor.name: tensor for tensor in tensors if tensor.name != ROPE_FREQUENCIES}
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    found = []
    for name, parameter in model.state_dict().items():
        places = _places(names, name, parameter.shape)
        if name in tied and not in_file & places.keys():
            continue
        if missing := sorted(places.keys() - set(in_file)):
            raise CheckpointError(f"the file has no {missing[0]}, which is {name} of {type(model).__name__}")
        if places.keys() <= left.keys():
            parts = {part: left.pop(part) for part in places}
            make = partial(_joined, names, name, tuple(parameter.shape), places, parts)
            kind = next(iter(parts.values())).dtype
            found.append(_narrowed(NewTensor(name, kind, tuple(parameter.shape), make), dtype))
    if left:
        raise CheckpointError(f"the file has {min(left)}, for which {type(model).__name__} has no place")
    return found


def _places(names: TensorNames, name: str, shape: Sequence[int]) -> dict[str, Rows]:
    if ".experts." not in name:
        return names.places(name, shape[0])
    return names.places(name, shape[-1 if len(shape) == 2 or _is_transposed(names, name, shape) else -2])


def _is_transposed(names: TensorNames, name: str, shape: Sequence[int]) -> bool:
    """Return whether the model has this weight of experts as ``[experts, in, out]``."""
    return names.architecture.gate_up_alternate and len(shape) == 3 and ".experts." in name


def _part(names: TensorNames, tensor: NewTensor, place: str, rows: Rows, dtype: torch.dtype) -> NewTensor:
    def select(values: torch.Tensor) -> torch.Tensor:
        values = values.mT if _is_transposed(names, tensor.name, tensor.shape) else values
        return values[:, rows] if ".experts." in tensor.name else values[rows]

    shape = tuple(select(torch.empty(tensor.shape, device="meta")).shape)
    stays = tensor.dtype != dtype or tensor.dtype == torch.float16
    wide = len(shape) == 1 or place.endswith(".bias") or ".ffn_gate_inp." in place
    kind = torch.float32 if wide else tensor.dtype if stays else torch.bfloat16
    return NewTensor(place, kind, shape, lambda: select(tensor.make()).to(kind))


def _joined(
    names: TensorNames,
    name: str,
    shape: tuple[int, ...],
    places: Mapping[str, Rows],
    parts: Mapping[str, NewTensor],
) -> torch.Tensor:
    values = {part: tensor.make() for part, tensor in parts.items()}
    transposed = _is_transposed(names, name, shape)
    whole = next(iter(values.values())).new_empty((shape[0], shape[2], shape[1]) if transposed else shape)
    for part, rows in places.items():
        if ".experts." in name:
            whole[:, rows] = values[part]
        else:
            whole[rows] = values[part]
    return whole.mT if transposed else whole


def _narrowed(tensor: NewTensor, dtype: torch.dtype) -> NewTensor:
    if tensor.dtype != torch.float32 or dtype not in (torch.bfloat16, torch.float16):
        return tensor
    values = tensor.make()
    return tensor.cast(torch.float32, dtype) if torch.equal(values.to(dtype).float(), values) else tensor
