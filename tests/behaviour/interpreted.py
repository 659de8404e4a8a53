# SPDX-License-Identifier: Apache-2.0
"""Section ``interpreted``: the Triton kernels, in Triton's interpreter; for a process with TRITON_INTERPRET=1. And the
calls of every public function of `mxfp4_kernels` that launches a kernel: small ones for the interpreter, and ones of
usual sizes for compilation."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import mxfp4_kernels
from mxfp4_kernels import Scheme, Side

from .inputs import generator, hard_matrix, save_base
from .models import DENSE, MOE, load, record_steps
from .numerics import RULES, record_scheme
from .record import Record


#: Of tensors: what goes with every scale rule.
_SCHEMES = (
    {},
    {"macro_block": 128, "outlier_fallback": 0.5},
    {"macro_block": "row"},
    {"macro_block": 64, "macro_search": "dynamic", "block_rows": 32},
    {"macro_block": 128, "macro_search": "block_mantissas", "outlier_fallback": 0.3},
)
#: Of models: mode and options.
_MODELS = {
    "w4a4": ("qat", {"preset": "w4a4"}),
    "w4a8g8": ("qat", {"preset": "w4a8g8", "matmul_backend": "fp8"}),
    "w4a4g4": ("qat", {"preset": "w4a4g4", "matmul_backend": "fp8", "macro_block": None}),
    "paper_b": ("qat", {"preset": "paper_b", "matmul_backend": "fp8"}),
    "packed": ("packed", {"preset": "w4a16"}),
    "packed w4a4": ("packed", {"preset": "w4a4", "macro_block": None}),
}
_SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}


def record(record: Record) -> None:
    """Record everything of this section."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("kernels are interpreted under TRITON_INTERPRET=1 alone; `record` sets it")
    x = hard_matrix(32, 160)
    for rule in RULES:
        for options in _SCHEMES:
            options = {"scale_rule": rule, **options}
            name = "+".join(map(str, options.values()))
            record_scheme(record, f"tensors/{name}", x, options, backend="triton")
    options = {"scale_rule": "even", "macro_block": 128, "rounding": "stochastic"}
    record_scheme(record, "tensors/stochastic", x, options, backend="triton", seed=99)
    for name, launch in launches("cpu", small=True).items():
        with record.errors(f"functions/{name}"):
            results = launch()
            results = results if isinstance(results, tuple) else (results,)
            for number, result in enumerate(flat(results)):
                keep = record.tensor if isinstance(result, torch.Tensor) else record.value
                keep(f"functions/{name}/{number}", result)
    for family in (DENSE, MOE):
        base = save_base(family, record.workplace / family, **_SMALL)
        for name, (mode, options) in _MODELS.items():
            with record.errors(f"models/{family}/{name}"):
                model = load(base, mode, backend="triton", **options)
                record_steps(record, f"models/{family}/{name}", model, steps=1, length=4)


def flat(results: object) -> list:
    """What nested tuples hold."""
    if isinstance(results, (tuple, list)):
        return [tensor for result in results for tensor in flat(result)]
    return [results]


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
_STATIC = Scheme("rceil", 128, "static", 0.5)
_MANTISSAS = Scheme("even", 128, "block_mantissas")
#: Of the functions that quantize: dtype, whether sizes are odd, scheme, and what the axis has of its own.
_QUANTIZE = {
    "plain": (BF16, False, Scheme(), Side()),
    "static": (BF16, False, _STATIC, Side()),
    "float32 floor 256": (F32, False, Scheme("floor", 256, "static", 0.3), Side()),
    "float16 even odd": (F16, True, Scheme("even", 64), Side()),
    "mse dynamic": (F32, False, Scheme("mse", 128, "dynamic"), Side()),
    "mantissas": (BF16, True, _MANTISSAS, Side()),
    "tiles": (BF16, False, Scheme("mse", block_rows=32), Side()),
    "stochastic": (BF16, False, _STATIC, Side(5)),
    "rotated": (F32, True, Scheme(), Side(None, 128)),
}
#: Of the functions for a matrix and its transpose.
_BOTH = {
    "plain": (BF16, False, Scheme(), Side()),
    "random": (BF16, False, _STATIC, Side(5, 16)),
    "tiles odd": (F16, True, Scheme("even", block_rows=32), Side()),
}
_PACKED = {"plain": Scheme(), "static": _STATIC, "mantissas": _MANTISSAS}


