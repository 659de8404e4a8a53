# SPDX-License-Identifier: Apache-2.0
"""Gradients of one weight matrix by ordinary products of quantized values: what every other way is measured by."""

from dataclasses import replace

import torch

from ..backends import select as backends
from ..backends import triton as triton_kernels
from ..numerics import FP8, FULL, GEMM_OPERANDS, REUSE, GemmScheme, QuantScheme, Rotation
from .counts import count_weight
from .layer_rng import LayerRng
from .operands import operand_seed, quantize_operand, rotate_back, rotation_signs
from .spec import GemmSpec


def quantized_grads(grad: torch.Tensor, spec: GemmSpec, rng: LayerRng) -> tuple[torch.Tensor | None, ...]:
    """The left operands of Dgrad and Wgrad, of ``grad [M, N]`` and of its transpose, from one read of it; `None` twice
    where the Triton kernels do not make both, or the schemes differ in more than rounding and rotation."""
    gemms = "dgrad", "wgrad"
    schemes = tuple(getattr(spec.scheme, gemm).left for gemm in gemms)
    rotations = [getattr(spec.scheme, gemm).rotation for gemm in gemms]
    if schemes == (FP8, FP8) and rotations == [None, None] and backends.takes_e4m3(grad, spec.backend):
        return triton_kernels.fake_quantize_e4m3_both(grad.detach())
    if not all(isinstance(scheme, QuantScheme) for scheme in schemes) or not _alike(schemes, rotations, grad.dtype):
        return None, None
    seeds, signs = [], []
    for gemm, scheme, rotation, length in zip(gemms, schemes, rotations, reversed(grad.shape), strict=True):
        seed = operand_seed(scheme, gemm, "grad", rng)
        if backends.choose_backend(grad, scheme, spec.backend, seed, length) != "triton":
            return None, None
        seeds.append(seed)
        signs.append(rotation and rotation_signs(rotation, gemm, length, rng, grad.device))
    sizes = tuple(rotation and rotation.size for rotation in rotations)
    return triton_kernels.fake_quantize_both(grad.detach(), schemes, tuple(seeds), sizes, tuple(signs), grad.dtype)


def _alike(schemes: tuple[QuantScheme, QuantScheme], rotations: list[Rotation | None], dtype: torch.dtype) -> bool:
    """Whether one launch gives the bits of two: schemes differ in rounding alone, and where one axis is rotated only,
    what is written is what both end as."""
    first, second = (replace(scheme, rounding="nearest") for scheme in schemes)
    mixed = (rotations[0] is None) != (rotations[1] is None)
    return (
        first == second
        and first.fallback_rate is None
        and not (mixed and triton_kernels.written_dtype(first, dtype) != dtype)
    )


def grad_x(
    grad: torch.Tensor,
    weight: torch.Tensor,
    reused: torch.Tensor | None,
    spec: GemmSpec,
    rng: LayerRng | None,
    left: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[..., K]`` from the output gradient ``grad [..., N]``.

    Args:
        weight: the master weight ``[N, K]`` as it is now.
        reused: what the forward product used of it, where the scheme takes that.
        spec, rng: of the layer.
        left: the quantized gradient where [`quantized_grads`] has made it, as a matrix.
    """
    right = weight if reused is None else forward_values(reused, weight.shape[-1], spec, rng)
    if left is not None:
        left = left.view(*grad.shape[:-1], left.shape[-1])
    return _product("dgrad", grad, right.t(), spec, rng, left)


def grad_weight(
    grad: torch.Tensor,
    saved: torch.Tensor,
    in_features: int,
    spec: GemmSpec,
    rng: LayerRng | None,
    left: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[N, K]`` from ``grad [M, N]`` and what the forward pass saved of its input, ``[M, K]``; ``left`` as in
    [`grad_x`], of the transpose."""
    right = saved if spec.saves_raw_input else forward_values(saved, in_features, spec, rng)
    return _product("wgrad", grad.t(), right.t(), spec, rng, left)


def forward_values(values: torch.Tensor, in_features: int, spec: GemmSpec, rng: LayerRng | None) -> torch.Tensor:
    """Return what the forward product used of an operand, rotated back: ``[..., in_features]``."""
    if spec.rotation_size == 1:
        return values
    return rotate_back(values, spec.scheme.fprop.rotation, "fprop", in_features, rng)


def _product(
    gemm: str,
    left: torch.Tensor,
    right: torch.Tensor,
    spec: GemmSpec,
    rng: LayerRng | None,
    quantized: torch.Tensor | None = None,
) -> torch.Tensor:
    """``left [..., C] right[D, C]^T``, both quantized along C, in the dtype of ``left``, which may already be
    ``quantized``."""
    scheme: GemmScheme = getattr(spec.scheme, gemm)
    operands = []
    precisions = (scheme.left, scheme.right)
    for name, values, precision in zip(GEMM_OPERANDS[gemm], (left, right), precisions, strict=True):
        if quantized is not None and values is left:
            values = quantized
        elif scheme.rotation is not None or precision not in (FULL, REUSE):
            if name == "weight":
                count_weight(values, gemm)
            # The Triton kernels read transposes as they are.
            if not isinstance(precision, QuantScheme) or values.device.type == "cpu":
                values = values.contiguous()
            options = {"rotation": scheme.rotation, "dtype": left.dtype}
            values = quantize_operand(values, precision, gemm, name, rng, spec.backend, **options)
        operands.append(values.to(left.dtype))
    return operands[0] @ operands[1].t()
