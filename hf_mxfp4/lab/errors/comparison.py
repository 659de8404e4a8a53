# SPDX-License-Identifier: Apache-2.0
"""Compare two checkpoints under one scheme, or an original and its packed weights."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...checkpoint import (
    ForeignSource,
    LayerSource,
    MasterSource,
    OnBytes,
    PackedSource,
    Problem,
    ShardError,
    StoredTensor,
    ignore_bytes,
    open_checkpoint,
    own_config,
)
from ...checkpoint.formats import FORMATS, ImportableFormat
from ...config import QUANT_METHOD
from ...files import json_clean
from ...numerics import OperandScheme, QuantScheme
from ...ops import quantize_weight, weight_values
from ..page import number
from .layers import Selection, location_of, natural_key
from .source import Source, SourceError
from .statistics import error_statistics, quotient
from .weights import SLICE_ELEMENTS, selected, weight_slices


#: Sums over the elements of a tensor on both sides; those of two tensors add up.
Sums = dict[str, float]
#: Title of a column, the number it shows, what it is multiplied by, and its decimals.
Column = tuple[str, str, float, int]

_COLUMNS: tuple[Column, ...] = (
    ("A rel. MSE %", "first_relative_mse", 100, 4),
    ("B rel. MSE %", "second_relative_mse", 100, 4),
    ("B / A", "mse_ratio", 1, 4),
    ("SQNR gain dB", "sqnr_gain_db", 1, 2),
    ("|A-B| / |A|", "relative_difference", 1, 6),
)
_PACKED_COLUMNS: tuple[Column, ...] = (
    ("SQNR dB", "sqnr_db", 1, 2),
    ("rel. MSE %", "relative_mse", 100, 4),
    ("|A-B| / |A|", "relative_difference", 1, 6),
)
_OTHERWISE: Column = ("packed otherwise", "elements_packed_otherwise", 1, 0)


@dataclass
class Comparison:
    """Sums by tensor name; ``only_first`` and ``only_second`` are names that one side has alone.

    Attributes:
        derive: gives the numbers of a table from sums.
        order: the number by which the worst tensors are found.
        columns, groups_title, worst_title, lines: how tables and sentences show it.
        scheme: the one that two checkpoints are compared under, or that of the packed weights.
        extra: more facts for the JSON report.
    """

    first: str
    second: str
    derive: Callable[[Sums], dict[str, float]]
    order: str
    columns: tuple[Column, ...]
    groups_title: str
    worst_title: str
    scheme: str
    sums: dict[str, Sums] = field(default_factory=dict)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def total(self) -> Sums:
        return _added(self.sums.values())

    def by_layer_type(self) -> dict[str, Sums]:
        groups: dict[str, list[Sums]] = {}
        for name in sorted(self.sums, key=natural_key):
            groups.setdefault(location_of(name)[0], []).append(self.sums[name])
        return {name: _added(members) for name, members in groups.items()}

    def worst(self, count: int = 20) -> list[str]:
        """Return the tensors with the largest error; those for which it is not defined are left out."""
        values = {}
        for name in sorted(self.sums, key=natural_key):
            value = self.derive(self.sums[name])[self.order]
            if not math.isnan(value):
                values[name] = value
        # Sorting is stable: equal ones stay in the order of their names.
        return sorted(values, key=lambda name: -values[name])[:count]

    def tables(self, worst: int = 20) -> list[tuple[str, list[list[str]]]]:
        """Return the titles and rows of cells of the tables, under the headings ``"tensors"`` and [`columns`]."""
        tables = []
        if self.sums:
            groups = {"all": self.total(), **self.by_layer_type()}
            tables.append((self.groups_title, [self._row(name, sums) for name, sums in groups.items()]))
        names = self.worst(worst)
        if names:
            tables.append((self.worst_title, [self._row(name, self.sums[name]) for name in names]))
        return tables

    def to_dict(self) -> dict[str, Any]:
        """Return all of it, JSON-clean; numbers that do not exist are null."""
        total = {}
        if self.sums:
            total = self.derive(self.total())
        return json_clean(
            {
                "first": self.first,
                "second": self.second,
                "scheme": self.scheme,
                "total": total,
                "by_layer_type": {name: self.derive(sums) for name, sums in self.by_layer_type().items()},
                "worst": self.worst(),
                "tensors": {name: self.derive(sums) for name, sums in self.sums.items()},
                "only_first": self.only_first,
                "only_second": self.only_second,
                "problems": [{"where": problem.where, "reason": problem.reason} for problem in self.problems],
                **self.extra,
            }
        )

    def _row(self, name: str, sums: Sums) -> list[str]:
        numbers = self.derive(sums)
        cells = [number(unit * numbers[key], digits) for _, key, unit, digits in self.columns]
        return [name, *cells]


def compare_sources(
    first: Source,
    second: Source,
    scheme: OperandScheme | None = None,
    exclude: Sequence[str] = (),
    on_bytes: OnBytes = ignore_bytes,
) -> Comparison:
    """Compare two checkpoints under ``scheme``, by default the first one's own or `rceil`; or, where one of them is
    packed, its weights as they are stored with those of the other.

    Raises [`SourceError`] for two packed checkpoints, for a scheme and a packed one, and as the two functions below do.
    """
    packed = [source for source in (first, second) if is_packed(source)]
    if len(packed) == 2:
        raise SourceError("both checkpoints store quantized weights; give the original of one of them as A")
    if packed:
        if scheme is not None:
            raise SourceError(f"{packed[0].name} stores weights under a scheme of its own; give no --scheme")
        original, stored = sorted((first, second), key=is_packed)
        return compare_packed(original, stored, Selection(tuple(exclude)), on_bytes)
    return compare_checkpoints(first, second, scheme or first.weight_scheme or QuantScheme(), exclude, on_bytes)


def compare_checkpoints(
    first: Source,
    second: Source,
    scheme: OperandScheme,
    exclude: Sequence[str] = (),
    on_bytes: OnBytes = ignore_bytes,
) -> Comparison:
    """Compare the tensors that both checkpoints have under the same name, in slices.

    Raises [`SourceError`] when they have no tensor to quantize in common, or one stores quantized weights.
    """
    result = Comparison(
        first.name,
        second.name,
        derive=_numbers,
        order="mse_ratio",
        columns=_COLUMNS,
        groups_title=f"under {scheme}, by layer",
        worst_title="where B is worst against A",
        scheme=str(scheme),
        lines=[f"A: {first.name}", f"B: {second.name}"],
    )
    in_first = _selected(first, exclude, result.problems)
    in_second = _selected(second, exclude, result.problems)
    result.only_first = sorted(in_first.keys() - in_second.keys(), key=natural_key)
    result.only_second = sorted(in_second.keys() - in_first.keys(), key=natural_key)
    common = sorted(in_first.keys() & in_second.keys(), key=natural_key)
    if not common and not result.problems:
        raise SourceError(f"{first.name} and {second.name} have no tensor to quantize in common")
    for name in common:
        a, axis = in_first[name]
        b, other_axis = in_second[name]
        if a.shape != b.shape or axis != other_axis:
            result.problems.append(Problem(name, f"shapes differ: {list(a.shape)} and {list(b.shape)}"))
            continue
        try:
            result.sums[name] = _compare_tensor(a, b, axis, scheme, on_bytes)
        except (ShardError, ValueError) as error:
            result.problems.append(Problem(name, str(error)))
    return result


def _selected(source: Source, exclude: Sequence[str], problems: list[Problem]) -> dict[str, tuple[StoredTensor, int]]:
    """Return the tensors of a checkpoint that would be quantized, and their axes, by name."""
    chosen = selected(source, Selection.of(source, exclude), problems)
    return {tensor.name: (tensor, axis) for tensor, axis in chosen}


def is_packed(source: Source) -> bool:
    """Whether a checkpoint stores 4-bit weights that [`compare_packed`] can read."""
    options = source.config.get("quantization_config")
    if not isinstance(options, dict):
        return False
    if options.get("quant_method") == QUANT_METHOD:
        return options.get("mode") == "packed"
    return _foreign_format(options) is not None


def compare_packed(
    original: Source, packed: Source, selection: Selection, on_bytes: OnBytes = ignore_bytes
) -> Comparison:
    """Compare the weights that a packed checkpoint stores with those of the full-precision one, a matrix at a time.

    Layers go by the names that they have in the model, so that experts in one fused tensor meet those in tensors of
    their own.

    Args:
        selection: whose ``exclude`` leaves layers out.

    Raises:
        SourceError: a pattern matches nothing, or the checkpoints have no quantized weight in common.
        CheckpointError: one of them cannot be read, or ``original`` stores quantized weights.
        ShardError: a file is missing or damaged.
    """
    packed_folder = open_checkpoint(packed.folder)
    folder = open_checkpoint(original.folder)
    foreign = _foreign_format(packed_folder.quantization)
    if foreign is None:
        stored: PackedSource | ForeignSource = PackedSource(packed_folder)
    else:
        stored = ForeignSource(packed_folder, foreign)
    # An original without a scheme has its layers found as the packed one has them.
    config = None
    if own_config(folder) is None:
        config = stored.config
    masters = MasterSource(folder, config)
    names = list(dict.fromkeys([*stored.shapes, *masters.shapes]))
    if unmatched := selection.unmatched(names):
        raise SourceError(f"no quantized layer of {packed.name} matches the pattern {unmatched[0]!r}")
    chosen = [name for name in names if selection.reason_against(name) is None]
    common = [name for name in chosen if name in stored.shapes and name in masters.shapes]
    if not common:
        raise SourceError(f"{original.name} and {packed.name} have no quantized weight in common")
    # Other formats do not record how scales were chosen, so that packing again means nothing.
    repack = foreign is None
    if repack:
        scheme = str(stored.config.weight_scheme)
        columns = (*_PACKED_COLUMNS, _OTHERWISE)
    else:
        scheme = str(packed_folder.quantization["quant_method"])
        columns = _PACKED_COLUMNS
    result = Comparison(
        original.name,
        packed.name,
        derive=_packed_numbers,
        order="relative_mse",
        columns=columns,
        groups_title=f"error of the stored weights ({scheme}), by layer",
        worst_title="largest relative errors",
        scheme=scheme,
        only_first=[name for name in chosen if name not in stored.shapes],
        only_second=[name for name in chosen if name not in masters.shapes],
    )
    for name in common:
        shape = masters.shapes[name]
        stored_shape = stored.shapes[name]
        size = [len(shape.matrices), shape.out_features, shape.in_features]
        stored_size = [len(stored_shape.matrices), stored_shape.out_features, stored_shape.in_features]
        if size != stored_size:
            result.problems.append(Problem(name, f"shapes differ: {size} and {stored_size}"))
            continue
        try:
            result.sums[name] = _added(_compare_matrix(masters, stored, name, part, repack) for part in shape.matrices)
        except (ShardError, ValueError) as error:
            result.problems.append(Problem(name, str(error)))
        on_bytes(masters.bytes_of(name) + stored.bytes_of(name), name)
    rest = _compare_rest(masters, stored, result.problems)
    result.extra["not_quantized"] = rest
    result.lines = _packed_lines(result, **rest)
    return result


def _numbers(sums: Sums) -> dict[str, float]:
    """Return the numbers of the tables of two checkpoints."""
    first = quotient(sums["first_noise"], sums["first"])
    second = quotient(sums["second_noise"], sums["second"])
    ratio = quotient(second, first)
    sqnr_gain_db = math.nan
    if ratio > 0:
        sqnr_gain_db = -10 * math.log10(ratio)
    return {
        "first_relative_mse": first,
        "second_relative_mse": second,
        "mse_ratio": ratio,
        "sqnr_gain_db": sqnr_gain_db,
        "relative_difference": math.sqrt(quotient(sums["distance"], sums["first"])),
    }


def _packed_numbers(sums: Sums) -> dict[str, float]:
    """Return the numbers of the tables of an original and its packed weights."""
    relative = quotient(sums["noise"], sums["energy"])
    sqnr_db = math.inf
    if relative != 0:
        sqnr_db = -10.0 * math.log10(relative)
    numbers = {
        "sqnr_db": sqnr_db,
        "relative_mse": relative,
        "relative_difference": math.sqrt(relative),
    }
    if "otherwise" in sums:
        numbers["elements_packed_otherwise"] = sums["otherwise"]
    return numbers


def _compare_tensor(a: StoredTensor, b: StoredTensor, axis: int, scheme: OperandScheme, on_bytes: OnBytes) -> Sums:
    """Return the sums of two tensors in full precision: their errors under a scheme, and their distance."""
    parts = []
    for x, y in zip(weight_slices(a, axis, [scheme]), weight_slices(b, axis, [scheme]), strict=True):
        bad = int((~torch.isfinite(x)).sum()) + int((~torch.isfinite(y)).sum())
        if bad:
            raise ValueError(f"{bad} elements of a slice are NaN or infinite")
        first = error_statistics(x, scheme)
        second = error_statistics(y, scheme)
        parts.append(
            {
                "first": first.energy,
                "second": second.energy,
                "first_noise": first.total,
                "second_noise": second.total,
                "distance": float((x.double() - y.double()).square_().sum(dim=-1).sum()),
            }
        )
        on_bytes(x.numel() * x.element_size() + y.numel() * y.element_size(), a.name)
    return _added(parts)


def _compare_matrix(masters: MasterSource, stored: LayerSource, name: str, expert: int | None, repack: bool) -> Sums:
    """Return the sums of a matrix as it is stored, and with ``repack`` how it differs from packing the original."""
    master = masters.master(name, expert)
    config = stored.config
    values = _values(stored, stored.read(name, expert), master.shape[1])
    if bad := int((~torch.isfinite(master)).sum() + (~torch.isfinite(values)).sum()):
        raise ValueError(f"{bad} elements are NaN or infinite")
    wide = master.double()
    sums: Sums = {
        "energy": float(wide.square().sum()),
        "noise": float((values.double() - wide).square().sum()),
        "elements": master.numel(),
    }
    if repack:
        # As the checkpoint was packed: from the dtype of the original.
        packed = quantize_weight(master, config.weight_scheme, config.backend, config.weight_rotation)
        sums["otherwise"] = int((_values(stored, packed, master.shape[1]) != values).sum())
    return sums


def _values(stored: LayerSource, packed: dict[str, torch.Tensor], columns: int) -> torch.Tensor:
    """Return the float32 values of the packed parts of a matrix with this many columns."""
    config = stored.config
    return weight_values(packed, columns, config.weight_scheme, torch.float32, config.backend, config.weight_rotation)


def _compare_rest(masters: LayerSource, stored: LayerSource, problems: list[Problem]) -> dict[str, list[str]]:
    """Return the names of tensors that are not quantized, with the same values on both sides or with others."""
    same: list[str] = []
    changed: list[str] = []
    for name in sorted(masters.rest.keys() & stored.rest.keys(), key=natural_key):
        try:
            is_same = _same_values(masters.rest[name], stored.rest[name])
        except ShardError as error:
            problems.append(Problem(name, str(error)))
            continue
        if is_same:
            same.append(name)
        else:
            changed.append(name)
    return {"same": same, "changed": changed}


def _same_values(a: StoredTensor, b: StoredTensor) -> bool:
    """Compare two tensors, some of their rows at a time."""
    if a.shape != b.shape:
        return False
    if not a.shape:
        return True  # no format stores a weight as a scalar
    step = max(1, SLICE_ELEMENTS // max(1, math.prod(a.shape[1:])))
    for start in range(0, a.shape[0], step):
        stop = min(start + step, a.shape[0])
        if not torch.equal(a.read(start, stop).float(), b.read(start, stop).float()):
            return False
    return True


def _packed_lines(result: Comparison, same: Sequence[str], changed: Sequence[str]) -> list[str]:
    """Return the sentences above the tables of an original and its packed weights."""
    lines = [
        f"A: {result.first}, the original",
        f"B: {result.second}, whose packed weights are compared as they are stored, dequantized",
    ]
    total = result.total()
    if total:
        lines.append(f"SQNR of {len(result.sums)} weights: {number(_packed_numbers(total)['sqnr_db'], 2)} dB")
    if total.get("otherwise"):
        lines.append(
            f"B is not what packing A now gives: {total['otherwise']:,} of {total['elements']:,} elements differ "
            "(packed from other weights, or by another version)"
        )
    elif "otherwise" in total:
        lines.append("B holds exactly what packing A now gives")
    rest = f"tensors that are not quantized: {len(same)} the same, {len(changed)} with other values"
    if changed:
        names = changed[:5]
        if len(changed) > 5:
            names = [*names, "..."]
        rest += f" ({', '.join(names)})"
    lines.append(rest)
    return lines


def _foreign_format(options: dict[str, Any]) -> ImportableFormat | None:
    """Return the format of another engine that a `quantization_config` names, if we can read it."""
    for format in FORMATS.values():
        if isinstance(format, ImportableFormat) and format.quant_method == options.get("quant_method"):
            return format
    return None


def _added(parts: Iterable[Sums]) -> Sums:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
