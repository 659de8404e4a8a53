# SPDX-License-Identifier: Apache-2.0
"""The experts of a mixture: products of their rows with packed weights, and both passes with all operands in MXFP4."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import hf_mxfp4
import mxfp4_kernels
from hf_mxfp4 import MXFP4Experts, MXFP4RLConfig
from hf_mxfp4.numerics import MXFP4Tensor

from ...macro_factors import PLAIN
from .. import peers
from ..bench import Aim, Bench, Measured, Work
from ..checks import expect_close
from ..shapes import QWEN3_30B_A3B, TINY_EXPERTS, Experts
from ..timing import Call
from .quantize_pack import TOKENS


NAME, SHARE = "grouped_experts", 60

BF16 = "BF16 grouped_mm"
#: Of [`EXPERTS`]; both passes, gradients of outputs quantized as well.
TRAINED = {
    "w4a4g4": MXFP4RLConfig(preset="w4a4g4", **PLAIN),
    "w4a4": MXFP4RLConfig(preset="w4a4", **PLAIN),
}
LEAST_AT_DECODE, LEAST_AT_LARGE = 2.5, 1.2


def run(bench: Bench) -> None:
    tiny = bench.machine.tiny
    experts = TINY_EXPERTS if tiny else QWEN3_30B_A3B
    counts = (1, 5) if tiny else (1, 16, 64, TOKENS)
    for tokens in counts:
        what = "packed w4a16, both products"
        bench.case(what, _shape(tokens, experts), lambda t=tokens: _packed(bench, experts, t))
    tokens = counts[-1]
    what = "w4a4 forward, weights quantized before"
    bench.case(what, _shape(tokens, experts), lambda: _forward(bench, experts, tokens))
    for name in TRAINED:
        what = f"{name}, forward and backward"
        bench.case(what, _shape(tokens, experts), lambda n=name: _trained(bench, experts, tokens, n))


def _shape(tokens: int, experts: Experts) -> list[int]:
    return [tokens, experts.num_experts, experts.hidden_size, experts.moe_intermediate_size]


@dataclass(frozen=True)
class Rows:
    """Tokens sent to experts at random: rows of both products, sorted by expert.

    Attributes:
        hidden, inner: ``[S, hidden]`` and ``[S, intermediate]``, the inputs of the two products.
        counts: rows of each expert.
        offsets: int32 ``[E]``, where they end.
        router_logits: ``[tokens, E]``, of which the largest chose.
        tokens: ``[tokens, hidden]``, the rows before they were sent.
    """

    hidden: torch.Tensor
    inner: torch.Tensor
    counts: tuple[int, ...]
    offsets: torch.Tensor
    router_logits: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def draw(cls, experts: Experts, n_tokens: int, device: torch.device, seed: int) -> "Rows":
        generator = torch.Generator(device).manual_seed(seed)
        logits = torch.randn(n_tokens, experts.num_experts, device=device, generator=generator).bfloat16()
        ids = logits.topk(experts.num_experts_per_tok).indices.flatten()
        tokens = torch.randn(n_tokens, experts.hidden_size, device=device, generator=generator).bfloat16()
        size = (len(ids), experts.moe_intermediate_size)
        inner = torch.randn(size, device=device, generator=generator).bfloat16()
        counts = torch.bincount(ids, minlength=experts.num_experts)
        order = ids.sort(stable=True).indices // experts.num_experts_per_tok
        offsets = counts.cumsum(0, dtype=torch.int32)
        return cls(tokens[order], inner, tuple(counts.tolist()), offsets, logits, tokens)


# ---- packed weights -------------------------------------------------------------------------------------------------


def _packed(bench: Bench, experts: Experts, n_tokens: int) -> Measured:
    device = bench.machine.device
    # Few tokens reach few experts: each set of rows reaches others, so that their weights do not stay in the cache.
    count = 1 if n_tokens > 64 or bench.machine.tiny else 8
    sets = [Rows.draw(experts, n_tokens, device, seed) for seed in range(count)]
    weights = _weights(experts, device)
    packed = [hf_mxfp4.quantize(weight, macro_block=128) for weight in weights]
    calls = [lambda rows=rows: _both_packed(rows, packed) for rows in sets]
    error = _check("packed", calls[0](), sets[0], [p.dequantize(torch.float32) for p in packed])
    plain = [hf_mxfp4.quantize(weight) for weight in weights]
    against: dict[str, peers.Builder] = {
        BF16: lambda: _dense(sets, weights),
        "triton_kernels": lambda: _hub(bench, experts, sets, plain),
    }
    work = _work(experts, sets, packed)
    found = bench.contest(calls, against, work, "TFLOP/s", sum(work.flops.values()) / 1e12, baseline=BF16)
    found.details["error"] = error
    if not bench.machine.interpreted:
        least = LEAST_AT_LARGE if n_tokens == TOKENS else LEAST_AT_DECODE
        found.aims = [Aim(f"of {BF16}", least, found.ratio)]
    return found


def _weights(experts: Experts, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the two projections, ``[E, N, K]``."""
    hidden, inner = experts.hidden_size, experts.moe_intermediate_size
    sizes = (experts.num_experts, 2 * inner, hidden), (experts.num_experts, hidden, inner)
    return tuple((torch.randn(size, device=device) * size[2] ** -0.5).bfloat16() for size in sizes)


