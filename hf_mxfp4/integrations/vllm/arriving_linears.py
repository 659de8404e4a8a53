# SPDX-License-Identifier: Apache-2.0
"""Weights of linear layers on their way into vLLM: packed ones into packed layers as they are, and everything else into
what the layer keeps.

A weight is converted whole, before vLLM splits it by columns or joins it with others. Its tensors may come in several
streams, one in each.
"""

import re
from collections.abc import Iterable

import torch

from ...backends.select import dequantize
from ...config import MXFP4RLConfig
from ...gemm import PACKED_FIELDS, check_packed, packed_shapes, packed_tensor, quantize_weight
from .expected import ExpectedLayers


_WEIGHT = re.compile(rf"(.*)\.({'|'.join(PACKED_FIELDS)})$")

_ADAPTER = re.compile(r"(.*)\.lora_[AB]\.weight$")

#: On a tensor that was made here: models hand weights on to their parts through another converter.
DONE = "mxfp4_is_converted"


class ArrivingLinears:
    """Converts the weights of the linear layers of one model.

    Raises `ValueError`, as tensors arrive, for packed ones of other shapes than the scheme says, and for adapters that
    there is no room for.
    """

    def __init__(self, scheme: MXFP4RLConfig, expected: ExpectedLayers):
        self.scheme, self.expected = scheme, expected

    def convert(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]] | None:
        """What to load in the place of ``tensor``, maybe nothing yet; `None` for what is no weight of a quantized
        linear layer."""
        if adapter := _ADAPTER.match(name):
            self._check_adapter(name, adapter[1])
            return None
        match = _WEIGHT.match(name)
        owner = self.expected.linear(match[1]) if match else None
        if owner is None or tensor.dim() != 2 or getattr(tensor, DONE, False):
            return None
        is_packed_here, is_packed = self.expected.settings.weights != "dense", tensor.dtype == torch.uint8
        if self.expected.settings.weights == "native" and self.expected.is_loaded:
            raise ValueError(
                f"{name} was pushed, and vLLM's own kernels have rearranged the weights; set weights='packed' in the "
                "vllm settings of the checkpoint"
            )
        if is_packed and is_packed_here:
            self.expected.arrived.add(owner)
            return None
        if is_packed:
            return self._from_packed(owner, match[1], match[2], tensor)
        if match[2] != "weight" or not tensor.is_floating_point():
            return None
        if is_packed_here:
            return self._to_packed(owner, match[1], tensor)
        if self.expected.is_loaded or self.scheme.mode == "packed":
            return None
        self.expected.note_quantized(name)
        return self._to_dense(owner, match[1], self._quantized(tensor), tensor.shape[1], tensor.dtype)

    def _check_adapter(self, name: str, layer: str) -> None:
        if self.expected.linear(layer) is not None and not self.expected.settings.adapter_rank:
            raise ValueError(
                f"{name} was pushed, and vLLM has no room for adapters; set adapter_rank in the vllm settings of the "
                "checkpoint, or push merged weights"
            )

    def _to_packed(self, owner: str, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        self.expected.note_quantized(name)
        self.expected.arrived.add(owner)
        return [(f"{name}.{part}", marked(value)) for part, value in self._quantized(tensor).items()]

    def _from_packed(
        self, owner: str, name: str, part: str, tensor: torch.Tensor
    ) -> Iterable[tuple[str, torch.Tensor]]:
        parts = self.expected.pending.setdefault(owner, {})
        parts[part] = tensor
        scheme = self.scheme.weight_scheme
        if not parts.keys() >= packed_shapes(1, 32, scheme).keys():
            return []
        del self.expected.pending[owner]
        rows, columns = parts["weight"].shape[0], 2 * parts["weight"].shape[1]
        check_packed(
            name, {part: parts.get(part) for part in PACKED_FIELDS}, packed_shapes(rows, columns, scheme), scheme
        )
        parts = {part: self.expected.here(value) for part, value in parts.items()}
        return self._to_dense(owner, name, parts, columns, self.expected.dtype or torch.get_default_dtype())

    def _to_dense(
        self, owner: str, name: str, packed: dict[str, torch.Tensor], columns: int, dtype: torch.dtype
    ) -> Iterable[tuple[str, torch.Tensor]]:
        self.expected.arrived.add(owner)
        tensor = packed_tensor(packed, columns, self.scheme.weight_scheme, dtype)
        return [(f"{name}.weight", marked(dequantize(tensor, dtype, self.scheme.backend)))]

    def _quantized(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        options = self.scheme.weight_scheme, self.scheme.backend, self.scheme.weight_rotation
        return quantize_weight(self.expected.here(weight.detach()).contiguous(), *options)


def marked(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, to be loaded as it is."""
    setattr(tensor, DONE, True)
    return tensor
