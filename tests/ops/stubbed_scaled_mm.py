# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's scaled product is defined to do with a scale for every 128 elements of both operands, in float64, and
what it asks of its arguments on a GPU. For CPUs, where PyTorch has none."""

import torch
import torch.nn.functional as F


def scaled_mm(
    mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, *, output_dtype, use_fast_accum
) -> torch.Tensor:
    """As ``torch.nn.functional.scaled_mm``; raises `ValueError` as PyTorch does."""
    (m, k), n = mat_a.shape, mat_b.shape[1]
    if scale_recipe_a is not F.ScalingType.BlockWise1x128 or scale_recipe_b is not F.ScalingType.BlockWise1x128:
        raise ValueError(f"scales by {scale_recipe_a} and {scale_recipe_b}")
    if mat_a.dtype != torch.float8_e4m3fn or mat_b.dtype != torch.float8_e4m3fn or use_fast_accum:
        raise ValueError(f"{mat_a.dtype}, {mat_b.dtype}, {use_fast_accum=}")
    if mat_a.stride() != (k, 1) or mat_b.stride() != (1, k) or k % 128 or n % 16:
        raise ValueError(f"[{m}, {k}] by {mat_a.stride()}, [{k}, {n}] by {mat_b.stride()}")
    for rows, scale in ((m, scale_a), (n, scale_b)):
        if scale.dtype != torch.float32 or scale.shape != (rows, k // 128) or scale.stride() != (1, rows):
            raise ValueError(f"a scale {scale.dtype} {list(scale.shape)} by {scale.stride()}")
    left = mat_a.double().unflatten(1, (-1, 128)) * scale_a.double()[:, :, None]
    right = mat_b.t().double().unflatten(1, (-1, 128)) * scale_b.double()[:, :, None]
    return (left.flatten(1) @ right.flatten(1).t()).to(output_dtype)
