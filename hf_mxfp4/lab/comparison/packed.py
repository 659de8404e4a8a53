# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of 4-bit weights beside the full-precision one that it was made from: what packing lost, as stored."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ...checkpoint.convert.sources import ForeignSource, LayerSource, MasterSource, PackedSource, own_config
from ...checkpoint.formats import FORMATS, PackedFormat
from ...checkpoint.io.folder import CheckpointFolder, open_checkpoint
from ...checkpoint.io.reader import ShardError, StoredTensor, read_rows
from ...config import QUANT_METHOD
from ...files import json_clean
from ...gemm import quantize_weight, weight_values
from ..errors.results import Problem, natural_key
from ..errors.source import Source, SourceError
from ..errors.weights import SLICE_ELEMENTS, OnBytes, Selection
from ..report.columns import number
from .checkpoints import Comparison


@dataclass(frozen=True)
class PackedPair:
    """Sums over the elements of an original weight ``a`` and of the stored one ``b``; ``+`` merges.

    Attributes:
        energy, noise: ``|a|**2`` and ``|b - a|**2``.
        elements, other: how many there are, and how many differ from ``a`` packed now under the scheme of ``b``.
    """

    energy: float = 0.0
    noise: float = 0.0
    elements: int = 0
    other: int = 0

    def __add__(self, more: "PackedPair") -> "PackedPair":
        if not isinstance(more, PackedPair):
            return NotImplemented
        return PackedPair(
            self.energy + more.energy,
            self.noise + more.noise,
            self.elements + more.elements,
            self.other + more.other,
        )

    @property
    def relative_mse(self) -> float:
        """``|b - a|**2 / |a|**2``; NaN when a is zero."""
        return self.noise / self.energy if self.energy else math.nan

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio in decibels; infinite without noise, NaN when a is zero."""
        relative = self.relative_mse
        return math.inf if relative == 0 else -10.0 * math.log10(relative)

    def summary(self) -> dict[str, float]:
        """Return the derived numbers by name."""
        return {
            "sqnr_db": self.sqnr_db,
            "relative_mse": self.relative_mse,
            "relative_difference": math.sqrt(self.relative_mse),
            "elements_packed_otherwise": self.other,
        }


@dataclass
class PackedComparison(Comparison):
    """Pairs by the names that layers have in the model; ``first`` is the original, ``second`` the packed checkpoint.

    Attributes:
        repacked: whether the originals were packed anew to compare (not for formats that do not record how).
        kept, changed: names of tensors that are not quantized and have the same values on both sides, or others.
    """

    repacked: bool = True
    kept: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    zero: ClassVar[Any] = PackedPair()
    worst_title: ClassVar[str] = "largest relative errors"

    @property
    def columns(self) -> dict[str, Callable[[Any], str]]:
        columns: dict[str, Callable[[Any], str]] = {
            "SQNR dB": lambda pair: number(pair.sqnr_db, 2),
            "rel. MSE %": lambda pair: number(100 * pair.relative_mse, 4),
            "|A-B| / |A|": lambda pair: number(math.sqrt(pair.relative_mse), 6),
        }
        if self.repacked:
            columns["packed otherwise"] = lambda pair: f"{pair.other:,}"
        return columns

    @property
    def groups_title(self) -> str:
        return f"error of the stored weights ({self.scheme}), by layer"

    def lines(self) -> list[str]:
        total = self.total()
        lines = [
            f"A: {self.first}, the original",
            f"B: {self.second}, whose packed weights are compared as they are stored, dequantized",
            f"SQNR of {len(self.pairs)} weights: {number(total.sqnr_db, 2)} dB",
        ]
        if self.repacked:
            lines.append(
                "B holds exactly what packing A now gives"
                if total.other == 0
                else f"B is not what packing A now gives: {total.other:,} of {total.elements:,} elements differ "
                "(packed from other weights, or by another version)"
            )
        lines.append(
            f"tensors that are not quantized: {len(self.kept)} the same, {len(self.changed)} with other values"
            + (f" ({', '.join(self.changed[:5])}{', ...' if len(self.changed) > 5 else ''})" if self.changed else "")
        )
        return lines

    def worst(self, count: int = 20) -> list[str]:
        """Tensors of largest relative error; all-zero ones, which have none, are left out."""
        known = [name for name in sorted(self.pairs, key=natural_key) if self.pairs[name].energy > 0]
        return sorted(known, key=lambda name: -self.pairs[name].relative_mse)[:count]

    def numbers(self, pair: PackedPair) -> dict[str, float]:
        found = pair.summary()
        if not self.repacked:
            del found["elements_packed_otherwise"]
        return found

    def to_dict(self) -> dict[str, Any]:
        return json_clean({**super().to_dict(), "not_quantized": {"same": self.kept, "changed": self.changed}})


def is_packed(source: Source) -> bool:
    """Whether a checkpoint stores 4-bit weights that [`compare_packed`] can read."""
    options = source.config.get("quantization_config")
    if not isinstance(options, dict):
        return False
    if options.get("quant_method") == QUANT_METHOD:
        return options.get("mode") == "packed"
    return _foreign_format(options) is not None


def compare_packed(
    original: Source, packed: Source, selection: Selection, on_bytes: OnBytes = lambda count, name: None
) -> PackedComparison:
    """Compare the weights that a packed checkpoint stores with those of the full-precision one, a matrix at a time.

    Layers go by the names that they have in the model, so that experts in one fused tensor meet those in tensors of
    their own.

    Args:
        selection: whose ``include`` and ``exclude`` choose among the layers.

    Raises:
        SourceError: a pattern matches nothing, or the checkpoints have no quantized weight in common.
        CheckpointError: one of them cannot be read, or ``original`` stores quantized weights.
        ShardError: a file is missing or damaged.
    """
    stored = _open_packed(_local_folder(packed))
    folder = _local_folder(original)
    masters = MasterSource(folder, stored.config if own_config(folder) is None else None)
    names = list(dict.fromkeys([*stored.shapes, *masters.shapes]))
    if unmatched := selection.unmatched(names):
        raise SourceError(f"no quantized layer of {packed.name} matches the pattern {unmatched[0]!r}")
    chosen = [name for name in names if selection.wants(name)]
    # Other formats do not record how scales were chosen.
    own_format = isinstance(stored, PackedSource)
    result = PackedComparison(
        original.name,
        packed.name,
        only_first=[name for name in chosen if name not in stored.shapes],
        only_second=[name for name in chosen if name not in masters.shapes],
        scheme=str(stored.config.weight_scheme) if own_format else str(stored.folder.quantization["quant_method"]),
        repacked=own_format,
    )
    common = [name for name in chosen if name in stored.shapes and name in masters.shapes]
    if not common:
        raise SourceError(f"{original.name} and {packed.name} have no quantized weight in common")
    for name in common:
        mine, theirs = masters.shapes[name], stored.shapes[name]
        sizes = [[s.n_matrices, s.out_features, s.in_features] for s in (mine, theirs)]
        if sizes[0] != sizes[1]:
            result.problems.append(Problem(name, f"shapes differ: {sizes[0]} and {sizes[1]}"))
            continue
        try:
            pairs = (_compare_matrix(masters, stored, name, expert, result.repacked) for expert in mine.matrices)
            result.pairs[name] = sum(pairs, PackedPair())
        except (ShardError, ValueError) as error:
            result.problems.append(Problem(name, str(error)))
        on_bytes(masters.bytes_of(name) + stored.bytes_of(name), name)
    _compare_rest(masters, stored, result)
    return result


def bytes_to_compare(original: Source, packed: Source) -> int:
    """About what will be read of the two."""
    return sum(source.path(shard).stat().st_size for source in (original, packed) for shard in source.shards)


def _compare_matrix(
    masters: MasterSource, stored: LayerSource, name: str, expert: int | None, repack: bool
) -> PackedPair:
    master = masters.master(name, expert)
    values = _values(stored, stored.read(name, expert), master.shape[1])
    if bad := int((~torch.isfinite(master)).sum() + (~torch.isfinite(values)).sum()):
        raise ValueError(f"{bad} elements are NaN or infinite")
    other = 0
    if repack:
        # As the checkpoint was packed: from the dtype of the original.
        config = stored.config
        packed = quantize_weight(master, config.weight_scheme, config.backend, config.weight_rotation)
        other = int((_values(stored, packed, master.shape[1]) != values).sum())
    wide = master.double()
    energy, noise = (float(x.square().sum()) for x in (wide, values.double() - wide))
    return PackedPair(energy, noise, master.numel(), other)


def _values(stored: LayerSource, packed: dict[str, torch.Tensor], columns: int) -> torch.Tensor:
    config = stored.config
    return weight_values(packed, columns, config.weight_scheme, torch.float32, config.backend, config.weight_rotation)


def _compare_rest(masters: LayerSource, stored: LayerSource, result: PackedComparison) -> None:
    for name in sorted(masters.rest.keys() & stored.rest.keys(), key=natural_key):
        try:
            same = _same_values(masters.rest[name], stored.rest[name])
        except ShardError as error:
            result.problems.append(Problem(name, str(error)))
            continue
        (result.kept if same else result.changed).append(name)


def _same_values(a: StoredTensor, b: StoredTensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.shape:
        return True  # no format stores a weight so
    step = max(1, SLICE_ELEMENTS // max(1, math.prod(a.shape[1:])))
    starts = range(0, a.shape[0], step)
    ends = [min(start + step, a.shape[0]) for start in starts]
    pairs = ((read_rows(a, *rows).float(), read_rows(b, *rows).float()) for rows in zip(starts, ends, strict=True))
    return all(torch.equal(x, y) for x, y in pairs)


def _open_packed(folder: CheckpointFolder) -> LayerSource:
    found = _foreign_format(folder.quantization)
    return PackedSource(folder) if found is None else ForeignSource(folder, found)


def _foreign_format(options: dict[str, Any]) -> PackedFormat | None:
    formats = (format for format in FORMATS.values() if isinstance(format, PackedFormat))
    return next((format for format in formats if format.quant_method == options.get("quant_method")), None)


def _local_folder(source: Source) -> CheckpointFolder:
    """The folder that the files of a source are in; those of a hub model are downloaded."""
    paths = [source.path(shard) for shard in source.shards]
    return open_checkpoint(paths[0].parent)
