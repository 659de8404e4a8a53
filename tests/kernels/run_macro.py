# SPDX-License-Identifier: Apache-2.0
"""Compares macro bytes that kernels write, and values that they make by such bytes, with the eager definition, bit for
bit, and trains layers whose backward pass takes the bytes of the forward pass; prints what differs, and calls, as JSON.

TRITON_INTERPRET=1 python run_macro.py
"""

import json
from collections import Counter
from collections.abc import Callable

import torch
from factors import factors_config
from run_fold import data, same

import mxfp4_kernels
from hf_mxfp4 import MXFP4Linear, numerics
from hf_mxfp4.gemm import linear


#: Shape, dtype of the input and of values, scheme.
CASES = (
    ((3, 256), torch.bfloat16, None, {"macro_block": 128}),
    ((5, 300), torch.bfloat16, None, {"macro_block": 128, "scale_rule": "even"}),
    ((2, 3, 200), torch.float32, torch.bfloat16, {"macro_block": 64}),
    ((7, 96), torch.float16, None, {"macro_block": 32, "outlier_fallback": 0.5}),
    ((4, 256), torch.float32, None, {"macro_block": 128, "scale_rule": "mse"}),
)


def differences() -> list[str]:
    wrong = []
    for number, (shape, dtype, out, scheme) in enumerate(CASES):
        rows = data((torch.Size(shape[:-1]).numel(), shape[-1]), dtype, 2 * number + 1)
        x, written = rows.view(shape), {} if out is None else {"dtype": out, "limit": dtype}
        for search in ("dynamic", "static"):
            options = {**scheme, "macro_search": search}
            values = numerics.fake_quantize(x, **options).to(out or dtype)
            macro = numerics.quantize(x, **options).macro
            found, of_values = mxfp4_kernels.fake_quantize_with_macro(x, **options, **written)
            again = mxfp4_kernels.fake_quantize_by_macro(x, macro, **scheme, **written)
            parts = {"values": (found, values), "macro": (of_values, macro), "values by macro": (again, values)}
            wrong += [f"{shape} {options} {part}" for part, pair in parts.items() if not same(*pair)]
        if scheme == {"macro_block": 128}:
            folded = mxfp4_kernels.fold_e4m3(x, **options | {"macro_search": "dynamic"})
            macro = numerics.quantize(x, macro_block=128, macro_search="dynamic").macro
            wrong += [] if same(folded.macro, macro) else [f"{shape} macro of what is folded"]
    # Of a transpose, too.
    x = data((130, 9), torch.bfloat16, 3).t()
    values, macro = mxfp4_kernels.fake_quantize_with_macro(x)
    parts = {"macro_block": 128, "macro_search": "dynamic"}
    wrong += [] if same(values, numerics.fake_quantize(x, **parts)) else ["values of a transpose"]
    return wrong + ([] if same(macro, numerics.quantize(x, **parts).macro) else ["macro of a transpose"])


def trained(engine: str, backend: str, options: dict) -> list[torch.Tensor]:
    torch.manual_seed(0)
    config = factors_config(preset="w4a4", engine=engine, backend=backend, **options)
    layer = MXFP4Linear(160, 12, dtype=torch.bfloat16, config=config)
    x = torch.randn(5, 160, dtype=torch.bfloat16, requires_grad=True)
    layer(x).backward(torch.randn(5, 12, dtype=torch.bfloat16))
    return [x.grad, layer.weight.grad]


def layers() -> dict[str, dict]:
    """Kernels that quantize, in both passes, and whether gradients are those of the eager reference."""
    calls, report = Counter(), {}

    def counted(name: str, function: Callable) -> Callable:
        def call(*arguments, **options):
            calls[name] += 1
            return function(*arguments, **options)

        return call

    values = "fake_quantize", "fake_quantize_with_macro", "fake_quantize_by_macro", "quantize_with_values"
    for name in (*values, "fold_e4m3", "quantize"):
        setattr(mxfp4_kernels, name, counted(name, getattr(mxfp4_kernels, name)))
    # As on a GPU, where a backward pass has no operand of its forward pass.
    linear.kept_for_backward = lambda weight: False
    for name, engine, options in (
        ("dense", "dense", {}),
        ("fp8", "fp8", {"outlier_fallback": None}),
        ("mxfp4", "mxfp4", {"outlier_fallback": None}),
        ("static", "dense", {"macro_search": "static"}),
    ):
        calls.clear()
        found, wanted = trained(engine, "triton", options), trained("dense", "eager", options)
        equal = all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        report[name] = {"equal": equal, "calls": dict(calls)}
    return report


if __name__ == "__main__":
    print(json.dumps({"differences": differences(), "layers": layers()}))
