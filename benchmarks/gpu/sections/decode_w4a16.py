# SPDX-License-Identifier: Apache-2.0
"""``y = x Q(W)^T`` for few rows of ``x``: packed weights, 16-bit activations."""

from collections.abc import Sequence
from typing import Any

import torch

import hf_mxfp4
import mxfp4_kernels
from hf_mxfp4.numerics import MXFP4Tensor

from .. import peers
from ..bench import Aim, Bench, Measured, Work
from ..checks import expect_close
from ..shapes import QWEN_3B, QWEN_7B, QWEN_32B, TINY
from ..timing import rotated


NAME, SHARE = "decode_w4a16", 100

PLAIN: dict[str, Any] = {}
#: What a packed model has by default: it weighs 4.3125 bits.
MACRO: dict[str, Any] = {"macro_block": 128, "macro_search": "dynamic"}
#: From this size on in both directions, three times BF16 is aimed at.
LARGE = 4096


def run(bench: Bench) -> None:
    for shape, rows, options in cases(bench.machine.tiny):
        name = f"{'macro 128' if options else 'plain'}, M = {rows}"
        bench.case(name, list(shape), lambda s=shape, m=rows, o=options: _measure(bench, s, m, o))


def cases(tiny: bool) -> list[tuple[tuple[int, int], int, dict[str, Any]]]:
    """``(N, K)``, M and scheme, in order of importance."""
    if tiny:
        return [(TINY.linears[name], rows, o) for name, rows, o in (("k_proj", 1, PLAIN), ("down_proj", 5, MACRO))]
    large = [QWEN_32B.linears["gate_proj"], QWEN_7B.linears["down_proj"], (LARGE, LARGE), QWEN_32B.linears["q_proj"]]
    small = [QWEN_7B.linears["q_proj"], QWEN_3B.linears["gate_proj"], QWEN_3B.linears["q_proj"]]
    first = [(shape, rows, PLAIN) for rows in (1, 16) for shape in large[:3]]
    macro = [(shape, rows, MACRO) for rows in (1, 16) for shape in large[:1]]
    rest = [(shape, rows, PLAIN) for rows in (1, 4, 16) for shape in (*large[3:], *small)]
    wide = [(large[0], rows, PLAIN) for rows in (4, 8, 64)]
    return [*first, *macro, *wide, *rest]


def _measure(bench: Bench, shape: tuple[int, int], rows: int, options: dict[str, Any]) -> Measured:
    machine = bench.machine
    n, k = shape
    weights = [
        (torch.randn(n, k, device=machine.device) * k**-0.5).bfloat16()
        for _ in range(rotated(machine, n * k // 2, most=24))
    ]
    inputs = [torch.randn(rows, k, device=machine.device).bfloat16() for _ in weights]
    packed = [hf_mxfp4.quantize(w, **options) for w in weights]
    calls = [lambda x=x, w=w: product(x, w, options) for x, w in zip(inputs, packed, strict=True)]
    effective = packed[0].dequantize(torch.float32).double()
    error = expect_close("product", calls[0](), inputs[0].double() @ effective.T, 1e-2)
    work = Work(n_bytes(packed[0]) + 2 * rows * (n + k), {"bf16": 2 * rows * n * k})
    against: dict[str, peers.Builder] = peers.weight_products(bench, inputs, weights, packed)
    if options:
        # Libraries know no macro blocks; they were measured on the same shape without.
        against = {"cuBLAS BF16": against["cuBLAS BF16"]}
    found = bench.contest(calls, against, work, "GB/s", work.n_bytes / 1e9, baseline="cuBLAS BF16")
    plan = mxfp4_kernels.plan_linear_w4a16(rows, n, k, **options)
    found.details |= {"error": error, "plan": f"{plan.route}: {plan.reason}"}
    found.aims = [] if machine.interpreted else _aims(found, min(n, k), rows)
    return found


def product(x: torch.Tensor, w: MXFP4Tensor, options: dict[str, Any]) -> torch.Tensor:
    """``x [M, K]`` times the packed ``w [N, K]``, transposed."""
    return mxfp4_kernels.linear_w4a16(x, w.codes, w.scale, length=w.length, macro=w.macro, **options)


def n_bytes(packed: MXFP4Tensor) -> int:
    """Of a packed weight."""
    parts: Sequence[torch.Tensor | None] = (packed.codes, packed.scale, packed.macro)
    return sum(part.numel() for part in parts if part is not None)


def _aims(found: Measured, smallest: int, rows: int) -> list[Aim]:
    ratios = {name: peer.get("ratio") for name, peer in found.details["peers"].items()}
    aims = [
        Aim(f"of {name}", 1.0, ratios[name]) for name in ("gemlite", "bitsandbytes NF4") if ratios.get(name) is not None
    ]
    if smallest >= LARGE and rows <= 16:
        aims.insert(0, Aim("of cuBLAS BF16", 3.0, ratios.get("cuBLAS BF16")))
    return aims
