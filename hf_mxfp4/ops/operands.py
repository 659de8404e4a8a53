# SPDX-License-Identifier: Apache-2.0
"""Quantized values of the operands of a product: rotated and quantized along the contraction axis."""

from dataclasses import replace
from typing import Any

import torch

from ..numerics import (
    FP8,
    FULL,
    MXFP8,
    NVFP4,
    REUSE,
    GemmScheme,
    OperandScheme,
    QuantScheme,
    Rotation,
    fake_quantize_nvfp4,
    nvfp4_tensor_scale,
    unrotate,
)
from . import quantization
from . import triton as triton_kernels
from .rng import LayerRng
from .spec import GemmSpec


def quantize_operand(
    x: torch.Tensor,
    scheme: OperandScheme,
    gemm: str,
    operand: str,
    rng: LayerRng | None,
    backend: str = "auto",
    *,
    rotation: Rotation | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the quantized values of an operand along its last axis.

    Args:
        x: the operand ``[..., K]``.
        scheme: how it is quantized; as it is under `FULL` and `REUSE`.
        gemm, operand: the product and the operand in it, for random numbers.
        rng: the random numbers of the layer, `None` where none are drawn.
        backend: see [`hf_mxfp4.fake_quantize`].
        rotation: done before, which pads the axis to a multiple of its size.
        dtype: of the result, by default that in which it is computed.
        out: where blocks of MXFP4 may be written; the result is another tensor where they cannot be.
    """
    if isinstance(scheme, QuantScheme):
        seed = None if scheme.rounding == "nearest" else operand_seed(scheme, gemm, operand, rng)
        if x.requires_grad:
            x = x.detach()
        if rotation is None:
            return quantization.fake_quantize(x, scheme, backend, seed=seed, dtype=dtype, out=out)
        signs = rotation_signs(rotation, gemm, x.shape[-1], rng, x.device)
        return quantization.fake_quantize(
            x, scheme, backend, seed=seed, rotation=rotation.size, signs=signs, dtype=dtype, out=out
        )
    if rotation is not None:
        x = rotate_operand(x, rotation, gemm, rng, backend)
    if scheme is FP8:
        return quantization.fake_quantize_e4m3(x, backend, dtype)
    if scheme is MXFP8:
        return quantization.fake_quantize_mxfp8(x, backend, dtype)
    if scheme is NVFP4:
        # Tokens, the rows of activations, do not depend on each other.
        x = fake_quantize_nvfp4(x, nvfp4_tensor_scale(x.detach(), per_row=operand == "x"))
    return x if dtype is None else x.to(dtype)


def quantize_input(
    x: torch.Tensor,
    dtype: torch.dtype,
    scheme: OperandScheme | None,
    backend: str = "auto",
    rotation: Rotation | None = None,
) -> torch.Tensor:
    """Return ``Q(x)`` along the last axis in ``dtype``, rounded to nearest; without quantization where there is no
    scheme. A deterministic ``rotation``, whose size divides the axis, is done before."""
    return quantize_operand(x, scheme or FULL, "fprop", "x", None, backend, rotation=rotation, dtype=dtype)


def gradient_operand(
    values: torch.Tensor,
    product: GemmScheme,
    gemm: str,
    operand: str,
    spec: GemmSpec,
    rng: LayerRng | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return an operand of Dgrad or Wgrad ``[R, C]`` in ``dtype``, quantized along C where the scheme of the product
    says so. ``operand`` is its name: ``"grad"``, ``"weight"`` or ``"x"``."""
    scheme = product.left if operand == "grad" else product.right
    if product.rotation is None and scheme in (FULL, REUSE):
        return values.to(dtype)
    # The Triton kernels read transposes as they are.
    if not isinstance(scheme, QuantScheme) or values.is_cpu:
        values = values.contiguous()
    return quantize_operand(
        values, scheme, gemm, operand, rng, spec.backend, rotation=product.rotation, dtype=dtype
    ).to(dtype)


def rows_and_columns(
    grad: torch.Tensor, spec: GemmSpec, rng: LayerRng | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the left operands of Dgrad and Wgrad, of ``grad [M, N]`` and of its transpose, from one read of it; `None`
    twice where the Triton kernels do not make both, or the schemes differ in more than rounding and rotation."""
    dgrad = spec.scheme.dgrad
    wgrad = spec.scheme.wgrad
    if not isinstance(dgrad.left, QuantScheme) or not isinstance(wgrad.left, QuantScheme):
        return None, None
    if (dgrad.rotation is None) != (wgrad.rotation is None):
        return None, None
    if replace(dgrad.left, rounding="nearest") != replace(wgrad.left, rounding="nearest"):
        return None, None
    schemes = (dgrad.left, wgrad.left)
    rotations = (dgrad.rotation, wgrad.rotation)
    seeds: list[int | None] = []
    sizes: list[Any] = []
    signs: list[torch.Tensor | None] = []
    lengths = reversed(grad.shape)
    for gemm, scheme, rotation, length in zip(("dgrad", "wgrad"), schemes, rotations, lengths, strict=True):
        seed = operand_seed(scheme, gemm, "grad", rng)
        if quantization.choose_backend(grad, scheme, spec.backend, seed) != "triton":
            return None, None
        seeds.append(seed)
        sizes.append(None if rotation is None else rotation.size)
        signs.append(None if rotation is None else rotation_signs(rotation, gemm, length, rng, grad.device))
    return triton_kernels.fake_quantize_rows_and_columns(grad.detach(), schemes, seeds, sizes, signs, grad.dtype)


# ---- random numbers and rotations -----------------------------------------------------------------------------------


def operand_seed(scheme: QuantScheme, gemm: str, operand: str, rng: LayerRng | None) -> int | None:
    """Return the seed of an operand that is rounded stochastically; `None` for one that is not."""
    return rng.seed_of(gemm, operand) if scheme.rounding == "stochastic" else None


def rotation_signs(
    rotation: Rotation, gemm: str, length: int, rng: LayerRng | None, device: torch.device
) -> torch.Tensor | None:
    """Return the signs of a random rotation of an axis of ``length`` elements, padding included; `None` for a
    deterministic one."""
    return rng.signs(gemm, length + -length % rotation.size, device) if rotation.random else None


def rotate_operand(
    x: torch.Tensor, rotation: Rotation | None, gemm: str, rng: LayerRng | None, backend: str = "auto"
) -> torch.Tensor:
    """Return an operand of a product as it is before it is quantized; see [`hf_mxfp4.ops.rotate_rows`]."""
    if rotation is None:
        return x
    signs = rotation_signs(rotation, gemm, x.shape[-1], rng, x.device)
    return quantization.rotate_rows(x, rotation.size, backend, signs=signs)


def rotate_back(
    x: torch.Tensor, rotation: Rotation | None, gemm: str, length: int, rng: LayerRng | None
) -> torch.Tensor:
    """Return the inverse of [`rotate_operand`] for an axis that had ``length`` elements, in float32 (float64 stays)."""
    if rotation is None:
        return x
    if x.dtype != torch.float64:
        x = x.float()
    signs = rotation_signs(rotation, gemm, length, rng, x.device)
    return unrotate(x, rotation.size, signs=signs)[..., :length]
