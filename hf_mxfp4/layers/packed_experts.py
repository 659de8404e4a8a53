# SPDX-License-Identifier: Apache-2.0
"""Frozen experts of a mixture: weights kept as packed 4-bit tensors, contraction axis last."""

from collections.abc import Mapping

import torch
from torch import nn

from ..config import MXFP4RLConfig
from ..model.structure import weight_size
from ..numerics import LinearScheme, MXFP4Tensor
from ..ops import (
    PACKED_SUFFIXES,
    Groups,
    PackedState,
    PackedWeight,
    check_rotation,
    compiled_packed_experts,
    dequantize,
    is_same_memory,
    packed_linear,
    packed_shapes,
    packed_tensor,
    quantize_experts,
    register_owner,
    weight_values,
)
from .experts import ExpertsBase
from .linear import spec_of
from .packed_linear import PackedLayer


class MXFP4PackedExperts(PackedLayer, ExpertsBase):
    """Experts that compute as an [`MXFP4PackedLinear`] for each projection of each expert would.

    Parameters, for each projection: those of [`MXFP4PackedLinear`] of all experts, ``[experts, N, ...]`` whatever the
    layout of the full-precision weight, under the names ``<projection>``, ``<projection>_scale`` and so on; and
    ``<projection>_bias``, floating-point ``[experts, N]``, where the model has it.

    Dequantized weights exist of one expert at a time. They are not kept within [`cached_weights`] either: experts are
    nearly all of a model, and packed to save that memory. Made by [`from_experts`] and [`placeholder`] alone.
    """

    @classmethod
    def from_experts(cls, experts: nn.Module, config: MXFP4RLConfig, name: str = "") -> "MXFP4PackedExperts":
        """Return the packed twin of plain or trainable quantized experts: their weights quantized, their very biases.

        Raises:
            ValueError: ``config`` is not one of mode ``"packed"``, or ``experts`` are not laid out as transformers'.
            TypeError: the weights are not floating-point.
        """
        layer = cls.placeholder(experts, config, name)
        for projection in layer.projections:
            weight = getattr(experts, projection)
            if not weight.is_floating_point():
                raise TypeError(f"{name}.{projection} is of {weight.dtype}; nothing to quantize")
            for tensor, value in layer.pack_weight(projection, weight.detach()).items():
                layer._set(tensor, value)
        return layer

    @classmethod
    def placeholder(cls, experts: nn.Module, config: MXFP4RLConfig, name: str = "") -> "MXFP4PackedExperts":
        """Return experts for a checkpoint to be loaded into. Their weights are the full-precision ones of ``experts``,
        to be replaced by packed tensors as they arrive."""
        if config.mode != "packed":
            raise ValueError(f"{cls.__name__} needs a config of mode='packed', not {config.mode!r}")
        plain = experts
        if isinstance(experts, ExpertsBase):
            plain = experts._to_plain()
        layer = cls._around(plain, config, name)
        register_owner(layer)  # compiled code finds the layer by the memory of its codes
        layer.sizes = {projection: weight_size(plain, projection) for projection in layer.projections}
        layer.compute_dtype = getattr(plain, layer.projections[0]).dtype
        shapes = layer.shapes()
        for projection in layer.projections:
            setattr(layer, projection, nn.Parameter(getattr(plain, projection), requires_grad=False))
            # The first field has the name of the weight itself.
            for tensor in (f"{projection}{suffix}" for suffix in PACKED_SUFFIXES[1:]):
                layer.register_parameter(tensor, None)
                if tensor in shapes:
                    layer._set(tensor, torch.empty(shapes[tensor], dtype=torch.uint8, device="meta"))
        for projection, (_, _, columns) in layer.sizes.items():
            check_rotation(f"{layer._label()}: {projection}", columns, config.weight_rotation)
            layer.states[projection] = PackedState(spec_of(config, LinearScheme(config.gemms().fprop)))
        return layer

    def _own_attributes(self) -> tuple[str, ...]:
        return (*super()._own_attributes(), "sizes", "compute_dtype")

    def pack_weight(self, projection: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the packed tensors, by their names here, of a full-precision weight in the layout of the model, one
        expert after the other; without memory for a meta tensor."""
        config = self.config
        if self.is_transposed:
            weight = weight.transpose(1, 2)
        packed = quantize_experts(weight, config.weight_scheme, config.backend, config.weight_rotation)
        return {self._tensor_name(projection, field): value for field, value in packed.items()}

    def unpacked(
        self, projection: str, packed: Mapping[str, torch.Tensor | None] | PackedWeight, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the values ``[n, K]`` that tensors such as [`pack_matrix`] makes stand for, rotated back; see
        [`hf_mxfp4.ops.weight_values`]."""
        config = self.config
        in_features = self.sizes[projection][2]
        return weight_values(packed, in_features, config.weight_scheme, dtype, config.backend, config.weight_rotation)

    def to_experts(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Return plain experts that hold the dequantized values (in ``dtype``, default `compute_dtype`)."""
        plain = self._to_plain()
        # The others keep their order: PEFT puts adapters of several parameters inside each other in it.
        for name in set(self.packed_names()) - set(self.projections):
            del plain._parameters[name]
        for projection in self.projections:
            setattr(plain, projection, nn.Parameter(self.dequantized_weight(projection, dtype)))
            bias = self.bias_of(projection)
            if bias is not None:
                value = bias.detach().to(dtype or bias.dtype, copy=True)
                setattr(plain, f"{projection}_bias", nn.Parameter(value, bias.requires_grad))
        return plain

    @torch.no_grad()
    def dequantized_weight(self, projection: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return ``Q(W)`` of all experts in ``dtype``, default `compute_dtype`, laid out as the model has it; of
        weights that are stored rotated, rotated back and rounded then."""
        dtype = dtype or self.compute_dtype
        n_experts, rows, columns = self.sizes[projection]
        packed = self.packed_weight(projection)
        device = packed[0].device
        if self.is_transposed:
            weight = torch.empty(n_experts, columns, rows, dtype=dtype, device=device)
            rows_first = weight.transpose(1, 2)
        else:
            weight = torch.empty(n_experts, rows, columns, dtype=dtype, device=device)
            rows_first = weight
        # One expert after the other: unpacking needs more memory than its result.
        for expert in range(n_experts):
            parts = tuple(None if tensor is None else tensor[expert] for tensor in packed)
            rows_first[expert].copy_(self.unpacked(projection, parts, dtype))
        return weight

    @torch.no_grad()
    def forward_weight(self, projection: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values that the forward product multiplies with, exactly: ``Q(W)``, or ``Q(W H)``
        where the scheme rotates, of all experts ``[E, N, K]`` in ``dtype``, default `compute_dtype`."""
        dtype = dtype or self.compute_dtype
        values = []
        for expert in range(self.n_experts):
            tensor = self.quantized_tensor(projection, expert)
            values.append(dequantize(tensor, dtype, self.config.backend))
        return torch.stack(values)

    def packed_weight(self, projection: str) -> PackedWeight:
        """Return the packed tensors in the order of [`PACKED_FIELDS`], `None` for those that the scheme has not."""
        return tuple(getattr(self, f"{projection}{suffix}") for suffix in PACKED_SUFFIXES)

    def quantized_tensor(self, projection: str, expert: int) -> MXFP4Tensor:
        """Return the weight ``[N, K]`` of one expert as it is stored, rotated where the scheme rotates, as a
        [`MXFP4Tensor`] that shares its memory."""
        parts = tuple(None if tensor is None else tensor[expert] for tensor in self.packed_weight(projection))
        return packed_tensor(parts, self.sizes[projection][2], self.config.weight_scheme, self.compute_dtype)

    def project(self, projection: str, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        packed = self.packed_weight(projection)
        if packed[0].dtype != torch.uint8:
            raise TypeError(
                f"{self._label()}: {projection} was replaced by a tensor of {packed[0].dtype}, which is not packed; "
                "build new experts with MXFP4PackedExperts.from_experts"
            )
        bias = self.bias_of(projection)
        if torch.compiler.is_compiling():
            return compiled_packed_experts(x, packed[0], bias, groups)
        return packed_linear(x, packed, bias, self.states[projection], groups)

    def packed_product(self, codes: torch.Tensor) -> tuple[PackedState, PackedWeight] | None:
        """Return what compiled code multiplies with; see [`hf_mxfp4.ops.packed_operators`]."""
        for projection, state in self.states.items():
            if is_same_memory(codes, getattr(self, projection)):
                return state, self.packed_weight(projection)
        return None

    def weight_size(self, projection: str) -> tuple[int, int, int]:
        return self.sizes[projection]

    def _input_dtype(self) -> torch.dtype | None:
        """Return the dtype of biases; without them, inputs may have any."""
        bias = self.bias_of(self.projections[0])
        if bias is None:
            return None
        return bias.dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            self._tensor_name(projection, field): (experts, *shape)
            for projection, (experts, rows, columns) in self.sizes.items()
            for field, shape in packed_shapes(rows, columns, self.config.weight_scheme).items()
        }

    @staticmethod
    def _tensor_name(projection: str, field: str) -> str:
        return f"{projection}{field.removeprefix('weight')}"

    def packed_names(self) -> list[str]:
        return [f"{projection}{suffix}" for projection in self.projections for suffix in PACKED_SUFFIXES]
