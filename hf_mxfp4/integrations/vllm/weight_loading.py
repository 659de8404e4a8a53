# SPDX-License-Identifier: Apache-2.0
"""Weights on their way into vLLM, from disk or pushed by a trainer, each converted into what its layer keeps: packed
layers keep codes and scales, which 16-bit weights become here; dense ones values, dequantized here.

A weight is converted whole, before vLLM splits it by columns or joins it with others. Its tensors may come in several
streams, one in each. Nothing here imports vLLM.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from ...backends import dequantize
from ...config import MXFP4RLConfig
from ...gemm import (
    PACKED_FIELDS,
    PACKED_SUFFIXES,
    check_packed,
    packed_shapes,
    packed_tensor,
    quantize_weight,
)
from ...numerics import BLOCK_SIZE, QuantScheme
from .experts_storage import ExpertsTarget
from .settings import EngineSettings


Weights = Iterable[tuple[str, torch.Tensor]]

_LINEAR = re.compile(rf"(.*)\.({'|'.join(PACKED_FIELDS)})$")
_ADAPTER = re.compile(r"(.*)\.lora_[AB]\.weight$")
#: A tensor of fused experts: whose, which projection, and which part of the packed weight.
_FUSED_EXPERTS = re.compile(rf"(.*experts)\.(gate_up_proj|down_proj)({'|'.join(PACKED_SUFFIXES)})$")
#: The full-precision weight of one expert: whose, its number, and what vLLM calls its projection.
_ONE_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(\w+)\.weight$")

#: An attribute of tensors that were made here: models hand weights on to their parts through another converter.
_DONE = "mxfp4_is_converted"


@dataclass
class ExpectedLayers:
    """Layers that vLLM has made, and what was loaded into them.

    Attributes:
        settings: how vLLM keeps their weights.
        linears: names of quantized linear layers as in checkpoints, before vLLM joined them.
        experts: quantized experts, by the names that vLLM has for them.
        projection_names: what vLLM calls gate, up and down of one expert.
        is_transposed: whether vLLM reads experts as gpt-oss has them, fused and ``[experts, K, N]``.
        has_old_names: whether vLLM's modules are called ``block_sparse_moe``, which transformers calls ``mlp``.
        device: where vLLM makes the layers, and weights are converted; `None` where they are.
        dtype: of vLLM's weights; `None` for that of what is loaded.
        pending: tensors of packed weights of which others are still to come, by the weight's name.
        loaded: the packed tensors of ``linears`` that came, or were made of what came.
        is_loaded: whether the checkpoint was read, so that what comes now is pushed by a trainer.
    """

    settings: EngineSettings = EngineSettings()
    linears: set[str] = field(default_factory=set)
    experts: dict[str, ExpertsTarget] = field(default_factory=dict)
    projection_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    is_transposed: bool = False
    has_old_names: bool = False
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    pending: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    is_loaded: bool = False

    @property
    def is_packed(self) -> bool:
        """Return whether codes and scales are kept."""
        return self.settings.weights == "packed"

    def own_name(self, name: str) -> str:
        """Return vLLM's name for one of transformers."""
        return name.replace(".mlp.", ".block_sparse_moe.") if self.has_old_names else name

    def linear(self, name: str) -> str | None:
        """Return the one of ``linears`` that ``name`` stands for; `None` for none, and for more than one."""
        return _called(name, self.linears)

    def experts_called(self, name: str) -> ExpertsTarget | None:
        """Return the experts that ``name`` stands for."""
        return self.experts.get(_called(name, self.experts))

    def check_linear(self, parts: list[str], scheme: QuantScheme) -> None:
        """Note that vLLM has read a checkpoint. Raise `ValueError` unless it had all tensors of the linear layers
        ``parts``."""
        self.is_loaded = True
        names = [f"{part}.{name}" for part in parts for name in packed_shapes(1, BLOCK_SIZE, scheme)]
        check_complete([name for name in names if name not in self.loaded])

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` where vLLM makes the layers."""
        return tensor if self.device is None else tensor.to(self.device)


def check_complete(missing: list[str]) -> None:
    """Raise `ValueError` for tensors that were not loaded."""
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: in no file of the checkpoint, where the scheme in config.json needs it, or vLLM "
            "loads this model's weights past the plugin; then export it with hf-mxfp4 export --format bf16"
        )


def _called(name: str, names: Iterable[str]) -> str | None:
    """Return the same name, or the only one of the two with more before it: models hand weights on to their parts by
    shorter names."""
    if name in names:
        return name
    found = [own for own in names if own.endswith(f".{name}") or name.endswith(f".{own}")]
    return found[0] if len(found) == 1 else None


class WeightConverter:
    """Converts the weights of one model: what a checkpoint of ``scheme`` stores into what vLLM's layers compute with.

    Raises `ValueError`, as tensors come, for packed ones of other shapes than the scheme says, and for adapters that
    there is no room for.
    """

    def __init__(self, scheme: MXFP4RLConfig, expected: ExpectedLayers):
        self.scheme, self.expected = scheme, expected

    def __call__(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            name = self.expected.own_name(name)
            converted = None if getattr(tensor, _DONE, False) else self.convert(name, tensor)
            yield from [(name, tensor)] if converted is None else converted

    def convert(self, name: str, tensor: torch.Tensor) -> Weights | None:
        """Return what to load in the place of ``tensor``, maybe nothing yet; `None` for what goes on as it is."""
        if adapter := _ADAPTER.match(name):
            self._check_adapter(name, adapter[1])
        elif fused := _FUSED_EXPERTS.match(name):
            return self._fused_experts(*fused.groups(), tensor)
        elif (one := _ONE_EXPERT.match(name)) and (target := self.expected.experts_called(one[1])) is not None:
            return self._one_expert(target, one[1], int(one[2]), one[3], tensor) if self._quantizes else None
        elif (linear := _LINEAR.match(name)) and (owner := self.expected.linear(linear[1])) is not None:
            return self._linear(owner, linear[1], linear[2], tensor) if tensor.dim() == 2 else None
        return None

    @property
    def _quantizes(self) -> bool:
        """Return whether 16-bit weights are quantized; those pushed into dense layers are already."""
        return self.expected.is_packed or self.scheme.mode == "qat" and not self.expected.is_loaded

    def _check_adapter(self, name: str, layer: str) -> None:
        if self.expected.linear(layer) is not None and not self.expected.settings.adapter_rank:
            raise ValueError(
                f"{name} was pushed, and vLLM has no room for adapters; set adapter_rank in the vllm settings of the "
                "checkpoint, or push merged weights"
            )

    def _pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        options = self.scheme.weight_scheme, self.scheme.backend, self.scheme.weight_rotation
        return quantize_weight(self.expected.here(weight.detach()).contiguous(), *options)

    def _values(self, packed: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        packed = {name: self.expected.here(part) for name, part in packed.items()}
        tensor = packed_tensor(packed, 2 * packed["weight"].shape[1], self.scheme.weight_scheme, dtype)
        return dequantize(tensor, dtype, self.scheme.backend)

    @property
    def _dtype(self) -> torch.dtype:
        return self.expected.dtype or torch.get_default_dtype()

    # ---- linear layers ----------------------------------------------------------------------------------------------

    def _linear(self, owner: str, name: str, part: str, tensor: torch.Tensor) -> Weights | None:
        if tensor.dtype == torch.uint8:
            self.expected.loaded.add(f"{owner}.{part}")
            return None if self.expected.is_packed else self._dequantized(owner, name, part, tensor)
        if part != "weight" or not tensor.is_floating_point() or not self._quantizes:
            return None
        packed = self._pack(tensor)
        self.expected.loaded.update(f"{owner}.{part}" for part in packed)
        if self.expected.is_packed:
            return [(f"{name}.{part}", _done(value)) for part, value in packed.items()]
        return [(f"{name}.weight", _done(self._values(packed, tensor.dtype)))]

    def _dequantized(self, owner: str, name: str, part: str, tensor: torch.Tensor) -> Weights:
        parts, scheme = self.expected.pending.setdefault(owner, {}), self.scheme.weight_scheme
        parts[part] = tensor
        if not parts.keys() >= packed_shapes(1, BLOCK_SIZE, scheme).keys():
            return []
        del self.expected.pending[owner]
        rows, n_bytes = parts["weight"].shape
        shapes = packed_shapes(rows, 2 * n_bytes, scheme)
        check_packed(name, {field: parts.get(field) for field in PACKED_FIELDS}, shapes, scheme)
        return [(f"{name}.weight", _done(self._values(parts, self._dtype)))]

    # ---- experts ----------------------------------------------------------------------------------------------------

    def _fused_experts(self, owner: str, projection: str, suffix: str, tensor: torch.Tensor) -> Weights | None:
        target, is_transposed = self.expected.experts_called(owner), self.expected.is_transposed
        if target is not None and tensor.dtype == torch.uint8:
            return self._codes(target, owner, projection, f"weight{suffix}", tensor)
        if tensor.dim() != 3 or not tensor.is_floating_point():
            return None
        if target is None or not self._quantizes:
            return None if is_transposed else self._by_expert(owner, projection, tensor)
        rows = tensor.transpose(1, 2) if is_transposed else tensor
        if target.is_packed:
            for expert in target.experts:
                target.store_expert(projection, expert, self._pack(rows[expert]))
            return ()
        target.loaded[projection].update(target.experts)
        return self._by_expert(owner, projection, (self._values(self._pack(each), each.dtype) for each in rows))

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
        target.loaded[projection].update(target.experts)
        experts = ({name: part[expert] for name, part in parts.items()} for expert in range(target.n_experts))
        return self._by_expert(owner, projection, (self._values(own, self._dtype) for own in experts))

    def _one_expert(self, target: ExpertsTarget, owner: str, expert: int, name: str, tensor: torch.Tensor) -> Weights:
        """Convert gate, up or down of an expert. Gate and up are quantized as the one weight that the policy has."""
        gate, up, down = self.expected.projection_names
        if target.is_packed and expert not in target.experts:
            return ()
        projection = "down_proj" if name == down else "gate_up_proj"
        if projection == "gate_up_proj":
            halves = target.halves.setdefault(expert, {})
            halves[name] = tensor
            if len(halves) < 2:
                return ()
            tensor = torch.cat([halves[gate], halves[up]])
            del target.halves[expert]
        packed = self._pack(tensor)
        if target.is_packed:
            target.store_expert(projection, expert, packed)
            return ()
        target.loaded[projection].add(expert)
        return self._of_one(owner, projection, expert, self._values(packed, tensor.dtype))

    def _by_expert(self, owner: str, projection: str, weights: Iterable[torch.Tensor]) -> Weights:
        """Name the values of all experts, each ``[N, K]``, as vLLM's own loaders read them."""
        if self.expected.is_transposed:
            yield f"{owner}.{projection}", _done(torch.stack([weight.t() for weight in weights]))
            return
        for expert, weight in enumerate(weights):
            yield from self._of_one(owner, projection, expert, weight)

    def _of_one(self, owner: str, projection: str, expert: int, weight: torch.Tensor) -> Weights:
        gate, up, down = self.expected.projection_names
        if projection == "down_proj":
            return [(f"{owner}.{expert}.{down}.weight", _done(weight))]
        halves = zip((gate, up), weight.chunk(2), strict=True)
        return [(f"{owner}.{expert}.{name}.weight", _done(half)) for name, half in halves]


def _done(tensor: torch.Tensor) -> torch.Tensor:
    setattr(tensor, _DONE, True)
    return tensor
