# SPDX-License-Identifier: Apache-2.0
"""What this GPU reaches at best: copying memory, and multiplying matrices by the vendor's library on random data."""

import torch

from ..bench import Bench, Measured
from ..checks import expect_close, expect_equal
from ..timing import compare
from ..torch_fp8 import fp8_rows, scaled_mm, values


NAME, SHARE = "ceilings", 20


def run(bench: Bench) -> None:
    bench.case("device copy", [size := _copy_bytes(bench)], lambda: _copy(bench, size))
    n = 128 if bench.machine.tiny else 8192
    bench.case("BF16 product", [n, n, n], lambda: _product(bench, n))
    bench.case("FP8 product, a scale per row", [n, n, n], lambda: _product_fp8(bench, n))


def _copy_bytes(bench: Bench) -> int:
    return 1 << 16 if bench.machine.tiny else 1 << 30


def _copy(bench: Bench, n_bytes: int) -> Measured:
    source = torch.randint(256, (n_bytes,), dtype=torch.uint8, device=bench.machine.device)
    target = torch.empty_like(source)
    target.copy_(source)
    expect_equal("copy", target, source)
    timing = compare(bench.machine, {"copy": [lambda: target.copy_(source)]})["copy"]
    bench.ceilings["copy"] = 2 * n_bytes / timing.seconds
    details = {"bytes": 2 * n_bytes, "seconds": timing.seconds, "launch": timing.launch}
    return Measured(bench.ceilings["copy"] / 1e9, "GB/s", details=details)


def _product(bench: Bench, n: int) -> Measured:
    a, b = (torch.randn(n, n, device=bench.machine.device).bfloat16() for _ in range(2))
    error = expect_close("product", (a @ b)[:64], a[:64].double() @ b.double(), 1e-2)
    return _rate(bench, "bf16", n, lambda: a @ b, error)


def _product_fp8(bench: Bench, n: int) -> Measured:
    a, b = (fp8_rows(bench.machine, torch.randn(n, n, device=bench.machine.device).bfloat16()) for _ in range(2))
    left, right = (values(operand)[:64].double() for operand in (a, b))
    error = expect_close("product", scaled_mm(a, b)[:64, :64], left @ right.T, 1e-2)
    return _rate(bench, "fp8", n, lambda: scaled_mm(a, b), error)


def _rate(bench: Bench, name: str, n: int, call, error: float) -> Measured:
    timing = compare(bench.machine, {name: [call]})[name]
    bench.ceilings[name] = 2 * n**3 / timing.seconds
    details = {"flops": 2 * n**3, "seconds": timing.seconds, "launch": timing.launch, "error": error}
    return Measured(bench.ceilings[name] / 1e12, "TFLOP/s", details=details)