class _Inputs:
    """Tensors on a device. On a CPU they hold seeded numbers, elsewhere nothing."""

    def __init__(self, device: str, small: bool):
        self.device, self.small = device, small

    def matrix(self, rows: int, columns: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        if self.device != "cpu":
            return torch.empty(rows, columns, dtype=dtype, device=self.device)
        return torch.randn(rows, columns, generator=generator(rows + columns)).to(dtype)

    def vector(self, length: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return self.matrix(1, length, dtype).view(length)

    def hard(self, odd: bool, dtype: torch.dtype) -> torch.Tensor:
        if not self.small:
            return self.matrix(4095 if odd else 4096, 4093 if odd else 4096, dtype)
        return hard_matrix(33 if odd else 32, 157 if odd else 160, dtype)

    def ends(self, *counts: int) -> torch.Tensor:
        """Where each expert's rows end."""
        if self.device != "cpu":
            return torch.empty(len(counts), dtype=torch.int32, device=self.device)
        return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def launches(device: str, small: bool) -> dict[str, Callable[[], Any]]:
    """Calls without arguments, by name."""
    inputs = _Inputs(device, small)
    found: dict[str, Callable[[], Any]] = {}
    for name, (dtype, odd, scheme, side) in _QUANTIZE.items():
        for function in ("fake_quantize", "quantize"):
            found[f"{function}/{name}"] = partial(_quantize, inputs, function, dtype, odd, scheme, side)
        if side == Side():
            found[f"dequantize/{name}"] = partial(_dequantize, inputs, dtype, odd, scheme)
    for name, (dtype, odd, scheme, side) in _BOTH.items():
        for what in ("fake_quantize", "quantize"):
            function = f"{what}_rows_and_columns"
            found[f"{what}_both/{name}"] = partial(_quantize, inputs, function, dtype, odd, scheme, Side(), side)
    return found | _others(inputs) | _products(inputs)


def _quantize(inputs: _Inputs, function: str, dtype: torch.dtype, odd: bool, scheme: Scheme, *sides: Side) -> Any:
    return getattr(mxfp4_kernels, function)(inputs.hard(odd, dtype), scheme, *sides)


def _dequantize(inputs: _Inputs, dtype: torch.dtype, odd: bool, scheme: Scheme) -> torch.Tensor:
    x = inputs.hard(odd, dtype)
    return mxfp4_kernels.dequantize(mxfp4_kernels.quantize(x, scheme), x.shape[-1], scheme, dtype)


def _others(inputs: _Inputs) -> dict[str, Callable[[], Any]]:
    x = inputs.hard(True, BF16)
    return {
        "fake_quantize/transposed": lambda: mxfp4_kernels.fake_quantize(x.mT),
        "to_fp8/rows": lambda: mxfp4_kernels.to_fp8(x),
        "to_fp8/columns": lambda: mxfp4_kernels.to_fp8(x.mT, torch.uint8),
        "from_fp8": lambda: mxfp4_kernels.from_fp8(*mxfp4_kernels.to_fp8(x, torch.uint8), BF16),
    }


def _products(inputs: _Inputs) -> dict[str, Callable[[], Any]]:
    experts, n, k = (3, 48, 256) if inputs.small else (64, 1536, 2048)

    def linear(scheme: Scheme, rows: int) -> torch.Tensor:
        packed = mxfp4_kernels.quantize(inputs.matrix(n, k), scheme)
        return mxfp4_kernels.linear_w4a16(inputs.matrix(rows, k), packed, k, scheme, inputs.vector(n))

    def of_experts(scheme: Scheme) -> torch.Tensor:
        packed = mxfp4_kernels.quantize(inputs.matrix(experts * n, k).view(experts, n, k), scheme)
        x, bias, ends = inputs.matrix(experts, k), inputs.matrix(experts, n), inputs.ends(*[1] * experts)
        return mxfp4_kernels.linear_w4a16(x, packed, k, scheme, bias, ends)

    found: dict[str, Callable[[], Any]] = {}
    for name, scheme in _PACKED.items():
        found[f"linear_w4a16/experts {name}"] = partial(of_experts, scheme)
        for rows in (1, 16, 64):
            found[f"linear_w4a16/{name} {rows}"] = partial(linear, scheme, rows)
    return found
