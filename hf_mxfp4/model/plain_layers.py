# SPDX-License-Identifier: Apache-2.0
"""Classes of plain layers that quantized layers can stand for: linear layers, and experts in 3-D parameters.

An adapter says how the layers of a class hold their weights and how they compute. To support another class, write an
adapter here and register it at the end of this file, or call [`register_linear`] or [`register_experts`] before a model
is loaded. Classes are registered by their full names, so that no model of transformers is imported.

A quantized linear layer has the parameters ``weight`` ``[N, K]`` and ``bias`` ``[N]``. Where the plain one calls its
weight otherwise or stores it transposed, the weight is converted when a model is loaded and saved. Quantized experts
keep a 3-D parameter for each projection, under the plain names.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


#: What transformers' `use_experts_implementation` leaves on every instance (5.17 and newer).
_EXPERTS_MARKS = ("is_transposed", "is_concatenated", "has_bias", "has_gate")


class LinearAdapter:
    """Adapter of layers that compute ``x W^T + b`` as `nn.Linear` does, and have its constructor.

    Attributes:
        weight_name: name of the weight among the parameters of the plain layer.
        is_transposed: whether the plain layer stores it as ``[K, N]``.
    """

    weight_name = "weight"
    is_transposed = False

    def size(self, layer: nn.Module) -> tuple[int, int]:
        """Return ``(N, K)`` of a plain layer that maps ``K`` features to ``N``."""
        return layer.out_features, layer.in_features

    def forward(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute what the plain layer does from ``weight`` ``[N, K]`` and ``bias`` of the quantized ``layer``."""
        return nn.functional.linear(x, layer.weight, layer.bias)

    def make_empty(self, plain_class: type[nn.Module], size: tuple[int, int], has_bias: bool) -> nn.Module:
        """Return a layer without memory, on the meta device."""
        rows, columns = size
        return plain_class(columns, rows, has_bias, device="meta")


