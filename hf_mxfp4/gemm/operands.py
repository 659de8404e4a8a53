# SPDX-License-Identifier: Apache-2.0
"""Operands of the three products of a linear layer, rotated and quantized along the contraction axis."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ..backends import select as backends
from ..backends import triton as triton_kernels
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
    fake_quantize_e4m3,
    rotate,
    unrotate,
)
from .layer_rng import Draws


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
    x: torch.Tensor,
    scheme: OperandScheme,
    gemm: str,
    operand: str,
    draws: Draws,
    backend: str = "auto",
    *,
    rotation: Rotation | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Quantized values of an operand along its last axis, rotated before ([`rotate_operand`]) where there is a
    rotation; without quantization where the scheme has none. As ``dtype`` if one is given."""
    if not isinstance(scheme, QuantScheme):
        x = rotate_operand(x, rotation, gemm, draws)
        x = fake_quantize_e4m3(x) if scheme is FP8 else x
        return x if dtype is None else x.to(dtype)
    x, seed = x.detach(), operand_seed(scheme, gemm, operand, draws)
    if rotation is None:
        values = backends.fake_quantize(x, scheme, backend, seed=seed)
        return values if dtype is None else values.to(dtype)
    signs = rotation_signs(rotation, gemm, x.shape[-1], draws, x.device)
    return backends.fake_quantize(x, scheme, backend, seed=seed, rotation=rotation.size, signs=signs, dtype=dtype)


def operand_seed(scheme: QuantScheme, gemm: str, operand: str, draws: Draws) -> int | None:
    """The seed of an operand that is rounded stochastically."""
    return draws.seed_of(gemm, operand) if scheme.rounding == "stochastic" else None


@dataclass(frozen=True)
class BackwardProducts:
    """Dgrad and Wgrad of one layer.

    Attributes:
        scheme: of all three products; that of the forward one says what a reused operand has to be rotated back from.
        draws: the layer's random numbers.
        backend: see [`hf_mxfp4.gemm.fake_quantize`].
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

    def quantized_grad(self, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The left operands of Dgrad and Wgrad, of ``grad [M, N]`` and of its transpose, from one read of it; `None`
        twice where the Triton kernels do not make both, or the schemes differ in more than rounding and rotation."""
        gemms = "dgrad", "wgrad"
        schemes = tuple(getattr(self.scheme, gemm).left for gemm in gemms)
        rotations = [getattr(self.scheme, gemm).rotation for gemm in gemms]
        if not all(isinstance(scheme, QuantScheme) for scheme in schemes) or not _alike(schemes, rotations, grad.dtype):
            return None, None
        seeds, signs = [], []
        for gemm, scheme, rotation, length in zip(gemms, schemes, rotations, reversed(grad.shape), strict=True):
            seed = operand_seed(scheme, gemm, "grad", self.draws)
            if backends.choose_backend(grad, scheme, self.backend, seed, length) != "triton":
                return None, None
            seeds.append(seed)
            signs.append(rotation and rotation_signs(rotation, gemm, length, self.draws, grad.device))
        sizes = tuple(rotation and rotation.size for rotation in rotations)
        return triton_kernels.fake_quantize_both(grad.detach(), schemes, tuple(seeds), sizes, tuple(signs), grad.dtype)

    def grad_x(
        self,
        grad: torch.Tensor,
        weight: torch.Tensor,
        quantize_weight: Quantizer | None,
        quantized: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[..., K]`` from ``grad [..., N]`` and the master weight ``[N, K]`` as it is now. ``quantized`` is the left
        operand where [`quantized_grad`] has made it, as a matrix."""
        right = weight
        if self.reuses_weight:
            right = self.reused(quantize_weight(weight, grad.dtype), weight.shape[-1])
        if quantized is not None:
            quantized = quantized.view(*grad.shape[:-1], quantized.shape[-1])
        return self._product("dgrad", grad, right.t(), quantized)

    def grad_weight(
        self, grad: torch.Tensor, kept: torch.Tensor, in_features: int, quantized: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[N, K]`` from ``grad [M, N]`` and what the forward pass kept of its input, ``[M, K]``; ``quantized`` as in
        [`grad_x`]."""
        right = kept if self.keeps_input else self.reused(kept, in_features)
        return self._product("wgrad", grad.t(), right.t(), quantized)

    def _quantized(
        self, values: torch.Tensor, treatment: OperandScheme, gemm: str, name: str, dtype: torch.dtype
    ) -> torch.Tensor:
        # The Triton kernels read transposes as they are.
        if not isinstance(treatment, QuantScheme) or values.device.type == "cpu":
            values = values.contiguous()
        rotation = getattr(self.scheme, gemm).rotation
        return quantize_operand(values, treatment, gemm, name, self.draws, self.backend, rotation=rotation, dtype=dtype)

    def reused(self, values: torch.Tensor, in_features: int) -> torch.Tensor:
        """What the forward product used of an operand, rotated back: ``[..., in_features]``."""
        return rotate_back(values, self.scheme.fprop.rotation, "fprop", in_features, self.draws)

    def _product(
        self, gemm: str, left: torch.Tensor, right: torch.Tensor, quantized: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``left [..., C] right[D, C]^T``, both quantized along C, in the dtype of ``left``, which may already be
        ``quantized``."""
        scheme: GemmScheme = getattr(self.scheme, gemm)
        operands = []
        treatments = (scheme.left, scheme.right)
        for name, values, treatment in zip(GEMM_OPERANDS[gemm], (left, right), treatments, strict=True):
            if quantized is not None and values is left:
                values = quantized
            elif scheme.rotation is not None or treatment not in (FULL, REUSE):
                values = self._quantized(values, treatment, gemm, name, left.dtype)
            operands.append(values.to(left.dtype))
        return operands[0] @ operands[1].t()


def _alike(schemes: tuple[QuantScheme, QuantScheme], rotations: list[Rotation | None], dtype: torch.dtype) -> bool:
    """Whether one launch gives the bits of two: schemes differ in rounding alone, and where one axis is rotated only,
    what is written is what both end as."""
    first, second = (replace(scheme, rounding="nearest") for scheme in schemes)
    mixed = (rotations[0] is None) != (rotations[1] is None)
    return first == second and not (mixed and triton_kernels.written_dtype(first, dtype) != dtype)
