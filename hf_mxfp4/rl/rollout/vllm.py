# SPDX-License-Identifier: Apache-2.0
"""Weights on their way to vLLM: what the policy computes with, not what it stores.

TRL pushes raw parameters. For a trained quantized policy these are the master weights, and hooks on the policy's norms
do not reach vLLM's; so quantized layers send ``Q(W)`` and norms send their noisy weights. Adapters are not merged into
master weights, as TRL would do: ``Q(W) + delta`` is sent, which is what the policy computes with, of trainable layers
([`adapter_sums`]) and of packed ones ([`policy_parameters`]). What vLLM does to activations, [`VLLMEngine`] knows.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...adapters import adapter_sums, is_packed_with_adapters, is_trainable_with_adapters, policy_parameters
from ...backends.devices import widest_float
from ...layers import trainable_matrices
from ..config import MXFP4GRPOConfig
from ..noise.linears import LinearNoise
from ..noise.norms import NoiseReport, NormNoise
from ..noise.rollouts import RolloutNoise
from ..noise.targets import plain_name
from .vllm_engine import VLLMEngine
from .vllm_server import WatchedServer


#: ``(name, weight)`` pairs.
Parameters = Iterable[tuple[str, torch.Tensor]]


class VLLMPolicy:
    """The policy as vLLM is to sample from it, whenever TRL's `VLLMGeneration` pushes weights.

    TRL makes that object itself, and walks over the parameters wherever it pushes: that walk is replaced, for good.

    Args:
        generation: TRL's object.
        model: the policy.
        args: of the trainer.
        noise: what goes on the weights; `None` without.
        rollout: gives the step and the standard deviation of its noise, now.

    Attributes:
        engine: what vLLM computes with.
        has_noise: whether some of vLLM's weights are noisy.
        server: what watches vLLM where it is a server; `None` elsewhere.

    Raises `ValueError` for adapters that cannot be pushed.
    """

    def __init__(
        self,
        generation: Any,
        model: nn.Module,
        args: MXFP4GRPOConfig,
        noise: RolloutNoise | None,
        rollout: Callable[[], tuple[int, float]],
    ):
        self._model, self._args, self._noise, self._rollout = model, args, noise, rollout
        self.has_noise = False
        self.engine = VLLMEngine.of(generation)
        self.engine.describe(model, args)
        self.server = WatchedServer.of(generation)
        if is_trainable_with_adapters(model):
            adapter_sums(model)
        walk = generation._iter_named_params
        generation._iter_named_params = lambda: self._parameters(walk)

    def is_what_trains(self) -> bool:
        """Whether what vLLM samples from now, and the policy that trains, differ by rounding alone."""
        args = self._args
        is_plain = args.top_p == 1 and not args.top_k and not args.min_p and args.repetition_penalty == 1
        is_plain = is_plain and not args.generation_kwargs and not args.vllm_structured_outputs_regex
        return is_plain and self._rollout()[1] == 0 and self.engine.quantizes_as(self._model)

    def _parameters(self, walk: Callable[[], Parameters]) -> Parameters:
        step, sigma = self._rollout()
        model, deltas = self._model, None
        if is_packed_with_adapters(model):
            named = policy_parameters(model)
        elif is_trainable_with_adapters(model):
            named, deltas = _without_merging(walk, model), adapter_sums(model)
        else:
            named = walk()
        # From the first tensor on, and until all of them are clean again.
        self.has_noise = self.has_noise or sigma > 0
        norms, linears = (None, None) if self._noise is None else (self._noise.norms, self._noise.linears)
        yield from rollout_parameters(named, model, norms, step, sigma, linears, deltas, self.engine.dtype)
        self.has_noise = sigma > 0


def _without_merging(walk: Callable[[], Parameters], model: nn.Module) -> Parameters:
    """TRL's walk over the parameters of a PEFT model, which gathers what is sharded, without the merge and unmerge
    around it, which would write the master weights."""
    merges = []
    model.merge_adapter, model.unmerge_adapter = lambda: merges.append(True), lambda: None
    try:
        for named in walk():
            if not merges:
                raise RuntimeError("TRL walks over a PEFT model in another way than this version of hf-mxfp4 knows")
            yield named
    finally:
        del model.merge_adapter, model.unmerge_adapter


def rollout_parameters(
    named: Parameters,
    model: nn.Module,
    noise: NormNoise | None = None,
    step: int = 0,
    sigma: float = 0.0,
    linear_noise: LinearNoise | None = None,
    deltas: Mapping[str, Callable[[], torch.Tensor]] | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs of ``named`` with quantized weights in place of master weights, and noise on the weights of norms and
    linear layers: that of a rollout in this process, at the same step.

    What the noise changed, after rounding to the dtype that is pushed and to that of vLLM, is left in the
    ``last_report`` of both.

    Args:
        deltas: what adapters add to parameters, see [`adapter_sums`]; added in float32, after quantization.
        dtype: in which vLLM keeps weights; by default that of each.

    Raises `ValueError` for a forward scheme that weights alone cannot express, such as one with rotated operands.
    Raises `RuntimeError` at the end when the model has quantized layers, or noise is on, and no name matched them, or
    when an adapter's did not.
    """
    if linear_noise is not None:
        linear_noise.begin()
    noisy_weights = linear_noise.parameters if linear_noise is not None and sigma > 0 else {}
    quantized = {plain_name(matrix.full_name): matrix for matrix in trainable_matrices(model)}
    deltas = dict(deltas or {})
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
        clean = quantized[name].layer_values(tensor) if name in quantized else tensor.detach()
        n_quantized += name in quantized
        delta = deltas.pop(name, None)
        adapted = clean if delta is None else (clean.float() + delta()).to(clean.dtype)
        if name in noisy_weights:
            without = clean if name in quantized and delta is not None else None
            yield name, linear_noise.noisy_values(name, adapted, step, sigma, without, dtype)
        elif name.endswith(".weight") and owner in norms:
            n_noisy += 1
            noisy = (adapted.float() + noise.noise(norms[owner], adapted, step, sigma)).to(adapted.dtype)
            energy += _energy(noisy, adapted, dtype or adapted.dtype)
            n_elements += tensor.numel()
            yield name, noisy
        else:
            yield name, tensor if adapted is clean and name not in quantized else adapted
    if quantized and n_quantized == 0:
        raise RuntimeError("the weights pushed to vLLM include none of the quantized layers")
    if deltas:
        raise RuntimeError(f"adapters reached none of the weights pushed to vLLM by the name of {', '.join(deltas)}")
    if norms and n_noisy == 0:
        raise RuntimeError("adaptive quantization noise reached none of the weights pushed to vLLM")
    if norms:
        noise.last_report = NoiseReport(sigma, math.sqrt(energy / n_elements), n_noisy, n_elements)
    if noisy_weights:
        linear_noise.finish(sigma * linear_noise.scale)


def _energy(noisy: torch.Tensor, clean: torch.Tensor, dtype: torch.dtype) -> float:
    """Sum of squared differences of two tensors, each rounded to a dtype."""
    exact = widest_float(clean.device)
    return float((noisy.to(dtype).to(exact) - clean.to(dtype).to(exact)).square().sum())
