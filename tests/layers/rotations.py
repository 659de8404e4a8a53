# SPDX-License-Identifier: Apache-2.0
"""Rotations of operands, written as matrices."""

import math

import torch


def rotation_matrix(rotation: str, length: int, signs: torch.Tensor | None) -> torch.Tensor:
    """``[length, padded length]``: what an operand is multiplied by, padding included."""
    if rotation == "none":
        return torch.eye(length, dtype=torch.float64)
    size = int(rotation.split("-")[1])
    padded = math.ceil(length / size) * size
    hadamard = torch.tensor(
        [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    ).double() / math.sqrt(size)
    matrix = torch.block_diag(*[hadamard] * (padded // size))
    if signs is not None:
        matrix = torch.diag(signs.double()) @ matrix
    return matrix[:length]
