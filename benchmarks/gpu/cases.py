# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.gpu` measures of kernels and layers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import hf_mxfp4
import mxfp4_kernels
from hf_mxfp4 import MXFP4Experts, MXFP4Linear, MXFP4RLConfig, numerics
from hf_mxfp4.layers import MXFP4PackedExperts, MXFP4PackedLinear
from hf_mxfp4.ops import WeightCache, quantize_e4m3
from hf_mxfp4.presets import PRESETS

from .bench import Call, Case


TOKENS = 8192
#: ``(out_features, in_features)`` of linear layers of Llama-3.1-8B, and the largest of Qwen2.5-32B.
LINEARS = (4096, 4096), (4096, 14336), (27648, 5120)
#: Hidden and inner size, experts, and experts of a token: those of Qwen3-30B-A3B, and tiny ones.
EXPERTS = (2048, 768, 128, 8), (64, 32, 4, 2)
BF16 = "BF16"
#: Options of quantization by name.
SCHEMES: dict[str, dict[str, Any]] = {
    "rceil": {"scale_rule": "rceil"},
    "rceil, macro 128 static": {"scale_rule": "rceil", "macro_block": 128},
    "even, block mantissas": {"scale_rule": "even", "macro_block": 128, "macro_search": "block_mantissas"},
    "even, block mantissas, fallback": {
        "scale_rule": "even",
        "macro_block": 128,
        "macro_search": "block_mantissas",
        "outlier_fallback": 1.0,
    },
}
#: Trained layers by name; `PLAIN` presets have block scales alone.
PLAIN = {"scale_rule": "rceil", "macro_block": None}
TRAINED = {
    "w4a4g4, plain": MXFP4RLConfig(preset="w4a4g4", **PLAIN),
    "w4a4, plain": MXFP4RLConfig(preset="w4a4", **PLAIN),
    # On FP8 tensor cores too.
    "w4a4, three levels": MXFP4RLConfig(preset="w4a4", macro_search="block_mantissas_fp8"),
    "w4a4, residuals": MXFP4RLConfig(preset="w4a4", outlier_fallback=1.0),
    **{preset: MXFP4RLConfig(preset=preset) for preset in PRESETS},
}
#: Those whose forward pass is measured alone, with the weight kept.
FORWARD = ("w4a16", "w4a8", "w4a4", "w4a4, plain", "w4a4, three levels", "w4a4, residuals")


def cases(tiny: bool = False) -> list[Case]:
    """Return all of them, in order of importance; with ``tiny`` on shapes that an interpreter manages."""
    sections = _trained_experts, _quantize, _to_e4m3, _decode, _experts, _linear, _forward
    return [case for section in sections for case in section(tiny)]


