# SPDX-License-Identifier: Apache-2.0
"""Calls of every public function of `mxfp4_kernels` that launches a kernel: small ones for the interpreter, and ones of
usual sizes for compilation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import mxfp4_kernels

from .inputs import generator, hard_matrix


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
_DEFAULT = {"macro_block": 128, "outlier_fallback": 0.5}
#: Of the functions that quantize: dtype, whether sizes are odd, options.
_QUANTIZE = {
    "plain": (BF16, False, {}),
    "default": (BF16, False, _DEFAULT),
    "float32 floor 256": (F32, False, {"scale_rule": "floor", "macro_block": 256, "outlier_fallback": 0.3}),
    "float16 even odd": (F16, True, {"scale_rule": "even", "macro_block": 64}),
    "mse dynamic": (F32, False, {"scale_rule": "mse", "macro_block": 128, "macro_search": "dynamic"}),
    "blockwise": (BF16, True, {"scale_rule": "even", "macro_block": 128, "macro_search": "blockwise"}),
    "row": (BF16, False, {"macro_block": "row"}),
    "tiles": (BF16, False, {"scale_rule": "mse", "block_rows": 32}),
    "tiles default": (BF16, False, {**_DEFAULT, "block_rows": 32, "macro_search": "dynamic"}),
    "stochastic": (BF16, False, {**_DEFAULT, "rounding": "stochastic", "seed": 5}),
    "rotated": (BF16, False, {"rotation": 16}),
    "signs": (F32, True, {"rotation": 128, "signs": True}),
}
#: Of the functions for a matrix and its transpose.
_BOTH = {
    "plain": (BF16, False, {}),
    "default": (BF16, False, _DEFAULT),
    "random": (BF16, False, {"rounding": ("nearest", "stochastic"), "seed": (None, 5), "rotation": (None, 16)}),
    "tiles odd": (F16, True, {"scale_rule": "even", "block_rows": 32}),
}
_PACKED = {
    "plain": {},
    "macro": {"macro_block": 128},
    "fallback": _DEFAULT,
    "blockwise": {"macro_block": 128, "macro_search": "blockwise"},
}


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
    for name, (dtype, odd, options) in _QUANTIZE.items():
        for function in ("fake_quantize", "quantize"):
            found[f"{function}/{name}"] = partial(_quantize, inputs, function, dtype, odd, options)
        if "rotation" not in options and "rounding" not in options:
            found[f"dequantize/{name}"] = partial(_dequantize, inputs, dtype, odd, options)
    found["fake_quantize/transposed"] = lambda: mxfp4_kernels.fake_quantize(inputs.hard(False, BF16).mT)
    for name, (dtype, odd, options) in _BOTH.items():
        for function in ("fake_quantize_both", "quantize_both"):
            found[f"{function}/{name}"] = partial(_quantize, inputs, function, dtype, odd, options)
    return found | _products(inputs) | _experts(inputs) | _fused(inputs)


def _signs(options: dict, inputs: _Inputs, length: int) -> dict:
    if "signs" not in options:
        return options
    padded = length + -length % options["rotation"]
    return {**options, "signs": inputs.vector(padded, F32).sign()}


def _quantize(inputs: _Inputs, function: str, dtype: torch.dtype, odd: bool, options: dict) -> Any:
    x = inputs.hard(odd, dtype)
    return getattr(mxfp4_kernels, function)(x, **_signs(options, inputs, x.shape[-1]))


def _dequantize(inputs: _Inputs, dtype: torch.dtype, odd: bool, options: dict) -> torch.Tensor:
    x = inputs.hard(odd, dtype)
    packed = mxfp4_kernels.quantize(x, **options)._asdict()
    kept = {key: options[key] for key in ("macro_block", "macro_search", "outlier_fallback") if key in options}
    return mxfp4_kernels.dequantize(**packed, length=x.shape[-1], dtype=dtype, **kept)


def _products(inputs: _Inputs) -> dict[str, Callable[[], Any]]:
    m, n, k = (24, 48, 256) if inputs.small else (4096, 4096, 4096)

    def fold(x: torch.Tensor, **options: Any) -> Any:
        return mxfp4_kernels.fold_e4m3(x, **options)

    def e4m3(group: int | str, rows: int, bias: bool) -> torch.Tensor:
        a, b = fold(inputs.matrix(rows, k), group=group), fold(inputs.matrix(n, k), group=group)
        # Another dtype than bfloat16 for whole rows, which PyTorch's product would take.
        options = {"out_dtype": F32} if group == "row" else {}
        return mxfp4_kernels.matmul_e4m3(a[0], a[1], b[0], b[1], bias=inputs.vector(n) if bias else None, **options)

    def mxf4(macro: bool, rows: int) -> torch.Tensor:
        options = {"macro_block": 128} if macro else {}
        a, b = (mxfp4_kernels.quantize(inputs.matrix(count, k), **options) for count in (rows, n))
        factors = {"a_macro": a.macro, "b_macro": b.macro} if macro else {}
        bias = inputs.vector(n)
        return mxfp4_kernels.matmul_mxf4(a.codes, a.scale, b.codes, b.scale, **factors, bias=bias)

    def linear(options: dict, rows: int, dtype: torch.dtype = BF16, columns: int = k) -> torch.Tensor:
        packed = mxfp4_kernels.quantize(inputs.matrix(n, columns, dtype), **options)._asdict()
        bias = inputs.vector(n, dtype)
        x = inputs.matrix(rows, columns, dtype)
        return mxfp4_kernels.linear_w4a16(x, **packed, length=columns, bias=bias, **options)

    x = inputs.matrix(m + 1, k)
    found: dict[str, Callable[[], Any]] = {
        "fold/128": lambda: fold(x, macro_block=128),
        "fold/row": lambda: fold(x, group="row", scale_rule="even"),
        "fold/columns": lambda: fold(x, axis=0),
        "fold/tiles": lambda: fold(x, block_rows=32, group="row"),
        "fold/random": lambda: fold(x, rounding="stochastic", seed=3, rotation=16),
        "fold/both": lambda: mxfp4_kernels.fold_e4m3_both(x),
        "fold/both reused": lambda: mxfp4_kernels.fold_e4m3_both(x, columns="reused"),
        "fold/across beside codes": lambda: mxfp4_kernels.fold_e4m3_both(x, columns="reused", rows="codes"),
        "quantize/with values": lambda: mxfp4_kernels.quantize_with_values(x, macro_block=128),
        "fold/kept": lambda: mxfp4_kernels.quantize_e4m3_rows(x),
        "fold/kept values": lambda: mxfp4_kernels.dequantize_e4m3(*mxfp4_kernels.quantize_e4m3_rows(x), BF16),
        "fold/gradient": lambda: mxfp4_kernels.quantize_e4m3(x),
        "fold/gradient columns": lambda: mxfp4_kernels.quantize_e4m3(x, axis=0),
        "fold/gradient both": lambda: mxfp4_kernels.quantize_e4m3_both(x),
        "linear_w4a16/float32": lambda: linear({}, 2, F32),
        "linear_w4a16/odd": lambda: linear({}, 3, F16, columns=k - 24),
    }
    for rows in (16, m):
        for group in (128, "row"):
            found[f"matmul_e4m3/{group} {rows}"] = partial(e4m3, group, rows, rows == m)
        for macro in (False, True):
            found[f"matmul_mxf4/{'macro' if macro else 'plain'} {rows}"] = partial(mxf4, macro, rows)
    for rows in (1, 16, 64):
        for name, options in _PACKED.items():
            found[f"linear_w4a16/{name} {rows}"] = partial(linear, options, rows)
    return found


def _experts(inputs: _Inputs) -> dict[str, Callable[[], Any]]:
    experts, n, k = (3, 48, 128) if inputs.small else (64, 1536, 2048)
    ends = inputs.ends(5, 0, 19) if inputs.small else inputs.ends(*range(experts))
    rows = 24 if inputs.small else 64 * sum(range(experts))

    def stack(dtype: torch.dtype = BF16) -> torch.Tensor:
        return inputs.matrix(experts * n, k, dtype).view(experts, n, k)

    def matmul(dtype: torch.dtype, bias: bool) -> torch.Tensor:
        given = inputs.matrix(experts, n, dtype) if bias else None
        return mxfp4_kernels.grouped_matmul(inputs.matrix(rows, k, dtype), stack(dtype), ends, given)

    def packed(options: dict) -> torch.Tensor:
        parts = mxfp4_kernels.quantize(stack(), **options)._asdict()
        x, bias = inputs.matrix(experts, k), inputs.matrix(experts, n)
        one_each = inputs.ends(*[1] * experts)
        return mxfp4_kernels.grouped_matmul_packed(x, **parts, offsets=one_each, bias=bias, length=k, **options)

    def e4m3(group: int | str) -> torch.Tensor:
        x, weight = (mxfp4_kernels.fold_e4m3(t, group=group) for t in (inputs.matrix(rows, k), stack().view(-1, k)))
        weights = weight[0].view(experts, n, -1)
        return mxfp4_kernels.grouped_matmul_e4m3(x[0], x[1], weights, weight[1], ends)

    def wgrad_e4m3() -> torch.Tensor:
        tokens = 128 * experts
        left, right = (mxfp4_kernels.fold_e4m3(inputs.matrix(tokens, size), axis=0) for size in (n, k))
        by_128 = torch.arange(1, experts + 1, dtype=torch.int32, device=inputs.device) * 128
        return mxfp4_kernels.grouped_wgrad_e4m3(left[0], left[1], right[0], right[1], by_128)

    left, right = inputs.matrix(rows, n), inputs.matrix(rows, k)
    found: dict[str, Callable[[], Any]] = {
        "grouped_matmul/bias": lambda: matmul(BF16, True),
        "grouped_matmul/float32": lambda: matmul(F32, False),
        "grouped_matmul/transposed": lambda: mxfp4_kernels.grouped_matmul(left, stack().transpose(1, 2), ends),
        "grouped_wgrad": lambda: mxfp4_kernels.grouped_wgrad(left, right, ends),
        "grouped_sum": lambda: mxfp4_kernels.grouped_sum(left, ends),
        "grouped_e4m3/128": lambda: e4m3(128),
        "grouped_e4m3/row": lambda: e4m3("row"),
        "grouped_e4m3/wgrad": wgrad_e4m3,
        "grouped_e4m3/values": lambda: mxfp4_kernels.grouped_fake_quantize_e4m3(left, ends),
        "grouped_e4m3/input": lambda: mxfp4_kernels.grouped_fold_e4m3(right, ends),
    }
    return found | {f"grouped_packed/{name}": partial(packed, options) for name, options in _PACKED.items()}


def _fused(inputs: _Inputs) -> dict[str, Callable[[], Any]]:
    """Of the fused norms and activations, where there are such functions."""
    if not hasattr(mxfp4_kernels, "rms_norm_quantize"):
        return {}
    rows, k = (5, 160) if inputs.small else (4096, 4096)
    x, y = inputs.matrix(rows, k), inputs.matrix(rows, k)
    weight = inputs.vector(k)
    noise = inputs.vector(k, F32)
    everything = {"outputs": ("packed", "values", "normed"), **_DEFAULT}
    norm, swiglu = mxfp4_kernels.rms_norm_quantize, mxfp4_kernels.swiglu_quantize
    return {
        "rms_norm/plain": lambda: norm(x, weight),
        "rms_norm/everything": lambda: norm(x, weight, residual=y, noise=noise, **everything),
        "swiglu/plain": lambda: swiglu(x, y),
        "swiglu/everything": lambda: swiglu(x, y, outputs=("packed", "values", "product"), **_DEFAULT),
    }
