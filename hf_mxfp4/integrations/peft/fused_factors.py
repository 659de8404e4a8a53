# SPDX-License-Identifier: Apache-2.0
"""LoRA in rollouts: ``y + (s B)(A x)`` in two products, of factors kept in the dtype of the layer.

PEFT's layer converts the input to the adapter's float32 and back, scales and adds in launches of their own: for a
single token that takes longer than the quantized product. Within contexts that trust the weights ([`WeightCache`]), as
rollouts are, a layer keeps ``A`` and ``s B`` of its active adapters, below and beside each other, in the dtype that it
computes in; on a CPU in float32, where small products in 16 bits take seven times as long. Values differ from PEFT's by
the rounding of factors and of the inner product to that dtype, and by the order of float32 sums.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ...gemm import WeightCache, autocast_dtype


class _Part(NamedTuple):
    """One adapter as it was when its factors were kept: its name, its two linear layers and its dropout, their weights
    with the versions that these had, and its scaling."""

    name: str
    a: nn.Module
    b: nn.Module
    dropout: nn.Module
    a_weight: torch.Tensor
    b_weight: torch.Tensor
    a_version: int
    b_version: int
    scaling: float

    def is_in(self, layer: "FusesFactors", modules: Mapping[str, Any]) -> bool:
        """Whether the layer still has it, unchanged, and nothing of it is dropped out or hooked."""
        name, a, b = self.name, self.a, self.b
        return (
            modules["lora_A"]._modules.get(name) is a
            and modules["lora_B"]._modules.get(name) is b
            and modules["lora_dropout"]._modules.get(name) is self.dropout
            and a._parameters["weight"] is self.a_weight
            and b._parameters["weight"] is self.b_weight
            and self.a_weight._version == self.a_version
            and self.b_weight._version == self.b_version
            and layer.scaling[name] == self.scaling
            and not (a._forward_hooks or a._forward_pre_hooks or b._forward_hooks or b._forward_pre_hooks)
            and _is_idle(self.dropout)
        )


class _Factors(NamedTuple):
    """The active adapters ``active`` together, of rank R: ``a`` ``[K, R]`` and, with the scalings in it, ``b``
    ``[R, N]``."""

    active: str | list[str]
    parts: tuple[_Part, ...]
    a: torch.Tensor
    b: torch.Tensor


class FusesFactors:
    """Mixin before PEFT's LoRA on a quantized linear layer, whose forward pass it is, but in rollouts.

    Passes with gradients, in compiled code, outside of contexts that trust weights, with ``adapter_names``, dropout,
    biases or variants of LoRA (DoRA), and of layers whose adapters are merged or disabled are PEFT's.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        factors = None
        ordinary = torch.compiler.is_compiling() or args or kwargs or torch.is_grad_enabled()
        cache = self._modules["base_layer"].state.cache
        if not ordinary and cache is not None and cache.form != "none":
            factors = self._kept_factors(_dtype_of_factors(x), cache)
        if factors is None:
            return super().forward(x, *args, **kwargs)
        base, a = self._modules["base_layer"], factors.a
        result = base(x)
        inner = torch.mm(_rows(x if x.dtype is a.dtype else x.to(a.dtype)), a)
        rows, own = _rows(result), not base._forward_hooks and result.is_contiguous()  # a hook may keep what it saw
        if result.dtype is not a.dtype:
            rows = (rows if own else rows.clone()).add_(torch.mm(inner, factors.b))
        else:
            rows = rows.addmm_(inner, factors.b) if own else torch.addmm(rows, inner, factors.b)
        return result if own else rows.view(result.shape)

    def _kept_factors(self, dtype: torch.dtype, cache: WeightCache) -> _Factors | None:
        """The factors of the active adapters in this dtype; `None` where they cannot be fused."""
        if self._disable_adapters or self.merged_adapters or self.lora_variant:
            return None
        base, make = self._modules["base_layer"], partial(self._fused, dtype)
        weight = base._parameters.get("weight")
        if weight is None:
            weight = base.weight  # of an engine that keeps parameters elsewhere
        key = self, dtype
        found = cache.get(weight, key, make)
        if found is not None and not self._are_current(found):
            cache.forget(key)
            found = cache.get(weight, key, make)
        if found is None:  # not for the rest of the context: it may be otherwise at the next call
            cache.forget(key)
        return found

    def _are_current(self, factors: _Factors) -> bool:
        if factors.active != self._active_adapter:
            return False
        for part in factors.parts:
            if not part.is_in(self, self._modules):
                return False
        return True

    @torch.no_grad()
    def _fused(self, dtype: torch.dtype) -> _Factors | None:
        adapters = [name for name in self.active_adapters if name in self.lora_A]
        sides = [(self.lora_A[name], self.lora_B[name], self.lora_dropout[name]) for name in adapters]
        if not adapters or not all(_is_plain(a) and _is_plain(b) and _is_idle(dropout) for a, b, dropout in sides):
            return None
        parts = []
        for name, (a, b, dropout) in zip(adapters, sides, strict=True):
            versions = a.weight._version, b.weight._version
            parts.append(_Part(name, a, b, dropout, a.weight, b.weight, *versions, self.scaling[name]))
        wide = torch.promote_types(dtype, torch.float32)
        scaled = [part.b_weight.to(wide) * part.scaling for part in parts]
        a, b = torch.cat([part.a_weight.to(wide) for part in parts]), torch.cat(scaled, dim=1)
        active = self._active_adapter
        active = active if isinstance(active, str) else list(active)
        return _Factors(active, tuple(parts), a.to(dtype).t().contiguous(), b.to(dtype).t().contiguous())


def _dtype_of_factors(x: torch.Tensor) -> torch.dtype:
    """The dtype that factors are kept in for an input."""
    cast = autocast_dtype(x)
    if cast is None and x.is_cpu and x.dtype in (torch.bfloat16, torch.float16):
        return torch.float32
    return cast or x.dtype


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _is_plain(module: nn.Module) -> bool:
    """Whether one side of an adapter is a product with a weight that is here, and nothing else: no bias, nothing that
    hooks do, and no weight that is sharded, offloaded, or without a version."""
    weight = module._parameters.get("weight")
    if type(module) is not nn.Linear or "forward" in module.__dict__ or _is_hooked(module):
        return False
    if module.bias is not None or type(weight) not in (torch.Tensor, nn.Parameter):
        return False
    return weight.dim() == 2 and weight.numel() > 0 and not weight.is_meta and not weight.is_inference()


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_idle(dropout: nn.Module) -> bool:
    """Whether a dropout gives its input, and nobody looks."""
    return (not dropout.training or isinstance(dropout, nn.Identity)) and not _is_hooked(dropout)
