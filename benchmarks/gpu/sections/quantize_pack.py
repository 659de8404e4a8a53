# SPDX-License-Identifier: Apache-2.0
"""BF16 matrices to packed codes and scale bytes, one read."""

from typing import Any

import torch

import mxfp4_kernels
from hf_mxfp4 import numerics

from .. import peers
from ..bench import Aim, Bench, Measured, Work
from ..checks import expect_equal, some_rows
from ..shapes import QWEN_3B, QWEN_7B, QWEN_32B, TINY
from ..timing import rotated


NAME, SHARE = "quantize_pack", 35

#: Scheme by its name in records: plain, the default ones of activations and of weights, and the costliest search.
SCHEMES: dict[str, dict[str, Any]] = {
    "rceil": {},
    "rceil, macro 128 static": {"macro_block": 128},
    "rceil, macro 128 static, fallback": {"macro_block": 128, "outlier_fallback": 0.5},
    "rceil, macro 128 searched": {"macro_block": 128, "macro_search": "dynamic"},
    "even, block mantissas": {"scale_rule": "even", "macro_block": 128, "macro_search": "blockwise"},
    "even, block mantissas, fallback": {
        "scale_rule": "even",
        "macro_block": 128,
        "macro_search": "blockwise",
        "outlier_fallback": 1.0,
    },
    "mse": {"scale_rule": "mse"},
    "rceil, stochastic": {"rounding": "stochastic", "seed": 1},
    "rceil, rotated by 16": {"rotation": 16},
}
BOTH = "rceil, along rows and columns"
TOKENS = 8192


def run(bench: Bench) -> None:
    if bench.machine.tiny:
        matrices = [(9, TINY.hidden_size), (3, 100)]
    else:
        # Inputs of the layers of 8k tokens, and the largest weight.
        matrices = [(TOKENS, width) for width in (QWEN_32B.hidden_size, QWEN_7B.intermediate_size, QWEN_3B.hidden_size)]
        matrices.append(QWEN_32B.linears["gate_proj"])
    for scheme, options in SCHEMES.items():
        for shape in matrices if scheme == "rceil" else matrices[:1]:
            # Others have plain MXFP4 alone, and some take seconds to compile for a shape.
            beside = scheme == "rceil" and shape == matrices[0]
            bench.case(scheme, list(shape), lambda s=shape, o=options, b=beside: _measure(bench, s, o, b))
    bench.case(BOTH, list(matrices[0]), lambda: _measure_both(bench, matrices[0]))


def _measure(bench: Bench, shape: tuple[int, int], options: dict[str, Any], beside_peers: bool) -> Measured:
    machine = bench.machine
    work = Work(n_bytes(shape, options))
    inputs = [random_matrix(shape, machine.device) for _ in range(rotated(machine, work.n_bytes))]
    _check(mxfp4_kernels.quantize(inputs[0], **options), inputs[0], options)
    found = bench.contest(
        [lambda x=x: mxfp4_kernels.quantize(x, **options) for x in inputs],
        peers.quantizers(bench, inputs) if beside_peers else {},
        work,
        "GB/s",
        work.n_bytes / 1e9,
    )
    return _with_aim(bench, found)


def _measure_both(bench: Bench, shape: tuple[int, int]) -> Measured:
    written = n_bytes(shape, {}) + n_bytes(shape[::-1], {}) - 4 * shape[0] * shape[1]
    work = Work(2 * shape[0] * shape[1] + written)
    inputs = [random_matrix(shape, bench.machine.device) for _ in range(rotated(bench.machine, work.n_bytes))]
    for packed, matrix in zip(mxfp4_kernels.quantize_both(inputs[0]), (inputs[0], inputs[0].T), strict=True):
        _check(packed, matrix, {})
    calls = [lambda x=x: mxfp4_kernels.quantize_both(x) for x in inputs]
    twice = {
        "two launches": lambda: [lambda x=x: (mxfp4_kernels.quantize(x), mxfp4_kernels.quantize(x.T)) for x in inputs]
    }
    found = bench.contest(calls, twice, work, "GB/s", work.n_bytes / 1e9, baseline="two launches")
    return _with_aim(bench, found)


def _with_aim(bench: Bench, found: Measured) -> Measured:
    reached = None if bench.machine.interpreted else found.ceiling_fraction
    found.aims = [Aim("of the copy ceiling", 0.85, reached, "%")]
    return found


def _check(packed: Any, matrix: torch.Tensor, options: dict[str, Any]) -> None:
    """Bit for bit against the eager definition, on some rows."""
    options = dict(options)
    rotation = options.pop("rotation", None)
    # Random numbers belong to places in the matrix: those of its first rows do not depend on the rest.
    rows = slice(0, 64) if "seed" in options else some_rows(matrix.shape[0], 96, matrix.device)
    some = matrix[rows].cpu().contiguous()
    if rotation is not None:
        some = numerics.rotate(some.float(), rotation)
    expected = numerics.quantize(some, **options)
    for name, tensor in packed._asdict().items():
        expect_equal(name, None if tensor is None else tensor[rows].cpu(), getattr(expected, name))


def random_matrix(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Normal values with a spread of scales between rows and a few outliers, as activations have them; bfloat16."""
    x = torch.randn(shape, device=device)
    x *= torch.exp2(torch.randint(-4, 5, (*shape[:-1], 1), device=device))
    x[..., :: max(1, shape[-1] // 7)] *= 16
    return x.bfloat16()


def n_bytes(shape: tuple[int, int], options: dict[str, Any]) -> int:
    """Of the matrix read and of what is written."""
    rows, columns = shape
    passes = 1 if options.get("outlier_fallback") is None else 2
    written = passes * (-(-columns // 2) + -(-columns // 32))
    if options.get("macro_block"):
        written += -(-columns // options["macro_block"])
    return rows * (2 * columns + written)
