# SPDX-License-Identifier: Apache-2.0
"""Compares products with packed weights with float64 products of the exact dequantized weight; prints a JSON report.

    TRITON_INTERPRET=1 python run_linear_w4a16.py [few|matrix]      the interpreted kernel
    python run_linear_w4a16.py matrix cuda                          the compiled kernel, on a GPU
    python run_linear_w4a16.py matrix-bfloat16 cuda                 the third of it that has this dtype

A process of its own, because Triton decides when it is imported whether kernels are interpreted.
"""

import itertools
import json
import sys
from collections.abc import Iterator

import torch

import mxfp4_kernels
from hf_mxfp4 import numerics


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCHEMES = (
    {},
    {"macro_block": 128},
    {"macro_block": 256, "macro_search": "dynamic", "outlier_fallback": 0.5},
    {"macro_block": 128, "macro_search": "blockwise"},
    {"outlier_fallback": 0.3},
    {"macro_block": 128, "macro_search": "blockwise", "outlier_fallback": 0.5},
)


def cases(what: str) -> Iterator[tuple]:
    """Tokens, rows, columns, dtype, options, whether there is a bias."""
    few = [
        (1, 64, 256, torch.bfloat16, {}, False),
        (3, 65, 512, torch.bfloat16, {"macro_block": 128}, True),
        (17, 33, 264, torch.bfloat16, {"macro_block": 128, "outlier_fallback": 0.5}, True),
        (2, 5, 8, torch.float16, {}, False),
        (4, 1, 1032, torch.float32, {"macro_block": 128, "macro_search": "blockwise"}, True),
        (1, 40, 2048, torch.float16, {"macro_block": 256, "macro_search": "dynamic"}, False),
        (40, 7, 288, torch.bfloat16, {"outlier_fallback": 0.3}, False),
        (2, 3, 7, torch.bfloat16, {}, True),
        (1, 129, 96, torch.bfloat16, {"macro_block": 128}, False),
        (12, 40, 256, torch.bfloat16, {"macro_block": 128, "outlier_fallback": 0.5}, True),
        # Not on the codes: rows that are no words, short macro blocks, many tokens.
        (3, 6, 33, torch.bfloat16, {"macro_block": 128}, True),
        (3, 6, 64, torch.float32, {"macro_block": 32}, False),
        (257, 2, 32, torch.bfloat16, {}, True),
    ]
    if what == "few":
        yield from few
        return
    shapes = itertools.product((1, 4, 9, 16, 33, 70), (1, 31, 130), (8, 56, 128, 320, 1152))
    wanted = what.partition("-")[2]
    for number, (shape, scheme) in enumerate(itertools.product(shapes, SCHEMES)):
        # Neither is settled by the scheme: dtypes turn with the shape, and every three shapes the bias changes.
        dtype, has_bias = DTYPES[(number + number // len(SCHEMES)) % 3], number // (3 * len(SCHEMES)) % 2 == 0
        if wanted in ("", str(dtype).removeprefix("torch.")):
            yield *shape, dtype, scheme, has_bias


def rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def problem(x, weight, bias, actual: torch.Tensor) -> str | None:
    """What is wrong with ``actual``, or `None`: each sum of K float32 products has an error of at most K ulp of their
    magnitudes' sum, and the result is rounded once more."""
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact += bias.double()
        magnitude += bias.double().abs()
    bound = (x.shape[1] + 8) * 2.0**-23 * magnitude + rounding(x.dtype) * exact.abs() + 2.0**-149
    if x.dtype == torch.float16:
        bound += 2.0**-25
    if actual.dtype != x.dtype or actual.shape != exact.shape:
        return f"{actual.dtype} {tuple(actual.shape)}"
    error = (actual.double() - exact).abs()
    if not (error <= bound).all():
        worst = int((error - bound).nan_to_num(torch.inf).argmax())
        return f"at {worst}: {actual.flatten()[worst]} for {exact.flatten()[worst]}"
    return None


def compare(what: str, device: str) -> dict:
    report = {"cases": 0, "fused": 0, "split": 0, "wrong": []}
    rng = torch.Generator().manual_seed(1)
    for n_tokens, n_rows, n_cols, dtype, options, has_bias in cases(what):
        x = torch.randn(n_tokens, n_cols, generator=rng).to(dtype)
        weight = torch.randn(n_rows, n_cols, generator=rng) * 0.05
        # Some blocks need the second multiply of the decoder.
        if n_rows % 2:
            weight[0, : min(40, n_cols)] *= 4000
        bias = torch.randn(n_rows, generator=rng).to(dtype) if has_bias else None
        packed = numerics.quantize(weight, **options)
        parts = {
            "length": n_cols,
            "macro": packed.macro,
            "residual_codes": packed.residual_codes,
            "residual_scale": packed.residual_scale,
            "bias": bias,
        }
        moved = {name: part.to(device) if isinstance(part, torch.Tensor) else part for name, part in parts.items()}
        plan = mxfp4_kernels.plan_linear_w4a16(n_tokens, n_rows, n_cols, "90", **options)
        y = mxfp4_kernels.linear_w4a16(
            x.to(device), packed.codes.to(device), packed.scale.to(device), **moved, **options
        ).cpu()
        reference = packed.dequantize(torch.float32 if plan.route == "fused" else dtype)
        report["cases"] += 1
        report["fused"] += plan.route == "fused"
        report["split"] += "1 splits" not in plan.reason and plan.route == "fused"
        if found := problem(x, reference, bias, y):
            report["wrong"].append(f"{n_tokens}x{n_rows}x{n_cols} {dtype} {options}: {found}")
    return report


if __name__ == "__main__":
    print(json.dumps(compare(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cpu")))
