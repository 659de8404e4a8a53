# SPDX-License-Identifier: Apache-2.0
"""Weights of experts on their way into vLLM, from a checkpoint or pushed by a trainer: into packed storage as codes,
which 16-bit weights become on arrival; otherwise dequantized, and on to vLLM's own loaders."""

import re
from collections.abc import Iterable

import torch

from ...backends.select import dequantize
from ...config import MXFP4RLConfig
from ...gemm import PACKED_SUFFIXES, packed_tensor, quantize_weight
from .arriving_linears import DONE, marked
from .expected import ExpectedLayers
from .experts_storage import ExpertsTarget


Weights = Iterable[tuple[str, torch.Tensor]]

#: A tensor of fused experts: whose, which projection, and which part of the packed weight.
_FUSED = re.compile(rf"(.*experts)\.(gate_up_proj|down_proj)({'|'.join(PACKED_SUFFIXES)})$")
#: The full-precision weight of one expert: whose, its number, and what vLLM calls its projection.
_ONE_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(\w+)\.weight$")


class ArrivingExperts:
    """Converts the weights of the experts of one model.

    Raises `ValueError` while weights arrive, when packed ones are of other shapes than the scheme says.
    """

    def __init__(self, scheme: MXFP4RLConfig, expected: ExpectedLayers):
        self.scheme, self.expected = scheme, expected

    def convert(self, name: str, tensor: torch.Tensor) -> Weights | None:
        """What to load in the place of ``tensor``, maybe nothing; `None` for what goes on as it is."""
        if getattr(tensor, DONE, False):
            return None
        if fused := _FUSED.match(name):
            return self._fused(*fused.groups(), tensor)
        if one := _ONE_EXPERT.match(name):
            target = self.expected.experts_called(one[1])
            if target is not None and self._is_quantized_here(target):
                return self._one_expert(target, one[1], int(one[2]), one[3], tensor)
        return None

    def _fused(self, owner: str, projection: str, suffix: str, tensor: torch.Tensor) -> Weights | None:
        target = self.expected.experts_called(owner)
        if target is not None and tensor.dtype == torch.uint8:
            return self._codes(target, owner, projection, f"weight{suffix}", tensor)
        if tensor.dim() != 3 or not tensor.is_floating_point():
            return None
        if target is not None and self._is_quantized_here(target):
            rows = tensor.transpose(1, 2) if self.expected.is_transposed else tensor
            return self._quantized(target, owner, projection, rows)
        return None if self.expected.is_transposed else self._named(owner, projection, tensor)

    def _is_quantized_here(self, target: ExpertsTarget) -> bool:
        """Whether 16-bit weights are quantized on arrival. What is pushed into dequantized ones is as it should be."""
        return target.is_packed or self.scheme.mode == "qat" and not self.expected.is_loaded

    def _codes(self, target: ExpertsTarget, owner: str, projection: str, part: str, tensor: torch.Tensor) -> Weights:
        if target.is_packed:
            target.store(projection, part, tensor)
            return ()
        target.check(projection, {part: tensor})
        parts = target.parts.setdefault(projection, {})
        parts[part] = tensor
        if parts.keys() < target.shapes(projection).keys():
            return ()
        del target.parts[projection]
        target.arrived[projection].update(target.share.experts)
        dtype = self.expected.dtype or torch.get_default_dtype()
        experts = ({name: part[expert] for name, part in parts.items()} for expert in range(target.share.n_experts))
        return self._named(owner, projection, (self._values(target, projection, own, dtype) for own in experts))

    def _quantized(self, target: ExpertsTarget, owner: str, projection: str, rows: torch.Tensor) -> Weights:
        """All experts, ``[experts, N, K]``."""
        if target.is_packed:
            for expert in target.share.experts:
                self._store(target, projection, expert, rows[expert])
            return ()
        target.arrived[projection].update(target.share.experts)
        return self._named(owner, projection, (self._rounded(target, projection, weight) for weight in rows))

    def _one_expert(self, target: ExpertsTarget, owner: str, expert: int, name: str, tensor: torch.Tensor) -> Weights:
        """One of gate, up and down of an expert. Gate and up are quantized as the one weight that the policy has."""
        gate, up, down = self.expected.projection_names
        if target.is_packed and expert not in target.share.experts:
            return ()
        projection = "down_proj" if name == down else "gate_up_proj"
        if projection == "gate_up_proj":
            halves = target.halves.setdefault(expert, {})
            halves[name] = tensor
            if len(halves) < 2:
                return ()
            tensor = torch.cat([halves[gate], halves[up]])
            del target.halves[expert]
        if target.is_packed:
            self._store(target, projection, expert, tensor)
            return ()
        target.arrived[projection].add(expert)
        return self._of_one(owner, projection, expert, self._rounded(target, projection, tensor))

    def _store(self, target: ExpertsTarget, projection: str, expert: int, weight: torch.Tensor) -> None:
        target.store_expert(projection, expert, self._packed(weight, f"{target.name}.{expert}.{projection}"))

    def _packed(self, weight: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        self.expected.note_quantized(name)
        return quantize_weight(self.expected.here(weight.contiguous()), self.scheme.weight_scheme, self.scheme.backend)

    def _rounded(self, target: ExpertsTarget, projection: str, weight: torch.Tensor) -> torch.Tensor:
        """``Q(W)`` of one expert in its dtype."""
        return self._values(target, projection, self._packed(weight, target.name), weight.dtype)

    def _values(
        self, target: ExpertsTarget, projection: str, parts: dict[str, torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        own = {name: self.expected.here(part) for name, part in parts.items()}
        tensor = packed_tensor(own, target.sizes[projection][1], target.scheme, dtype)
        return dequantize(tensor, dtype, self.scheme.backend)

    def _named(self, owner: str, projection: str, weights: Iterable[torch.Tensor]) -> Weights:
        """Weights ``[N, K]`` of one expert after the other, by the names that vLLM's loaders know."""
        if self.expected.is_transposed:
            yield f"{owner}.{projection}", marked(torch.stack([weight.t() for weight in weights]))
            return
        for expert, weight in enumerate(weights):
            yield from self._of_one(owner, projection, expert, weight)

    def _of_one(self, owner: str, projection: str, expert: int, weight: torch.Tensor) -> Weights:
        gate, up, down = self.expected.projection_names
        if projection == "down_proj":
            return [(f"{owner}.{expert}.{down}.weight", marked(weight))]
        halves = zip((gate, up), weight.chunk(2), strict=True)
        return [(f"{owner}.{expert}.{name}.weight", marked(half)) for name, half in halves]
