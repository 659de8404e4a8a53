# SPDX-License-Identifier: Apache-2.0
"""What the launches of each kernel have to do, read from their arguments: loops, bytes, and operations.

A rule per kernel says how often its loops run, which only its source shows. Where a kernel gets other loops, its rule
must follow: with fewer loops than the rule counts, [`weights_of`] raises. A kernel without a rule has no loops, or is
refused ([`benchmarks.gpu.model.estimate.executed`]).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .stub import Launch


@dataclass(frozen=True)
class Work:
    """Of one launch.

    Attributes:
        n_bytes: to move through device memory, each input and each output once.
        elements, unit: what instructions are divided by, and its name.
        trips: of the first loops; the others do not run.
        finishing: see [`benchmarks.gpu.model.instructions.weights_of`].
        programs: that have something to do.
        flops: by kind of product.
        product_in_loop: the first loop multiplies.
        has_rule: otherwise the kernel must be one without loops.
    """

    n_bytes: float
    elements: float
    unit: str
    programs: int
    trips: tuple[float, ...] = ()
    finishing: float = 1.0
    flops: dict[str, float] = field(default_factory=dict)
    product_in_loop: bool = False
    has_rule: bool = True


class Arguments(dict):
    """Of a launch, by name; those in capitals that bundles hold are there by their own names too."""

    def __init__(self, launch: Launch):
        names = launch.kernel.arg_names
        super().__init__(zip(names, launch.arguments, strict=False))
        self.update(launch.constants)
        for bundle in list(self.values()):
            for name, value in getattr(bundle, "_asdict", dict)().items():
                if name.isupper():
                    self.setdefault(name, value)


def work_of(launch: Launch, reached: float = 1.0) -> Work:
    """``reached``: the part of experts that have rows, for kernels of mixtures."""
    if launch.name in _RULES:
        return _RULES[launch.name](launch, Arguments(launch), reached)
    n_elements = tensors_of(launch.arguments)[0].numel()
    return Work(bytes_of(launch.arguments), n_elements, "element", launch.programs, has_rule=False)


def tensors_of(values: Any) -> list[torch.Tensor]:
    """All tensors in bundles."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [x for value in values for x in tensors_of(value)] if isinstance(values, (tuple, list)) else []


def bytes_of(values: Any) -> int:
    """Of the numbers that tensors hold, those expanded once."""
    total = 0
    for x in tensors_of(values):
        sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride]
        total += math.prod(sizes) * x.element_size()
    return total


def _once(*counts: float) -> tuple[float, ...]:
    """Trips of loops that are there: the compiler leaves none of one trip."""
    return tuple(count for count in counts if count != 1)


def _searched(at: Arguments) -> tuple[float, ...]:
    """Of the search for macro bytes within a strip or tile."""
    from mxfp4_kernels.common import macro
    from mxfp4_kernels.common.blocks import DYNAMIC

    return (float(macro._DYNAMIC_CANDIDATES.value),) if at["SCHEME"].SEARCH == DYNAMIC.value else ()


def _plain(launch: Launch, at: Arguments, n_elements: int, trips: Sequence[float]) -> Work:
    return Work(bytes_of(launch.arguments), n_elements, "element", launch.programs, tuple(trips))


def _rows(launch: Launch, at: Arguments, _: float) -> Work:
    return _plain(launch, at, at["x_ptr"].numel(), _searched(at))


def _both(launch: Launch, at: Arguments, _: float) -> Work:
    search = _searched(at)
    strips = at["TILE"] // at["STRIP"]
    columns = strips if at["BY_ROWS"] else 1
    trips = (*_once(columns), *search, *((*_once(strips), *search) if at["BY_ROWS"] else ()))
    return _plain(launch, at, at["x_ptr"].numel(), trips)


def _dequantize(launch: Launch, at: Arguments, _: float) -> Work:
    return _plain(launch, at, at["out_ptr"].numel(), ())


def _fold_groups(launch: Launch, at: Arguments, _: float) -> Work:
    return _plain(launch, at, at["x_ptr"].numel(), _searched(at))


