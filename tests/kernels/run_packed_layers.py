# SPDX-License-Identifier: Apache-2.0
"""Layers that compute on packed weights by the Triton kernels against the same without them; prints a JSON report.

TRITON_INTERPRET=1 python run_packed_layers.py
"""

import contextlib
import json

import torch
from factors import factors_config
from torch import nn

from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, cached_weights
from hf_mxfp4.backends import triton as triton_kernels
from hf_mxfp4.gemm import matmul_route
from mxfp4_kernels.gemm import decode


OPTIONS = [
    {"preset": "w4a16"},
    {"preset": "w4a16", "macro_block": None},
    {"preset": "w4a4", "outlier_fallback": 0.5, "macro_search": "static"},
    {"preset": "w4a16", "macro_search": "blockwise"},
]


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).abs().max() <= 2e-5 * expected.abs().max())


def copies(linear: nn.Linear) -> dict[str, int]:
    """How often two products of more rows than the kernel takes dequantize the weight, by layer and context."""
    calls, original = [], triton_kernels.dequantize

    def counted(*arguments):
        calls.append(arguments)
        return original(*arguments)

    triton_kernels.dequantize = counted
    x, found = torch.randn(260, 160), {}
    trainable = MXFP4Linear.from_linear(linear, factors_config(backend="triton", **OPTIONS[0]))
    packed = MXFP4PackedLinear.from_linear(linear, factors_config(mode="packed", backend="triton", **OPTIONS[0]))
    many = torch.randn(4100, 160)
    for name, layer, form, rows in (
        ("packed layer", packed, "auto", x),
        ("packed layer, no context", packed, None, x),
        ("auto", trainable, "auto", x),
        ("auto, few rows", trainable, "auto", x[:5]),
        ("auto, very many rows", trainable, "auto", many),
        ("packed", trainable, "packed", x),
        ("dense", trainable, "dense", x),
    ):
        calls.clear()
        with torch.no_grad(), contextlib.nullcontext() if form is None else cached_weights(trainable, form):
            first, second = layer(rows), layer(rows)
        found[name] = len(calls)
        values = layer.dequantized_weight() if layer is packed else layer.effective_weight(linear.weight)
        assert torch.equal(first, second) and close(first, nn.functional.linear(rows, values, linear.bias)), name
    triton_kernels.dequantize = original
    return found


def rotated(linear: nn.Linear, x: torch.Tensor, grad: torch.Tensor) -> list[str]:
    """What of layers that rotate differs from the eager functions."""
    wrong = []
    for options in ({"preset": "w4a16", "macro_search": "blockwise"}, {"preset": "w4a4", "outlier_fallback": 0.5}):
        found = []
        for backend in ("triton", "eager"):
            scheme = {"fprop": {"rotation": "deterministic-32"}, "backend": backend, **options}
            layer = MXFP4PackedLinear.from_linear(linear, factors_config(mode="packed", **scheme))
            taken = x.clone().requires_grad_()
            y = layer(taken)
            y.backward(grad)
            codes = [part for part in layer.packed_weight() if part is not None]
            found.append((*codes, layer.quantized_input(x, torch.float32), y.detach(), taken.grad))
        for one, other in zip(*found, strict=True):
            exact = one is not found[0][-1] and one is not found[0][-2]
            if not (torch.equal(one, other) if exact else close(one, other)):
                wrong.append(f"rotated {options}: {tuple(one.shape)} {one.dtype}")
    return wrong


def main() -> dict:
    report = {"layers": 0, "launches": 0, "wrong": []}
    launch = decode._launch_fused

    def counted(*arguments):
        report["launches"] += 1
        launch(*arguments)

    decode._launch_fused = counted
    torch.manual_seed(0)
    linear, x = nn.Linear(160, 40), torch.randn(2, 3, 160)
    grad = torch.randn(2, 3, 40)
    for options in OPTIONS:
        layers = {}
        for backend in ("triton", "eager"):
            config = factors_config(mode="packed", backend=backend, **options)
            layers[backend] = MXFP4PackedLinear.from_linear(linear, config)
        results = {}
        for backend, layer in layers.items():
            layer.bias = nn.Parameter(layer.bias.detach().clone())
            taken = x.clone().requires_grad_()
            y = layer(taken)
            y.backward(grad)
            results[backend] = y.detach(), taken.grad, layer.bias.grad
        names = ("output", "gradient of x", "gradient of the bias")
        for name, one, other in zip(names, results["triton"], results["eager"], strict=True):
            if not close(one, other):
                report["wrong"].append(f"packed {options}: {name}")
        trainable = MXFP4Linear.from_linear(linear, factors_config(backend="triton", **options))
        outside = trainable(x).detach()
        before = report["launches"]
        for form, launches in (("auto", 1), ("packed", 1), ("dense", 0)):
            with torch.no_grad(), cached_weights(trainable, form):
                y = trainable(x)
            if report["launches"] - before != launches or not close(y, outside):
                report["wrong"].append(f"trainable {options}, {form}: {report['launches'] - before} launches")
            before = report["launches"]
        with cached_weights(trainable, "packed"):
            if not torch.equal(trainable(x), outside) or report["launches"] != before:
                report["wrong"].append(f"trainable {options}: with gradients it must not be packed")
        route = matmul_route(6, 40, 160, layer.config.weight_scheme, "cpu", torch.float32, "triton")
        if route[0] != "fused":
            report["wrong"].append(f"route {route}")
        report["layers"] += 3
    report["rotated"] = rotated(linear, x, grad)
    report["dequantized"] = copies(linear)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        y = layers["triton"](x)
        if y.dtype != torch.bfloat16 or (y.float() - layers["eager"](x).float()).abs().max() > 0.02 * y.abs().max():
            report["wrong"].append("autocast")
    return report


if __name__ == "__main__":
    print(json.dumps(main()))
