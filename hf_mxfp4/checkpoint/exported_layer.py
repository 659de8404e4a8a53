# SPDX-License-Identifier: Apache-2.0
"""What happens to one layer on its way into another engine's format, and doing it."""

from dataclasses import dataclass

import torch

from ..gemm import quantize_weight, weight_values
from ..numerics import QuantScheme
from .formats import Format, PackedFormat
from .layers import LayerShape, NewLayer, stack_packed
from .report import LayerCost
from .sources import LayerSource, MasterSource


@dataclass(frozen=True)
class Decision:
    """What happens to a layer, one of the report's actions or ``"refused"``, and why if the format leaves no choice."""

    action: str
    reason: str | None = None

    @property
    def is_quantized(self) -> bool:
        return self.action not in ("dequantized", "left")


def decide(format: Format, source: LayerSource, written: QuantScheme, shape: LayerShape, on_mismatch: str) -> Decision:
    """Decide what happens to a layer of this shape in ``format``, where full-precision weights become ``written``."""
    if not isinstance(format, PackedFormat):
        return Decision("dequantized")
    masters = isinstance(source, MasterSource)
    # Weights of a plain checkpoint were never quantized, and stay so.
    full = "left" if masters and source.is_plain else "dequantized"
    if reason := format.leaves_out(shape):
        return Decision(full, reason)
    if reason := format.shape_misfit(shape):
        return Decision("refused" if on_mismatch == "refuse" else full, reason)
    if not format.misfits(written if masters else source.config.weight_scheme):
        return Decision("packed" if masters else "kept")
    return Decision({"refuse": "refused", "requantize": "requantized", "dequantize": "dequantized"}[on_mismatch])


def exported_layer(
    source: LayerSource, layer: str, format: Format, decision: Decision, written: QuantScheme
) -> tuple[NewLayer, LayerCost]:
    """Return the tensors of a layer in ``format``, and its entry in the report, which is filled as they are made.

    ``written`` is the scheme of what is quantized here.
    """
    cost, shape = LayerCost(layer, decision.action, decision.reason), source.shapes[layer]
    name = source.in_plain_files(layer) if format.plain_names else layer
    matrices = (source, layer, written, cost)
    if decision.is_quantized:
        return NewLayer(
            format.specs(name, shape),
            lambda: format.tensors(name, shape, stack_packed(shape, [_packed(*matrices, e) for e in shape.matrices])),
        ), cost

    def make_full() -> dict[str, torch.Tensor]:
        full = [_full(*matrices, expert) for expert in shape.matrices]
        return format.full_tensors(name, shape, full[0] if shape.experts is None else torch.stack(full))

    return NewLayer(format.full_tensors(name, shape, shape.meta()), make_full), cost


def _packed(
    source: LayerSource, layer: str, written: QuantScheme, cost: LayerCost, expert: int | None
) -> dict[str, torch.Tensor]:
    """Return the packed fields of one matrix, in the scheme ``written`` unless they are kept."""
    if cost.action == "kept":
        return source.read(layer, expert)
    if cost.action == "packed":
        before = source.master(layer, expert)
        packed = quantize_weight(before, written, source.config.backend)
    else:
        before = weight_values(
            source.read(layer, expert), source.shapes[layer].in_features, source.config.weight_scheme, torch.float32
        )
        packed = quantize_weight(before, written)
    cost.add(before, weight_values(packed, before.shape[1], written, torch.float32))
    return packed


def _full(source: LayerSource, layer: str, written: QuantScheme, cost: LayerCost, expert: int | None) -> torch.Tensor:
    """Return one matrix in bfloat16, with its quantized values unless it is left alone."""
    before = source.master(layer, expert) if isinstance(source, MasterSource) else None
    if cost.action == "left":
        return before.to(torch.bfloat16)
    packed = source.read(layer, expert) if before is None else source.pack(before)
    options = (packed, source.shapes[layer].in_features, source.config.weight_scheme)
    rotation = source.config.weight_rotation
    after = weight_values(*options, torch.bfloat16, "auto", rotation)
    cost.add(weight_values(*options, torch.float32, "auto", rotation) if before is None else before, after)
    return after
