# SPDX-License-Identifier: Apache-2.0
"""Weights on their way from a checkpoint into vLLM: master weights quantized, then vLLM's own loaders split them by
process. Those of experts have a module of their own (`arriving_experts.py`).

vLLM asks the quantization method for a `WeightsMapper` and sends every stream of weights through it, the one from disk
and those that a trainer pushes later.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from vllm.model_executor.models.utils import WeightsMapper

from ..backends.select import dequantize
from ..config import MXFP4RLConfig
from ..gemm.storage.packed_weight import packed_tensor, quantize_weight
from .arriving_experts import ArrivingExperts
from .expected import ExpectedLayers


Weights = Iterable[tuple[str, torch.Tensor]]


class ConvertingMapper(WeightsMapper):
    """Converts weights, then does with their names what other mappers do."""

    def __init__(self, convert: Callable[[Weights], Weights], others: WeightsMapper | None = None):
        super().__init__()
        self.convert, self.others = convert, others or WeightsMapper()

    def __or__(self, other: WeightsMapper) -> "ConvertingMapper":
        return ConvertingMapper(self.convert, self.others | other)

    def __ror__(self, other: WeightsMapper) -> "ConvertingMapper":
        return ConvertingMapper(self.convert, other | self.others)

    def _map_name_with_shard(self, key: str):
        return self.others._map_name_with_shard(key)

    def apply(self, weights: Weights) -> Weights:
        return self.others.apply(self.convert(weights))


class Converter:
    """Converts the weights of one model: what a checkpoint of ``scheme`` stores into what vLLM's layers compute with."""

    def __init__(self, scheme: MXFP4RLConfig, expected: ExpectedLayers):
        self.scheme, self.expected = scheme, expected
        self.experts = ArrivingExperts(scheme, expected)

    def __call__(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            name = self.expected.own_name(name)
            found = self.experts(name, tensor)
            if found is None:
                yield name, self._from_masters(name, tensor)
            else:
                yield from found

    @property
    def _converts_masters(self) -> bool:
        return self.scheme.mode == "qat" and not self.expected.is_loaded

    def _from_masters(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """``Q(W)`` of the master weight of a quantized layer, the whole one; others as they are."""
        if not self._converts_masters or not name.endswith(".weight") or tensor.dim() != 2:
            return tensor
        owner = name.removesuffix(".weight")
        if owner not in self.expected.linears:
            return tensor
        self.expected.arrived.add(owner)
        return self._quantized(tensor)

    def _quantized(self, weight: torch.Tensor) -> torch.Tensor:
        scheme, backend = self.scheme.weight_scheme, self.scheme.backend
        packed = quantize_weight(self._here(weight.contiguous()), scheme, backend)
        return dequantize(packed_tensor(packed, weight.shape[1], scheme, weight.dtype), weight.dtype, backend)

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.expected.device is None else tensor.to(self.expected.device)
