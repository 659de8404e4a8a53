# SPDX-License-Identifier: Apache-2.0
"""Tensors of a model as tensors of a GGUF file.

GGML's `block_mxfp4` has 17 bytes for 32 elements: a scale byte and the codes, with no arithmetic either way. Byte ``j``
has element ``j`` in the low nibble and ``j + 16`` in the high one, where this package has ``2j`` and ``2j + 1``. GGML
reads the codes as integers, twice the E2M1 values, and halves the scale. Byte 255, NaN here, is 2^128 there.

Of the tensors that are not quantized, vectors and routers are float32 in the file, as llama.cpp wants them; embeddings,
the head and other matrices keep 16 bits.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ....numerics import BLOCK_SIZE
from ...folder import CheckpointError
from ...tensors import NewTensor
from .layout import ROPE_FREQUENCIES, Rows, TensorNames, rope_frequencies


if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_HALF = BLOCK_SIZE // 2
_HEAD = "lm_head.weight"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def to_blocks(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return codes ``[..., K/2]`` and scale bytes ``[..., K/32]`` as rows of blocks ``[..., K/32 * 17]``, all uint8."""
    first, second = codes.unflatten(-1, (-1, 2, _HALF // 2)).unbind(-2)
    even, odd = first & 15 | second << 4, first >> 4 | second & 0xF0
    return torch.cat([scale[..., None], torch.stack([even, odd], dim=-1).flatten(-2)], dim=-1).flatten(-2)


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
