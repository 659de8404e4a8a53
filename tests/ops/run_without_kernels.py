# SPDX-License-Identifier: Apache-2.0
"""Layers that take kernels by themselves, as on a GPU, where self-checks pass and where they fail; prints a JSON report
of the kernels called and of how far results are from those of the eager reference.

TRITON_INTERPRET=1 python run_without_kernels.py
"""

import json
from collections import Counter
from collections.abc import Callable

import torch
from factors import factors_config
from torch import nn

import mxfp4_kernels
from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear
from hf_mxfp4.backends import select
from hf_mxfp4.backends.self_check import verdicts
from hf_mxfp4.gemm.tensor_cores import choose


LAYERS = {
    "fp8": {"preset": "w4a4g4", "outlier_fallback": None},
    "dense": {"preset": "w4a4"},
    "packed": {"preset": "w4a16", "mode": "packed"},
}
_original = select.backend_for


def as_on_a_gpu(device_type, dtype, scheme, backend, length=0):
    return ("triton", None) if backend == "auto" else _original(device_type, dtype, scheme, backend, length)


def counted(name: str, calls: Counter) -> Callable:
    function = getattr(mxfp4_kernels, name)

    def call(*arguments, **options):
        calls[name] += 1
        return function(*arguments, **options)

    return call


def results(options: dict, **others: str) -> list[torch.Tensor]:
    """Output and gradient of the input of a layer, and of a trainable one's weight."""
    torch.manual_seed(0)
    linear, x, grad = nn.Linear(160, 24), torch.randn(3, 160).requires_grad_(), torch.randn(3, 24)
    config = factors_config(**options, **others)
    layer = (MXFP4PackedLinear if config.mode == "packed" else MXFP4Linear).from_linear(linear, config)
    out = layer(x)
    out.backward(grad)
    found = [out.detach(), x.grad]
    return found if config.mode == "packed" else [*found, layer.weight.grad]


def main() -> dict:
    calls: Counter = Counter()
    for name in ("fake_quantize", "fake_quantize_both", "quantize", "dequantize", "linear_w4a16", "fold_e4m3"):
        setattr(mxfp4_kernels, name, counted(name, calls))
    select.backend_for, choose.hardware_of = as_on_a_gpu, lambda device: "sm_90"
    report = {}
    for label, problem in (("passed", None), ("failed", "broken")):
        verdicts._found.clear()
        verdicts._checked_now = lambda family, device, found=problem: found
        for name, options in LAYERS.items():
            calls.clear()
            found = results(options)
            taken = sorted(calls)
            plain = {"backend": "eager"} | ({} if name == "packed" else {"engine": "dense"})
            distances = [float((a - b).abs().max()) for a, b in zip(found, results(options, **plain), strict=True)]
            report[f"{name}, {label}"] = [taken, max(distances)]
    return report


if __name__ == "__main__":
    print(json.dumps(main()))