def _fold_rows(launch: Launch, at: Arguments, _: float) -> Work:
    steps = math.ceil(at["lengths"].padded_cols / at["COLS"])
    trips = () if at["ONE_TILE"] else _once(steps, steps)
    return _plain(launch, at, at["x_ptr"].numel(), trips)


def _fold_both(launch: Launch, at: Arguments, _: float) -> Work:
    strips, search = 128 // at["STRIP"], _searched(at)
    return _plain(launch, at, at["x_ptr"].numel(), (strips, *search, strips, *search))


def _pairs(launch: Launch, at: Arguments, _: float) -> Work:
    return _plain(launch, at, 32 * at["n_blocks"], ())


def _pairs_both(launch: Launch, at: Arguments, _: float) -> Work:
    strips = 128 // at["STRIP"]
    return _plain(launch, at, at["x_ptr"].numel(), (strips, strips) if at["BY_ROWS"] else ())


def _fp8_rows(launch: Launch, at: Arguments, _: float) -> Work:
    steps = math.ceil(at["n_cols"] / at["COLS"])
    return _plain(launch, at, at["x_ptr"].numel(), () if at["ONE_TILE"] else _once(steps, steps))


def _column_maxima(launch: Launch, at: Arguments, _: float) -> Work:
    return _plain(launch, at, at["x_ptr"].numel(), (at["part_steps"],))


def _decode(launch: Launch, at: Arguments, _: float) -> Work:
    n_tokens, n_rows, n_cols, tile = at["n_tokens"], at["n_rows"], at["n_cols"], at["TILE"]
    steps = math.ceil(n_cols / tile.BK)
    trips = steps / at["n_splits"]
    n_bytes = bytes_of((at["x_ptr"], at["packed"], at["bias_ptr"], at["out_ptr"]))
    copies = 2 if at["packed"].residual_codes is not None else 1
    return Work(
        n_bytes=n_bytes,
        elements=n_rows * n_cols * copies * math.ceil(n_tokens / tile.BM),
        unit="weight",
        programs=launch.programs,
        trips=(trips,),
        finishing=1 / at["n_splits"],
        flops={"bf16": 2.0 * max(n_tokens, tile.BM) * n_rows * n_cols * copies},
        product_in_loop=True,
    )


def _grouped_packed(launch: Launch, at: Arguments, reached: float) -> Work:
    shape, tile, x = at["SHAPE"], at["TILE"], at["x_ptr"]
    experts = max(1.0, reached * at["n_experts"])
    # Each of as many splits as share a tile takes its steps; the sums of splits are not counted.
    programs = math.ceil(experts * math.ceil(shape.N / tile.BN)) * at["n_splits"]
    trips = min(at["split_steps"], math.ceil(shape.K / tile.BK))
    weights = experts * shape.N * shape.K
    n_bytes = bytes_of(at["packed"]) * experts / at["n_experts"] + bytes_of((x, at["out_ptr"]))
    flops = {"bf16": 2.0 * tile.BM * weights}
    return Work(n_bytes, weights, "weight", programs, _once(trips), 1.0, flops, True)


_RULES: dict[str, Callable[[Launch, Arguments, float], Work]] = {
    "quantize_kernel": _rows,
    "quantize_both_kernel": _both,
    "quantize_pairs_kernel": _pairs,
    "pairs_values_kernel": _pairs,
    "quantize_mantissas_kernel": _pairs,
    "fake_mantissas_kernel": _pairs,
    "quantize_pairs_both_kernel": _pairs_both,
    "dequantize_kernel": _dequantize,
    "fold_groups_kernel": _fold_groups,
    "fold_rows_kernel": _fold_rows,
    "fold_both_kernel": _fold_both,
    "fake_rows_kernel": _fp8_rows,
    "column_maxima_kernel": _column_maxima,
    "scale_bytes_kernel": _column_maxima,
    "linear_kernel": _decode,
    "grouped_packed_kernel": _grouped_packed,
}
