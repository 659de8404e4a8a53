# SPDX-License-Identifier: Apache-2.0
"""Export to the formats of other engines."""

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..numerics import BLOCK_SIZE, MXFP4Tensor, QuantScheme
from ..numerics.scheme import one_of
from ..ops.packed import dequantize, packed_tensor, quantize_weight
from .conversion import LayerWriter, OnBytes, convert
from .costs import ConversionReport, LayerCost
from .folder import CheckpointError, model_dtype, open_checkpoint
from .formats import FORMATS, Format, LayerShape, PackedFormat
from .other_tensors import OtherTensor, file_tensors
from .sources import LayerSource, MasterSource, PackedSource, own_config
from .validate import make_record
from .writer import MAX_SHARD_SIZE, ShardWriter, TensorSpec


ON_MISMATCH = ("refuse", "requantize", "dequantize")
REPORT = "export_report.json"

#: Layers are dequantized in portions of about this many elements.
_PORTION = 1 << 22


def export(
    source_dir: str | os.PathLike,
    out_dir: str | os.PathLike,
    format: str,
    on_mismatch: str = "refuse",
    *,
    overwrite: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    on_bytes: OnBytes = lambda count, name: None,
) -> ConversionReport:
    """Write a packed checkpoint, or one trained with ``mode="qat"``, in another engine's format.

    Plain MXFP4 keeps its bytes. Macro factors and outlier fallback have no place in other formats: by default they are
    refused. One layer is in memory at a time, and of experts one.

    Args:
        source_dir: folder that `save_pretrained` wrote. A QAT checkpoint is packed under its scheme on the way.
        out_dir: new or empty folder; with ``overwrite`` also a checkpoint, which is replaced.
        format: ``"compressed-tensors"``, ``"quark"``, ``"gpt-oss"`` or ``"bf16"``.
        on_mismatch: for layers that the format cannot hold: ``"refuse"``; ``"requantize"`` to plain MXFP4 by the
            scheme's rule; ``"dequantize"`` to bfloat16. Layers that cannot be MXFP4 there at all are dequantized under
            either of the last two, and those that a format never quantizes always.

    Returns:
        What was done to each layer and what it cost, which is also in `export_report.json` in the folder: the ratio of
        the dequantized values to their change, in decibels.

    Raises:
        CheckpointError: the source cannot be read, or the format does not hold it and ``on_mismatch="refuse"``.
        FolderError: ``out_dir`` cannot be written.
        ShardError: a file of the source is missing or damaged.
        ValueError: an unknown ``format`` or ``on_mismatch``.
    """
    one_of("format", format, tuple(FORMATS))
    one_of("on_mismatch", on_mismatch, ON_MISMATCH)
    target = FORMATS[format]
    folder = open_checkpoint(source_dir)
    own = own_config(folder)
    packed = own is not None and own.mode == "packed"
    source: LayerSource = PackedSource(folder) if packed else MasterSource(folder)
    if reason := target.architecture_misfit(source.model.config.model_type):
        raise CheckpointError(f"format {format!r} cannot hold {source.folder.path}: {reason}")
    decisions = {
        layer: decide(target, source.config.weight_scheme, shape, on_mismatch) for layer, shape in source.shapes.items()
    }
    if any(decision.action == "refused" for decision in decisions.values()):
        raise CheckpointError(_refusal(source, target, decisions))
    quantized = {layer for layer, decision in decisions.items() if decision.action != "dequantized"}
    others = file_tensors(source)
    names = ignored_layers(source, others, quantized), sorted(quantized)
    options = target.quantization_config(source.config, *names) if quantized else None
    notes = target.notes(source.config, *names)
    report = ConversionReport(Path(out_dir), format, source.config.describe(), notes=notes)
    dtype = model_dtype(folder)
    if isinstance(target, PackedFormat):
        left_out = [reason for shape in source.shapes.values() if (reason := target.leaves_out(shape))]
        if left_out:
            report.notes.append(f"{len(left_out)} layers were dequantized to bfloat16: {left_out[0]}.")
    if dtype != torch.bfloat16:
        report.notes.append(f"All other tensors are converted from {dtype} to bfloat16, what other engines compute in.")
    if isinstance(target, PackedFormat) and not quantized:
        report.notes.append("No layer is MXFP4 any more: this is a plain checkpoint, as format bf16 writes it.")
    return convert(
        source,
        out_dir,
        {layer: ExportedLayer(source, layer, target, decision) for layer, decision in decisions.items()},
        others,
        _config(folder.config, options),
        report,
        cast=dtype,
        overwrite=overwrite,
        max_shard_size=max_shard_size,
        on_bytes=on_bytes,
        report_file=REPORT,
        metadata=_metadata(source, decisions),
    )


