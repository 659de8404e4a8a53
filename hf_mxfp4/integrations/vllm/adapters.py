# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters next to the packed weight of a linear layer, written in place: ``y + (x A^T) B^T``.

The factors are modules of their own, ``lora_A`` and ``lora_B``, so that their weights have the names by which trainers
push them, and that vLLM can load the layer again without them. Both are zero until something is pushed.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


#: vLLM's names of the parts of a layer that it joins from queries, keys and values; other parts have numbers.
PART_INDEX = {"q": 0, "k": 1, "v": 2}


class _Factor(nn.Module):
    """Weight of one factor, of all layers that vLLM has joined in ``layer``."""

    def __init__(self, layer: nn.Module, name: str, rank: int, shape: tuple[int, int], dtype: torch.dtype):
        super().__init__()
        # vLLM's reloading remembers parameters with their loaders, for as long as the module of these loaders lives.
        self._layer, self._name, self._rank = weakref.ref(layer), name, rank
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        self.weight.weight_loader = self.load

    def _check(self, rank: int) -> None:
        if rank > self._rank:
            raise ValueError(
                f"{self._name}: an adapter of rank {rank} was pushed, and there is room for rank {self._rank}; set "
                "adapter_rank in the vllm settings of the checkpoint"
            )


class _Down(_Factor):
    """``A`` ``[parts * rank, K]``: the parts of a joined layer below each other, each of this process's columns."""

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
        """Load ``[r, K]`` in the place of one part's adapter, whatever rank that had."""
        self._check(loaded_weight.shape[0])
        columns = param.shape[1]
        if loaded_weight.shape[1] != columns:  # split by columns
            loaded_weight = loaded_weight.narrow(1, self._layer().tp_rank * columns, columns)
        index = PART_INDEX.get(loaded_shard_id, loaded_shard_id)
        if index is None and param.shape[0] == self._rank:
            index = 0
        if not isinstance(index, int):
            raise ValueError(f"{self._name}: {loaded_shard_id!r} is none of the layers that vLLM has joined in it")
        room = param.data.narrow(0, index * self._rank, self._rank)
        room.copy_(F.pad(loaded_weight, (0, 0, 0, self._rank - loaded_weight.shape[0])))


class _Up(_Factor):
    """``B`` ``[N, rank]``, of this process's rows."""

    def __init__(self, *arguments: Any, loader: Callable[..., Any]):
        super().__init__(*arguments)
        self.weight.output_dim = 0
        self._loader = loader.__func__

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
        """Load ``[N, r]`` in the place of one part's adapter, as vLLM loads the rows of its weight."""
        self._check(loaded_weight.shape[1])
        padded = F.pad(loaded_weight, (0, self._rank - loaded_weight.shape[1]))
        shard = () if loaded_shard_id is None else (loaded_shard_id,)
        self._loader(self._layer(), param, padded, *shard)


def make_room(
    layer: nn.Module,
    name: str,
    rank: int,
    n_parts: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    loader: Callable[..., Any],
) -> None:
    """Give ``layer`` factors of zeros, for adapters up to ``rank``.

    Args:
        name: of the layer in vLLM, for messages.
        n_parts: how many layers with adapters of their own vLLM has joined in it.
        shape: ``(N, K)`` of the weight, in this process.
        loader: vLLM's, a method of ``layer``, which knows the rows of this process.
    """
    rows, columns = shape
    layer.lora_A = _Down(layer, name, rank, (n_parts * rank, columns), dtype)
    layer.lora_B = _Up(layer, name, rank, (rows, rank), dtype, loader=loader)


def add_adapters(y: torch.Tensor, x: torch.Tensor, layer: nn.Module, rows: list[int]) -> torch.Tensor:
    """Return ``y`` ``[..., N]`` with what the adapters of ``layer`` add to it for inputs ``x`` ``[..., K]``.

    Args:
        rows: of this process, of each layer with an adapter of its own.
    """
    inner, up = F.linear(x, layer.lora_A.weight), layer.lora_B.weight
    if len(rows) == 1:
        return y + F.linear(inner, up)
    parts = zip(inner.chunk(len(rows), dim=-1), up.split(rows), strict=True)
    return y + torch.cat([F.linear(part, factor) for part, factor in parts], dim=-1)
