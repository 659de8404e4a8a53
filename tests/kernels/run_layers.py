# SPDX-License-Identifier: Apache-2.0
"""Layers of hf_mxfp4 with backend="triton" against the same with "eager"; prints, for each, the largest difference
relative to the largest value of outputs and gradients, and how often kernels were launched.

TRITON_INTERPRET=1 python run_layers.py
"""

import json
from collections import Counter
from functools import partial, partialmethod
from unittest import mock

import torch
from tiny_models import make_model
from torch import nn

import mxfp4_kernels
from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig
from hf_mxfp4.layers import MXFP4PackedExperts
from hf_mxfp4.ops import quantization
from hf_mxfp4.ops.choice import HAS_FP8_ON_CPU


LAUNCHES: Counter = Counter()
NAMES = ("fake_quantize", "fake_quantize_rows_and_columns", "quantize", "dequantize", "to_fp8", "from_fp8")
NAMES += ("to_fp8_rows_and_columns", "gradient_to_fp8")
ROTATED = {"rotation": "deterministic-32"}
LAYERS = {
    "w4a4": (MXFP4Linear, {"preset": "w4a4"}),
    "w4a4g4": (MXFP4Linear, {"preset": "w4a4g4"}),
    "w4a8": (MXFP4Linear, {"preset": "w4a8"}),
    "w4a8g8": (MXFP4Linear, {"preset": "w4a8g8"}),
    "paper_a": (MXFP4Linear, {"preset": "paper_a"}),
    "paper_b": (MXFP4Linear, {"preset": "paper_b", "wgrad": {"rotation": "random-16"}}),
    "packed": (MXFP4PackedLinear, {"preset": "w4a16", "mode": "packed"}),
    "packed, w4a8": (MXFP4PackedLinear, {"preset": "w4a8", "mode": "packed"}),
    "packed, rotated": (MXFP4PackedLinear, {"preset": "w4a4", "mode": "packed", "fprop": ROTATED}),
}


#: On FP8 products, which have outputs in float32 on CPUs: weights with one scale, and with scales of rows.
SPREADS = {"w4a8g8 in FP8": 0, "w4a8g8 in FP8, scales of rows": 16}


def spy() -> None:
    def counted(name, function, *arguments, **options):
        LAUNCHES[name] += 1
        return function(*arguments, **options)

    def counted_method(product, function, *arguments):
        return counted("packed product", function, product, *arguments)

    for name in NAMES:
        setattr(mxfp4_kernels, name, partial(counted, name, getattr(mxfp4_kernels, name)))
    mxfp4_kernels.PackedProduct.__call__ = partialmethod(counted_method, mxfp4_kernels.PackedProduct.__call__)


def linear(kind: type, options: dict, backend: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = kind.from_linear(nn.Linear(160, 48).bfloat16(), MXFP4RLConfig(backend=backend, **options))
    x = torch.randn(2, 10, 160).bfloat16().requires_grad_()
    out = layer(x)
    out.backward(torch.randn(out.shape).bfloat16())
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def in_fp8(spread: int, backend: str) -> list[torch.Tensor]:
    """Both passes of a layer on FP8 products, its weights by rows ``spread`` binades apart."""
    torch.manual_seed(0)
    config = MXFP4RLConfig(preset="w4a8g8", matmul_backend="fp8", backend=backend)
    layer = MXFP4Linear.from_linear(nn.Linear(160, 48), config)
    with torch.no_grad():
        layer.weight.mul_(torch.linspace(-spread, spread, 48).round().exp2()[:, None])
    x = torch.randn(64, 160).mul(torch.linspace(-9, 9, 64).round().exp2()[:, None]).requires_grad_()
    # Operands of FP8 products are converted on the best backend, of CPUs the eager one.
    with mock.patch.object(quantization, "supports_e4m3", lambda *_: backend == "triton"):
        out = layer(x)
        out.backward(torch.randn(out.shape))
    return [out.detach(), x.grad, layer.weight.grad]


def experts(backend: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    config = MXFP4RLConfig(preset="w4a16", mode="packed", backend=backend, macro_block=None)
    plain = make_model("qwen3_moe", layers=1, dtype=torch.bfloat16).model.layers[0].mlp.experts
    layer = MXFP4PackedExperts.from_experts(plain, config, "experts")
    x = torch.randn(6, 64).bfloat16()
    chosen = torch.tensor([[0, 1], [2, 1], [0, 2], [1, 0], [0, 1], [1, 0]])
    with torch.no_grad():
        return [layer(x, chosen, torch.rand(6, 2).bfloat16())]


@torch.no_grad()
def joined(rows: int) -> dict:
    """Three layers of one input: whether a joined product has the bits of separate ones, and products of each."""
    torch.manual_seed(0)
    config = MXFP4RLConfig(mode="packed", backend="triton")
    sizes = {"q": 48, "k": 16, "v": 32}
    layers = [MXFP4PackedLinear.from_linear(nn.Linear(160, n).bfloat16(), config, name) for name, n in sizes.items()]
    x = torch.randn(rows, 160).bfloat16()
    outputs = []
    products = []
    for _ in range(2):
        LAUNCHES.clear()
        outputs.append(torch.cat([layer(x) for layer in layers], -1))
        products.append(dict(LAUNCHES))
    return {"equal": torch.equal(*outputs), "products": products}


def compared(compute) -> dict:
    expected = compute("eager")
    LAUNCHES.clear()
    found = compute("triton")
    differences = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]
    return {"differences": differences, "launches": dict(LAUNCHES)}


if __name__ == "__main__":
    spy()
    report = {name: compared(partial(linear, *given)) for name, given in LAYERS.items()}
    if HAS_FP8_ON_CPU:
        report |= {name: compared(partial(in_fp8, spread)) for name, spread in SPREADS.items()}
    report["experts"] = compared(experts)
    of_joined = {"few": joined(3), "many": joined(300)}
    print(json.dumps({"layers": report, "joined": of_joined}))
