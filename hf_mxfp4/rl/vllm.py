# SPDX-License-Identifier: Apache-2.0
"""Weights on their way to vLLM: what the policy computes with, not what it stores.

TRL pushes raw parameters, which for a trained quantized policy are the master weights. Here quantized layers send
``Q(W)``, and norms their noisy weights. A vLLM that keeps weights in 4 bits is sent codes and scales, and the factors
of adapters beside them ([`adapter_factors`]); others ``Q(W) + delta``, which is what the policy computes with, of
trainable layers ([`adapter_sums`]) and of packed ones ([`policy_parameters`]).
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from ..integrations.peft import (
    adapted_parameters,
    adapter_factors,
    adapter_sums,
    policy_parameters,
)
from ..layers import PACKED, TRAINABLE, WeightMatrix, trainable_matrices
from ..ops import widest_float
from .noise import NoiseReport, NormNoise, plain_name
from .vllm_engine import VLLMEngine, check_forward, check_served, explain_server_errors


#: ``(name, weight)`` pairs.
Parameters = Iterable[tuple[str, torch.Tensor]]


class VLLMPolicy:
    """The policy as vLLM is to sample from it, whenever TRL's `VLLMGeneration` pushes weights.

    TRL's walk over the parameters is replaced, for good. It leaves out what a colocated vLLM that does not sleep has
    already: frozen weights, since they were pushed. ``rollout`` gives the step and the standard deviation of its noise.

    Attributes:
        engine: what vLLM computes with.
        has_noise: whether some of vLLM's weights are noisy.
        n_syncs: how many times the weights were pushed.

    Raises `ValueError` for adapters that cannot be pushed, and where what vLLM keeps cannot hold the policy.
    """

    def __init__(
        self,
        generation: Any,
        model: nn.Module,
        args: Any,
        noise: NormNoise | None,
        rollout: Callable[[], tuple[int, float]],
        record: Callable[[str, float], None],
    ):
        self._generation = generation
        self._model = model
        self._noise = noise
        self._rollout = rollout
        self._record = record
        self.has_noise = False
        self.n_syncs = 0
        self.engine = VLLMEngine.of(generation)
        self.engine.describe(model, args)
        self.engine.check(model)
        check_forward(model)
        self._is_server = getattr(generation, "mode", None) == "server"
        if self._is_server:
            check_served(model)
            client = getattr(generation, "vllm_client", None)  # in the main process alone
            if client is not None:
                explain_server_errors(client)
        is_adapted = isinstance(model, PeftModel)
        self._is_adapted_packed = is_adapted and _has_layer(model, PACKED)
        self._is_adapted_trainable = is_adapted and not self._is_adapted_packed and _has_layer(model, TRAINABLE)
        if self._is_adapted_trainable:
            adapter_sums(model)  # raises for adapters that cannot be pushed
        # At the level at which TRL lets vLLM sleep, it throws weights away after each generation.
        self._pushed: PushedWeights | None = None
        if not self._is_server and not getattr(generation, "enable_sleep_mode", False):
            self._pushed = PushedWeights(model)
        self._walk = generation._iter_named_params
        self._sync_of_trl = generation.sync_weights
        generation._iter_named_params = self._parameters
        generation.sync_weights = self._sync

    def _sync(self) -> None:
        """Have TRL push the weights; raise `RuntimeError` when it pushes none."""
        before = self.n_syncs
        self._sync_of_trl()
        if self.n_syncs == before:
            raise RuntimeError("TRL has pushed none of the weights of the policy to vLLM")

    def _parameters(self) -> Parameters:
        """Yield what vLLM is given, in the place of TRL's walk over the parameters."""
        step, sigma = self._rollout()
        # A server is announced first what it will be pushed, by a walk of its own.
        is_push = not (self._is_server and getattr(self._generation, "_weight_metadata", ()) is None)
        named, merged, deltas, factors = self._of_policy()
        if self._pushed is not None:
            changing = {*merged, *deltas}
            if self._noise is not None and sigma > 0:
                changing.update(f"{plain_name(name)}.weight" for name in self._noise.norms)
            self._pushed.begin(changing)
        # From the first tensor on, and until all of them are clean again.
        self.has_noise = self.has_noise or sigma > 0
        tensors = rollout_parameters(
            named, self._model, self._noise, step, sigma, deltas, self.engine.dtype,
            factors=factors, packs=self.engine.is_packed, pushed=self._pushed, merged=merged,
        )  # fmt: skip
        n_bytes = 0
        for name, tensor in tensors:
            n_bytes += tensor.nbytes
            yield name, tensor
        if n_bytes == 0:
            raise RuntimeError("nothing of the policy is left to push to vLLM: all of it is frozen, and vLLM has it")
        if is_push:
            self.has_noise = sigma > 0
            self.n_syncs += 1
            self._record("vllm/sync_bytes", n_bytes)

    def _of_policy(self) -> tuple[Parameters, set[str], dict, dict]:
        """Return the parameters to push, the names of those with adapters in them, what adapters add to others, and the
        factors of adapters that vLLM keeps apart."""
        model = self._model
        packs = self.engine.is_packed
        # Of layers without adapters vLLM has zeros, unless it throws them away; a server is to load those of a layer
        # that is joined with one that has an adapter.
        everywhere = packs and self.engine.settings.adapter_rank > 0 and self._pushed is None
        factors = {}
        if packs:
            factors = adapter_factors(model, everywhere)
        apart = {f"{name}.weight" for name in factors}
        if self._is_adapted_packed:
            return policy_parameters(model, packed=packs), adapted_parameters(model) - apart, {}, factors
        if self._is_adapted_trainable:
            deltas = {name: delta for name, delta in adapter_sums(model).items() if name not in apart}
            return _without_merging(self._walk, model), adapted_parameters(model), deltas, factors
        return self._walk(), set(), {}, factors


