# SPDX-License-Identifier: Apache-2.0
"""Rows of the trained weights of a model, evenly spread over all of its matrices, to be looked at again and again."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn

from ...layers import WeightMatrix, gathered, trainable_matrices
from ...numerics import QuantScheme


@dataclass(frozen=True)
class WeightSample:
    """Units of one parameter: single rows, or the groups of rows that share scales, so that their quantized values are
    those that they have in the whole matrix.

    Attributes:
        kind: the type of the layers: ``"q_proj"``, or ``"experts.down_proj"``.
        matrices: those of the parameter that units are taken of, one or some experts'.
        units: for each of them which units, as first, end and stride.
        scheme, backend: how the weight is quantized.
        n_units, n_rows, n_weights: how many units, rows of matrices and weights there are.
    """

    kind: str
    matrices: tuple[WeightMatrix, ...]
    units: tuple[slice, ...]
    scheme: QuantScheme
    backend: str
    n_units: int
    n_rows: int
    n_weights: int

    @torch.no_grad()
    def take(self) -> torch.Tensor:
        """The units as they are now ``[n_units, rows, K]``, a copy; the last group of a matrix may end in zeros. Under
        FSDP2 and ZeRO-3 all processes must call this."""
        first = self.matrices[0]
        with gathered(getattr(first.layer, first.parameter)) as value:
            found = zip(self.matrices, self.units, strict=True)
            return torch.cat([_units(matrix.of(value), self.scheme.block_rows)[part] for matrix, part in found])


def sample_weights(model: nn.Module, max_weights: int) -> list[WeightSample]:
    """Every ``n``-th unit of the trained quantized weights, counted through the matrices of each layer type, with ``n``
    such that there are about ``max_weights`` elements, and at least a unit of each type.

    Empty where nothing is trained. Layers whose weights have no values of their own between two steps (rotated, rounded
    at random, or in full precision; see `weights_alone_unsupported_reason` of the config) are left out.
    """
    matrices = [
        matrix
        for matrix in trainable_matrices(model)
        if getattr(matrix.layer, matrix.parameter).requires_grad
        and not matrix.layer.config.weights_alone_unsupported_reason
    ]
    shapes = [_shape(matrix) for matrix in matrices]
    stride = max(1, -(-sum(rows * columns for rows, columns in shapes) // max_weights))
    passed: dict[str, int] = defaultdict(int)
    chosen: dict[tuple[int, str], list[tuple[WeightMatrix, slice, int]]] = defaultdict(list)
    for matrix, (rows, _) in zip(matrices, shapes, strict=True):
        kind = layer_type(matrix)
        count = -(-rows // matrix.fprop.right.block_rows)
        units = slice(-passed[kind] % stride, count, stride)
        passed[kind] += count
        if units.start < count:
            chosen[id(matrix.layer), matrix.parameter].append((matrix, units, rows))
    return [_sample(parts) for parts in chosen.values()]


def layer_type(matrix: WeightMatrix) -> str:
    """``"q_proj"`` of ``model.layers.3.self_attn.q_proj``; of experts ``"experts.down_proj"``."""
    name = matrix.name.removesuffix(".base_layer").rpartition(".")[2]  # PEFT's name for what it wraps
    return name if matrix.expert is None else f"experts.{name}"


def _sample(parts: list[tuple[WeightMatrix, slice, int]]) -> WeightSample:
    matrix = parts[0][0]
    scheme = matrix.fprop.right
    size, columns = scheme.block_rows, _shape(matrix)[1]
    taken = [range(units.start, units.stop, units.step) for _, units, _ in parts]
    n_rows = sum(
        min((unit + 1) * size, rows) - unit * size
        for (_, _, rows), units in zip(parts, taken, strict=True)
        for unit in units
    )
    return WeightSample(
        kind=layer_type(matrix),
        matrices=tuple(part[0] for part in parts),
        units=tuple(part[1] for part in parts),
        scheme=scheme,
        backend=matrix.layer.config.backend,
        n_units=sum(map(len, taken)),
        n_rows=n_rows,
        n_weights=n_rows * columns,
    )


def _shape(matrix: WeightMatrix) -> tuple[int, int]:
    """Rows and columns of the matrix, of which ZeRO-3 leaves a parameter of no elements between uses."""
    parameter = getattr(matrix.layer, matrix.parameter)
    rows, columns = getattr(parameter, "ds_shape", parameter.shape)[-2:]
    return (columns, rows) if matrix.expert is not None and matrix.layer.is_transposed else (rows, columns)


def _units(matrix: torch.Tensor, size: int) -> torch.Tensor:
    """A matrix ``[N, K]`` as ``[units, size, K]``, the same memory unless rows are missing from the last unit."""
    missing = -matrix.shape[0] % size
    if missing:
        matrix = nn.functional.pad(matrix, (0, 0, 0, missing))
    return matrix.unflatten(0, (-1, size))
