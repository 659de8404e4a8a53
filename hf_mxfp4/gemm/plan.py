# SPDX-License-Identifier: Apache-2.0
"""What the products of a linear layer have in common as long as its inputs are of one kind: found once, not at every
call, since to look it up takes longer than the product of a single token."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from ..backends import select as backends
from ..backends.cpu.packed_product import OnCodes
from ..numerics import QuantScheme
from .linear import as_dtype, autocast_dtype, can_autocast, linear_with_gradient, needs_gradient, quantized_linear
from .operands import input_operand, kept_weight_operand, nearest_input
from .saved import SavedInput, save_input
from .shared_input import key_of, shared_input
from .spec import GemmSpec, PackedSpec
from .state import GemmState
from .tensor_cores.select import INTERPRETER, count_product, hardware_of


class InputPlan:
    """How inputs of one dtype, device and length become operands of the forward product of one layer.

    Args:
        x: such an input.
        state: of the layer, with its spec.
        name: of the layer. Layers of one parent share what they make of an input, see [`shared_input`].
        layer_dtype: that the layer compares the dtype of its input with.

    Attributes:
        dtype: of the product.
        is_dense: whether the forward product is one of dense values on this device, whatever kernels its spec names.
        packs: by the form that a [`cached_weights`] context asks for, whether a trainable layer keeps its weight packed
            there; filled by who uses it.
        on_codes: what computes products with packed weights of the layer on the CPU, where that is known to do it;
            filled as well.
    """

    __slots__ = (
        "_autocasts",
        "_device",
        "_input_dtype",
        "_key",
        "_layer_dtype",
        "_length",
        "_passes",
        "_quantize",
        "_saved_key",
        "_spec",
        "dtype",
        "is_dense",
        "on_codes",
        "packs",
    )

    def __init__(self, x: torch.Tensor, state: GemmState, name: str, layer_dtype: torch.dtype | None):
        spec = state.spec
        self.dtype = autocast_dtype(x) or x.dtype
        self._input_dtype, self._device, self._length = x.dtype, x.device, x.shape[-1]
        self._layer_dtype = layer_dtype
        self._autocasts = can_autocast(x.device.type)
        self._spec = spec
        self.packs: dict[str, bool] = {}
        self.on_codes: OnCodes | None = None
        kernel = spec.gemm_kernel if isinstance(spec, GemmSpec) else "dense"
        on_cpu = kernel == "auto" and hardware_of(x.device) in ("cpu", INTERPRETER)
        self.is_dense = kernel == "dense" or on_cpu
        self._quantize = self._key = self._saved_key = None
        rotation = spec.rotation if isinstance(spec, PackedSpec) else None
        unquantized = isinstance(spec, PackedSpec) and spec.inputs is None
        self._passes = unquantized and rotation is None and self.dtype is x.dtype
        scheme = _nearest_scheme(spec)
        if scheme is not None and isinstance(x, FakeTensor):
            self._quantize = functools.partial(_like, dtype=self.dtype)
        elif rotation is not None and backends.is_torchs_own(x):
            options = {"scheme": scheme, "backend": spec.backend, "rotation": rotation}
            self._quantize = functools.partial(_rotated, dtype=self.dtype, **options)
        elif scheme is not None and backends.is_torchs_own(x):
            self._quantize = _to_dtype(backends.quantizer(x, scheme, spec.backend), self.dtype)
        if self._quantize is not None and name:
            self._key = key_of(name, scheme, spec.backend, self.dtype, rotation)
            if isinstance(spec, GemmSpec) and spec.saved != "full":
                self._saved_key = key_of(name, scheme, spec.backend, self.dtype, spec.saved, spec.saves_raw_input)

    def takes(self, x: torch.Tensor, state: GemmState, layer_dtype: torch.dtype | None) -> bool:
        """Whether it is the plan for this input and what the layer is now."""
        shape = x.shape
        if not backends.is_torchs_own(x) or not shape or shape[-1] != self._length:
            return False
        if x.dtype is not self._input_dtype or layer_dtype is not self._layer_dtype or x.device != self._device:
            return False
        if state.spec is not self._spec:
            return False
        if self._autocasts and torch.is_autocast_enabled(self._device.type):
            return self.dtype is (autocast_dtype(x) or x.dtype)
        return self.dtype is self._input_dtype

    def operand(self, x: torch.Tensor, state: GemmState) -> torch.Tensor:
        """The operand of the forward product, without a gradient."""
        if self._passes:
            return x
        made = self.quantized(x, state)
        if made is not None:
            return made
        spec = self._spec
        if isinstance(spec, PackedSpec):
            return nearest_input(x, self.dtype, spec.inputs, spec.backend, spec.rotation)
        return input_operand(x, self.dtype, state)

    def quantized(self, x: torch.Tensor, state: GemmState) -> torch.Tensor | None:
        """[`operand`] where that is ``x`` quantized to nearest, or rotated for packed weights, which other layers may
        share; `None` elsewhere."""
        quantize = self._quantize
        if quantize is None:
            return None
        return quantize(x) if self._key is None else shared_input(x, self._key, state, quantize)

    def saved(self, x: torch.Tensor, state: GemmState) -> torch.Tensor | SavedInput | None:
        """[`quantized`] with what is saved of ``x`` for the gradient of the weight, shared too."""
        if state.spec.saved == "full":
            return self.quantized(x, state)
        if self._saved_key is None:
            return None
        return shared_input(x, self._saved_key, state, functools.partial(_saved_input, dtype=self.dtype, state=state))


@torch.no_grad()
def _saved_input(x: torch.Tensor, dtype: torch.dtype, state: GemmState) -> SavedInput:
    saved = save_input(x.detach(), dtype, state, None, weight_needs_grad=True, multiplies=True)
    # Values of codes are made anew at each use, so that only codes are kept.
    return saved._replace(operand=None) if saved.record.form == "mxfp4" else saved


def planned_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: GemmState, plan: InputPlan
) -> torch.Tensor:
    """[`quantized_linear`] of one weight ``[N, K]``, by the plan of its layer."""
    spec = state.spec
    if needs_gradient(x, bias, weight):
        operand = None
        if plan.is_dense:  # other kernels make operands of their own
            trains = weight.requires_grad and torch.is_grad_enabled()
            operand = plan.saved(x, state) if trains else plan.quantized(x, state)
        return linear_with_gradient(x, weight, bias, state, None, plan.dtype, (operand, None))
    if not plan.is_dense:
        return quantized_linear(x, weight, bias, state)
    if spec.gemm_kernel != "dense":
        count_product("fprop", "dense")
    right = kept_weight_operand(weight, plan.dtype, state)
    return F.linear(plan.operand(x, state), right, as_dtype(bias, plan.dtype))


def _nearest_scheme(spec: GemmSpec | PackedSpec) -> QuantScheme | None:
    """The scheme of the input where the operand is a function of it and the input alone."""
    if isinstance(spec, PackedSpec):
        return spec.inputs
    scheme = spec.scheme.fprop.left
    return scheme if spec.quantizes_input and spec.rotation_size == 1 and scheme.rounding == "nearest" else None


def _like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.no_grad()
def _rotated(x: torch.Tensor, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    return nearest_input(x.detach(), dtype, **options)


def _to_dtype(quantize: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> Any:
    def converted(x: torch.Tensor) -> torch.Tensor:
        values = quantize(x.detach() if x.requires_grad else x)
        return values if values.dtype is dtype else values.to(dtype)

    return converted
