# SPDX-License-Identifier: Apache-2.0
"""Trains a layer once on every engine and on the dense one; prints how far results are apart, as JSON.

TRITON_INTERPRET=1 python run_engines.py few      on the CPU, every scheme in one dtype
TRITON_INTERPRET=1 python run_engines.py all      on the CPU, every scheme in both dtypes
python run_engines.py cuda                        on a GPU, with engine="auto"
"""

import json
import os
import sys

import torch
from factors import factors_config

from hf_mxfp4 import MXFP4Linear
from hf_mxfp4.gemm import gemm_kernel_counts, linear, reset_gemm_kernel_counts
from hf_mxfp4.gemm.tensor_cores import choose, fast
from hf_mxfp4.layers import cached_weights
from hf_mxfp4.numerics import FP8


WHAT = sys.argv[1]
DEVICE = "cuda" if WHAT == "cuda" else "cpu"
DTYPES = (torch.float32, torch.bfloat16)
ENGINES = ("fp8", "mxfp4") if DEVICE == "cpu" else ("auto",)
PLAIN, NO_FALLBACK = {"outlier_fallback": None, "macro_block": None}, {"outlier_fallback": None}
CONFIGS = {
    "w4a4": {"preset": "w4a4", **NO_FALLBACK},
    "w4a4 plain": {"preset": "w4a4", "saved_activations": "mxfp4", **PLAIN},
    "w4a4g4": {"preset": "w4a4g4", **NO_FALLBACK},
    "w4a4g4 plain": {"preset": "w4a4g4", "saved_activations": "fp8", "scale_rule": "even", **PLAIN},
    "w4a4g8 plain": {"preset": "w4a4g8", **PLAIN},
    "w4a4g8 plain, no bias": {"preset": "w4a4g8", **PLAIN},
    "w4a4g8": {"preset": "w4a4g8", **NO_FALLBACK},
    "paper_b": {"preset": "paper_b"},
    "random": {
        "preset": "w4a4g4",
        **NO_FALLBACK,
        "stochastic_seed": 3,
        "fprop": {"weight": "rceil", "x": "rceil+stochastic", "rotation": "random-16"},
        "dgrad": {"grad": "even+mbs128-static+stochastic"},
        "wgrad": {"grad": "even+mbs128-static", "x": "rceil+stochastic", "rotation": "random-32"},
    },
    "random reuse": {
        "preset": "w4a4g8",
        **PLAIN,
        "fprop": {"weight": "rceil+stochastic", "x": "rceil+stochastic"},
    },
    "tuned": {"preset": "w4a4g4_tuned"},
    "fallback": {"preset": "w4a4"},
}
IN, OUT, ROWS = (70, 20, 37) if DEVICE == "cpu" else (2048, 1536, 777)


def results(engine: str, dtype: torch.dtype, options: dict) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    bias = options is not CONFIGS["w4a4g8 plain, no bias"]
    layer = MXFP4Linear(IN, OUT, bias, dtype=torch.float32, config=factors_config(engine=engine, **options))
    x, grad = torch.randn(2, ROWS, IN), torch.randn(2, ROWS, OUT) * 1e-3
    layer, x, grad = layer.to(DEVICE, dtype), x.to(DEVICE, dtype).requires_grad_(), grad.to(DEVICE, dtype)
    out = layer(x)
    out.backward(grad)
    found = {"out": out, "x": x.grad, "weight": layer.weight.grad}
    if bias:
        found["bias"] = layer.bias.grad
    return {name: value.detach().double() for name, value in found.items()}


def distance(found: torch.Tensor, dense: torch.Tensor) -> float:
    """Largest difference over the size of the result."""
    return float((found - dense).abs().max() / dense.abs().max())


def has_fp8_operands(options: dict) -> bool:
    """Whether gradients are E4M3 of their own, not folded MXFP4, of which FP8 tensor cores lose digits."""
    scheme = factors_config(**options).gemms()
    return any(FP8 in (gemm.left, gemm.right) for gemm in (scheme.dgrad, scheme.wgrad))


