# SPDX-License-Identifier: Apache-2.0
"""The frozen linear layer: a weight kept as packed 4-bit tensors, the base that adapters are trained on."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..config import MXFP4RLConfig
from ..model.plain_layers import linear_size, linear_weight
from ..numerics import LinearScheme, MXFP4Tensor
from ..ops import (
    PACKED_FIELDS,
    JoinedRows,
    PackedState,
    PackedWeight,
    check_packed,
    check_rotation,
    compiled_packed_linear,
    dequantize,
    is_same_memory,
    observe,
    packed_linear,
    packed_shapes,
    packed_tensor,
    quantize_input,
    quantize_weight,
    register_owner,
    traced_product,
    weight_values,
)
from .linear import QuantizedLayer, plain_class_of, spec_of


class PackedLayer(QuantizedLayer):
    """Mixin of frozen layers: the dtype of the layer that they stand for, and loading of packed tensors.

    Attributes:
        compute_dtype: of the layer that it stands for; follows ``.to(dtype)``. PEFT makes adapters in it.
    """

    compute_dtype: torch.dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the packed tensors under the scheme, by name."""
        raise NotImplementedError

    def packed_names(self) -> list[str]:
        """Return the names of packed tensors, those that the scheme has not among them."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `ValueError` unless every packed tensor is there, uint8, and of the shape that the scheme says."""
        tensors = {name: getattr(self, name) for name in self.packed_names()}
        check_packed(self.name or type(self).__name__, tensors, self.shapes(), self.config.weight_scheme)

    def pack_matrix(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors of [`packed_shapes`] of a full-precision weight ``[N, K]``, or of rows of it."""
        config = self.config
        return quantize_weight(weight, config.weight_scheme, config.backend, config.weight_rotation)

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        for name in self.shapes():
            value = state_dict.get(prefix + name)
            # Copying would round floats to whole numbers without a word.
            if value is not None and value.dtype != torch.uint8:
                errors.append(f"{prefix}{name} is {value.dtype}, but the packed layer needs the uint8 tensor")
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        super().__setstate__(attributes)
        register_owner(self)

    def _set(self, name: str, value: torch.Tensor | None) -> None:
        """Make a tensor a frozen parameter of the layer: autograd refuses others than floating-point ones."""
        setattr(self, name, None if value is None else nn.Parameter(value, requires_grad=False))


class MXFP4PackedLinear(PackedLayer, nn.Linear):
    """`nn.Linear` that computes ``Q(x) Q(W)^T + b`` from a packed, frozen ``Q(W)``; gradients flow to ``x`` and ``b``.
    Under a scheme whose forward product rotates, ``Q(x H) Q(W H)^T + b`` from ``Q(W H)``.

    Parameters (the first three on every row of the weight, without padding; those that the scheme has not are `None`):
        weight: uint8 ``[out_features, ceil(in_features / 2)]``, two codes per byte.
        weight_scale: uint8 ``[out_features, ceil(in_features / 32)]``.
        weight_macro: uint8 ``[out_features, ceil(in_features / macro_block)]``, with macro blocks.
        weight_residual, weight_residual_scale: as ``weight`` and ``weight_scale``, with outlier fallback of weights.
        bias: floating-point ``[out_features]`` or `None`.

    Attributes:
        in_features, out_features: of the linear layer that it stands for.
        config: the scheme; see [`MXFP4RLConfig`].
        name: the layer's place in the model, for messages.
        state: as in [`MXFP4Linear`].
        joined: the layer's place in a product with other layers; see [`hf_mxfp4.ops.joined`].

    A new layer holds zeros. Raises `ValueError` unless ``config`` is one of mode ``"packed"``, whose rotation, if it
    has one, divides ``in_features``.
    """

    joined: JoinedRows | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: MXFP4RLConfig | None = None,
        name: str = "",
    ):
        nn.Module.__init__(self)  # nn.Linear's would make and initialise a full-precision weight
        register_owner(self)
        self.config = config = MXFP4RLConfig(mode="packed") if config is None else config
        if config.mode != "packed":
            raise ValueError(f"{type(self).__name__} needs a config of mode='packed', not {config.mode!r}")
        self.in_features = in_features
        self.out_features = out_features
        self.name = name
        self.compute_dtype = dtype or torch.get_default_dtype()
        check_rotation(self._label(), in_features, config.weight_rotation)
        self.state = PackedState(spec_of(config, LinearScheme(config.gemms().fprop)))
        shapes = self.shapes()
        for tensor in PACKED_FIELDS:
            self.register_parameter(tensor, None)
            if tensor in shapes:
                self._set(tensor, torch.zeros(shapes[tensor], dtype=torch.uint8, device=device))
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, dtype=self.compute_dtype, device=device))

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: MXFP4RLConfig, name: str = "") -> "MXFP4PackedLinear":
        """Return the packed twin of a plain or trainable quantized layer: its weight quantized, its very bias.

        Raises `TypeError` for a layer whose weight is not floating-point.
        """
        weight = linear_weight(linear)
        if not weight.is_floating_point():
            raise TypeError(f"{type(linear).__name__} {name} has a weight of {weight.dtype}; nothing to quantize")
        layer = cls._around(linear, config, name)
        for tensor, value in layer.pack_weight(weight).items():
            layer._set(tensor, value)
        return layer

    @classmethod
    def placeholder(cls, linear: nn.Linear, config: MXFP4RLConfig, name: str = "") -> "MXFP4PackedLinear":
        """Return a layer of meta tensors around the very bias of a meta ``linear``, for a checkpoint to be loaded into.
        Its weight is the full-precision one, to be replaced by packed tensors as it arrives."""
        layer = cls._around(linear, config, name)
        layer.weight = nn.Parameter(linear_weight(linear), requires_grad=False)
        return layer

    @classmethod
    def _around(cls, linear: nn.Linear, config: MXFP4RLConfig, name: str) -> "MXFP4PackedLinear":
        """Return a layer of meta tensors in the place of ``linear``, with its very bias."""
        rows, columns = linear_size(linear)
        layer = cls(columns, rows, False, "meta", linear_weight(linear).dtype, config=config, name=name)
        layer.plain_class = plain_class_of(linear)
        layer.bias = linear.bias
        return layer.train(linear.training)

    pack_weight = PackedLayer.pack_matrix

    def unpacked(self, packed: Mapping[str, torch.Tensor | None] | PackedWeight, dtype: torch.dtype) -> torch.Tensor:
        """Return the values ``[n, K]`` that tensors such as [`pack_weight`] makes stand for, rotated back; see
        [`hf_mxfp4.ops.weight_values`]."""
        config = self.config
        return weight_values(
            packed, self.in_features, config.weight_scheme, dtype, config.backend, config.weight_rotation
        )

    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """Return a plain layer whose weight holds the dequantized values (in ``dtype``, default `compute_dtype`); of a
        rotated weight those of [`dequantized_weight`]."""
        return self._to_linear(self.dequantized_weight(dtype), dtype, True)

    def quantized_tensor(self) -> MXFP4Tensor:
        """Return the weight as stored, rotated where the scheme rotates, as a [`MXFP4Tensor`] of the same memory."""
        return packed_tensor(self.packed_weight(), self.in_features, self.config.weight_scheme, self.compute_dtype)

    def packed_weight(self) -> PackedWeight:
        """Return the packed tensors in the order of [`PACKED_FIELDS`], `None` for those that the scheme has not."""
        return tuple(getattr(self, name) for name in PACKED_FIELDS)

    def dequantized_weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return ``Q(W)`` ``[out_features, in_features]`` in ``dtype``, default `compute_dtype`; of a weight that is
        stored rotated, rotated back and rounded then. See [`forward_weight`]."""
        return self.unpacked(self.packed_weight(), dtype or self.compute_dtype)

    def forward_weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values that the forward product multiplies with [`quantized_input`], exactly: ``Q(W)``, or ``Q(W
        H)`` where the scheme rotates, ``[out_features, in_features]`` in ``dtype``, default `compute_dtype`."""
        return dequantize(self.quantized_tensor(), dtype or self.compute_dtype, self.config.backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, in the dtype of ``x`` or that of autocast.

        Raises:
            ValueError: the last axis of ``x`` is not ``in_features``.
            TypeError: ``x`` is not floating-point, or differs from the bias in dtype outside of autocast; or the weight
                was replaced by something that is not packed.
        """
        if torch.compiler.is_compiling():
            # All that is read of the layer here is guarded in each call of compiled code.
            if self.joined is None or torch.is_grad_enabled():
                return compiled_packed_linear(x, self.weight, self.bias)
            return traced_product(self.joined, x, self)
        # `nn.Module.__getattr__` would take longer than all of the rest.
        packed = tuple(map(self._parameters.get, PACKED_FIELDS))
        bias = self._parameters.get("bias")
        state = self.state
        if self.joined is not None:
            out = self.joined(x, packed, bias, state)
            if out is not None:
                return out
        plan = state.plans.get(x.dtype)
        if plan is not None and plan.takes(x, packed, bias, state):
            plan.is_used = True
            return plan(x, packed, bias)

        # No plan yet for such an input, or one that does not fit the layer any more.
        packed = self.packed_weight()
        bias = self.bias
        self._check_features(x)
        self._check_dtype(x, x.dtype if bias is None else bias.dtype)
        if packed[0].dtype != torch.uint8:
            raise TypeError(
                f"{self._label()}: its weight was replaced by one of {packed[0].dtype}, which is not packed; build a "
                "layer of new weights with MXFP4PackedLinear.from_linear"
            )
        out = packed_linear(x, packed, bias, state)
        if state.plans.get(x.dtype) is not plan:
            observe(self, x)
        return out

    def packed_product(self, codes: torch.Tensor) -> tuple[PackedState, PackedWeight] | None:
        """Return what compiled code multiplies with; see [`hf_mxfp4.ops.packed_operators`]."""
        if is_same_memory(codes, self.weight):
            return self.state, self.packed_weight()
        return None

    def quantized_input(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``Q(x)`` in ``dtype``, rotated where the scheme rotates; without ``Q`` under a weight-only preset."""
        config = self.config
        return quantize_input(x, dtype, config.activation_scheme, config.backend, config.weight_rotation)

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        if self.joined is not None and not self.joined.is_of(self):
            # The buffer would stay in memory. New plans let the layers be joined again.
            self.joined = None
            self.state.plans.clear()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "joined"}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return packed_shapes(self.out_features, self.in_features, self.config.weight_scheme)

    def packed_names(self) -> list[str]:
        return list(PACKED_FIELDS)

    def reset_parameters(self) -> None:
        raise TypeError(f"{self._label()} is packed and frozen; it has no random initialisation")
