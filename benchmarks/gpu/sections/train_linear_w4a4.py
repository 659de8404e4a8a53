# SPDX-License-Identifier: Apache-2.0
"""A linear layer forward and backward, every operand of its three products quantized in the time that is measured."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig
from hf_mxfp4.gemm import matmul_counts, reset_matmul_counts
from hf_mxfp4.numerics import GEMM_OPERANDS

from ...macro_factors import FACTORS, FACTORS_OF, PLAIN
from .. import peers
from ..bench import Absent, Aim, Bench, Measured, Work
from ..checks import expect_close
from ..shapes import QWEN_3B, QWEN_7B, QWEN_32B, TINY
from ..timing import Call
from ..torch_fp8 import fp8_rows, scaled_mm, values
from .quantize_pack import TOKENS


NAME, SHARE = "train_linear_w4a4", 100

BF16, QDQ, UNSCALED = "BF16 nn.Linear", "quantize-dequantize + BF16", "without macro blocks"
#: Scheme by name, in order of importance, with what is aimed at: the least ratio to BF16, and to QDQ.
SCHEMES: dict[str, tuple[MXFP4RLConfig, float | None, float | None]] = {
    "w4a4g4": (MXFP4RLConfig(preset="w4a4g4", **PLAIN), 1.25, 2.0),
    "w4a4g8": (MXFP4RLConfig(preset="w4a4g8", **PLAIN), 1.25, 2.0),
    "w4a4": (MXFP4RLConfig(preset="w4a4", **PLAIN), 1.0, None),
    "w4a4g4, macro 128": (MXFP4RLConfig(preset="w4a4g4", outlier_fallback=None, **FACTORS), None, None),
    "w4a4, macro 128, fallback": (MXFP4RLConfig(preset="w4a4", **FACTORS_OF), None, None),
    "w4a4, block mantissas": (MXFP4RLConfig(outlier_fallback=None), None, None),
    "w4a4, block mantissas, fallback": (MXFP4RLConfig(), None, None),
}
#: Products of a scheme on FP8 units; the others are in BF16.
FP8_PRODUCTS = {"w4a4g4": 3, "w4a4g8": 3, "w4a4": 1, "w4a4g4, macro 128": 3}
#: What macro blocks may cost: a tenth of the time without.
LEAST_WITH_MACRO = 1 / 1.1


def run(bench: Bench) -> None:
    if bench.machine.tiny:
        shapes = [(32, 48, TINY.hidden_size)]
    else:
        linears = (4096, 4096), QWEN_7B.linears["gate_proj"], QWEN_32B.linears["down_proj"], QWEN_3B.linears["q_proj"]
        shapes = [(TOKENS, *linear) for linear in linears]
    for shape in shapes:
        for name in SCHEMES:
            bench.case(name, list(shape), lambda s=shape, n=name: _measure(bench, s, n))


def _measure(bench: Bench, shape: tuple[int, int, int], name: str) -> Measured:
    tokens, n, k = shape
    config, least_bf16, least_qdq = SCHEMES[name]
    if bench.machine.interpreted:
        # The search for factors takes minutes there.
        searched = config.macro_block is not None and config.macro_search == "hybrid"
        search = "static" if searched else config.macro_search
        engine = "fp8" if name in FP8_PRODUCTS else "auto"
        config = replace(config, backend="triton", macro_search=search, engine=engine)
    step = Step(bench, shape)
    layer = step.layer(config)
    reset_matmul_counts()
    error = step.check(layer, config)
    engines = _engines()
    products = {"fp8": FP8_PRODUCTS.get(name, 0), "bf16": 3 - FP8_PRODUCTS.get(name, 0)}
    flops = {rate: count * 2 * tokens * n * k for rate, count in products.items() if count}
    work = Work(2 * (2 * tokens * (n + k) + 2 * n * k), flops)
    against: dict[str, peers.Builder] = {
        BF16: lambda: [step.call(step.plain())],
        QDQ: lambda: [step.call(step.layer(by_definition(config)))],
        "torch FP8, products alone": lambda: step.fp8_products(),
    }
    if name == "w4a4g4, macro 128":
        without = replace(SCHEMES["w4a4g4"][0], backend=config.backend)
        against[UNSCALED] = lambda: [step.call(step.layer(without))]
    amount = sum(flops.values()) / 1e12
    found = bench.contest([step.call(layer)], against, work, "TFLOP/s", amount, baseline=BF16)
    found.details |= {"error": error, "remarks": [engines]}
    if not bench.machine.interpreted:
        ratios = {peer: note.get("ratio") for peer, note in found.details["peers"].items()}
        wanted = [(BF16, least_bf16), (QDQ, least_qdq)]
        if name == "w4a4g4, macro 128":
            wanted.append((UNSCALED, LEAST_WITH_MACRO))
        found.aims = [Aim(f"of {peer}", least, ratios.get(peer)) for peer, least in wanted if least is not None]
    return found


def _engines() -> str:
    """What multiplied each product; the dense engine also did for the definition that it was compared with."""
    counts = matmul_counts()
    took = {gemm: next((name for name in counts[gemm] if name != "dense"), "dense") for gemm in GEMM_OPERANDS}
    inexact = counts["inexact_blocks"]
    return ", ".join(f"{gemm} {name}" for gemm, name in took.items()) + (f", {inexact} rounded" if inexact else "")


def by_definition(config: MXFP4RLConfig) -> MXFP4RLConfig:
    """The same scheme as quantize-dequantize and 16-bit products."""
    return replace(config, engine="dense")


class Step:
    """The tensors of one shape, and what a training step does with a layer."""

    def __init__(self, bench: Bench, shape: tuple[int, int, int]):
        self.machine = bench.machine
        self.tokens, self.n, self.k = shape
        generator = torch.Generator(self.machine.device).manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, device=self.machine.device, generator=generator)

        self.weight = (normal(self.n, self.k) * self.k**-0.5).bfloat16()
        self.x = normal(self.tokens, self.k).bfloat16()
        # Gradients of tokens differ in size.
        self.grad = (normal(self.tokens, self.n) * torch.exp2(3 * normal(self.tokens, 1)).clamp(2**-8, 2**8)).bfloat16()

    def layer(self, config: MXFP4RLConfig, dtype: torch.dtype = torch.bfloat16) -> MXFP4Linear:
        layer = MXFP4Linear(self.k, self.n, bias=False, device="meta", config=config)
        layer.weight = nn.Parameter(self.weight.to(dtype, copy=True))
        return layer

    def plain(self) -> nn.Linear:
        layer = nn.Linear(self.k, self.n, bias=False, device="meta")
        layer.weight = nn.Parameter(self.weight.clone())
        return layer

    def passes(self, layer: nn.Linear) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output, and gradients of input and weight."""
        dtype = layer.weight.dtype
        x = self.x.to(dtype).requires_grad_()
        out = layer(x)
        return out, *torch.autograd.grad(out, (x, layer.weight), self.grad.to(dtype))

    def call(self, layer: nn.Linear) -> Call:
        """Both passes after an update of the weight, which makes a quantized copy of it stale."""

        def run() -> None:
            with torch.no_grad():
                layer.weight[:1, :1].add_(0)
            self.passes(layer)

        return run

    def check(self, layer: MXFP4Linear, config: MXFP4RLConfig) -> float:
        """The largest relative error of the three results, against the same operands multiplied in float32."""
        exact = self.layer(replace(by_definition(config), backend="eager"), torch.float32)
        names = "output", "gradient of the input", "gradient of the weight"
        pairs = zip(names, self.passes(layer), self.passes(exact), strict=True)
        return max(expect_close(name, out, expected, 1e-2) for name, out, expected in pairs)

    def fp8_products(self) -> Sequence[Call]:
        """The three products by torch's scaled product on operands that are FP8 already: what is left for an FP8 layer
        when quantization costs nothing."""
        if any(size % 16 for size in (self.tokens, self.n, self.k)):
            raise Absent("the scaled product needs multiples of 16")
        x, weight, grad = self.x, self.weight, self.grad
        pairs = ((x, weight), (grad, weight.t()), (grad.t(), x.t()))
        operands = [tuple(fp8_rows(self.machine, side.contiguous()) for side in pair) for pair in pairs]
        left, right = (values(operand)[:64].double() for operand in operands[0])
        expect_close("torch FP8", scaled_mm(*operands[0])[:64, :64], left @ right.T, 1e-2)

        def run() -> None:
            for pair in operands:
                scaled_mm(*pair)

        return [run]
