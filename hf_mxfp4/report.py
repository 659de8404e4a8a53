# SPDX-License-Identifier: Apache-2.0
"""What quantizing a model did: which layers, at what error, in how many bits."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from .config import MXFP4RLConfig
from .layers import MXFP4Linear, MXFP4PackedLinear
from .ops import fake_quantize
from .ops.packed import dequantize, packed_tensor


#: Rows of a large weight that the load-time SQNR looks at.
_SQNR_ROWS = 256


@dataclass(frozen=True)
class QuantizationReport:
    """What was quantized when a model was loaded or packed; `model.quantization_report`.

    Attributes:
        scheme: one line, see [`MXFP4RLConfig.describe`].
        quantized, skipped: names of the linear layers in MXFP4 and of those left in full precision.
        sqnr_db: signal to quantization noise ratio of the weights, energies summed over layers (at most 256 evenly
            spaced rows of each), in decibels; `None` when the weights are not materialised, and for a checkpoint that
            stores packed weights, whose originals are gone.
        n_weights: elements of the quantized weights, each layer once. In packed models transformers'
            `num_parameters()` counts stored bytes in their place.
        packed_bytes: what those weights take in packed tensors; `None` when they are not packed.
    """

    scheme: str
    quantized: tuple[str, ...]
    skipped: tuple[str, ...]
    sqnr_db: float | None
    n_weights: int
    packed_bytes: int | None = None

    @property
    def n_quantized(self) -> int:
        return len(self.quantized)

    @property
    def n_skipped(self) -> int:
        return len(self.skipped)

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits for each element of the packed weights; `None` when they are not packed."""
        return None if self.packed_bytes is None else 8 * self.packed_bytes / self.n_weights

    def __str__(self) -> str:
        sqnr = "not measured" if self.sqnr_db is None else f"{self.sqnr_db:.2f} dB"
        if self.packed_bytes is not None and self.sqnr_db is None:
            sqnr = "not measured (the originals of packed weights are gone)"
        packed = "" if self.packed_bytes is None else f"packed {self.bits_per_weight:.5g} bits/weight "
        left = f" ({', '.join(self.skipped)})" if 0 < self.n_skipped <= 4 else ""
        counts = f"n_quantized={self.n_quantized} n_skipped={self.n_skipped}{left}"
        return f"{counts} weight SQNR={sqnr} | {packed}{self.scheme}"


class ErrorEnergy:
    """Energy of weights and of their quantization errors, summed over layers."""

    def __init__(self):
        self._signal = self._noise = 0.0

    def add(self, original: torch.Tensor, quantized: torch.Tensor) -> None:
        """Count a weight, or the rows of it that [`sampled_rows`] names."""
        original = original.detach().float()
        self._signal += original.square().sum().item()
        self._noise += (quantized.detach().float() - original).square().sum().item()

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantization noise ratio in decibels; `None` before anything but zeros was counted."""
        if self._noise == 0:
            return math.inf if self._signal else None
        return 10.0 * math.log10(self._signal / self._noise) if self._signal else None


def sampled_rows(rows: int) -> slice:
    """At most 256 evenly spaced rows."""
    return slice(None, None, -(-rows // _SQNR_ROWS))


def master_sqnr(model: nn.Module) -> float | None:
    """SQNR of the weights of all [`MXFP4Linear`] layers; `None` when they are not materialised."""
    energy = ErrorEnergy()
    for module in model.modules():
        if not isinstance(module, MXFP4Linear):
            continue
        weight = module.weight.detach()
        if weight.is_meta:
            return None
        rows = weight[sampled_rows(weight.shape[0])]
        if module.config.packing_obstacle:  # rotated, random or in full precision: the layer knows
            energy.add(rows, module.effective_weight(rows))
        else:
            energy.add(rows, fake_quantize(rows, module.config.weight_scheme, module.config.backend))
    return energy.sqnr_db


def add_packed(
    energy: ErrorEnergy, original: torch.Tensor, packed: dict[str, torch.Tensor], config: MXFP4RLConfig
) -> None:
    """Count the error of a weight and the tensors that it was packed into; nothing for meta tensors."""
    if original.is_meta:
        return
    rows = sampled_rows(original.shape[0])
    some = {name: tensor[rows] for name, tensor in packed.items()}
    tensor = packed_tensor(some, original.shape[1], config.weight_scheme, original.dtype)
    energy.add(original[rows], dequantize(tensor, original.dtype, config.backend))


def count_weights(model: nn.Module) -> tuple[int, int | None]:
    """Elements of all quantized weights, and the bytes that they are packed in (`None` when they are not packed)."""
    n_weights, n_bytes, packed = 0, 0, False
    for module in model.modules():
        if isinstance(module, (MXFP4Linear, MXFP4PackedLinear)):
            n_weights += module.in_features * module.out_features
        if isinstance(module, MXFP4PackedLinear):
            packed = True
            n_bytes += sum(tensor.numel() for tensor in module.packed_weight() if tensor is not None)
    return n_weights, n_bytes if packed else None
