# SPDX-License-Identifier: Apache-2.0
"""Error statistics of a checkpoint's weights: one shard after the other, one slice of a tensor at a time."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...checkpoint import ShardError, StoredTensor, read_header
from ...config import QUANT_METHOD, MXFP4RLConfig
from ...module_names import CONV1D_HINT, CONV1D_MODELS, name_matches
from ...numerics import QuantScheme
from .layer_names import TensorDecision, classify, module_name
from .progress import ProgressLog
from .results import Analysis, Problem, TensorResult
from .source import Source, SourceError
from .statistics import ErrorStatistics, error_statistics
from .sweep import PrecisionSweep, precision_sweep


#: Elements that are read at once.
SLICE_ELEMENTS = 2**20
#: Told of analysed bytes as they are done, with the name of the tensor they belong to.
OnBytes = Callable[[int, str], None]


@dataclass(frozen=True)
class Selection:
    """Which tensors of a checkpoint are analysed: those that its architecture has quantized, within what the user
    wants. ``include`` and ``exclude`` are patterns of [`hf_mxfp4.module_names.name_matches`]."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    skips: tuple[str, ...] = ()
    model_type: str = ""

    def wants(self, name: str) -> bool:
        """Whether the user wants the layer of this name."""
        included = not self.include or any(name_matches(name, pattern) for pattern in self.include)
        return included and not any(name_matches(name, pattern) for pattern in self.exclude)

    def classify(self, tensor: StoredTensor) -> TensorDecision:
        name = module_name(tensor.name)
        if self.include and not any(name_matches(name, pattern) for pattern in self.include):
            return TensorDecision(skipped="not in --include")
        if any(name_matches(name, pattern) for pattern in self.exclude):
            return TensorDecision(skipped="--skip")
        return classify(tensor.name, tensor.shape, tensor.dtype, self.model_type, self.skips)

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """Patterns that match none of the tensor names."""
        modules = [module_name(name) for name in names]
        return [p for p in (*self.include, *self.exclude) if not any(name_matches(name, p) for name in modules)]


def own_config(source: Source) -> MXFP4RLConfig | None:
    """The scheme that a checkpoint was trained under; `None` for one that is not quantized.

    Raises [`SourceError`] for a checkpoint whose weights are stored quantized: their error cannot be measured any more.
    """
    options = source.config.get("quantization_config")
    if not options:
        return None
    method = options.get("quant_method") if isinstance(options, dict) else None
    if method != QUANT_METHOD or options.get("mode") == "packed":
        what = f"{QUANT_METHOD!r}, mode='packed'" if method == QUANT_METHOD else repr(method)
        raise SourceError(
            f"{source.name} stores quantized weights already (quant_method {what} in its config.json), so their "
            "original values, and the error, are gone; analyse the full-precision checkpoint they were made from, or "
            "compare the two: hf-mxfp4 compare ORIGINAL PACKED"
        )
    try:
        return MXFP4RLConfig.from_dict(options)
    except (TypeError, ValueError) as error:
        raise SourceError(f"the quantization_config of {source.name} cannot be read: {error}") from error


def selection_for(
    source: Source, include: Sequence[str] = (), exclude: Sequence[str] = (), config: MXFP4RLConfig | None = None
) -> Selection:
    """The selection for a checkpoint with this [`own_config`]."""
    skips = tuple(config.modules_to_not_convert or ()) if config else ()
    return Selection(tuple(include), tuple(exclude), skips, str(source.config.get("model_type", "")))


def analyze_weights(
    source: Source,
    schemes: Sequence[QuantScheme],
    selection: Selection,
    *,
    progress: ProgressLog | None = None,
    on_bytes: OnBytes = lambda count, name: None,
) -> Analysis:
    """Statistics of every selected weight under every scheme. What cannot be read becomes a problem of the result.

    Raises:
        SourceError: nothing is selected, a pattern matches nothing, or the weights are stored quantized.
        ProgressMismatch: the progress log was written from other files.
    """
    analysis = Analysis(source.name, tuple(map(str, schemes)))
    if unmatched := selection.unmatched(tensor_names(source)):
        raise SourceError(f"no tensor of {source.name} matches the pattern {unmatched[0]!r}")
    seen: dict[str, str] = {}
    for shard, identity, tensors in readable_shards(source, analysis.problems):
        for tensor in tensors:
            if seen.setdefault(tensor.name, shard) != shard:
                analysis.problems.append(
                    Problem(tensor.name, f"is in {shard} too; the one in {seen[tensor.name]} counts")
                )
                continue
            decision = selection.classify(tensor)
            if decision.stored:
                raise SourceError(
                    f"{source.name} stores quantized weights already, such as {decision.stored}; "
                    "analyse the full-precision checkpoint they were made from"
                )
            if decision.skipped:
                analysis.skipped.setdefault(decision.skipped, []).append(tensor.name)
                continue
            result = None if progress is None else progress.find(tensor.name, shard, identity)
            if result is None:
                try:
                    result = analyze_tensor(tensor, decision.axis, schemes, on_bytes)
                except (ShardError, NonFiniteError) as error:
                    analysis.problems.append(Problem(tensor.name, str(error)))
                    continue
                if progress is not None:
                    progress.add(result, shard, identity)
            analysis.results.append(result)
        if progress is not None:
            progress.sync()
    if not analysis.results and not analysis.problems:
        counts = ", ".join(f"{len(names)} {reason}" for reason, names in analysis.skipped.items())
        hint = f". {CONV1D_HINT}" if selection.model_type in CONV1D_MODELS else ""
        counted = counts or "nothing, it is empty"
        raise SourceError(f"no weight of {source.name} would be quantized; skipped: {counted}{hint}")
    return analysis


