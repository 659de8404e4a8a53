# SPDX-License-Identifier: Apache-2.0
"""The bytes that weights take inside vLLM, beside what their format needs and what 16 bits would take."""

from dataclasses import dataclass

import torch

from ...gemm import packed_shapes
from ...numerics import QuantScheme


@dataclass(frozen=True)
class WeightBytes:
    """Of quantized weights in one process: bytes ``stored`` in memory, bytes that their format ``needs``, and the
    number of ``values`` that they stand for."""

    stored: int = 0
    needed: int = 0
    values: int = 0

    @classmethod
    def of(cls, tensors: list[torch.Tensor], rows: int, columns: int, scheme: QuantScheme) -> "WeightBytes":
        """Of ``tensors`` that hold ``rows`` rows of ``columns`` values."""
        needed = sum(n_rows * size for n_rows, size in packed_shapes(rows, columns, scheme).values())
        return cls(sum(_storages(tensors).values()), needed, rows * columns)

    def __add__(self, other: "WeightBytes") -> "WeightBytes":
        return WeightBytes(self.stored + other.stored, self.needed + other.needed, self.values + other.values)

    @property
    def in_16_bits(self) -> int:
        return 2 * self.values

    def __str__(self) -> str:
        return (
            f"{_mib(self.stored)} ({8 * self.stored / max(1, self.values):.2f} bits a weight); the format needs "
            f"{_mib(self.needed)}, and 16 bits would take {_mib(self.in_16_bits)}"
        )


@dataclass(frozen=True)
class ServedBytes:
    """What the parameters of a model in vLLM take in the memory of one process.

    Attributes:
        quantized: of quantized weights.
        adapters: room for adapters beside them, in bytes.
        other: all other parameters, in bytes: embeddings, heads, norms, biases, routers.
        n_layers: how many of vLLM's layers are quantized.
    """

    quantized: WeightBytes
    adapters: int
    other: int
    n_layers: int

    def __str__(self) -> str:
        return (
            f"{self.n_layers} quantized layers: {self.quantized}; adapters: {_mib(self.adapters)}; other parameters: "
            f"{_mib(self.other)}"
        )


def served_bytes(model: torch.nn.Module) -> ServedBytes:
    """Measure a model inside vLLM.

    Raises `ValueError` when it has no layer that this plugin quantizes.
    """
    quantized, n_layers, adapters = WeightBytes(), 0, []
    for module in model.modules():
        measure = getattr(getattr(module, "quant_method", None), "weight_bytes", None)
        # vLLM's wrapper for its own adapters answers for the layer inside of it.
        if measure is not None and "quant_method" in vars(module).keys() | module._modules.keys():
            quantized, n_layers = quantized + measure(module), n_layers + 1
        if getattr(module, "is_mxfp4_adapter", False):
            adapters += module.parameters(recurse=False)
    if n_layers == 0:
        raise ValueError(f"{type(model).__name__} has no layer that is quantized by this plugin")
    everything = sum(_storages(list(model.parameters())).values())
    n_adapters = sum(_storages(adapters).values())
    return ServedBytes(quantized, n_adapters, everything - quantized.stored - n_adapters, n_layers)


def _storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Bytes of the memory that tensors lie in, each once, by its address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.1f} MiB"
