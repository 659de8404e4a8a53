# SPDX-License-Identifier: Apache-2.0
"""What vLLM has made layers for, told to what converts the weights for them."""

from dataclasses import dataclass, field

import torch

from .._logging import get_logger
from .experts_storage import ExpertsTarget


@dataclass
class ExpectedLayers:
    """What vLLM has made layers for, and what came for them.

    Attributes:
        linears: names of quantized linear layers as in checkpoints, before vLLM joined them.
        experts: quantized experts, by the names that vLLM has for them.
        projection_names: what vLLM calls gate, up and down of one expert.
        is_transposed: whether vLLM reads experts as gpt-oss has them, fused and ``[experts, K, N]``.
        has_old_names: whether vLLM's modules are called ``block_sparse_moe``, which transformers calls ``mlp``.
        device: where vLLM makes the layers, and weights are converted; `None` where they arrive.
        arrived: names of ``linears`` that were converted.
        is_loaded: whether the checkpoint was read, so that what comes now is pushed by a trainer, and is as it
            should be.
        n_quantized: weights of single experts that were quantized as they arrived.
    """

    linears: set[str] = field(default_factory=set)
    experts: dict[str, ExpertsTarget] = field(default_factory=dict)
    projection_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    is_transposed: bool = False
    has_old_names: bool = False
    device: torch.device | None = None
    arrived: set[str] = field(default_factory=set)
    is_loaded: bool = False
    n_quantized: int = 0
    _has_told: bool = False

    def own_name(self, name: str) -> str:
        """A name of transformers, as vLLM has it."""
        if self.has_old_names:
            return name.replace(".mlp.", ".block_sparse_moe.")
        return name

    def experts_called(self, name: str) -> ExpertsTarget | None:
        """Quantized experts that are here, with or without what stands before the layers."""
        found = self.experts.get(name)
        if found is None:
            ends = (target for own, target in self.experts.items() if f".{own}".endswith(f".{name}"))
            found = next(ends, None) or next((t for own, t in self.experts.items() if name.endswith(f".{own}")), None)
        return found

    def count_quantized(self) -> None:
        """Count a weight of an expert that was quantized as it arrived; say so once when a trainer pushes it."""
        self.n_quantized += 1
        if self.is_loaded and not self._has_told:
            self._has_told = True
            get_logger().info("vLLM: 16-bit weights of experts are pushed, and quantized as they arrive")
