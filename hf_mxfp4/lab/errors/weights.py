# SPDX-License-Identifier: Apache-2.0
"""Measure the quantization error of a checkpoint's weights, one file after the other, one slice at a time."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...checkpoint import OnBytes, Problem, StoredTensor, ignore_bytes
from ...checkpoint.manifest import record_of
from ...numerics import NVFP4, OperandScheme
from ..resume_log import ProgressMismatch, ResumeLog
from .bits import bits_text
from .layers import Selection, location_of, natural_key
from .source import Source, SourceError
from .statistics import ErrorStatistics, error_statistics


#: Elements that are read at once.
SLICE_ELEMENTS = 2**20
#: A caution that is printed with the ranking by error.
SQNR_NOTE = (
    "SQNR does not rank schemes by the perplexity of the model: between schemes of about the same bits let that "
    "decide (hf-mxfp4 eval), or the accuracy on your task (recipes/evaluate.py)."
)


@dataclass(frozen=True)
class TensorResult:
    """Statistics of one tensor, by scheme (its string form)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    statistics: dict[str, ErrorStatistics]


@dataclass
class Analysis:
    """Statistics of the weights of one model. ``schemes`` are string forms; ``skipped`` has tensor names by reason."""

    model: str
    schemes: tuple[str, ...]
    results: list[TensorResult] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def in_order(self) -> list[TensorResult]:
        """The results in natural order of their names."""
        return sorted(self.results, key=lambda r: natural_key(r.name))

    def totals(self) -> dict[str, ErrorStatistics]:
        """Return sums over all tensors, by scheme."""
        return {
            scheme: sum((r.statistics[scheme] for r in self.in_order), ErrorStatistics()) for scheme in self.schemes
        }

    def by_layer_type(self, scheme: str) -> dict[str, ErrorStatistics]:
        return _grouped(self.in_order, scheme, lambda r: location_of(r.name)[0])

    def by_depth(self, scheme: str) -> dict[int, ErrorStatistics]:
        """Return sums by index of the layer; tensors outside of numbered layers are left out."""
        placed = [r for r in self.in_order if location_of(r.name)[1] is not None]
        return dict(sorted(_grouped(placed, scheme, lambda r: location_of(r.name)[1]).items()))

    def worst(self, scheme: str, count: int = 20) -> dict[str, ErrorStatistics]:
        """Return the tensors of largest relative error; all-zero ones, which have none, are left out."""
        known = {r.name: r.statistics[scheme] for r in self.in_order if r.statistics[scheme].energy > 0}
        return dict(sorted(known.items(), key=lambda item: -item[1].relative_mse)[:count])


class TensorLog(ResumeLog):
    """Keep the results of finished tensors on disk, each with the checksum of its file.

    Args:
        path: the log; made with its folder if need be.
        model: what the results are of, kept in the first line; ``schemes`` and ``version`` too.
        overwrite: start over whatever the log holds.

    Raises [`ProgressMismatch`] when the log was written for something else.
    """

    def __init__(self, path: Path, model: str, schemes: Sequence[str], version: str, *, overwrite: bool = False):
        self._checksums: dict[Path, str] = {}
        header = {"format": 3, "hf_mxfp4": version, "model": model, "schemes": list(schemes)}
        super().__init__(path, header, lambda line: line["tensor"], overwrite=overwrite)

    def find(self, tensor: StoredTensor) -> TensorResult | None:
        """Return the result of a tensor, if it is known.

        Raises [`ProgressMismatch`] when it was computed from another version of the file.
        """
        line = self.done.get(tensor.name)
        if line is None:
            return None
        if line["shard"] != tensor.file.name or line["checksum"] != self._checksum(tensor.file):
            raise ProgressMismatch(
                f"{self.path} holds results of {line['shard']} as it was before it changed; "
                "start over with --overwrite, or give another folder"
            )
        statistics = {scheme: ErrorStatistics.from_dict(sums) for scheme, sums in line["statistics"].items()}
        return TensorResult(tensor.name, tuple(line["shape"]), line["dtype"], statistics)

    def _checksum(self, file: Path) -> str:
        if file not in self._checksums:
            self._checksums[file] = record_of(file).xxh3_128
        return self._checksums[file]

    def keep(self, result: TensorResult, file: Path) -> None:
        """Append a finished result."""
        self.add(
            {
                "tensor": result.name,
                "shard": file.name,
                "checksum": self._checksum(file),
                "shape": list(result.shape),
                "dtype": result.dtype,
                "statistics": {scheme: statistics.to_dict() for scheme, statistics in result.statistics.items()},
            }
        )


def analyze_weights(
    source: Source,
    schemes: Sequence[OperandScheme],
    selection: Selection,
    *,
    log: TensorLog | None = None,
    on_bytes: OnBytes = ignore_bytes,
) -> Analysis:
    """Measure every selected weight under every scheme. What cannot be read becomes a problem of the result.

    Raises:
        SourceError: nothing is selected, a pattern matches nothing, or the weights are stored quantized.
        ProgressMismatch: the log was written from other files.
    """
    analysis = Analysis(source.name, tuple(map(str, schemes)))
    if unmatched := selection.unmatched(source.tensor_names()):
        raise SourceError(f"no tensor of {source.name} matches the pattern {unmatched[0]!r}")
    for tensor, axis in selected(source, selection, analysis.problems, analysis.skipped):
        result = None if log is None else log.find(tensor)
        if result is None:
            try:
                result = analyze_tensor(tensor, axis, schemes, on_bytes)
            except ValueError as error:
                analysis.problems.append(Problem(tensor.name, str(error)))
                continue
            if log is not None:
                log.keep(result, tensor.file)
        analysis.results.append(result)
    if not analysis.results and not analysis.problems:
        counts = ", ".join(f"{len(names)} {reason}" for reason, names in analysis.skipped.items())
        raise SourceError(f"no weight of {source.name} would be quantized; skipped: {counts or 'nothing, it is empty'}")
    return analysis