class FalconLinear(LinearAdapter):
    """Adapter of transformers' `FalconLinear`, which adds the bias after a product in its own dtype."""

    def forward(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        product = x @ layer.weight.T
        return product if layer.bias is None else product + layer.bias


@dataclass(frozen=True)
class ExpertsLayout:
    """How experts hold their weights, in 3-D parameters called `projections`, maybe with biases ``<projection>_bias``.

    Attributes:
        is_transposed: whether weights are ``[experts, K, N]``, instead of ``[experts, N, K]``.
        is_concatenated: whether all rows of gate come before those of up. Otherwise they alternate.
        has_bias: whether each projection has a bias ``[experts, N]``.
        has_gate: whether the first projection is that of gate and up together.
    """

    is_transposed: bool = False
    is_concatenated: bool = True
    has_bias: bool = False
    has_gate: bool = True

    @property
    def projections(self) -> tuple[str, str]:
        """Return the names of the two weights, in the order in which tokens pass them."""
        return ("gate_up_proj" if self.has_gate else "up_proj", "down_proj")


class ExpertsAdapter:
    """Adapter of experts that transformers' `use_experts_implementation` made: they are called with the states of all
    tokens, and with indices and weights of the experts that the router chose."""

    def layout(self, experts: nn.Module) -> ExpertsLayout:
        """Return how these experts hold their weights."""
        return ExpertsLayout(**{mark: getattr(experts, mark) for mark in _EXPERTS_MARKS})

    def activate(self, experts: nn.Module, states: torch.Tensor) -> torch.Tensor:
        """Compute what lies between the projections, ``[S, N of the first]`` to ``[S, K of the second]``."""
        return experts._apply_gate(states) if experts.has_gate else experts.act_fn(states)

    def routing(self, experts: nn.Module, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return indices and weights ``[tokens, k]`` for experts that are called with states alone."""
        raise TypeError(f"{type(experts).__name__} needs the indices and the weights of the experts of each token")


class Llama4Experts(ExpertsAdapter):
    """Adapter of transformers' `Llama4TextExperts`. Its input is sorted by expert, has as many rows for each of them,
    and is weighted already."""

    def layout(self, experts: nn.Module) -> ExpertsLayout:
        return ExpertsLayout(is_transposed=True)

    def activate(self, experts: nn.Module, states: torch.Tensor) -> torch.Tensor:
        gate, up = states.chunk(2, dim=-1)
        return up * experts.act_fn(gate)

    def routing(self, experts: nn.Module, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.arange(experts.num_experts, device=states.device)
        indices = indices.repeat_interleave(len(states) // experts.num_experts)
        return indices[:, None], states.new_ones(len(states), 1)


# ---- the registry ---------------------------------------------------------------------------------------------------

_LINEARS: dict[str, Any] = {}
_EXPERTS: dict[str, Any] = {}


def register_linear(class_name: str, adapter: Any) -> None:
    """Have linear layers of exactly this class quantized. ``adapter`` has the members of [`LinearAdapter`].

    Raises:
        ValueError: a class of this full name (``"package.module.Class"``) is registered already.
        TypeError: the adapter lacks a member.
    """
    _register(_LINEARS, class_name, adapter, LinearAdapter)


def register_experts(class_name: str, adapter: Any) -> None:
    """Have experts of a class and its subclasses quantized. ``adapter`` has the members of [`ExpertsAdapter`].

    Raises as [`register_linear`] does.
    """
    _register(_EXPERTS, class_name, adapter, ExpertsAdapter)


def _register(adapters: dict[str, Any], class_name: str, adapter: Any, needed: type) -> None:
    if class_name in adapters:
        raise ValueError(f"{class_name} is registered already, with {type(adapters[class_name]).__name__}")
    members = [name for name in vars(needed) if not name.startswith("_")]
    missing = [name for name in members if getattr(adapter, name, None) is None]
    if missing:
        raise TypeError(f"the adapter of {class_name} lacks {', '.join(missing)}; see {needed.__name__}")
    adapters[class_name] = adapter


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def linear_adapter(module: nn.Module) -> Any | None:
    """Return the adapter of a linear layer, plain or quantized; `None` for any other module."""
    plain_class = getattr(module, "plain_class", type(module))
    if _full_name(plain_class) in _LINEARS:
        return _LINEARS[_full_name(plain_class)]
    return _LINEARS[_full_name(nn.Linear)] if isinstance(module, nn.Linear) else None


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer of any class, plain or quantized."""
    return linear_adapter(module) is not None


def linear_size(layer: nn.Module) -> tuple[int, int]:
    """Return ``(N, K)`` of a linear layer, plain or quantized."""
    if hasattr(layer, "plain_class"):
        return layer.out_features, layer.in_features
    return linear_adapter(layer).size(layer)


def linear_weight(layer: nn.Module) -> nn.Parameter:
    """Return the weight ``[N, K]`` of a linear layer, plain or quantized; transposed ones share the memory."""
    weight = getattr(layer, linear_weight_name(layer))
    if hasattr(layer, "plain_class") or not linear_adapter(layer).is_transposed:
        return weight
    return nn.Parameter(weight.mT, weight.requires_grad)


def linear_weight_name(layer: nn.Module) -> str:
    """Return the name of the weight among the parameters of a linear layer, plain or quantized."""
    return "weight" if hasattr(layer, "plain_class") else linear_adapter(layer).weight_name


def needs_conversion(layer: nn.Module) -> bool:
    """Return whether the weight of a linear layer, plain or quantized, has another name or layout in plain files."""
    adapter = linear_adapter(layer)
    return adapter.weight_name != "weight" or adapter.is_transposed


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a quantized layer can take the place of a module. It cannot for a subclass that is not registered,
    whose code may do anything."""
    return _full_name(type(module)) in _LINEARS


def experts_adapter(module: nn.Module) -> Any | None:
    """Return the adapter of experts, plain or quantized; `None` for any other module."""
    adapter = experts_adapter_of(type(module))
    if adapter is _DECORATED and not all(hasattr(module, mark) for mark in _EXPERTS_MARKS):
        return None
    return adapter


def experts_adapter_of(cls: type[nn.Module]) -> Any:
    """Return the adapter of a class of experts: the registered one, or that of `use_experts_implementation`."""
    names = (_full_name(base) for base in cls.__mro__)
    return next((_EXPERTS[name] for name in names if name in _EXPERTS), _DECORATED)


_DECORATED = ExpertsAdapter()
register_linear(_full_name(nn.Linear), LinearAdapter())
register_linear("transformers.models.falcon.modeling_falcon.FalconLinear", FalconLinear())
register_experts("transformers.models.llama4.modeling_llama4.Llama4TextExperts", Llama4Experts())