def _both_packed(rows: Rows, packed: Sequence[MXFP4Tensor]) -> list[torch.Tensor]:
    return [
        mxfp4_kernels.grouped_matmul_packed(
            x, w.codes, w.scale, rows.offsets, length=w.length, macro=w.macro, macro_block=w.scheme.macro_block
        )
        for x, w in zip((rows.hidden, rows.inner), packed, strict=True)
    ]


def _dense(sets: Sequence[Rows], weights: Sequence[torch.Tensor]) -> list[Call]:
    def both(rows: Rows) -> list[torch.Tensor]:
        pairs = zip((rows.hidden, rows.inner), weights, strict=True)
        return [F.grouped_mm(x, w.transpose(1, 2), offs=rows.offsets) for x, w in pairs]

    _check(BF16, both(sets[0]), sets[0], weights)
    return [lambda rows=rows: both(rows) for rows in sets]


def _hub(bench: Bench, experts: Experts, sets: Sequence[Rows], packed: Sequence[MXFP4Tensor]) -> list[Call]:
    hub = peers.triton_kernels(bench)
    stored = [peers.hub_weight(hub, w.codes, w.scale) for w in packed]
    top_k = experts.num_experts_per_tok
    routes = [hub.routing.routing(rows.router_logits, top_k) for rows in sets]

    def both(rows: Rows, route: tuple) -> list[torch.Tensor]:
        data, gather, _ = route
        (first, first_options), (second, second_options) = stored
        product = hub.matmul_ogs.matmul_ogs
        return [
            product(rows.tokens, first, None, data, gather_indx=gather, precision_config=first_options),
            product(rows.inner, second, None, data, precision_config=second_options),
        ]

    # It sorts rows of one expert in an order of its own.
    order = routes[0][1].src_indx.long() // top_k
    sorted_by_hub = replace(sets[0], hidden=sets[0].tokens[order])
    _check("triton_kernels", both(sets[0], routes[0]), sorted_by_hub, [w.dequantize(torch.float32) for w in packed])
    return [lambda rows=rows, route=route: both(rows, route) for rows, route in zip(sets, routes, strict=True)]