@dataclass(frozen=True)
class Decision:
    """What happens to a layer, one of the report's actions or ``"refused"``, and why if the format leaves no choice."""

    action: str
    reason: str | None = None


def decide(format: Format, scheme: QuantScheme, shape: LayerShape, on_mismatch: str) -> Decision:
    """What happens to a layer of this scheme and shape in ``format``."""
    if not isinstance(format, PackedFormat):
        return Decision("dequantized")
    if reason := format.leaves_out(shape):
        return Decision("dequantized", reason)
    if reason := format.shape_misfit(shape):
        return Decision("refused" if on_mismatch == "refuse" else "dequantized", reason)
    if not format.misfits(scheme):
        return Decision("kept")
    return Decision({"refuse": "refused", "requantize": "requantized", "dequantize": "dequantized"}[on_mismatch])


def plain_scheme(scheme: QuantScheme) -> QuantScheme:
    """The scheme without macro factors and outlier fallback: same rule, same blocks."""
    return QuantScheme(scheme.scale_rule, block_rows=scheme.block_rows)


def ignored_layers(source: LayerSource, others: Sequence[OtherTensor], quantized: Set[str]) -> list[str]:
    """Names of everything that an engine may take for a linear layer and that is not quantized, sorted.

    These are the model's linear layers, and the matrices in the files that are neither embeddings nor of such a layer:
    experts have one each there while the model keeps them in one.
    """
    dequantized = {
        name: size
        for layer, shape in source.shapes.items()
        if layer not in quantized
        for name, size in bf16_sizes(layer, shape).items()
    }
    modules = dict(source.model.named_modules(remove_duplicate=False))
    linears = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    matrices = {
        name.removesuffix(".weight")
        for name, shape in [*((tensor.name, tensor.shape) for tensor in others), *dequantized.items()]
        if name.endswith(".weight") and len(shape) == 2
    }
    embeddings = {name for name, module in modules.items() if isinstance(module, nn.Embedding)}
    return sorted((linears | matrices) - embeddings - quantized)


