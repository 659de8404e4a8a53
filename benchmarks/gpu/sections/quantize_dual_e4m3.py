# SPDX-License-Identifier: Apache-2.0
"""BF16 matrices to the FP8 operands of two products, blocks along rows and along columns, from one read."""

from typing import Any

import torch

import mxfp4_kernels
from hf_mxfp4 import numerics

from ..bench import Aim, Bench, Measured, Work
from ..checks import expect_equal, some_rows
from ..shapes import QWEN_7B, QWEN_32B
from ..timing import rotated
from .quantize_pack import TOKENS, random_matrix


NAME, SHARE = "quantize_dual_e4m3", 30

SCHEMES: dict[str, dict[str, Any]] = {
    "rceil": {},
    "rceil, macro 128 static": {"macro_block": 128},
    "rceil, macro 128 searched": {"macro_block": 128, "macro_search": "dynamic"},
}
_GROUP = 128


def run(bench: Bench) -> None:
    if bench.machine.tiny:
        matrices = [(130, 96)]
    else:
        # Gradients of outputs, and inputs, of 8k tokens.
        matrices = [(TOKENS, width) for width in (QWEN_32B.hidden_size, QWEN_7B.intermediate_size, 4096)]
    for scheme, options in SCHEMES.items():
        for shape in matrices if scheme == "rceil" else matrices[:1]:
            bench.case(scheme, list(shape), lambda s=shape, o=options: _measure(bench, s, o))


def _measure(bench: Bench, shape: tuple[int, int], options: dict[str, Any]) -> Measured:
    machine = bench.machine
    work = Work(n_bytes(shape))
    inputs = [random_matrix(shape, machine.device) for _ in range(rotated(machine, work.n_bytes))]
    for name, folded, matrix in zip(
        ("rows", "columns"), mxfp4_kernels.fold_e4m3_both(inputs[0], **options), (inputs[0], inputs[0].T), strict=True
    ):
        some = some_rows(matrix.shape[0], 48, machine.device)
        expected = numerics.fold(numerics.quantize(matrix[some].cpu().contiguous(), **options), _GROUP)
        expect_equal(f"elements of {name}", folded.elements[some].cpu(), expected.elements)
        expect_equal(f"scales of {name}", folded.scale[some].cpu().contiguous(), expected.scale.contiguous())
    found = bench.contest(
        [lambda x=x: mxfp4_kernels.fold_e4m3_both(x, **options) for x in inputs],
        {"two launches": lambda: [lambda x=x: _twice(x, options) for x in inputs]},
        work,
        "GB/s",
        work.n_bytes / 1e9,
        baseline="two launches",
    )
    found.aims = [Aim("of the copy ceiling", 0.85, None if machine.interpreted else found.ceiling_fraction, "%")]
    return found


def n_bytes(shape: tuple[int, int]) -> int:
    """Of the matrix read and of both operands."""
    rows, columns = shape
    padded = (columns + -columns % _GROUP, rows + -rows % _GROUP)
    written = sum(lines * (length + 4 * length // _GROUP) for lines, length in zip(shape, padded, strict=True))
    return 2 * rows * columns + written


def _twice(x: torch.Tensor, options: dict[str, Any]) -> None:
    for axis in (1, 0):
        mxfp4_kernels.fold_e4m3(x, axis=axis, **options)