def _without_merging(walk: Callable[[], Parameters], model: nn.Module) -> Parameters:
    """Yield the parameters of TRL's walk over a PEFT model without the merge around it, which would write master
    weights."""
    merges = []
    model.merge_adapter = lambda: merges.append(True)
    model.unmerge_adapter = lambda: None
    try:
        for named in walk():
            if not merges:
                raise RuntimeError("TRL walks over a PEFT model in another way than this version of hf-mxfp4 knows")
            yield named
    finally:
        del model.merge_adapter, model.unmerge_adapter


def _has_layer(model: nn.Module, kind: Any) -> bool:
    return any(isinstance(module, kind) for module in model.modules())


class PushedWeights:
    """Knows which frozen parameters vLLM has as they are now, so that they are pushed once. A parameter that was
    replaced or written counts as another one.

    ``left_out`` has the names that need not be pushed in the walk that has begun.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._pushed: dict[str, tuple[weakref.ref, int]] = {}
        self._frozen: dict[str, nn.Parameter] = {}
        self.left_out: set[str] = set()

    def begin(self, changing: Set[str]) -> None:
        """Begin a walk in which the parameters ``changing`` are pushed with noise, or with adapters in them."""
        self._frozen = {}
        for name, parameter in self._model.named_parameters():
            if not (parameter.requires_grad or ".lora_" in name or ".original_module." in name):
                self._frozen[plain_name(name)] = parameter
        self.left_out = {name for name in self._pushed if self._has(name)} - changing

    def note(self, name: str, is_clean: bool) -> None:
        """Remember that this parameter was pushed. It ``is_clean`` without noise and without adapters in it."""
        parameter = self._frozen.get(name)
        if is_clean and parameter is not None:
            self._pushed[name] = weakref.ref(parameter), parameter._version
        else:
            self._pushed.pop(name, None)

    def _has(self, name: str) -> bool:
        parameter = self._frozen.get(name)
        pushed, version = self._pushed[name]
        return parameter is not None and pushed() is parameter and version == parameter._version


def rollout_parameters(
    named: Parameters,
    model: nn.Module,
    noise: NormNoise | None = None,
    step: int = 0,
    sigma: float = 0.0,
    deltas: Mapping[str, Callable[[], torch.Tensor]] | None = None,
    dtype: torch.dtype | None = None,
    *,
    factors: Mapping[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] | None = None,
    packs: bool = False,
    pushed: PushedWeights | None = None,
    merged: Set[str] = frozenset(),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the pairs of ``named`` with quantized weights in place of master weights, and noise on the weights of
    norms. What the noise changed, after rounding to the dtype of vLLM, is left in its ``last_report``.

    Args:
        deltas: what adapters add to parameters, see [`adapter_sums`]; added in float32, after quantization.
        dtype: in which vLLM keeps weights, and quantized ones are given; by default that of each.
        factors: of adapters that vLLM keeps apart, by layer, see [`adapter_factors`]; they follow the layer's weight.
        packs: quantized weights without noise or ``deltas`` are codes and scales, by the names of packed checkpoints.
        pushed: what vLLM has, and what is left out therefore; it is told what is pushed.
        merged: the names of ``named`` that have adapters in them, which ``pushed`` does not see.

    Raises `ValueError` for a forward scheme that weights alone cannot express, and `RuntimeError` at the end when
    quantized layers, noise or an adapter met no name.
    """
    check_forward(model)
    quantized = {plain_name(matrix.full_name): matrix for matrix in trainable_matrices(model)}
    on_norms = _NoiseOnNorms(noise, step, sigma)
    # What is met is taken out; what is left at the end met no name.
    deltas = dict(deltas or {})
    factors = dict(factors or {})
    left_out: set[str] = set()
    if pushed is not None:
        left_out = pushed.left_out
    n_quantized = 0
    for name, tensor in named:
        matrix = quantized.get(name)
        n_quantized += matrix is not None
        delta = deltas.pop(name, None)
        is_clean = delta is None and not on_norms.has(name)
        if not is_clean:
            value = tensor.detach() if matrix is None else matrix.layer_values(tensor)
            if delta is not None:
                value = (value.float() + delta()).to(value.dtype)
            if on_norms.has(name):
                value = on_norms.added(name, value, dtype or value.dtype)
            elif matrix is not None:
                value = value.to(dtype or value.dtype)
            yield name, value
        elif name not in left_out:  # vLLM has the others already
            yield from _clean_values(name, tensor, matrix, dtype, packs)
        if pushed is not None and name not in left_out:
            pushed.note(name, is_clean and name not in merged)
        owner = name.removesuffix(".weight")
        if owner != name and owner in factors:
            for side, factor in zip("AB", factors.pop(owner)(), strict=True):
                yield f"{owner}.lora_{side}.weight", factor
    if quantized and n_quantized == 0:
        raise RuntimeError("the weights pushed to vLLM include none of the quantized layers")
    if deltas or factors:
        names = ", ".join([*deltas, *factors])
        raise RuntimeError(f"adapters reached none of the weights pushed to vLLM by the name of {names}")
    on_norms.report()


