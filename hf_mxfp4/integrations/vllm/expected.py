# SPDX-License-Identifier: Apache-2.0
"""What vLLM has made layers for, told to what converts the weights for them."""

from dataclasses import dataclass, field

import torch

from ..._logging import get_logger
from .experts_storage import ExpertsTarget
from .served import WeightBytes
from .settings import EngineSettings


@dataclass
class ExpectedLayers:
    """What vLLM has made layers for, and what came for them.

    Attributes:
        settings: how vLLM keeps their weights.
        linears: names of quantized linear layers as in checkpoints, before vLLM joined them.
        experts: quantized experts, by the names that vLLM has for them.
        projection_names: what vLLM calls gate, up and down of one expert.
        is_transposed: whether vLLM reads experts as gpt-oss has them, fused and ``[experts, K, N]``.
        has_old_names: whether vLLM's modules are called ``block_sparse_moe``, which transformers calls ``mlp``.
        device: where vLLM makes the layers, and weights are converted; `None` where they arrive.
        dtype: of vLLM's weights; `None` for that of what arrives.
        pending: tensors of packed weights of which others are still to come, by the weight's name: they may come in
            several streams.
        arrived: names of ``linears`` that were converted.
        n_quantized: how many weights came in full precision and were quantized as they came.
        has_been_told: whether that was logged of pushed ones.
        is_loaded: whether the checkpoint was read, so that what comes now is pushed by a trainer.
        n_layers: how many quantized layers vLLM has made, joined as it does.
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
    arrived: set[str] = field(default_factory=set)
    n_quantized: int = 0
    has_been_told: bool = False
    is_loaded: bool = False
    n_layers: int = 0
    _n_done: int = field(default=0, init=False, repr=False)
    _bytes: WeightBytes = field(default=WeightBytes(), init=False, repr=False)
    _tails: dict[str, str | None] = field(default_factory=dict, init=False, repr=False)
    _n_indexed: int = field(default=0, init=False, repr=False)

    def own_name(self, name: str) -> str:
        """A name of transformers, as vLLM has it."""
        if self.has_old_names:
            return name.replace(".mlp.", ".block_sparse_moe.")
        return name

    def linear(self, name: str) -> str | None:
        """The one of ``linears`` that ``name`` stands for: the same name, or one of the two with more before it, since
        models hand weights on to their parts by shorter names. `None` for none, and for more than one."""
        if name in self.linears:
            return name
        if self._n_indexed != len(self.linears):
            self._tails, self._n_indexed = {}, len(self.linears)
            for own in self.linears:
                for tail in _tails_of(own):
                    self._tails[tail] = None if tail in self._tails else own
        if name in self._tails:
            return self._tails[name]
        return next((tail for tail in _tails_of(name) if tail in self.linears), None)

    def experts_called(self, name: str) -> ExpertsTarget | None:
        """The experts that ``name`` stands for: the same name, or one of the two with more before it."""
        found = self.experts.get(name)
        if found is None:
            tails = (own for own in self.experts if own.endswith(f".{name}") or name.endswith(f".{own}"))
            found = self.experts.get(next(tails, ""))
        return found

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` where vLLM makes the layers."""
        return tensor if self.device is None else tensor.to(self.device)

    def note_quantized(self, name: str) -> None:
        """Count a weight that came in full precision and is quantized; the first that a trainer pushes is logged."""
        if self.is_loaded and not self.has_been_told:
            get_logger().info("weights are pushed to vLLM in full precision (%s) and quantized as they come", name)
            self.has_been_told = True
        self.n_quantized += 1

    def is_done(self, size: WeightBytes) -> None:
        """Take note that one of vLLM's layers has its weights, of ``size``; after the last, log what all take."""
        self.is_loaded = True
        if self._n_done == self.n_layers:  # loaded again
            return
        self._n_done, self._bytes = self._n_done + 1, self._bytes + size
        if self._n_done < self.n_layers:
            return
        storage = self.settings.weights
        get_logger().info("vLLM keeps %d quantized layers %s in %s", self.n_layers, storage, self._bytes)
        if self.settings.adapter_rank:
            get_logger().info("each has room for adapters up to rank %d", self.settings.adapter_rank)
        if self.n_quantized:
            get_logger().info("%d weights came in full precision and were quantized as they came", self.n_quantized)


def _tails_of(name: str) -> list[str]:
    """``name`` without its first part, its first two, and so on."""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(1, len(parts))]
