# SPDX-License-Identifier: Apache-2.0
"""Weights on their way to vLLM: what the policy computes with, not what it stores.

TRL pushes raw parameters. For a trained quantized policy these are the master weights, and hooks on the policy's norms
do not reach vLLM's; so quantized layers send ``Q(W)`` and norms send their noisy weights. A packed policy with adapters
is sent as [`policy_parameters`] gives it: ``Q(W) + delta``. Activations cannot be quantized on vLLM's side, whose
rollouts are W4A16; TRL's importance sampling corrects the difference.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..._logging import get_logger
from ...layers import QUANTIZED, trainable_matrices
from ..noise.linears import LinearNoise
from ..noise.norms import NoiseReport, NormNoise
from ..noise.targets import plain_name


#: ``(name, weight)`` pairs.
Parameters = Iterable[tuple[str, torch.Tensor]]


def send_rollout_policy(generation: Any, model: nn.Module, policy: Callable[[Callable[[], Parameters]], Parameters]):
    """Have TRL's `VLLMGeneration` push other weights than the parameters of the model that it was given.

    TRL makes this object itself, and walks over the parameters wherever it pushes: that walk is replaced, for good.

    Args:
        model: the policy, for a warning about what vLLM does not quantize.
        policy: called with TRL's own walk, gives the weights to push.
    """
    own = generation._iter_named_params
    generation._iter_named_params = lambda: policy(own)
    layers = [module for module in model.modules() if isinstance(module, QUANTIZED)]
    if any(layer.config.activation_scheme is not None for layer in layers):
        get_logger().warning(
            "vLLM samples from the quantized weights with full-precision activations (W4A16); "
            "vllm_importance_sampling_correction accounts for the difference"
        )


def rollout_parameters(
    named: Parameters,
    model: nn.Module,
    noise: NormNoise | None = None,
    step: int = 0,
    sigma: float = 0.0,
    linear_noise: LinearNoise | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs of ``named`` with quantized weights in place of master weights, and noise on the weights of norms and
    linear layers: that of a rollout in this process, at the same step.

    What the noise changed, after rounding to the dtype that is pushed, is left in the ``last_report`` of both.

    Raises `ValueError` for a forward scheme that weights alone cannot express, such as one with rotated operands.
    Raises `RuntimeError` at the end when the model has quantized layers, or noise is on, and no name matched them.
    """
    if linear_noise is not None:
        linear_noise.begin()
    noisy_weights = linear_noise.parameters if linear_noise is not None and sigma > 0 else {}
    quantized = {plain_name(matrix.full_name): matrix for matrix in trainable_matrices(model)}
    norms = (
        {plain_name(name): index for index, name in enumerate(noise.norms)} if noise is not None and sigma > 0 else {}
    )
    for name, matrix in quantized.items():
        reason = matrix.layer.config.packing_unsupported_reason
        if reason:
            owner = name.removesuffix(".weight")
            raise ValueError(f"vLLM cannot sample from {owner}: {reason}; set use_vllm=False")
    n_quantized = n_noisy = n_elements = 0
    energy = 0.0
    for name, tensor in named:
        owner = name.removesuffix(".weight")
        if name in quantized or name in noisy_weights:
            values = quantized[name].layer_values(tensor) if name in quantized else tensor
            n_quantized += name in quantized
            yield name, linear_noise.noisy_values(name, values, step, sigma) if name in noisy_weights else values
        elif name.endswith(".weight") and owner in norms:
            n_noisy += 1
            clean = tensor.detach()
            noisy = (clean.float() + noise.noise(norms[owner], clean, step, sigma)).to(clean.dtype)
            energy += float((noisy.double() - clean.double()).square().sum())
            n_elements += tensor.numel()
            yield name, noisy
        else:
            yield name, tensor
    if quantized and n_quantized == 0:
        raise RuntimeError("the weights pushed to vLLM include none of the quantized layers")
    if norms and n_noisy == 0:
        raise RuntimeError("adaptive quantization noise reached none of the weights pushed to vLLM")
    if norms:
        noise.last_report = NoiseReport(sigma, math.sqrt(energy / n_elements), n_noisy, n_elements)
    if noisy_weights:
        linear_noise.finish(sigma * linear_noise.scale)
