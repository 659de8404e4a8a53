# SPDX-License-Identifier: Apache-2.0
"""What is modelled: cases of `benchmarks.gpu` by their names there, what they launch, and what they are measured by."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_mxfp4 import MXFP4RLConfig

from ...macro_factors import FACTORS
from ..sections import decode_w4a16, grouped_experts, quantize_dual_e4m3, quantize_pack, train_linear_w4a4
from ..sections.quantize_pack import TOKENS
from ..shapes import QWEN3_30B_A3B, QWEN_32B
from .gpus import GPU, START
from .stub import Step


#: Products that aims are for: those of Llama-3.1-8B, and the largest of Qwen2.5-32B.
LINEARS = (4096, 4096), (4096, 14336), QWEN_32B.linears["gate_proj"]
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One record per GPU.

    Attributes:
        section, what, shape: as in the records of `benchmarks.gpu`.
        build: makes what is needed on a device, and returns the call that is modelled.
        n_bytes, flops: what cannot be done without; see [`benchmarks.gpu.bench.Work`]. `None` for the products that are
            launched, whatever tensor cores they take.
        baseline: its name, and its seconds on a GPU; or none, and the aim is a part of the ceiling.
        aims: least value by GPU: of the ratio to the baseline, or of the ceiling.
        reached: the part of experts that have rows.
    """

    section: str
    what: str
    shape: tuple[int, ...]
    build: Callable[[torch.device], Callable[[], Any]]
    n_bytes: float = 0.0
    flops: dict[str, float] | None = field(default_factory=dict)
    baseline: tuple[str, Callable[[GPU], float]] | None = None
    aims: dict[str, float] = field(default_factory=dict)
    reached: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.section} / {self.what}"


def cases() -> list[Case]:
    """All of them."""
    return [*_quantize(), *_dual(), *_decode(), *_train(), *_experts()]


def recorded(case: Case, steps: list[Step], device: torch.device) -> list[Step]:
    """What a case launches, the second time: what is kept from the first one is there."""
    call = case.build(device)
    call()
    steps.clear()
    call()
    return list(steps)


def _quantize() -> Iterator[Case]:
    import mxfp4_kernels

    shape = (TOKENS, QWEN_32B.hidden_size)
    for what, options in quantize_pack.SCHEMES.items():
        least = {"rceil": {"H100": 0.85, "H200": 0.7}}.get(what, {})
        if what in ("rceil, macro 128 static", "rceil, macro 128 static, fallback"):
            least = {"H100": 0.6}
        yield Case(
            quantize_pack.NAME,
            what,
            shape,
            lambda device, o=options: functools.partial(mxfp4_kernels.quantize, _empty(device, *shape), **o),
            quantize_pack.n_bytes(shape, options),
            aims=least,
        )
    both = quantize_pack.n_bytes(shape, {}) + quantize_pack.n_bytes(shape[::-1], {}) - 2 * math.prod(shape)
    yield Case(
        quantize_pack.NAME,
        quantize_pack.BOTH,
        shape,
        lambda device: functools.partial(mxfp4_kernels.quantize_both, _empty(device, *shape)),
        both,
    )


def _dual() -> Iterator[Case]:
    import mxfp4_kernels

    shape = (TOKENS, QWEN_32B.hidden_size)
    for what, options in quantize_dual_e4m3.SCHEMES.items():
        yield Case(
            quantize_dual_e4m3.NAME,
            what,
            shape,
            lambda device, o=options: functools.partial(mxfp4_kernels.fold_e4m3_both, _empty(device, *shape), **o),
            quantize_dual_e4m3.n_bytes(shape),
            aims={} if "searched" in what else {"H100": 0.75},
        )


