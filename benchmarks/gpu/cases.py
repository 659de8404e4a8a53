# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.gpu.timed` measures of kernels and layers, by item."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
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
#: ``(out_features, in_features)`` of trained layers: MLP and attention of Llama-3.1-8B, and the MLP of Qwen2.5-1.5B.
TRAINED_LINEARS = (4096, 14336), (4096, 4096), (8960, 1536)
#: Tokens with it of tiny runs.
TINY_LINEAR = 16, 32, 32
#: Hidden size, inner size, and size of keys of Qwen2.5 from 1.5B to 32B.
QWEN = {
    "1.5B": (1536, 8960, 256),
    "3B": (2048, 11008, 256),
    "7B": (3584, 18944, 512),
    "14B": (5120, 13824, 1024),
    "32B": (5120, 27648, 1024),
}
#: Rows of products: those that decide first.
ROWS = (1, 16), (4, 64, 256)
#: Hidden and inner size, experts, and experts of a token: those of Qwen3-30B-A3B, few small ones, and tiny ones.
EXPERTS = (2048, 768, 128, 8)
SMALL_EXPERTS = (512, 256, 8, 2)
TINY_EXPERTS = (32, 32, 3, 2)
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
#: Those that are trained most, and those whose forward pass is measured alone, with the weight kept.
TRAINED_FIRST = ("w4a8g8", "w4a8")
FORWARD = ("w4a16", "w4a8", "w4a4", "w4a4, plain", "w4a4, three levels", "w4a4, residuals")