def _clean_values(
    name: str, tensor: torch.Tensor, matrix: WeightMatrix | None, dtype: torch.dtype | None, packs: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a parameter without noise and adapters: as it is, as quantized values, or as codes and scales."""
    if matrix is None:
        yield name, tensor
    elif packs:
        for suffix, part in matrix.packed_values(tensor).items():
            yield f"{name}{suffix}", part
    else:
        value = matrix.layer_values(tensor)
        yield name, value.to(dtype or value.dtype)


class _NoiseOnNorms:
    """The noise of one push, and how much of it is left after rounding to the dtype of vLLM."""

    def __init__(self, noise: NormNoise | None, step: int, sigma: float):
        self._noise = noise
        self._step = step
        self._sigma = sigma
        self._norms: dict[str, int] = {}
        if noise is not None and sigma > 0:
            self._norms = {f"{plain_name(name)}.weight": index for index, name in enumerate(noise.norms)}
        self._n_noisy = 0
        self._n_elements = 0
        self._energy = 0.0

    def has(self, name: str) -> bool:
        """Return whether there is noise on a parameter."""
        return name in self._norms

    def added(self, name: str, clean: torch.Tensor, served_dtype: torch.dtype) -> torch.Tensor:
        """Return a weight with its noise, in its own dtype."""
        noise = self._noise.noise(self._norms[name], clean, self._step, self._sigma)
        noisy = (clean.float() + noise).to(clean.dtype)
        exact = widest_float(clean.device)
        deviation = noisy.to(served_dtype).to(exact) - clean.to(served_dtype).to(exact)
        self._energy += float(deviation.square().sum())
        self._n_noisy += 1
        self._n_elements += clean.numel()
        return noisy

    def report(self) -> None:
        """Leave what was added in `last_report` of the noise. Raises `RuntimeError` where it reached no weight."""
        if not self._norms:
            return
        if self._n_noisy == 0:
            raise RuntimeError("adaptive quantization noise reached none of the weights pushed to vLLM")
        spread = math.sqrt(self._energy / self._n_elements)
        self._noise.last_report = NoiseReport(self._sigma, spread, self._n_noisy, self._n_elements)
