# SPDX-License-Identifier: Apache-2.0
"""What the launches of each kernel have to do, read from their arguments: loops, bytes, and operations.

A rule per kernel says how often its loops run, which only its source shows. Where a kernel gets other loops, its rule
must follow: with fewer loops than the rule counts, [`weights_of`] raises. A kernel without a rule has no loops, or is
refused ([`benchmarks.gpu.model.estimate.executed`]).
"""

import math
from collections.abc import Callable, Mapping, Sequence
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


#: Of a launch, by name.
Arguments = Mapping[str, Any]


def work_of(launch: Launch, reached: float = 1.0) -> Work:
    """Return the work of a launch; ``reached`` is the part of experts that have rows."""
    if launch.name in _RULES:
        at = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.constants
        return _RULES[launch.name](launch, at, reached)
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


def _plain(launch: Launch, n_elements: int, trips: Sequence[float] = ()) -> Work:
    return Work(bytes_of(launch.arguments), n_elements, "element", launch.programs, tuple(trips))


def _quantize(launch: Launch, at: Arguments, _: float) -> Work:
    from mxfp4_kernels.common import blocks

    scheme = at["SCHEME"]
    search = {blocks.DYNAMIC.value: (16.0,), blocks.BLOCK_MANTISSAS.value: (float(scheme.MANTISSAS),)}
    search = search.get(scheme.SEARCH, ())
    tile, sides, trips = at["TILE"], at["SIDES"], ()
    for side, length in ((sides.columns, tile.WIDTH), (sides.rows, tile.HEIGHT)):
        if side is not None:
            trips += (*_once(length // tile.STRIP), *(() if side.BF16X2 else search))
    return _plain(launch, at["x_ptr"].numel(), trips)


def _dequantize(launch: Launch, at: Arguments, _: float) -> Work:
    return _plain(launch, at["out_ptr"].numel())


def _to_fp8(launch: Launch, at: Arguments, _: float) -> Work:
    steps = math.ceil(at["n_cols"] / at["COLS"])
    return _plain(launch, at["x_ptr"].numel(), (steps,) if at["top_ptr"] is not None else (steps, steps))


def _decode(launch: Launch, at: Arguments, reached: float) -> Work:
    weight, x, packed = at["WEIGHT"], at["x_ptr"], at["packed"]
    experts = max(1.0, reached * at["n_experts"]) if weight.EXPERTS else 1
    tiles = math.ceil(weight.N / weight.BN) * (experts if weight.EXPERTS else math.ceil(at["n_rows"] / weight.BM))
    # As many programs as there are splits share a tile; the sums of splits are not counted.
    trips = min(at["split_steps"], math.ceil(weight.K / weight.BK))
    copies = 2 if packed.residual_codes is not None else 1
    weights = tiles * weight.BN * weight.K * copies
    n_bytes = bytes_of(packed) * experts / at["n_experts"] + bytes_of((x, at["bias_ptr"], at["out_ptr"]))
    flops = {"bf16": 2.0 * weight.BM * weights}
    return Work(n_bytes, weights, "weight", math.ceil(tiles) * at["n_splits"], _once(trips), 1.0, flops, True)


_RULES: dict[str, Callable[[Launch, Arguments, float], Work]] = {
    "quantize_kernel": _quantize,
    "dequantize_kernel": _dequantize,
    "from_fp8_kernel": _dequantize,
    "to_fp8_kernel": _to_fp8,
    "decode_kernel": _decode,
}
