# SPDX-License-Identifier: Apache-2.0
"""Weights on their way into vLLM, those from disk and those that a trainer pushes later, each converted into what its
layer keeps (`arriving_linears.py`, `arriving_experts.py`).

vLLM asks the quantization method for a `WeightsMapper` and sends every stream of weights through it.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from vllm.model_executor.models.utils import WeightsMapper

from ...config import MXFP4RLConfig
from .arriving_experts import ArrivingExperts
from .arriving_linears import ArrivingLinears
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
    """Converts the weights of one model: what a checkpoint of ``scheme`` stores into what vLLM's layers compute with.

    Raises `ValueError` while weights arrive, when packed ones are of other shapes than the scheme says.
    """

    def __init__(self, scheme: MXFP4RLConfig, expected: ExpectedLayers):
        self.expected = expected
        self.experts, self.linears = ArrivingExperts(scheme, expected), ArrivingLinears(scheme, expected)

    def __call__(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            name = self.expected.own_name(name)
            converted = self.experts.convert(name, tensor)
            if converted is None:
                converted = self.linears.convert(name, tensor)
            yield from [(name, tensor)] if converted is None else converted
