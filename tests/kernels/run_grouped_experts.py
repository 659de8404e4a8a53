# SPDX-License-Identifier: Apache-2.0
"""Experts on the grouped kernels against experts one after the other, forward and backward; prints a JSON report.

    TRITON_INTERPRET=1 python run_grouped_experts.py

Reported are the largest differences relative to the largest value, whether counts were read back, and launches.
"""

import contextlib
import json
from collections import Counter
from functools import partial

import torch
from factors import factors_config
from torch import nn

import mxfp4_kernels
from hf_mxfp4 import cached_weights
from hf_mxfp4.gemm import GemmSpec, GemmState, LayerRng, group_by_expert, quantized_linear
from hf_mxfp4.gemm.counts import weight_quantizations
from hf_mxfp4.gemm.weight_cache import StepWeights
from hf_mxfp4.layers import MXFP4Experts, MXFP4PackedExperts
from hf_mxfp4.numerics import LinearScheme


E, N, K = 4, 48, 40
IDS = torch.tensor([0] * 5 + [2] * 33 + [3] * 2)
SCHEMES = {
    "default": None,
    "w4a4g8": {"preset": "w4a4g8"},
    "macro": {"preset": "w4a4g4", "macro_block": 128, "outlier_fallback": 0.5},
    "paper_b": {"preset": "paper_b"},
    "full": {"dgrad": {"weight": "full"}, "wgrad": {"x": "full"}},
    "stochastic": {"dgrad": {"grad": "rceil+stochastic"}},
}
LAUNCHES = Counter()


def spy() -> None:
    """Count the launches of grouped products."""

    def counted(name, function, *args, **kwargs):
        LAUNCHES[name] += 1
        return function(*args, **kwargs)

    for name in ("grouped_matmul", "grouped_matmul_packed", "grouped_wgrad", "grouped_sum"):
        setattr(mxfp4_kernels, name, partial(counted, name, getattr(mxfp4_kernels, name)))


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()


def linear(scheme: str, transposed: bool, dtype: torch.dtype, backend: str) -> tuple[list[torch.Tensor], bool]:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, grad = (
        torch.randn(*size, generator=generator).to(dtype) for size in ((40, K), (E, N, K), (E, N), (40, N))
    )
    weight = weight.transpose(1, 2).contiguous() if transposed else weight
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    _, groups = group_by_expert(IDS, E)
    options = factors_config(**{"macro_block": None, "outlier_fallback": None, **(SCHEMES[scheme] or {})})
    gemms = options.gemms() if SCHEMES[scheme] else LinearScheme(options.gemms().fprop)
    spec = GemmSpec(gemms, backend, transposed=transposed)
    state = GemmState(spec, [LayerRng(0, f"experts.{e}") for e in range(E)])
    out = quantized_linear(*leaves, state, groups)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)], "counts" in vars(groups)


class Plain(nn.Module):
    """Laid out as transformers' experts are."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.num_experts, self.hidden_dim, self.intermediate_dim = E, hidden, inner
        self.has_gate, self.has_bias, self.is_transposed, self.is_concatenated = True, True, False, True
        generator = torch.Generator().manual_seed(1)
        for name, size in {
            "gate_up_proj": (E, 2 * inner, hidden),
            "gate_up_proj_bias": (E, 2 * inner),
            "down_proj": (E, hidden, inner),
            "down_proj_bias": (E, hidden),
        }.items():
            setattr(self, name, nn.Parameter(torch.randn(*size, generator=generator) * 0.3))
        self.act_fn = nn.SiLU()

    def _apply_gate(self, states):
        gate, up = states.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def layer(kind: type, backend: str) -> list[torch.Tensor]:
    config = factors_config(
        preset="w4a16", macro_search="static", backend=backend, mode="packed" if kind is MXFP4PackedExperts else "qat"
    )
    experts = kind.from_experts(Plain(64, 48).to(torch.bfloat16), config, "experts")
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(6, 64, generator=generator).bfloat16().requires_grad_()
    chosen = torch.tensor([[0, 1], [2, 1], [0, 2], [1, 0], [0, 1], [1, 0]])
    out = experts(x, chosen, torch.rand(6, 2, generator=generator).bfloat16())
    out.float().square().sum().backward()
    trained = [p.grad for p in experts.parameters() if p.grad is not None]
    return [out.detach(), x.grad, *trained]


def rollouts() -> dict[str, object]:
    """Trainable experts without gradients within [`cached_weights`] and [`StepWeights`]: launches, quantizations, and
    differences from products of dense values. Twice each."""
    config = factors_config(preset="w4a16", macro_search="static", backend="triton")
    experts, found = MXFP4Experts.from_experts(Plain(64, 48), config, "experts"), {}
    generator = torch.Generator().manual_seed(2)
    x, shares = torch.randn(6, 64, generator=generator), torch.rand(6, 2, generator=generator)
    inputs = x, torch.tensor([[0, 1], [2, 1], [0, 2], [1, 0], [0, 1], [1, 0]]), shares
    step = StepWeights("auto")
    with torch.no_grad():
        expected = experts(*inputs)
        for name, contexts in {
            "auto": (cached_weights("auto"),),
            "dense": (cached_weights("dense"),),
            "of a step": (step.active(), cached_weights("auto")),
            "after it": (step.active(),),
        }.items():
            LAUNCHES.clear()
            before = weight_quantizations()["fprop"]
            with contextlib.ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                differences = [difference(experts(*inputs), expected) for _ in range(2)]
            found[name] = [dict(LAUNCHES), weight_quantizations()["fprop"] - before, max(differences)]
    return found


if __name__ == "__main__":
    spy()
    report = {}
    for number, scheme in enumerate(SCHEMES):
        transposed, dtype = ((False, torch.float32), (True, torch.bfloat16))[number % 2]
        LAUNCHES.clear()
        found, read = linear(scheme, transposed, dtype, "triton")
        launches = dict(LAUNCHES)
        wanted, _ = linear(scheme, transposed, dtype, "eager")
        report[scheme] = {
            "differences": [difference(*pair) for pair in zip(found, wanted, strict=True)],
            "read": read,
            "launches": launches,
            "zero": bool(found[2][1].eq(0).all() and found[3][1].eq(0).all()),
        }
    for kind in (MXFP4Experts, MXFP4PackedExperts):
        LAUNCHES.clear()
        found, launches = layer(kind, "triton"), dict(LAUNCHES)
        wanted = layer(kind, "eager")
        report[kind.__name__] = {
            "differences": [difference(*pair) for pair in zip(found, wanted, strict=True)],
            "launches": launches,
        }
    report["rollouts"] = rollouts()
    print(json.dumps(report))