def bf16_sizes(layer: str, shape: LayerShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that plain checkpoints have for a weight."""
    if shape.pieces:
        return {piece.name: (shape.n_rows(piece), shape.in_features) for piece in shape.pieces}
    return {f"{layer}.weight" if shape.experts is None else layer: shape.full_shape()}


class ExportedLayer(LayerWriter):
    """A layer on its way into a format: as it is, re-quantized, or dequantized."""

    def __init__(self, source: LayerSource, layer: str, format: Format, decision: Decision):
        self._source, self._layer, self._format, self._decision = source, layer, format, decision
        self._shape, self._scheme = source.shapes[layer], source.config.weight_scheme
        if isinstance(format, PackedFormat) and decision.action != "dequantized":
            self.specs = format.specs(layer, self._shape)
        else:
            sizes = bf16_sizes(layer, self._shape)
            self.specs = {name: TensorSpec(torch.bfloat16, size) for name, size in sizes.items()}

    def write(self, writer: ShardWriter) -> LayerCost:
        matrices = self._shape.n_matrices
        cost = LayerCost(self._layer, self._decision.action, self._decision.reason, matrices=matrices)
        for expert in self._shape.matrices:
            packed = self._source.read(self._layer, expert)
            if cost.action == "dequantized":
                self._write_dequantized(writer, expert, self._dequantized(packed, cost))
                continue
            if cost.action == "requantized":
                packed = self._requantized(packed, cost)
            for name, tensor in self._format.tensors(self._layer, self._shape, expert, packed).items():
                writer.append(name, tensor)
        return cost

    def _write_dequantized(self, writer: ShardWriter, expert: int | None, parts: Iterator[torch.Tensor]) -> None:
        if expert is None:
            for part in parts:
                writer.append(f"{self._layer}.weight", part)
            return
        matrix = torch.cat(list(parts))
        for piece in self._shape.pieces_of(expert):
            writer.append(piece.name, matrix[piece.rows])
        if not self._shape.pieces:
            writer.append(self._layer, matrix.t() if self._shape.transposed else matrix)

    def _requantized(self, packed: dict[str, torch.Tensor], cost: LayerCost) -> dict[str, torch.Tensor]:
        plain, parts = plain_scheme(self._scheme), []
        for portion in self._portions(packed):
            before = dequantize(portion, torch.float32)
            parts.append(quantize_weight(before, plain))
            after = packed_tensor(parts[-1], self._shape.in_features, plain, torch.float32)
            cost.add(before, dequantize(after, torch.float32))
        return {field: torch.cat([part[field] for part in parts]) for field in parts[0]}

    def _dequantized(self, packed: dict[str, torch.Tensor], cost: LayerCost) -> Iterator[torch.Tensor]:
        for portion in self._portions(packed):
            after = dequantize(portion, torch.bfloat16)
            cost.add(dequantize(portion, torch.float32), after)
            yield after

    def _portions(self, packed: dict[str, torch.Tensor]) -> Iterator[MXFP4Tensor]:
        """Whole tiles of 32 rows, so that the portions quantize as the whole would."""
        rows = max(1, _PORTION // max(1, self._shape.in_features) // BLOCK_SIZE) * BLOCK_SIZE
        for start in range(0, self._shape.out_features, rows):
            some = {field: tensor[start : start + rows] for field, tensor in packed.items()}
            yield packed_tensor(some, self._shape.in_features, self._scheme, torch.float32)


def _refusal(source: LayerSource, format: PackedFormat, decisions: Mapping[str, Decision]) -> str:
    refused = {layer: decision.reason for layer, decision in decisions.items() if decision.action == "refused"}
    odd = {layer: reason for layer, reason in refused.items() if reason}
    parts = format.misfits(source.config.weight_scheme)
    reasons = [f"it has no place for {' and '.join(parts)}"] if parts else []
    if odd:
        reasons.append(f"of {min(odd)}{_and_more(odd)}, {odd[min(odd)]}")
    plain = plain_scheme(source.config.weight_scheme)
    n_refused, n_layers = (sum(source.shapes[layer].n_matrices for layer in layers) for layers in (refused, decisions))
    return (
        f"format {format.name!r} cannot hold {n_refused} of {n_layers} layers of {source.folder.path} "
        f"({source.config.weight_scheme}): {'; '.join(reasons)}. Choose what happens to them: "
        f"on_mismatch='requantize' makes them plain MXFP4 ({plain}), which costs accuracy; 'dequantize' makes them "
        "bfloat16, which costs memory. Either way the error is measured and reported per layer"
    )


def _and_more(names: Mapping[str, Any]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _metadata(source: LayerSource, decisions: Mapping[str, Decision]) -> dict[str, str]:
    """What was recorded of the weights, as long as they are the same: an import finds it again."""
    same = isinstance(source, PackedSource) and all(decision.action == "kept" for decision in decisions.values())
    return make_record(source.config, source.sqnr_db) if same else {}


def _config(config: Mapping[str, Any], options: dict[str, Any] | None) -> dict[str, Any]:
    """`config.json` of a bfloat16 model, with another `quantization_config` or none."""
    rest = _in_bf16({key: value for key, value in config.items() if key != "quantization_config"})
    return rest if options is None else {**rest, "quantization_config": options}


def _in_bf16(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {k: "bfloat16" if k in ("dtype", "torch_dtype") and v is not None else _in_bf16(v) for k, v in value.items()}