class NonFiniteError(ValueError):
    """A tensor that holds NaN or infinity has no quantization error."""


def analyze_tensor(
    tensor: StoredTensor, axis: int, schemes: Sequence[QuantScheme], on_bytes: OnBytes = lambda count, name: None
) -> TensorResult:
    """Statistics of a stored tensor with two or three axes, blocks along the last (-1) or the middle one (1).

    Raises [`NonFiniteError`] with the count of NaN and infinite elements, and [`ShardError`].
    """
    statistics = {str(scheme): ErrorStatistics() for scheme in schemes}
    sweep, bad = PrecisionSweep(), 0
    for first, x in enumerate(weight_slices(tensor, axis, schemes)):
        bad += int((~torch.isfinite(x)).sum())
        if bad == 0:
            for scheme in schemes:
                statistics[str(scheme)] += error_statistics(x, scheme)
            if first == 0:
                sweep = precision_sweep(x)
        on_bytes(x.numel() * x.element_size(), tensor.name)
    if bad:
        raise NonFiniteError(f"{bad} of {math.prod(tensor.shape)} elements are NaN or infinite")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorResult(tensor.name, "weight", tensor.shape, dtype, statistics, sweep)


def _slices(tensor: StoredTensor, max_elements: int, multiple_of: int = 1) -> Iterator[torch.Tensor]:
    """Yield a tensor with two or three axes as matrices ``[rows, columns]`` of at most about ``max_elements``, each
    within one matrix of the tensor; all but the last of a matrix have a multiple of ``multiple_of`` rows."""
    *matrices, rows, columns = tensor.shape
    step = max(1, max_elements // max(1, columns) // multiple_of) * multiple_of
    for index in range(matrices[0]) if matrices else (None,):
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield tensor.read(start, stop) if index is None else tensor.read(index, index + 1)[0, start:stop]


def weight_slices(tensor: StoredTensor, axis: int, schemes: Sequence[QuantScheme]) -> Iterator[torch.Tensor]:
    """Matrices whose last axis is the contraction axis, in a fixed order and size."""
    if axis == -1:
        yield from _slices(tensor, SLICE_ELEMENTS, max(scheme.block_rows for scheme in schemes))
    else:
        for matrix in _slices(tensor, tensor.shape[-2] * tensor.shape[-1]):
            yield matrix.t()


def tensor_names(source: Source) -> list[str]:
    """All tensor names that the index or, without one, the readable headers give."""
    if source.expected:
        return [name for names in source.expected.values() for name in names]
    return [tensor.name for _, _, tensors in readable_shards(source, []) for tensor in tensors]


def readable_shards(source: Source, problems: list[Problem]) -> Iterator[tuple[str, list, list[StoredTensor]]]:
    """File name, identity and tensors of every shard that can be read; the others are added to ``problems``, as are
    tensors that the index promises and a shard lacks."""
    for shard in source.shards:
        expected = source.expected.get(shard, ())
        try:
            path = source.path(shard)
            identity = source.identity(path)
            tensors = read_header(path).tensors
        except ShardError as error:
            lost = f" ({len(expected)} tensors)" if expected else ""
            problems.append(Problem(shard, f"{error}{lost}"))
            continue
        present = {tensor.name for tensor in tensors}
        problems.extend(
            Problem(name, f"{shard} lacks it, though the index says otherwise")
            for name in expected
            if name not in present
        )
        yield shard, identity, tensors


def bytes_to_analyze(source: Source, selection: Selection) -> int | None:
    """Bytes of the selected tensors of a local checkpoint; for a hub one all bytes, as far as its index says."""
    if source.kind == "hub":
        return source.total_bytes
    return sum(
        tensor.nbytes
        for _, _, tensors in readable_shards(source, [])
        for tensor in tensors
        if selection.classify(tensor).axis is not None
    )


def describe_source(source: Source) -> dict[str, Any]:
    """Return for reports the kind of source, architecture, and number of files."""
    architectures = source.config.get("architectures")
    return {
        "kind": source.kind,
        "architecture": architectures[0] if isinstance(architectures, list) and architectures else None,
        "files": len(source.shards),
    }
