# SPDX-License-Identifier: Apache-2.0
"""Experts of a mixture: what trainable and packed ones share (how they stand in for a transformers module, and how
tokens pass them), and the trainable ones, with full-precision master weights in one 3-D parameter, MXFP4 operands."""

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import nn

from ..config import MXFP4RLConfig
from ..model.plain_layers import ExpertsAdapter, ExpertsLayout, experts_adapter_of
from ..model.structure import experts_unsupported_reason, projections, weight_size
from ..numerics import LinearScheme
from ..ops import (
    GemmState,
    Groups,
    LayerRng,
    compiled_linear,
    effective_rows,
    group_by_expert,
    quantized_linear,
)
from .linear import QuantizedLayer, spec_of


#: See [`ExpertsBase.project`].
Projection = Callable[[str, torch.Tensor, Groups], torch.Tensor]


class ExpertsBase(QuantizedLayer):
    """Mixin before a class of transformers' experts, whose parameters' names, activation and gating it keeps.

    Attributes:
        config: the scheme; see [`MXFP4RLConfig`]. (The model's own config, which transformers keeps under this name,
            is of no use here: neither the choice of an experts implementation nor anything else is read from it.)
        name: the module's place in the model, for messages, the options of single layers, and random numbers.
        projections: names of the two weights, ``gate_up_proj`` (or ``up_proj``) and ``down_proj``.
        n_experts: how many there are.
        states: by projection, the product and what of it changes, as `state` of [`MXFP4Linear`].
    """

    #: How experts of `plain_class` hold their weights and compute.
    adapter: ExpertsAdapter

    @classmethod
    def class_for(cls, plain_class: type[nn.Module]) -> type["ExpertsBase"]:
        """Return the class that is both this one and ``plain_class``; always the same."""
        classes = cls.__dict__.get("_classes")
        if classes is None:
            classes = cls._classes = {}
        if plain_class not in classes:
            prefix = cls.__name__.removesuffix("Experts")
            adapter = experts_adapter_of(plain_class)
            names = {"plain_class": plain_class, "adapter": adapter, "__module__": cls.__module__}
            classes[plain_class] = type(f"{prefix}{plain_class.__name__}", (cls, plain_class), names)
        return classes[plain_class]

    @classmethod
    def _around(cls, experts: nn.Module, config: MXFP4RLConfig, name: str) -> "ExpertsBase":
        """Return a module of [`class_for`] with the very parameters, buffers and submodules of ``experts``.

        Raises `ValueError` for a module that is not laid out as transformers' experts are.
        """
        problem = experts_unsupported_reason(experts)
        if problem:
            raise ValueError(f"{name or 'these experts'} cannot be quantized: {problem}")
        layer_class = cls.class_for(type(experts))
        # Without __init__, which would make weights: the attributes of the plain module are taken over.
        layer = layer_class.__new__(layer_class)
        layer.__dict__.update(_shallow(experts))
        for hooked in ("forward", "_old_forward", "_hf_hook"):  # accelerate's, which would run the plain experts
            layer.__dict__.pop(hooked, None)
        layout = asdict(layer.adapter.layout(experts))
        # Attributes of the plain module that have other values here; its own forward needs them back.
        replaced = ("config", "name", *layout)
        layer.plain_attributes = {key: layer.__dict__[key] for key in replaced if key in layer.__dict__}
        layer.__dict__.update(layout)
        layer.config = config
        layer.name = name
        layer.projections = projections(experts)
        layer.n_experts = getattr(experts, layer.projections[0]).shape[0]
        layer.states = {}
        return layer

    def _to_plain(self) -> nn.Module:
        """Return a module of the plain class with all that this one has but what `_around` and subclasses added."""
        plain = self.plain_class.__new__(self.plain_class)  # type: ignore[call-overload]
        plain.__dict__.update(_shallow(self))
        for name in self._own_attributes():
            plain.__dict__.pop(name, None)
        plain.__dict__.update(self.plain_attributes)
        return plain

    def _own_attributes(self) -> tuple[str, ...]:
        layout = [field.name for field in fields(ExpertsLayout)]
        return ("config", "name", "projections", "n_experts", "states", "plain_attributes", *layout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
        project: Projection | None = None,
    ) -> torch.Tensor:
        """Compute what transformers' experts do, whatever implementation the model's config names.

        Args:
            hidden_states: ``[tokens, hidden]``.
            top_k_index: ``[tokens, k]``, the experts of each token. Some models route before; see `adapter`.
            top_k_weights: ``[tokens, k]``, their weights in the sum.
            project: takes the place of [`project`], as adapters do.

        Returns:
            ``[tokens, hidden]`` in the dtype of ``hidden_states``. The ``k`` outputs of a token are summed in the order
            of ``top_k_index``, so that equal inputs give equal bits.

        Raises:
            ValueError: the experts are spread over processes, or ``hidden_states`` has another size.
            TypeError: the dtypes of ``hidden_states`` and the weights (packed: biases) differ outside of autocast.
        """
        self._check_input(hidden_states)
        project = self.project if project is None else project
        if top_k_index is None:
            top_k_index, top_k_weights = self.adapter.routing(self, hidden_states)
        n_tokens, k = top_k_index.shape
        order, groups = group_by_expert(top_k_index.reshape(-1), self.n_experts)
        up, down = self.projections
        states = project(up, hidden_states[order // k], groups)
        dtype = states.dtype
        states = self.adapter.activate(self, states)
        states = project(down, states.to(dtype), groups)
        if getattr(self, "has_post_expert_norm", False):
            states = self.post_expert_norm(states)
        states = states * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        # Back to the order of tokens, by a gather instead of a scatter: sums in a fixed order.
        places = torch.empty_like(order)
        places[order] = torch.arange(order.numel(), device=order.device)
        return states[places].view(n_tokens, k, states.shape[-1]).sum(dim=1).to(hidden_states.dtype)

    def project(self, projection: str, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Map rows ``[S, K]``, sorted by expert, to ``[S, N]``."""
        raise NotImplementedError

    def _check_input(self, hidden_states: torch.Tensor) -> None:
        if getattr(self, "_is_expert_parallel", False):
            raise ValueError(
                f"{self._label()}: MXFP4 experts cannot be spread over processes; load the model without expert "
                "parallelism"
            )
        features = self.weight_size(self.projections[0])[2]
        if hidden_states.dim() != 2 or hidden_states.shape[1] != features:
            raise ValueError(f"{self._label()}: input {tuple(hidden_states.shape)} is not [tokens, {features}]")
        self._check_dtype(hidden_states, self._input_dtype() or hidden_states.dtype)

    def weight_size(self, projection: str) -> tuple[int, int, int]:
        """Return ``(experts, N, K)`` of a weight that maps ``K`` features to ``N``."""
        raise NotImplementedError

    def bias_of(self, projection: str) -> nn.Parameter | None:
        """Return the bias ``[experts, N]`` of a projection, or `None`."""
        if self.has_bias:
            return getattr(self, f"{projection}_bias")
        return None

    def extra_repr(self) -> str:
        sizes = ", ".join(f"{name} {list(self.weight_size(name))}" for name in self.projections)
        return f"{sizes}, {self.config.describe()}"

    def __reduce__(self):
        # Its class is made at run time: pickle cannot find it by name.
        base = next(cls for cls in type(self).__mro__ if "_classes" in cls.__dict__)
        return _rebuild, (base, self.plain_class), self.__dict__.copy()


def _rebuild(base: type[ExpertsBase], plain_class: type[nn.Module]) -> ExpertsBase:
    layer_class = base.class_for(plain_class)
    return layer_class.__new__(layer_class)


def _shallow(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, in containers of their own: a parameter is added to the copy alone."""
    return {key: value.copy() if isinstance(value, (dict, set)) else value for key, value in vars(module).items()}


class MXFP4Experts(ExpertsBase):
    """Experts that compute as an [`MXFP4Linear`] for each projection of each expert would.

    Every expert's weight is quantized on its own, in blocks along the contraction axis whatever axis that is in the
    master weight. The parameters are those of the transformers module (same names, shapes and dtypes), so conversion
    of checkpoints, optimizers, DDP, FSDP2, ZeRO and PEFT's ``target_parameters`` see the experts that they know;
    nothing ever writes them but the optimizer. Made by [`from_experts`] alone.
    """

    @classmethod
    def from_experts(cls, experts: nn.Module, config: MXFP4RLConfig, name: str = "") -> "MXFP4Experts":
        """Return quantized experts around the very parameters of ``experts``.

        Raises `ValueError` for a module that is not laid out as transformers' experts are.
        """
        layer = cls._around(experts, config, name)
        for projection in layer.projections:
            spec = spec_of(config, config.gemms(), layer.is_transposed)
            # As those of a linear layer have the name that the layer would have.
            names = [f"{name}.{expert}.{projection}" for expert in range(layer.n_experts)]
            layer.states[projection] = GemmState(
                spec, [LayerRng(config.stochastic_seed, linear_name) for linear_name in names]
            )
        return layer

    @property
    def gemms(self) -> dict[str, LinearScheme]:
        """Return by projection what the scheme means for the three products."""
        return {projection: state.spec.scheme for projection, state in self.states.items()}

    def full_precision_forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Compute what the plain experts do on the master weights; see [`full_precision`]."""
        ours = {name: self.__dict__[name] for name in self.plain_attributes}
        self.__dict__.update(self.plain_attributes)
        try:
            return super(ExpertsBase, self).forward(*inputs)
        finally:
            self.__dict__.update(ours)

    def set_step(self, step: int) -> None:
        """Draw the random numbers of optimizer step ``step`` from now on."""
        for state in self.states.values():
            state.set_step(step)

    def to_experts(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Return plain experts whose weights hold the quantized values (in ``dtype``, default the master's)."""
        plain = self._to_plain()
        for name, parameter in self.named_parameters(recurse=False):
            value_dtype = dtype or parameter.dtype
            if name in self.projections:
                value = self.effective_weight(name, parameter).to(value_dtype)
            else:
                value = parameter.detach().to(value_dtype, copy=True)
            setattr(plain, name, nn.Parameter(value, parameter.requires_grad))
        return plain

    def weight_size(self, projection: str) -> tuple[int, int, int]:
        return weight_size(self, projection)

    def _input_dtype(self) -> torch.dtype:
        return getattr(self, self.projections[0]).dtype

    def project(self, projection: str, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        product = compiled_linear if torch.compiler.is_compiling() else quantized_linear
        return product(x, getattr(self, projection), self.bias_of(projection), self.states[projection], groups)

    def rows_first(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a master weight as ``[experts, N, K]``, the same memory."""
        if self.is_transposed:
            return weight.transpose(1, 2)
        return weight

    @torch.no_grad()
    def effective_weight(self, projection: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the values that the forward product takes for a master weight, in its shape and dtype."""
        out = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for expert, rows in enumerate(self.rows_first(weight.detach())):
            self.rows_first(out)[expert] = effective_rows(rows, self.states[projection], expert)
        return out