def selected(
    source: Source, selection: Selection, problems: list[Problem], skipped: dict[str, list[str]] | None = None
) -> Iterator[tuple[StoredTensor, int]]:
    """Yield the selected tensors of a checkpoint, and the axis that blocks run along. Those that are left out are
    added to ``skipped`` by their reason.

    Raises [`SourceError`] for a tensor that is stored quantized.
    """
    seen: dict[str, str] = {}
    for shard, tensors in source.shards(problems):
        for tensor in tensors:
            if seen.setdefault(tensor.name, shard) != shard:
                problems.append(Problem(tensor.name, f"is in {shard} too; the one in {seen[tensor.name]} counts"))
                continue
            decision = selection.decide(tensor)
            if decision is None:
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise SourceError(
                    f"{source.name} stores quantized weights already, such as {tensor.name} ({dtype}); "
                    "analyse the full-precision checkpoint they were made from"
                )
            if isinstance(decision, int):
                yield tensor, decision
            elif skipped is not None:
                skipped.setdefault(decision, []).append(tensor.name)


def analyze_tensor(
    tensor: StoredTensor, axis: int, schemes: Sequence[OperandScheme], on_bytes: OnBytes = ignore_bytes
) -> TensorResult:
    """Measure a stored tensor with two or three axes, blocks along the last (-1) or the middle one (1).

    Raises `ValueError` with the count of NaN and infinite elements, and `ShardError`.
    """
    statistics = {str(scheme): ErrorStatistics() for scheme in schemes}
    bad = 0
    for x in weight_slices(tensor, axis, schemes):
        bad += int((~torch.isfinite(x)).sum())
        if bad == 0:
            for scheme in schemes:
                statistics[str(scheme)] += error_statistics(x, scheme)
        on_bytes(x.numel() * x.element_size(), tensor.name)
    if bad:
        raise ValueError(f"{bad} of {math.prod(tensor.shape)} elements are NaN or infinite")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorResult(tensor.name, tensor.shape, dtype, statistics)


def _slices(tensor: StoredTensor, max_elements: int, multiple_of: int = 1) -> Iterator[torch.Tensor]:
    """Yield a tensor with two or three axes as matrices ``[rows, columns]`` of at most about ``max_elements``, each
    within one matrix of the tensor; all but the last of a matrix have a multiple of ``multiple_of`` rows."""
    *matrices, rows, columns = tensor.shape
    step = max(1, max_elements // max(1, columns) // multiple_of) * multiple_of
    indices: Iterable[int | None] = [None]
    if matrices:
        indices = range(matrices[0])
    for index in indices:
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            if index is None:
                yield tensor.read(start, stop)
            else:
                yield tensor.read(index, index + 1)[0, start:stop]


def weight_slices(tensor: StoredTensor, axis: int, schemes: Sequence[OperandScheme]) -> Iterator[torch.Tensor]:
    """Yield matrices whose last axis is the contraction axis, in a fixed order and size: whole ones under NVFP4, which
    has a scale for all of a matrix."""
    if axis == -1 and NVFP4 not in schemes:
        yield from _slices(tensor, SLICE_ELEMENTS, max(scheme.block_rows for scheme in schemes))
    else:
        for matrix in _slices(tensor, tensor.shape[-2] * tensor.shape[-1]):
            if axis != -1:
                matrix = matrix.t()
            yield matrix


def least_error(by_scheme: Mapping[str, ErrorStatistics]) -> str:
    """Name, in one sentence, the scheme of least error for each number of bits; empty where there is no error."""
    groups: dict[str, list[tuple[str, ErrorStatistics]]] = {}
    for scheme, statistics in by_scheme.items():
        if statistics.total > 0:
            groups.setdefault(bits_text(scheme), []).append((scheme, statistics))
    parts = []
    for bits, members in sorted(groups.items(), key=lambda item: float(item[0])):
        (best, statistics), *others = sorted(members, key=lambda item: -item[1].sqnr_db)
        next_best = ""
        if others:
            scheme, next_statistics = others[0]
            next_best = f", next is {scheme} with {next_statistics.sqnr_db:.2f}"
        parts.append(f"at {bits} bits an element {best} (SQNR {statistics.sqnr_db:.2f} dB{next_best})")
    if not parts:
        return ""
    return f"Verdict, least error: {'; '.join(parts)}."


def _grouped(results: Iterable[TensorResult], scheme: str, key: Callable[[TensorResult], Hashable]) -> dict:
    """Return the sums under a scheme of the results that have the same key."""
    groups: dict = {}
    for result in results:
        group = key(result)
        groups[group] = groups.get(group, ErrorStatistics()) + result.statistics[scheme]
    return groups
