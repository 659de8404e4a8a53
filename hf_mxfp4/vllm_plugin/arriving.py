# SPDX-License-Identifier: Apache-2.0
"""Weights on their way from a checkpoint into vLLM: experts dequantized, master weights quantized, then vLLM's own
loaders split them by expert and by process.

vLLM asks the quantization method for a `WeightsMapper` and sends every stream of weights through it, the one from disk
and those that a trainer pushes later.
"""

import re
from collections.abc import Callable, Iterable, Iterator

import torch
from vllm.model_executor.models.utils import WeightsMapper

from ..backends.select import dequantize
from ..config import MXFP4RLConfig
from ..gemm.storage.packed_weight import (
    PACKED_FIELDS,
    PACKED_SUFFIXES,
    check_packed,
    packed_shapes,
    packed_tensor,
    quantize_weight,
)
from .arriving_linears import ArrivingLinears
from .expected import ExpectedLayers


Weights = Iterable[tuple[str, torch.Tensor]]

#: A tensor of fused experts: whose, which projection, and which part of the packed weight.
_FUSED = re.compile(rf"(.*experts)\.(gate_up_proj|down_proj)({'|'.join(PACKED_SUFFIXES)})$")
_ONE_EXPERT = re.compile(r"(.*experts)\.\d+\.\w+\.weight$")


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

    Raises `ValueError` while weights arrive, when those of packed experts are incomplete or of other shapes than the
    scheme says.
    """

    def __init__(self, scheme: MXFP4RLConfig, expected: ExpectedLayers):
        self.scheme, self.expected = scheme, expected
        self.linears = ArrivingLinears(scheme, expected)

    def __call__(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        pending: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
        for name, tensor in weights:
            name = self.expected.own_name(name)
            match = _FUSED.match(name)
            if match is None:
                converted = self.linears.convert(name, tensor)
                yield from [(name, self._from_masters(name, tensor))] if converted is None else converted
            elif tensor.dtype == torch.uint8:
                owner, projection, suffix = match.groups()
                parts = pending.setdefault((owner, projection), {})
                parts[f"weight{suffix}"] = tensor
                if parts.keys() >= packed_shapes(1, 32, self.scheme.weight_scheme).keys():
                    yield from self._dequantized(owner, projection, pending.pop((owner, projection)))
            elif tensor.dim() == 3:
                yield from self._fused(*match.group(1, 2), tensor)
            else:
                yield name, tensor
        for (owner, projection), parts in pending.items():
            missing = packed_shapes(1, 32, self.scheme.weight_scheme).keys() - parts.keys()
            names = ", ".join(sorted(name.replace("weight", f"{owner}.{projection}", 1) for name in missing))
            raise ValueError(f"{names}: in no file of the checkpoint; the scheme in config.json needs it")

    def _dequantized(self, owner: str, projection: str, parts: dict[str, torch.Tensor]) -> Weights:
        """The weights of all experts from their packed tensors ``[experts, N, ...]``, one expert at a time."""
        scheme, codes = self.scheme.weight_scheme, parts["weight"]
        rows, columns = codes.shape[1], 2 * codes.shape[2]
        shapes = {name: (len(codes), *shape) for name, shape in packed_shapes(rows, columns, scheme).items()}
        check_packed(f"{owner}.{projection}", {name: parts.get(name) for name in PACKED_FIELDS}, shapes, scheme)
        dtype = torch.get_default_dtype()  # vLLM's, while it loads
        weights = (
            dequantize(
                packed_tensor({name: self._here(part[expert]) for name, part in parts.items()}, columns, scheme, dtype),
                dtype,
                self.scheme.backend,
            )
            for expert in range(len(codes))
        )
        self.expected.arrived.add(f"{owner}.{projection}")
        yield from self._named(owner, projection, weights)

    def _fused(self, owner: str, projection: str, tensor: torch.Tensor) -> Weights:
        """Full-precision experts that transformers keeps in one tensor: masters from disk, or what a trainer pushes."""
        if self._converts_masters and owner in self.expected.experts:
            self.expected.arrived.add(f"{owner}.{projection}")
            rows = tensor.transpose(1, 2) if self.expected.is_transposed else tensor
            yield from self._named(owner, projection, map(self._quantized, rows))
        elif self.expected.is_transposed:
            yield f"{owner}.{projection}", tensor
        else:
            yield from self._named(owner, projection, tensor)

    def _named(self, owner: str, projection: str, weights: Iterable[torch.Tensor]) -> Weights:
        """Weights ``[N, K]`` of one expert after the other, by the names that vLLM's loaders know."""
        gate, up, down = self.expected.projection_names
        if self.expected.is_transposed:
            yield f"{owner}.{projection}", torch.stack([weight.t() for weight in weights])
            return
        for expert, weight in enumerate(weights):
            if projection == "down_proj":
                yield f"{owner}.{expert}.{down}.weight", weight
            else:
                for own, half in zip((gate, up), weight.chunk(2), strict=True):
                    yield f"{owner}.{expert}.{own}.weight", half

    @property
    def _converts_masters(self) -> bool:
        return self.scheme.mode == "qat" and not self.expected.is_loaded

    def _from_masters(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """``Q(W)`` of the master weight of one expert, the whole one; others as they are."""
        if not self._converts_masters or not name.endswith(".weight") or tensor.dim() != 2:
            return tensor
        one_expert = _ONE_EXPERT.match(name)
        if one_expert and one_expert[1] in self.expected.experts:
            projection = "down_proj" if f".{self.expected.projection_names[2]}." in name else "gate_up_proj"
            self.expected.arrived.add(f"{one_expert[1]}.{projection}")
        else:
            return tensor
        return self._quantized(tensor)

    def _quantized(self, weight: torch.Tensor) -> torch.Tensor:
        scheme, backend = self.scheme.weight_scheme, self.scheme.backend
        packed = quantize_weight(self._here(weight.contiguous()), scheme, backend)
        return dequantize(packed_tensor(packed, weight.shape[1], scheme, weight.dtype), weight.dtype, backend)

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.expected.device is None else tensor.to(self.expected.device)
