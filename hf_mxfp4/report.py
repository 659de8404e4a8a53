# SPDX-License-Identifier: Apache-2.0
"""What quantizing a model did: which layers, at what error, in how many bits."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from .config import MXFP4RLConfig
from .layers import (
    QUANTIZED,
    MXFP4Experts,
    MXFP4Linear,
    MXFP4PackedExperts,
    MXFP4PackedLinear,
    n_elements,
    trainable_matrices,
)
from .model.layer_names import READS_WEIGHT
from .numerics import FULL, ErrorEnergy
from .ops import weight_values
from .prepare import FULL_NUMBERS, DitherReport, Smoothing


#: Rows of a large weight that the load-time SQNR looks at.
_SQNR_ROWS = 256
#: Above any scheme's own ratio, and below that of 16-bit numbers next to the grid.
_ON_GRID_DB = 50.0


@dataclass(frozen=True)
class QuantizationReport:
    """What was quantized when a model was loaded or packed; `model.quantization_report`.

    Attributes:
        scheme: one line, see [`MXFP4RLConfig.describe`].
        quantized, skipped: names of the linear layers in MXFP4 and of those left in full precision. Of experts in
            fused weights each has one for each of its projections (``...mlp.experts.3.down_proj``).
        skip_reasons: why each of the skipped was left alone, by name.
        sqnr_db: signal to quantization noise ratio of the weights in decibels, energies summed over layers (of about
            256 evenly spaced rows of each); `None` when weights are not materialised, or were stored packed.
        n_weights: elements of the quantized weights, each layer once.
        packed_bytes: what those weights take in packed tensors; `None` when they are not packed.
        dither: what was done about ties of master weights; `None` in packed models and under ``dither_ties=False``.
        smoothing: what was scaled as the model was loaded; `None` where nothing was.
    """

    scheme: str
    quantized: tuple[str, ...]
    skipped: tuple[str, ...]
    sqnr_db: float | None
    n_weights: int
    packed_bytes: int | None = None
    dither: DitherReport | None = None
    smoothing: Smoothing | None = None
    skip_reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def n_quantized(self) -> int:
        return len(self.quantized)

    @property
    def n_skipped(self) -> int:
        return len(self.skipped)

    @property
    def masters_on_grid(self) -> bool:
        """Whether trainable master weights lie on the grid of their scheme, as [`hf_mxfp4.lab.round_model`] makes them:
        an optimizer's small steps then change no quantized weight."""
        return self.packed_bytes is None and self.sqnr_db is not None and self.sqnr_db > _ON_GRID_DB

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits for each element of the packed weights; `None` when they are not packed."""
        if self.packed_bytes is None:
            return None
        return 8 * self.packed_bytes / self.n_weights

    def __str__(self) -> str:
        counts = f"n_quantized={self.n_quantized} n_skipped={self.n_skipped}"
        if 0 < self.n_skipped <= 4:
            counts += f" ({', '.join(self.skipped)})"
        if self.sqnr_db is not None:
            sqnr = f"{self.sqnr_db:.2f} dB"
        elif self.packed_bytes is not None:
            sqnr = "not measured (the originals of packed weights are gone)"
        else:
            sqnr = "not measured"
        scheme = self.scheme
        if self.packed_bytes is not None:
            scheme = f"packed {self.bits_per_weight:.5g} bits/weight {scheme}"
        parts = [f"{counts} weight SQNR={sqnr}", scheme]
        readers = Counter(reason for reason in self.skip_reasons.values() if reason.endswith(READS_WEIGHT))
        parts += [f"{count} layers in full precision: {reason}" for reason, count in readers.items()]
        if self.smoothing is not None:
            parts.append(str(self.smoothing))
        # That weights of full float32 precision have no ties is as expected, and not worth a word.
        if self.dither is not None and (self.dither.n_weights or set(self.dither.skipped) != {FULL_NUMBERS}):
            parts.append(str(self.dither))
        return " | ".join(parts)


def weight_sqnr(energies: Iterable[ErrorEnergy]) -> float | None:
    """Return the SQNR of several weights in decibels; `None` if there are none, or only zeros."""
    total = ErrorEnergy.total(energies)
    if not total.signal:
        return None
    return total.sqnr_db


def sampled_rows(rows: int, siblings: int = 1) -> slice:
    """Return evenly spaced rows of one of ``siblings`` matrices, so many that all give about 256 and each gives one."""
    step = math.ceil(rows * siblings / _SQNR_ROWS)
    return slice(None, None, step)


def master_sqnr(model: nn.Module) -> float | None:
    """Return the SQNR of the weights of all trainable quantized layers; `None` when they are not materialised or
    quantized."""
    energies = []
    for matrix in trainable_matrices(model):
        weight = matrix.weight()
        if weight.is_meta or matrix.fprop.right is FULL:
            return None
        rows = weight[sampled_rows(weight.shape[0], matrix.siblings)]
        energies.append(ErrorEnergy.of(rows, matrix.effective_rows(rows)))
    return weight_sqnr(energies)


def add_packed(
    energies: list[ErrorEnergy],
    original: torch.Tensor,
    packed: dict[str, torch.Tensor],
    config: MXFP4RLConfig,
    siblings: int = 1,
) -> None:
    """Append the error of a weight, one of ``siblings``, by the tensors that it was packed into; nothing on meta."""
    if original.is_meta:
        return
    n_rows, n_columns = original.shape
    rows = sampled_rows(n_rows, siblings)
    packed_rows = {name: tensor[rows] for name, tensor in packed.items()}
    values = weight_values(
        packed_rows, n_columns, config.weight_scheme, original.dtype, config.backend, config.weight_rotation
    )
    energies.append(ErrorEnergy.of(original[rows], values))


def count_weights(model: nn.Module) -> tuple[int, int | None]:
    """Return the elements of all quantized weights, and the bytes that they are packed in (`None` when they are not
    packed)."""
    n_weights = 0
    tensors = list[torch.Tensor | None]()
    for module in _untied(model):
        if isinstance(module, (MXFP4Linear, MXFP4PackedLinear)):
            n_weights += module.in_features * module.out_features
        elif isinstance(module, (MXFP4Experts, MXFP4PackedExperts)):
            n_weights += sum(math.prod(module.weight_size(projection)) for projection in module.projections)
        if isinstance(module, MXFP4PackedLinear):
            tensors += module.packed_weight()
        elif isinstance(module, MXFP4PackedExperts):
            for projection in module.projections:
                tensors += module.packed_weight(projection)
    if not tensors:
        return n_weights, None
    n_bytes = sum(n_elements(tensor) for tensor in tensors if tensor is not None)
    return n_weights, n_bytes


def _untied(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the quantized layers; of those that share their weight only the first one."""
    seen = set()
    for module in model.modules():
        if isinstance(module, QUANTIZED):
            weight = next(module.parameters(recurse=False))
            if weight not in seen:
                seen.add(weight)
                yield module


def uncounted_weights(model: nn.Module) -> int:
    """Return how many more weights the packed tensors of a model stand for than they have elements."""
    if not any(isinstance(module, (MXFP4PackedLinear, MXFP4PackedExperts)) for module in model.modules()):
        return 0
    n_weights, packed_bytes = count_weights(model)
    return n_weights - packed_bytes
