# SPDX-License-Identifier: Apache-2.0
"""What happens to one layer on its way into another engine's format, and doing it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...backends.select import dequantize
from ...gemm import packed_tensor, quantize_weight
from ...lab.rounding import round_weight
from ...numerics import BLOCK_SIZE, MXFP4Tensor, QuantScheme, unrotate
from ..formats import Format, LayerShape, PackedFormat
from ..io.folder import CheckpointError
from ..io.writer import TensorStream
from .calibration import Calibration
from .conversion import LayerWriter
from .costs import LayerCost
from .sources import LayerSource, MasterSource


#: Layers are dequantized in portions of about this many elements.
_PORTION = 1 << 22


@dataclass(frozen=True)
class Decision:
    """What happens to a layer, one of the report's actions or ``"refused"``, and why if the format leaves no choice."""

    action: str
    reason: str | None = None


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


class ExportedLayer(LayerWriter):
    """A layer on its way into a format: as it is, quantized from full precision or again, dequantized, or left alone.

    ``written`` is the scheme of what is quantized here, rounded by GPTQ where there is a ``calibration``.
    """

    def __init__(
        self,
        source: LayerSource,
        layer: str,
        format: Format,
        decision: Decision,
        written: QuantScheme,
        calibration: Calibration | None = None,
    ):
        self._source, self._layer, self._format, self._decision = source, layer, format, decision
        self._shape, self._written, self._calibration = source.shapes[layer], written, calibration
        self._name = source.in_plain_files(layer) if format.plain_names else layer
        if isinstance(format, PackedFormat) and decision.action not in ("dequantized", "left"):
            self.specs = format.specs(self._name, self._shape)
        else:
            self.specs = format.full_specs(self._name, self._shape)

    def write(self, writer: TensorStream) -> LayerCost:
        action, matrices = self._decision.action, self._shape.n_matrices
        cost = LayerCost(self._layer, action, self._decision.reason, matrices=matrices)
        for expert in self._shape.matrices:
            for name, tensor in self._tensors(action, expert, cost).items():
                writer.append(name, tensor)
        return cost

    def _tensors(self, action: str, expert: int | None, cost: LayerCost) -> dict[str, torch.Tensor]:
        place = (self._name, self._shape, expert)
        if action == "left":
            return self._format.full_tensors(*place, self._source.master(self._layer, expert).to(torch.bfloat16))
        if action == "dequantized":
            return self._format.full_tensors(*place, torch.cat(list(self._dequantized(expert, cost))))
        return self._format.tensors(*place, self._packed(expert, cost))

    def _packed(self, expert: int | None, cost: LayerCost) -> dict[str, torch.Tensor]:
        if cost.action == "kept":
            return self._source.read(self._layer, expert)
        if cost.action == "requantized":
            return self._requantized(self._source.read(self._layer, expert), cost)
        master = self._source.master(self._layer, expert)
        packed = self._quantized(master)
        for rows, portion in self._portions(packed, self._written):
            cost.add(master[rows], dequantize(portion, torch.float32))
        return packed

    def _quantized(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._calibration is not None and self._shape.experts is None:
            try:
                master = round_weight(master.float(), self._calibration.gram(self._layer), self._written)
            except ValueError as error:
                raise CheckpointError(f"{self._layer} cannot be calibrated: {error}") from None
        return quantize_weight(master, self._written, self._source.config.backend)

    def _requantized(self, packed: dict[str, torch.Tensor], cost: LayerCost) -> dict[str, torch.Tensor]:
        parts = []
        for _, portion in self._portions(packed, self._source.config.weight_scheme):
            before = dequantize(portion, torch.float32)
            parts.append(quantize_weight(before, self._written))
            after = packed_tensor(parts[-1], self._shape.in_features, self._written, torch.float32)
            cost.add(before, dequantize(after, torch.float32))
        return {field: torch.cat([part[field] for part in parts]) for field in parts[0]}

    def _dequantized(self, expert: int | None, cost: LayerCost) -> Iterator[torch.Tensor]:
        source, scheme, master = self._source, self._source.config.weight_scheme, None
        if isinstance(source, MasterSource):
            master = source.master(self._layer, expert)
        packed = source.read(self._layer, expert) if master is None else source.pack(master)
        for rows, portion in self._portions(packed, scheme):
            after = self._values(portion, torch.bfloat16)
            cost.add(self._values(portion, torch.float32) if master is None else master[rows], after)
            yield after

    def _values(self, portion: MXFP4Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values of stored weights, rotated back where they are rotated."""
        rotation = self._source.config.weight_rotation
        if rotation is None:
            return dequantize(portion, dtype)
        return unrotate(dequantize(portion, torch.float32), rotation.size).to(dtype)

    def _portions(self, packed: dict[str, torch.Tensor], scheme: QuantScheme) -> Iterator[tuple[slice, MXFP4Tensor]]:
        """Whole tiles of 32 rows, so that the portions quantize as the whole would."""
        step = max(1, _PORTION // max(1, self._shape.in_features) // BLOCK_SIZE) * BLOCK_SIZE
        for start in range(0, self._shape.out_features, step):
            rows = slice(start, min(start + step, self._shape.out_features))
            some = {field: tensor[rows] for field, tensor in packed.items()}
            yield rows, packed_tensor(some, self._shape.in_features, scheme, torch.float32)
