# SPDX-License-Identifier: Apache-2.0
"""Random numbers of a layer, a function of (seed, rank, step, layer, product, operand), so that a run can be repeated
and resumed.

Draws of the forward product are the same in all forward passes of a step, hence also in one that gradient checkpointing
repeats. Draws of the backward products also depend on how many backward passes the layer has had in the step, so that
the micro-batches of a step round independently.
"""

import hashlib

import torch

from ..numerics import random_signs


class LayerRng:
    """Source of the random numbers of one layer.

    Args:
        seed: of the run.
        layer: name of the layer in its model.

    Attributes:
        step: the optimizer step, see [`set_step`].
        n_backward: backward passes of this layer since the step was set.
    """

    def __init__(self, seed: int, layer: str):
        self.seed = seed
        self.layer = layer
        self.step = self.n_backward = 0

    def set_step(self, step: int) -> None:
        """Begin an optimizer step. Not between a forward pass and its backward pass."""
        self.step = step
        self.n_backward = 0

    def seed_of(self, gemm: str, operand: str) -> int:
        """Seed of the stochastic rounding of one operand, whose random numbers are the same on every device. The weight
        in the forward product is rounded alike on all ranks: there is one policy; everything else independently."""
        rank = 0 if (gemm, operand) == ("fprop", "weight") else _rank()
        return self._seed(gemm, operand, rank)

    @property
    def dither_seed(self) -> int:
        """Seed of the dither of the layer's master weight, equal on all ranks and at every step."""
        return _hash((self.seed, self.layer, "dither"))

    def signs(self, gemm: str, length: int, device: torch.device) -> torch.Tensor:
        """Signs for both operands of a product, equal on all ranks."""
        return random_signs(length, self._seed(gemm, "signs", 0), device)

    def _seed(self, gemm: str, operand: str, rank: int) -> int:
        count = 0 if gemm == "fprop" else self.n_backward
        return _hash((self.seed, rank, self.step, count, self.layer, gemm, operand))


def _hash(key: tuple) -> int:
    """63 bits that depend on every part of the key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


def _rank() -> int:
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