def _decode() -> Iterator[Case]:
    for scheme, rows in (("plain", 1), ("plain", 8), ("plain", 16), ("macro 128", 1), ("macro 128", 16)):
        for n, k in LINEARS:
            aims = {"H100": 2.9 if rows <= 8 else 2.5} if (n, k) == (4096, 14336) and scheme == "plain" else {}
            n_bytes = n * (k // 2 + k // 32) + 2 * rows * (n + k) + (n * k // 128 if scheme != "plain" else 0)
            yield Case(
                decode_w4a16.NAME,
                f"{scheme}, M = {rows}",
                (n, k),
                lambda device, n=n, k=k, m=rows, macro=scheme != "plain": _linear(device, m, n, k, macro),
                n_bytes,
                {"bf16": 2.0 * rows * n * k},
                ("cuBLAS BF16", lambda gpu, n=n, k=k, m=rows: _bf16(gpu, m, n, k)),
                aims,
            )


def _linear(device: torch.device, rows: int, n: int, k: int, macro: bool) -> Callable[[], Any]:
    import mxfp4_kernels

    parts = [_empty(device, n, k // size, dtype=torch.uint8) for size in (2, 32, 128)]
    options = {"macro": parts[2], "macro_block": 128} if macro else {}
    x = _empty(device, rows, k)
    return lambda: mxfp4_kernels.linear_w4a16(x, *parts[:2], length=k, **options)


#: Schemes of the section, and those that the default macro search makes of the others.
TRAINED = {
    **{name: scheme[0] for name, scheme in train_linear_w4a4.SCHEMES.items()},
    "w4a4g8, macro 128": MXFP4RLConfig(preset="w4a4g8", outlier_fallback=None, **FACTORS),
}


def _train() -> Iterator[Case]:
    for name, config in TRAINED.items():
        for n, k in LINEARS[:2]:
            least = 1.15 if (n, k) == (4096, 4096) else 1.25
            yield Case(
                train_linear_w4a4.NAME,
                name,
                (TOKENS, n, k),
                lambda device, n=n, k=k, c=config: _step(device, n, k, c),
                2.0 * (2 * TOKENS * (n + k) + 2 * n * k),
                None,
                ("BF16 nn.Linear", lambda gpu, n=n, k=k: 3 * _bf16(gpu, TOKENS, n, k)),
                {"H100": least} if name in ("w4a4g4", "w4a4g8") else {},
            )


def _step(device: torch.device, n: int, k: int, config: MXFP4RLConfig) -> Callable[[], Any]:
    from hf_mxfp4 import MXFP4Linear

    layer = MXFP4Linear(k, n, bias=False, device=device, dtype=BF16, config=config)
    x, grad = _empty(device, TOKENS, k).requires_grad_(), _empty(device, TOKENS, n)
    return lambda: torch.autograd.grad(layer(x), (x, layer.weight), grad)


def _experts() -> Iterator[Case]:
    of = QWEN3_30B_A3B
    for tokens in (1, 16, 64):
        reached = 1 - (1 - of.num_experts_per_tok / of.num_experts) ** tokens
        sizes = [(2 * of.moe_intermediate_size, of.hidden_size), (of.hidden_size, of.moe_intermediate_size)]
        rows = tokens * of.num_experts_per_tok
        weights = sum(n * k for n, k in sizes) * of.num_experts * reached
        n_bytes = weights * (0.5 + 1 / 32 + 1 / 128) + sum(2 * rows * (n + k) for n, k in sizes)
        dense = 2 * weights + sum(2 * rows * (n + k) for n, k in sizes)
        yield Case(
            grouped_experts.NAME,
            "packed w4a16, both products",
            (tokens, of.num_experts, of.hidden_size, of.moe_intermediate_size),
            lambda device, sizes=sizes, rows=rows: _packed_experts(device, of.num_experts, sizes, rows),
            n_bytes,
            {"bf16": 2.0 * rows * sum(n * k for n, k in sizes)},
            (grouped_experts.BF16, lambda gpu, dense=dense: 2 * START + dense / gpu.copy),
            {"H100": 2.5},
            reached,
        )


def _packed_experts(device: torch.device, n_experts: int, sizes: list[tuple[int, int]], rows: int) -> Callable[[], Any]:
    import mxfp4_kernels

    offsets = _empty(device, n_experts, dtype=torch.int32)
    parts = [[_empty(device, n_experts, n, k // size, dtype=torch.uint8) for size in (2, 32, 128)] for n, k in sizes]
    inputs = [_empty(device, rows, k) for _, k in sizes]

    def call() -> None:
        for x, (codes, scale, macro) in zip(inputs, parts, strict=True):
            options = {"length": x.shape[1], "macro": macro, "macro_block": 128}
            mxfp4_kernels.grouped_matmul_packed(x, codes, scale, offsets, **options)

    return call


def _bf16(gpu: GPU, m: int, n: int, k: int) -> float:
    """Seconds of the vendor's product."""
    return START + max(2.0 * (m * k + n * k + m * n) / gpu.copy, 2.0 * m * n * k / gpu.library("bf16"))


def _empty(device: torch.device, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=device)
