# SPDX-License-Identifier: Apache-2.0
"""What the products with one packed weight have in common: its tensors as one, and how inputs are quantized."""

from collections.abc import Mapping

import torch

from ...backends import select as backends
from ...backends.cpu.packed_product import OnCodes, on_codes
from ...numerics import MXFP4Tensor
from ..plan import InputPlan
from ..state import GemmState
from .packed_weight import PackedWeight


class PackedPlan(InputPlan):
    """The plan of a packed layer for inputs of one kind, as long as its parameters are the same objects. What these
    hold may change meanwhile, and be moved.

    Args:
        packed: the tensors of [`hf_mxfp4.gemm.storage.packed_weight.PACKED_FIELDS`].
        bias: of the layer.

    Attributes:
        packed: those tensors.
        weight: them as one, with values of the dtype of the product. The very objects: tensors that are detached from
            parameters would stay what a parameter had before it was moved.
    """

    __slots__ = ("packed", "weight")

    def __init__(self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, state: GemmState, name: str):
        super().__init__(x, state, name, None if bias is None else bias.dtype)
        spec, self.packed = state.spec, packed
        self.weight = MXFP4Tensor(*packed, length=spec.in_features, axis=1, scheme=spec.weights, dtype=self.dtype)
        self.on_codes = product_on_codes(x, self.weight, self.dtype, spec.backend)

    def takes_layer(self, x: torch.Tensor, state: GemmState, parameters: Mapping[str, torch.Tensor | None]) -> bool:
        """Whether it is the plan for this input and the layer with these parameters."""
        get, packed = parameters.get, self.packed
        codes, bias = get("weight"), get("bias")
        if codes is not packed[0] or codes.dtype is not torch.uint8 or codes.device != self._device:
            return False
        if get("weight_scale") is not packed[1] or get("weight_macro") is not packed[2]:
            return False
        if get("weight_residual") is not packed[3] or get("weight_residual_scale") is not packed[4]:
            return False
        return self.takes(x, state, None if bias is None else bias.dtype)


def product_on_codes(x: torch.Tensor, weight: MXFP4Tensor, dtype: torch.dtype, backend: str) -> OnCodes | None:
    """Return what computes products in ``dtype`` of inputs like ``x`` with this weight on the CPU; `None` where
    something else does."""
    like = x.new_empty(0, dtype=dtype)
    if backends.choose_backend(like, backends.as_read(weight.scheme), backend, length=weight.length) != "cpu":
        return None
    return on_codes(weight.scheme, weight.length, weight.codes.shape[0], dtype)