def random_matrix(device: torch.device, *shape: int) -> torch.Tensor:
    """Return normal values with a spread of scales between rows and a few outliers, as activations have; bfloat16."""
    torch.manual_seed(0)
    x = torch.randn(shape, device=device) * torch.exp2(torch.randint(-4, 5, (*shape[:-1], 1), device=device))
    x[..., :: max(1, shape[-1] // 7)] *= 16
    return x.bfloat16()


# ---- quantization ---------------------------------------------------------------------------------------------------


def _quantize(tiny: bool) -> Iterator[Case]:
    rows, columns = shape = (8, 64) if tiny else (TOKENS, 5120)
    for name, options in SCHEMES.items():
        written = columns / 2 + columns / 32  # codes and scales of a row
        if options.get("outlier_fallback"):
            written *= 2
        if "macro_block" in options:
            written += columns / 128
        peers = {}
        if name == "rceil":
            peers["torchao"] = lambda device: _torchao(random_matrix(device, *shape))
        yield Case(
            "quantize",
            name,
            shape,
            _quantizer(shape, options),
            rows * (2 * columns + written),
            peers=peers,
            timing="graph",
        )
    both = 2 * rows * columns * (1 / 2 + 1 / 32)
    yield Case(
        "quantize",
        "rceil, rows and columns",
        shape,
        _quantizer_of_both(shape),
        2 * rows * columns + both,
        timing="graph",
    )


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
    rows, columns = shape = (8, 64) if tiny else (TOKENS, 5120)

    def build(device: torch.device, backend: str) -> Call:
        x = random_matrix(device, *shape)
        return lambda: quantize_e4m3(x, backend)

    yield Case("to_e4m3", "rows", shape, build, rows * (3 * columns + 1), timing="graph")


# ---- products with packed weights -----------------------------------------------------------------------------------


def products(tiny: bool) -> Iterator[Case]:
    """Yield products of 1 to 256 rows with the weights of Qwen2.5 from 1.5B to 32B, and of a packed MoE layer."""
    for few_or_many in [(1, 5)] if tiny else ROWS:
        for n, k in [(32, 64)] if tiny else shapes_of_qwen():
            for rows in few_or_many:
                yield _product(rows, n, k)
    yield from _packed_experts(tiny)


def shapes_of_qwen() -> list[tuple[int, int]]:
    """Return ``(out_features, in_features)`` of the linear layers, q, k, v and gate, up joined as well as alone."""
    shapes = []
    for hidden, inner, keys in QWEN.values():
        attention = [(hidden, hidden), (keys, hidden), (hidden + 2 * keys, hidden)]
        mlp = [(inner, hidden), (2 * inner, hidden), (hidden, inner)]
        shapes += attention + mlp
    return list(dict.fromkeys(shapes))


def _product(rows: int, n: int, k: int) -> Case:
    weights = 4.3125 / 8 * n * k
    inputs_and_outputs = 2.0 * rows * (n + k)
    return Case(
        "products",
        f"{rows} rows",
        (n, k),
        _packed_product(rows, n, k),
        weights + inputs_and_outputs,
        {"bf16": 2.0 * rows * n * k},
        {
            BF16: _plain_product(rows, n, k),
            "bitsandbytes NF4": _nf4_product(rows, n, k),
            "torchao INT4": _int4_product(rows, n, k),
        },
        tolerance=1e-2,
        timing="graph",
    )


@lru_cache(maxsize=1)
def _weight(device: torch.device, n: int, k: int) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(n, k, device=device) * k**-0.5).bfloat16()


def linear_layer(device: torch.device, n: int, k: int) -> nn.Linear:
    """Return a frozen linear layer in bfloat16, with the same weight each time."""
    layer = nn.Linear(k, n, bias=False, device="meta")
    layer.weight = nn.Parameter(_weight(device, n, k), requires_grad=False)
    return layer


def packed_layer(device: torch.device, n: int, k: int, backend: str) -> MXFP4PackedLinear:
    """Return the packed form of [`linear_layer`]."""
    config = MXFP4RLConfig(mode="packed", backend=backend)
    return MXFP4PackedLinear.from_linear(linear_layer(device, n, k), config, "layer")


#: One for each backend: cases of one shape follow one another.
_kept_packed_layer = lru_cache(maxsize=2)(packed_layer)


def _packed_product(rows: int, n: int, k: int):
    def build(device: torch.device, backend: str) -> Call:
        layer = _kept_packed_layer(device, n, k, backend)
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


def _int4_product(rows: int, n: int, k: int):
    def build(device: torch.device) -> Call:
        from torchao.quantization import Int4WeightOnlyConfig, quantize_

        x = random_matrix(device, rows, k)
        holder = nn.Sequential(linear_layer(device, n, k))
        # The layout of the kernel that PyTorch has itself.
        quantize_(holder, Int4WeightOnlyConfig(group_size=32, int4_packing_format="tile_packed_to_4d"))
        return torch.no_grad()(lambda: holder(x))

    return build


def _calls_of_experts(tokens: int, sizes: tuple[int, int, int, int], preset: str | None = None):
    """Return what builds a call of quantized experts, packed or with both passes under a preset, and the peers."""
    hidden, inner, count, chosen = sizes

    def call(device: torch.device, config: MXFP4RLConfig | None = None) -> Call:
        model_config = Qwen3MoeConfig(
            hidden_size=hidden, moe_intermediate_size=inner, num_experts=count, num_experts_per_tok=chosen
        )
        model_config._experts_implementation = "grouped_mm"
        with device:
            experts = Qwen3MoeExperts(model_config).bfloat16().requires_grad_(False)
        # The same values on every device, soon made: those of one expert, moved on by a column for each.
        torch.manual_seed(0)
        for weight in (experts.gate_up_proj, experts.down_proj):
            one = torch.randn(weight.shape[1:]).mul_(weight.shape[-1] ** -0.5).bfloat16().to(device)
            for index in range(count):
                weight[index].copy_(one.roll(index, -1))
        if config is not None:
            layer_class = MXFP4PackedExperts if preset is None else MXFP4Experts
            experts = layer_class.from_experts(experts, config, "experts")
        cpu = torch.device("cpu")
        x = random_matrix(cpu, tokens, hidden).to(device)
        # Later experts get fewer tokens, the last one none.
        logits = torch.randn(tokens, count) - torch.linspace(0, 2, count)
        logits[:, -1] = -100
        scores, ids = logits.softmax(-1).topk(chosen)
        inputs = x, ids.to(device), scores.bfloat16().to(device)
        if preset is not None:
            grad = random_matrix(cpu, tokens, hidden).to(device)
            return _both_passes(experts.requires_grad_(), grad, *inputs)
        return torch.no_grad()(lambda: experts(*inputs))

    def quantized(device: torch.device, backend: str) -> Call:
        if sizes == TINY_EXPERTS and backend == "triton":
            backend = "cpu"  # the interpreter would take half a minute
        scheme = {"mode": "packed"} if preset is None else {"preset": preset}
        return call(device, MXFP4RLConfig(backend=backend, **scheme))

    return quantized, {BF16: call}


def _packed_experts(tiny: bool) -> Iterator[Case]:
    sizes = TINY_EXPERTS if tiny else EXPERTS
    hidden, inner, count, chosen = sizes
    for tokens in (5,) if tiny else (1, 16, 64):
        reached = 1 - (1 - chosen / count) ** tokens  # the part of experts that have rows
        weights = 4.3125 / 8 * 3 * hidden * inner * count * reached
        rows = tokens * chosen
        inputs_and_outputs = 2.0 * rows * (2 * hidden + 3 * inner)
        build, peers = _calls_of_experts(tokens, sizes)
        yield Case(
            "products",
            f"experts, {tokens} tokens",
            (count, hidden, inner),
            build,
            weights + inputs_and_outputs,
            {"bf16": 2.0 * rows * 3 * hidden * inner},
            peers,
            tolerance=5e-2,
            timing="graph",
        )


# ---- training -------------------------------------------------------------------------------------------------------


def experts(tiny: bool) -> Iterator[Case]:
    """Yield both passes of experts, whose products of PyTorch assert on GPUs what no CPU does: small ones against the
    CPU, then those of Qwen3-30B-A3B."""
    for sizes, tokens in [(TINY_EXPERTS, 16)] if tiny else [(SMALL_EXPERTS, 500), (EXPERTS, TOKENS)]:
        hidden, inner, count, chosen = sizes
        rows = tokens * chosen
        weights = 3 * hidden * inner * count
        n_bytes = 2.0 * (2 * rows * (2 * hidden + 3 * inner) + 2 * weights)
        flops = 18.0 * rows * hidden * inner
        for preset in ("w4a8",) if tiny else ("w4a8", "w4a8g8", "w4a4g4"):
            build, peers = _calls_of_experts(tokens, sizes, preset)
            yield Case(
                "experts",
                preset,
                (tokens, count, hidden, inner),
                build,
                n_bytes,
                {"bf16": flops},
                peers,
                # Values between the two products that other orders of sums move to another code move by a whole step.
                tolerance=1e-1,
                expected_on_cpu=sizes != EXPERTS,
            )


def training(tiny: bool) -> Iterator[Case]:
    """Yield both passes of a linear layer on FP8 tensor cores, with their kernels."""
    for tokens, n, k in [TINY_LINEAR] if tiny else [(TOKENS, *shape) for shape in TRAINED_LINEARS]:
        for name in TRAINED_FIRST:
            yield _trained_linear(name, tokens, n, k)


def _trained_linear(name: str, tokens: int, n: int, k: int) -> Case:
    def build(device: torch.device, backend: str) -> Call:
        config = replace(TRAINED[name], backend=backend)
        return called(MXFP4Linear(k, n, bias=False, device="meta", config=config), device)

    def plain(device: torch.device) -> Call:
        return called(nn.Linear(k, n, bias=False, device="meta"), device)

    def torchao(device: torch.device) -> Call:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        holder = nn.Sequential(nn.Linear(k, n, bias=False, device="meta"))
        convert_to_float8_training(holder, config=Float8LinearConfig.from_recipe_name("rowwise"))
        layer = holder[0]
        run = called(layer, device)
        layer.compile(dynamic=False)  # which torchao's speed needs
        return run

    def called(layer: nn.Linear, device: torch.device) -> Call:
        layer.weight = nn.Parameter(_weight(device, n, k).clone())
        return _both_passes(layer, random_matrix(device, tokens, n), random_matrix(device, tokens, k))

    first = name in TRAINED_FIRST
    peers: dict[str, Callable[[torch.device], Call]] = {BF16: plain}
    if first:
        peers["torchao FP8 rowwise"] = torchao
    return Case(
        "linear",
        name,
        (tokens, n, k),
        build,
        2.0 * (2 * tokens * (n + k) + 2 * n * k),
        {"bf16": 6.0 * tokens * n * k},
        peers,
        tolerance=5e-2,
        kernels=first,
    )


def schemes(tiny: bool) -> Iterator[Case]:
    """Yield what is left: quantization, forward passes alone, and training under all other presets."""
    yield from _quantize(tiny)
    yield from _to_e4m3(tiny)
    yield from _forward(tiny)
    tokens, n, k = TINY_LINEAR if tiny else (TOKENS, *TRAINED_LINEARS[0])
    for name in ("w4a16",) if tiny else TRAINED:
        if name not in TRAINED_FIRST:
            yield _trained_linear(name, tokens, n, k)


def _forward(tiny: bool) -> Iterator[Case]:
    tokens, n, k = shape = TINY_LINEAR if tiny else (TOKENS, *TRAINED_LINEARS[0])

    def build(device: torch.device, backend: str, config: MXFP4RLConfig) -> Call:
        layer = MXFP4Linear(k, n, bias=False, device="meta", config=replace(config, backend=backend))
        layer.weight = nn.Parameter(_weight(device, n, k))
        layer.state.cache = WeightCache(layer)
        x = random_matrix(device, tokens, k)
        return torch.no_grad()(lambda: layer(x))

    n_bytes = 2.0 * (tokens * (n + k) + n * k)
    flops = {"bf16": 2.0 * tokens * n * k}
    peers = {BF16: _plain_product(tokens, n, k)}
    for name in FORWARD[:1] if tiny else FORWARD:
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
