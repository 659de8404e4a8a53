# SPDX-License-Identifier: Apache-2.0
"""Experts as the policy computes them, as one operator: inputs of both projections quantized where the scheme does
that, weights packed or dequantized before.

vLLM computes an expert in one kernel, in which the input of ``down_proj`` cannot be quantized; hence this one. On GPUs
each projection of all experts is one grouped kernel and nothing is read back, so that CUDA graphs can hold it
([`hf_mxfp4.gemm.reads_packed_on_gpus`] says of which schemes); elsewhere experts come one after the other.
"""

import torch
import torch.nn.functional as F

from ...gemm import (
    PACKED_FIELDS,
    Groups,
    PackedSpec,
    group_by_expert,
    matmul,
    packed_forward,
    packed_shapes,
    quantize_input,
    read_scheme,
)
from ...numerics import QuantScheme


def _swiglu_oai(states: torch.Tensor) -> torch.Tensor:
    """gpt-oss: gate and up columns alternate, and both are clamped."""
    gate, up = states[..., ::2].clamp(max=7.0), states[..., 1::2].clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def _gated(function):
    def apply(states: torch.Tensor) -> torch.Tensor:
        gate, up = states.chunk(2, dim=-1)
        return function(gate) * up

    return apply


#: What lies between the projections, ``[S, 2 I]`` to ``[S, I]``, by vLLM's names, with the arithmetic of transformers.
ACTIVATIONS = {
    "silu": _gated(F.silu),
    "gelu": _gated(F.gelu),
    "gelu_tanh": _gated(lambda gate: F.gelu(gate, approximate="tanh")),
    "swigluoai": _swiglu_oai,
}

#: Those of [`ACTIVATIONS`] for which rows of gate and up alternate in the weight.
INTERLEAVED = ("swigluoai",)


@torch.library.custom_op("mxfp4_rl::experts", mutates_args=())
def experts_operator(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    gate_up: list[torch.Tensor],
    down: list[torch.Tensor],
    biases: list[torch.Tensor],
    weight_scheme: str,
    input_scheme: str,
    activation: str,
    backend: str,
) -> torch.Tensor:
    """Return the weighted sum ``[tokens, hidden]`` of the experts of each token, in the dtype of ``x``.

    Args:
        x: ``[tokens, hidden]``.
        topk_weights, topk_ids: ``[tokens, k]``.
        expert_map: int ``[experts of the model]``, the place of each among the weights and -1 for those of other
            processes, which add nothing to the sum; `None` when all are here.
        gate_up, down: the weights of all experts here, ``[E, N, ...]``: the packed tensors that the scheme has, in the
            order of [`PACKED_FIELDS`], or one tensor of dequantized values.
        biases: ``[E, N]`` of each projection, or none.
        weight_scheme: as text; ``""`` for dequantized weights.
        input_scheme: as text; ``""`` where inputs are not quantized.
        activation: one of [`ACTIVATIONS`].
        backend: see [`hf_mxfp4.fake_quantize`].
    """
    n_tokens, k = topk_ids.shape
    order, groups, is_here = _sorted(topk_ids.reshape(-1), expert_map, len(gate_up[0]))

    def project(states: torch.Tensor, weight: list[torch.Tensor], own: list[torch.Tensor]) -> torch.Tensor:
        bias = own[0].to(x.dtype) if own else None
        if weight_scheme:
            out = _packed_product(states, weight, bias, groups, weight_scheme, input_scheme, backend)
        else:
            states = quantize_input(states, x.dtype, _read(input_scheme), backend)
            out = _dense_product(states, weight[0], bias, groups, is_here is None, backend)
        # No expert has written the rows of other processes.
        return out if is_here is None else torch.where(is_here, out, 0)

    states = project(x[order // k], gate_up, biases[:1])
    states = project(ACTIVATIONS[activation](states), down, biases[1:])
    states = states * topk_weights.reshape(-1)[order].unsqueeze(-1)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    return states[places].view(n_tokens, k, states.shape[-1]).sum(dim=1).to(x.dtype)


@experts_operator.register_fake
def _(
    x,
    topk_weights,
    topk_ids,
    expert_map,
    gate_up,
    down,
    biases,
    weight_scheme,
    input_scheme,
    activation,
    backend,
):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _sorted(
    ids: torch.Tensor, expert_map: torch.Tensor | None, n_experts: int
) -> tuple[torch.Tensor, Groups, torch.Tensor | None]:
    """Return the order that sorts rows by expert, their groups, and which of the sorted rows, ``[S, 1]``, have an
    expert here: those of others come last."""
    if expert_map is None:
        return *group_by_expert(ids, n_experts), None
    ids = expert_map[ids]
    ids, order = torch.sort(torch.where(ids < 0, n_experts, ids), stable=True)
    ends = torch.searchsorted(ids, torch.arange(n_experts, device=ids.device, dtype=ids.dtype), right=True)
    return order, Groups.of_ends(ends.to(torch.int32), len(ids)), (ids < n_experts).unsqueeze(-1)


def _packed_product(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    bias: torch.Tensor | None,
    groups: Groups,
    weight_scheme: str,
    input_scheme: str,
    backend: str,
) -> torch.Tensor:
    scheme, inputs = read_scheme(weight_scheme), _read(input_scheme)
    found = dict(zip(packed_shapes(1, 32, scheme), weight, strict=True))
    spec = PackedSpec(scheme, inputs, x.shape[-1], backend)
    return packed_forward(x, tuple(found.get(name) for name in PACKED_FIELDS), bias, spec, groups, x.dtype)


def _dense_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: Groups,
    has_all: bool,
    backend: str,
) -> torch.Tensor:
    """``has_all``: whether every row has an expert here."""
    if bias is None or has_all:
        return matmul(x, weight, bias, groups)
    # On GPUs a bias is repeated for as many rows as there are: rows without an expert get that of the last one.
    ends = groups.offsets(x.device)
    rows = torch.arange(groups.n_rows, device=x.device, dtype=ends.dtype)
    expert = torch.searchsorted(ends, rows, right=True).clamp(max=groups.n_experts - 1)
    return matmul(x, weight, groups=groups) + bias[expert]


def _read(scheme: str) -> QuantScheme | None:
    return read_scheme(scheme) if scheme else None
