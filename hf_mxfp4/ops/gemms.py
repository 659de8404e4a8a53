# SPDX-License-Identifier: Apache-2.0
"""Operands of the three products of a linear layer, rotated and quantized along the contraction axis."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..numerics import (
    FP8,
    FULL,
    GEMM_OPERANDS,
    REUSE,
    GemmScheme,
    LinearScheme,
    OperandScheme,
    QuantScheme,
    Rotation,
    apply_scheme,
    fake_quantize_e4m3,
    rotate,
    unrotate,
)
from . import backends
from .draws import Draws


Quantizer = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def rotate_padded(x: torch.Tensor, rotation: Rotation, signs: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` rotated along its last axis, zeros appended up to a multiple of the size; float32 (float64 stays)."""
    x = x if x.dtype == torch.float64 else x.float()
    return rotate(F.pad(x, (0, -x.shape[-1] % rotation.size)), rotation.size, signs=signs)


def rotation_signs(
    rotation: Rotation, gemm: str, length: int, draws: Draws, device: torch.device
) -> torch.Tensor | None:
    """Signs of a random rotation of an axis of ``length`` elements, padding included; `None` without signs."""
    return draws.signs(gemm, length + -length % rotation.size, device) if rotation.random else None


def rotate_operand(x: torch.Tensor, rotation: Rotation | None, gemm: str, draws: Draws) -> torch.Tensor:
    """An operand of a product in the domain in which it is quantized; see [`rotate_padded`]."""
    if rotation is None:
        return x
    return rotate_padded(x, rotation, rotation_signs(rotation, gemm, x.shape[-1], draws, x.device))


def rotate_back(x: torch.Tensor, rotation: Rotation | None, gemm: str, length: int, draws: Draws) -> torch.Tensor:
    """The inverse of [`rotate_operand`] for an axis that had ``length`` elements, in float32 (float64 stays)."""
    if rotation is None:
        return x
    x = x if x.dtype == torch.float64 else x.float()
    signs = rotation_signs(rotation, gemm, length, draws, x.device)
    return unrotate(x, rotation.size, signs=signs)[..., :length]


def quantize_operand(
    x: torch.Tensor, scheme: OperandScheme, gemm: str, operand: str, draws: Draws, backend: str = "auto"
) -> torch.Tensor:
    """Quantized values of an operand along its last axis; itself where the scheme has nothing to quantize."""
    if scheme is FP8:
        return fake_quantize_e4m3(x)
    if not isinstance(scheme, QuantScheme):
        return x
    x = x.detach()
    if scheme.rounding == "stochastic":
        return apply_scheme(x, scheme, generator=draws.generator(gemm, operand, x.device))
    return backends.fake_quantize(x, scheme, backend)


@dataclass(frozen=True)
class BackwardProducts:
    """Dgrad and Wgrad of one layer.

    Attributes:
        scheme: of all three products; that of the forward one says what a reused operand has to be rotated back from.
        draws: the layer's random numbers.
        backend: see [`hf_mxfp4.ops.fake_quantize`].
    """

    scheme: LinearScheme
    draws: Draws
    backend: str = "auto"

    @property
    def keeps_input(self) -> bool:
        """Whether Wgrad needs the layer's input itself and not what the forward product used of it."""
        return self.scheme.wgrad.right is not REUSE

    @property
    def reuses_weight(self) -> bool:
        """Whether Dgrad needs what the forward product used of the weight."""
        return self.scheme.dgrad.right is REUSE

    def grad_x(self, grad: torch.Tensor, weight: torch.Tensor, quantize_weight: Quantizer) -> torch.Tensor:
        """``[..., K]`` from ``grad [..., N]`` and the master weight ``[N, K]`` as it is now."""
        right = weight
        if self.reuses_weight:
            right = self._reused(quantize_weight(weight, grad.dtype), weight.shape[-1])
        return self._product("dgrad", grad, right.t())

    def grad_weight(self, grad: torch.Tensor, kept: torch.Tensor, in_features: int) -> torch.Tensor:
        """``[N, K]`` from ``grad [M, N]`` and what the forward pass kept of its input, ``[M, K]``."""
        right = kept if self.keeps_input else self._reused(kept, in_features)
        return self._product("wgrad", grad.t(), right.t())

    def _reused(self, values: torch.Tensor, in_features: int) -> torch.Tensor:
        return rotate_back(values, self.scheme.fprop.rotation, "fprop", in_features, self.draws)

    def _product(self, gemm: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """``left [..., C] right[D, C]^T``, both quantized along C, in the dtype of ``left``."""
        scheme: GemmScheme = getattr(self.scheme, gemm)
        operands = []
        treatments = (scheme.left, scheme.right)
        for name, values, treatment in zip(GEMM_OPERANDS[gemm], (left, right), treatments, strict=True):
            if scheme.rotation is not None or treatment not in (FULL, REUSE):
                values = rotate_operand(values.contiguous(), scheme.rotation, gemm, self.draws)
                values = quantize_operand(values, treatment, gemm, name, self.draws, self.backend)
            operands.append(values.to(left.dtype))
        return operands[0] @ operands[1].t()