def _check(name: str, outs: Sequence[torch.Tensor], rows: Rows, weights: Sequence[torch.Tensor]) -> float:
    """The largest relative error over the products of some experts, those with the first and the last rows among
    them."""
    reached = [expert for expert, count in enumerate(rows.counts) if count]
    worst = 0.0
    for out, x, weight in zip(outs, (rows.hidden, rows.inner), weights, strict=True):
        for expert in {reached[0], reached[len(reached) // 2], reached[-1]}:
            end = sum(rows.counts[: expert + 1])
            own = slice(end - rows.counts[expert], end)
            expected = x[own].double() @ weight[expert].double().T
            worst = max(worst, expect_close(f"{name}, expert {expert}", out[own], expected, 2e-2))
    return worst


def _work(experts: Experts, sets: Sequence[Rows], packed: Sequence[MXFP4Tensor]) -> Work:
    """Of one call on average: weights of experts that have rows are read, others are not."""
    n_rows = sets[0].hidden.shape[0]
    reached = sum(sum(count > 0 for count in rows.counts) for rows in sets) / len(sets)
    weights = sum(part.numel() for w in packed for part in (w.codes, w.scale, w.macro) if part is not None)
    widths = 2 * experts.hidden_size + 3 * experts.moe_intermediate_size
    n_bytes = int(weights * reached / experts.num_experts) + 2 * n_rows * widths
    return Work(n_bytes, {"bf16": 2 * n_rows * 3 * experts.hidden_size * experts.moe_intermediate_size})


# ---- FP8 operands --------------------------------------------------------------------------------------------------


def _forward(bench: Bench, experts: Experts, n_tokens: int) -> Measured:
    device = bench.machine.device
    rows = Rows.draw(experts, n_tokens, device, 0)
    weights = _weights(experts, device)
    folded = [mxfp4_kernels.fold_e4m3(weight.flatten(0, 1)) for weight in weights]

    def both() -> list[torch.Tensor]:
        out = []
        for x, weight, shape in zip((rows.hidden, rows.inner), folded, weights, strict=True):
            operand = mxfp4_kernels.fold_e4m3(x)
            elements = weight.elements.view(*shape.shape[:2], -1)
            scales = operand.scale, weight.scale
            out.append(
                mxfp4_kernels.grouped_matmul_e4m3(operand.elements, scales[0], elements, scales[1], rows.offsets)
            )
        return out

    hidden, inner = (hf_mxfp4.fake_quantize(x.float()) for x in (rows.hidden, rows.inner))
    quantized = [hf_mxfp4.fake_quantize(weight) for weight in weights]
    error = _check("folded", both(), replace(rows, hidden=hidden, inner=inner), quantized)
    widths = 2 * experts.hidden_size + 3 * experts.moe_intermediate_size
    n_bytes = sum(f.elements.numel() + 4 * f.scale.numel() for f in folded) + 2 * len(rows.hidden) * widths
    flops = 2 * len(rows.hidden) * 3 * experts.hidden_size * experts.moe_intermediate_size
    work = Work(n_bytes, {"fp8": flops})
    found = bench.contest([both], {BF16: lambda: _dense([rows], weights)}, work, "TFLOP/s", flops / 1e12, baseline=BF16)
    found.details["error"] = error
    if not bench.machine.interpreted:
        found.aims = [Aim(f"of {BF16}", LEAST_AT_LARGE, found.ratio)]
    return found


# ---- trained experts ------------------------------------------------------------------------------------------------


def _trained(bench: Bench, experts: Experts, n_tokens: int, name: str) -> Measured:
    config = TRAINED[name]
    if bench.machine.interpreted:
        config = replace(config, backend="triton")
    device = bench.machine.device
    plain = _plain(experts, device)
    x, grad = (torch.randn(n_tokens, experts.hidden_size, device=device).bfloat16() for _ in range(2))
    scores, ids = (
        torch.randn(n_tokens, experts.num_experts, device=device).softmax(-1).topk(experts.num_experts_per_tok)
    )

    def passes(layer: nn.Module, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
        tokens = x.to(dtype).requires_grad_()
        out = layer(tokens, ids, scores.to(dtype))
        return out, *torch.autograd.grad(out, (tokens, layer.gate_up_proj, layer.down_proj), grad.to(dtype))

    def call(layer: nn.Module) -> Callable[[], None]:
        def step() -> None:
            with torch.no_grad():
                # As after an update: a quantized copy is stale.
                for weight in (layer.gate_up_proj, layer.down_proj):
                    weight[:1, :1, :1].add_(0)
            passes(layer)

        return step

    ours = MXFP4Experts.from_experts(plain, config)
    error = _check_trained(passes, ours, plain, replace(config, backend="eager"))
    rate = "fp8" if name == "w4a4g4" else "bf16"
    macs = ids.numel() * 3 * experts.hidden_size * experts.moe_intermediate_size
    weights = plain.gate_up_proj.numel() + plain.down_proj.numel()
    work = Work(2 * (4 * x.numel() + 2 * weights), {rate: 3 * 2 * macs})
    found = bench.contest([call(ours)], {BF16: lambda: [call(plain)]}, work, "TFLOP/s", 6 * macs / 1e12, baseline=BF16)
    found.details["error"] = error
    if not bench.machine.interpreted and name == "w4a4g4":
        found.aims = [Aim(f"of {BF16}", LEAST_AT_LARGE, found.ratio)]
    return found


def _plain(experts: Experts, device: torch.device) -> Qwen3MoeExperts:
    """Of transformers, in bfloat16, computing by grouped products."""
    config = Qwen3MoeConfig(
        hidden_size=experts.hidden_size,
        moe_intermediate_size=experts.moe_intermediate_size,
        num_experts=experts.num_experts,
        num_experts_per_tok=experts.num_experts_per_tok,
    )
    config._experts_implementation = "grouped_mm"
    plain = Qwen3MoeExperts(config).to(device, torch.bfloat16)
    with torch.no_grad():
        for weight in (plain.gate_up_proj, plain.down_proj):
            weight.normal_(std=weight.shape[-1] ** -0.5)
    return plain


def _check_trained(passes: Callable, ours: nn.Module, plain: nn.Module, definition: MXFP4RLConfig) -> float:
    """The largest relative error of output and gradients, against the eager definition in the same dtype. Between the
    two projections values move across rounding boundaries with the order of sums, and then by a whole step."""
    eager = MXFP4Experts.from_experts(plain, definition)
    names = "output", "gradient of the input", "gradient of gate and up", "gradient of down"
    pairs = zip(names, passes(ours), passes(eager), strict=True)
    return max(expect_close(name, out, expected, 5e-2) for name, out, expected in pairs)