def random_matrix(device: torch.device, *shape: int) -> torch.Tensor:
    """Return normal values with a spread of scales between rows and a few outliers, as activations have; bfloat16."""
    torch.manual_seed(0)
    x = torch.randn(shape, device=device) * torch.exp2(torch.randint(-4, 5, (*shape[:-1], 1), device=device))
    x[..., :: max(1, shape[-1] // 7)] *= 16
    return x.bfloat16()


# ---- quantization ---------------------------------------------------------------------------------------------------


def _quantize(tiny: bool) -> Iterator[Case]:
    rows, columns = shape = (40, 96) if tiny else (TOKENS, 5120)
    for name, options in SCHEMES.items():
        written = columns / 2 + columns / 32  # codes and scales of a row
        if options.get("outlier_fallback"):
            written *= 2
        if "macro_block" in options:
            written += columns / 128
        peers = {}
        if name == "rceil":
            peers["torchao"] = lambda device: _torchao(random_matrix(device, *shape))
        yield Case("quantize", name, shape, _quantizer(shape, options), rows * (2 * columns + written), peers=peers)
    both = 2 * rows * columns * (1 / 2 + 1 / 32)
    yield Case("quantize", "rceil, rows and columns", shape, _quantizer_of_both(shape), 2 * rows * columns + both)


def _quantizer(shape: tuple[int, ...], options: Mapping[str, Any]):
    def build(device: torch.device, backend: str) -> Call:
        x = random_matrix(device, *shape)

        def call() -> list[torch.Tensor | None]:
            packed = hf_mxfp4.quantize(x, backend=backend, **options)
            return [packed.codes, packed.scale, packed.macro, packed.residual_codes, packed.residual_scale]

        return call

    return build


def _quantizer_of_both(shape: tuple[int, ...]):
    def build(device: torch.device, backend: str) -> Call:
        x = random_matrix(device, *shape)

        def call() -> list[tuple[torch.Tensor, torch.Tensor]]:
            if backend == "triton":
                rows, columns = mxfp4_kernels.quantize_rows_and_columns(x)
            else:
                rows = numerics.quantize(x)
                columns = numerics.quantize(x.mT.contiguous())
            return [(rows.codes, rows.scale), (columns.codes, columns.scale)]

        return call

    return build


def _torchao(x: torch.Tensor) -> Call:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    mode = ScaleCalculationMode("rceil")
    run = torch.compile(lambda: to_mx(x, torch.float4_e2m1fn_x2, block_size=32, scaling_mode=mode), dynamic=False)
    return run if x.is_cuda else lambda: None


def _to_e4m3(tiny: bool) -> Iterator[Case]:
    rows, columns = shape = (40, 96) if tiny else (TOKENS, 5120)

    def build(device: torch.device, backend: str) -> Call:
        x = random_matrix(device, *shape)
        return lambda: quantize_e4m3(x, backend)

    yield Case("to_e4m3", "rows", shape, build, rows * (3 * columns + 1))


# ---- decoding -------------------------------------------------------------------------------------------------------


def _decode(tiny: bool) -> Iterator[Case]:
    for n, k in [(160, 96)] if tiny else LINEARS:
        for rows in (1, 5) if tiny else (1, 16):
            weights = 4.3125 / 8 * n * k
            inputs_and_outputs = 2.0 * rows * (n + k)
            yield Case(
                "decode",
                f"{rows} rows",
                (n, k),
                _packed_product(rows, n, k),
                weights + inputs_and_outputs,
                {"bf16": 2.0 * rows * n * k},
                {BF16: _plain_product(rows, n, k), "bitsandbytes NF4": _nf4_product(rows, n, k)},
                tolerance=1e-2,
            )


def _weight(device: torch.device, n: int, k: int) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(n, k, device=device) * k**-0.5).bfloat16()


def _packed_product(rows: int, n: int, k: int):
    def build(device: torch.device, backend: str) -> Call:
        plain = nn.Linear(k, n, bias=False, device="meta")
        plain.weight = nn.Parameter(_weight(device, n, k), requires_grad=False)
        config = MXFP4RLConfig(mode="packed", backend=backend)
        layer = MXFP4PackedLinear.from_linear(plain, config, "layer")
        x = random_matrix(device, rows, k)
        return torch.no_grad()(lambda: layer(x))

    return build


def _plain_product(rows: int, n: int, k: int):
    def build(device: torch.device) -> Call:
        x = random_matrix(device, rows, k)
        weight = _weight(device, n, k)
        return lambda: F.linear(x, weight)

    return build


def _nf4_product(rows: int, n: int, k: int):
    def build(device: torch.device) -> Call:
        import bitsandbytes as bnb

        x = random_matrix(device, rows, k)
        weight = _weight(device, n, k)
        stored, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
        return lambda: bnb.matmul_4bit(x, stored.t(), quant_state=state)

    return build


def _calls_of_experts(tokens: int, tiny: bool, trained: bool = False):
    """Return what builds a call of quantized experts, packed or with both passes, and the peers."""
    hidden, inner, count, chosen = EXPERTS[tiny]

    def call(device: torch.device, config: MXFP4RLConfig | None = None) -> Call:
        sizes = Qwen3MoeConfig(
            hidden_size=hidden, moe_intermediate_size=inner, num_experts=count, num_experts_per_tok=chosen
        )
        sizes._experts_implementation = "grouped_mm"
        torch.manual_seed(0)
        with device:
            experts = Qwen3MoeExperts(sizes).bfloat16().requires_grad_(False)
        for weight in (experts.gate_up_proj, experts.down_proj):
            weight.normal_(std=weight.shape[-1] ** -0.5)
        if config is not None:
            quantized = MXFP4Experts if trained else MXFP4PackedExperts
            experts = quantized.from_experts(experts, config, "experts")
        x = random_matrix(device, tokens, hidden)
        scores, ids = torch.randn(tokens, count, device=device).softmax(-1).topk(chosen)
        inputs = x, ids, scores.bfloat16()
        if trained:
            return _both_passes(experts.requires_grad_(), random_matrix(device, tokens, hidden), *inputs)
        return torch.no_grad()(lambda: experts(*inputs))

    scheme = {"preset": "w4a8"} if trained else {"mode": "packed"}
    return lambda device, backend: call(device, MXFP4RLConfig(backend=backend, **scheme)), {BF16: call}


def _experts(tiny: bool) -> Iterator[Case]:
    """Yield experts with packed weights."""
    hidden, inner, count, chosen = EXPERTS[tiny]
    for tokens in (1, 5) if tiny else (1, 16, 64):
        reached = 1 - (1 - chosen / count) ** tokens  # the part of experts that have rows
        weights = 4.3125 / 8 * 3 * hidden * inner * count * reached
        rows = tokens * chosen
        inputs_and_outputs = 2.0 * rows * (2 * hidden + 3 * inner)
        build, peers = _calls_of_experts(tokens, tiny)
        yield Case(
            "decode",
            f"experts, {tokens} tokens",
            (count, hidden, inner),
            build,
            weights + inputs_and_outputs,
            {"bf16": 2.0 * rows * 3 * hidden * inner},
            peers,
            tolerance=5e-2,
        )


# ---- training -------------------------------------------------------------------------------------------------------


def _trained_experts(tiny: bool) -> Iterator[Case]:
    """Yield both passes of experts, whose products of PyTorch assert on GPUs what no CPU does."""
    hidden, inner, count, chosen = EXPERTS[tiny]
    tokens = 32 if tiny else TOKENS
    rows = tokens * chosen
    weights = 3 * hidden * inner * count
    n_bytes = 2.0 * (2 * rows * (2 * hidden + 3 * inner) + 2 * weights)
    flops = 18.0 * rows * hidden * inner
    build, peers = _calls_of_experts(tokens, tiny, trained=True)
    shape = tokens, count, hidden, inner
    yield Case("linear", "experts, w4a8", shape, build, n_bytes, {"bf16": flops}, peers, tolerance=5e-2)


def _linear(tiny: bool) -> Iterator[Case]:
    tokens, n, k = shape = (32, 48, 96) if tiny else (TOKENS, 4096, 14336)
    n_bytes = 2.0 * (2 * tokens * (n + k) + 2 * n * k)
    flops = 6.0 * tokens * n * k

    def build(device: torch.device, backend: str, config: MXFP4RLConfig) -> Call:
        return called(MXFP4Linear(k, n, bias=False, device="meta", config=replace(config, backend=backend)), device)

    def plain(device: torch.device) -> Call:
        return called(nn.Linear(k, n, bias=False, device="meta"), device)

    def called(layer: nn.Linear, device: torch.device) -> Call:
        layer.weight = nn.Parameter(_weight(device, n, k))
        return _both_passes(layer, random_matrix(device, tokens, n), random_matrix(device, tokens, k))

    for name, config in TRAINED.items():
        made = partial(build, config=config)
        yield Case("linear", name, shape, made, n_bytes, {"bf16": flops}, {BF16: plain}, tolerance=5e-2)


def _forward(tiny: bool) -> Iterator[Case]:
    tokens, n, k = shape = (288, 48, 96) if tiny else (TOKENS, 4096, 14336)

    def build(device: torch.device, backend: str, config: MXFP4RLConfig) -> Call:
        layer = MXFP4Linear(k, n, bias=False, device="meta", config=replace(config, backend=backend))
        layer.weight = nn.Parameter(_weight(device, n, k))
        layer.state.cache = WeightCache(layer)
        x = random_matrix(device, tokens, k)
        return torch.no_grad()(lambda: layer(x))

    n_bytes = 2.0 * (tokens * (n + k) + n * k)
    flops = {"bf16": 2.0 * tokens * n * k}
    peers = {BF16: _plain_product(tokens, n, k)}
    for name in FORWARD:
        made = partial(build, config=TRAINED[name])
        yield Case("forward", name, shape, made, n_bytes, flops, peers, tolerance=5e-2)


def _both_passes(layer: nn.Module, grad: torch.Tensor, x: torch.Tensor, *routing: torch.Tensor) -> Call:
    """Return the forward and the backward pass after an update of the weights: output and all gradients."""
    leaves = [x.requires_grad_(), *layer.parameters()]

    def run() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            for weight in leaves[1:]:
                weight[:1, :1].add_(0)
        out = layer(x, *routing)
        return out, *torch.autograd.grad(out, leaves, grad)

    return run
