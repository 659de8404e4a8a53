# SPDX-License-Identifier: Apache-2.0
"""What vLLM has made layers for, told to what converts the weights for them."""

from dataclasses import dataclass, field

import torch


@dataclass
class ExpectedLayers:
    """What vLLM has made layers for, and what came for them.

    Attributes:
        linears: names of quantized linear layers as in checkpoints, before vLLM joined them.
        experts: names of quantized experts, as vLLM has them.
        projection_names: what vLLM calls gate, up and down of one expert.
        is_transposed: whether vLLM reads experts as gpt-oss has them, fused and ``[experts, K, N]``.
        has_old_names: whether vLLM's modules are called ``block_sparse_moe``, which transformers calls ``mlp``.
        device: where vLLM makes the layers, and weights are converted; `None` where they arrive.
        arrived: names of ``linears``, and of projections of ``experts``, that were converted.
        is_loaded: whether the checkpoint was read, so that what comes now is pushed by a trainer, and is as it
            should be.
    """

    linears: set[str] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)
    projection_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    is_transposed: bool = False
    has_old_names: bool = False
    device: torch.device | None = None
    arrived: set[str] = field(default_factory=set)
    is_loaded: bool = False

    def own_name(self, name: str) -> str:
        """A name of transformers, as vLLM has it."""
        if self.has_old_names:
            return name.replace(".mlp.", ".block_sparse_moe.")
        return name

    def has_arrived(self, name: str) -> bool:
        """Whether ``name`` was converted, with or without what stands before the layers."""
        return any(own == name or name.endswith(f".{own}") for own in self.arrived)