def compare() -> dict:
    report = {}
    for number, (name, options) in enumerate(CONFIGS.items()):
        for dtype in (DTYPES[number % 2],) if WHAT == "few" else DTYPES:
            dense = results("dense", dtype, options)
            for engine in ENGINES:
                reset_gemm_kernel_counts()
                found = results(engine, dtype, options)
                counts = gemm_kernel_counts()
                label = f"{name}, {engine}, {str(dtype).removeprefix('torch.')}"
                report[label] = {
                    "distance": {part: distance(found[part], dense[part]) for part in dense},
                    "engines": [next(iter(counts[gemm])) for gemm in ("fprop", "dgrad", "wgrad")],
                    "inexact": counts["inexact_blocks"],
                    "fp8 operands": has_fp8_operands(options),
                }
    return report


def saved_for_wgrad(engine: str, *names: str) -> dict[str, list[str]]:
    """The forms in which layers of an engine save an input for Wgrad, and what of their results is not, to the bit,
    what it is when its quantized values are saved; last, of the gradient of the weight when its product is a dense one
    after all, in a layer of the dense engine."""
    report = {}
    ways = linear._saved_operand, fast.gradients
    for name in names:
        forms, options = [], CONFIGS[name]

        def noted(*arguments, _forms=forms):
            found = ways[0](*arguments)
            _forms.append("values" if found[1] is None else found[1].record.form)
            return found

        linear._saved_operand = noted
        found = results(engine, torch.bfloat16, options)
        fast.gradients = lambda *_: (None, None)
        late = results(engine, torch.bfloat16, options)["weight"]
        fast.gradients = ways[1]
        linear._saved_operand = lambda *_: (None, None)
        plain = results(engine, torch.bfloat16, options)
        linear._saved_operand = ways[0]
        wrong = [part for part in plain if not torch.equal(found[part], plain[part])]
        wrong += ["dense"] * (not torch.equal(late, results("dense", torch.bfloat16, options)["weight"]))
        report[name] = [*forms, *wrong]
    return report


def weights_are_folded_once() -> list[int]:
    """Calls of the folding kernel in two forward passes within ``cached_weights("dense")``, and after an update."""
    import mxfp4_kernels
    from mxfp4_kernels.e4m3 import fold as _fold

    calls = []
    original = _fold.fold_e4m3

    def counted(x: torch.Tensor, **options):
        calls.append(tuple(x.shape))
        return original(x, **options)

    mxfp4_kernels.fold_e4m3 = counted
    layer = MXFP4Linear(IN, OUT, config=factors_config(engine=ENGINES[0], **CONFIGS["w4a4"])).to(DEVICE)
    x = torch.randn(3, IN, device=DEVICE)
    with torch.no_grad(), cached_weights("dense"):
        first, second = layer(x), layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
        third = layer(x)
    del mxfp4_kernels.fold_e4m3
    assert torch.equal(first, second) and not torch.equal(first, third)
    return [sum(shape == (OUT, IN) for shape in calls), len(calls)]


def outliers() -> list[int | bool]:
    """Blocks that do not fold are counted, and the result is near the dense one all the same."""
    reset_gemm_kernel_counts()
    outs = []
    for engine in ("fp8", "dense"):
        layer = MXFP4Linear(128, 16, config=factors_config(engine=engine, **CONFIGS["w4a4 plain"])).to(DEVICE)
        torch.nn.init.ones_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
        x = torch.full((4, 128), 2.0**-20, device=DEVICE)
        x[1, :32] = 2.0
        with torch.no_grad():
            outs.append(layer(x))
    return [gemm_kernel_counts()["inexact_blocks"], bool((outs[0] - outs[1]).abs().max() <= 2.0**-15 * 2.0 * 128)]


if __name__ == "__main__":
    found = {"layers": compare(), "folds": weights_are_folded_once(), "outliers": outliers()}
    if DEVICE == "cpu":
        found["saved"] = saved_for_wgrad("fp8", "w4a4g8 plain", "w4a4g8 plain, no bias", "random reuse")
        # As on a GPU with tensor cores for MXFP4, which has those for FP8 too.
        choose.hardware_of = lambda device: "sm_100"
        os.environ["HF_MXFP4_SELF_CHECK"] = "0"
        found["saved beside codes"] = saved_for_wgrad("auto", "w4a4g8 plain", "w4a4g8", "random reuse", "random")
    print(json.dumps(found))
