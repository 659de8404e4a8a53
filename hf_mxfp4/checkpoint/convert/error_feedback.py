# SPDX-License-Identifier: Apache-2.0
"""Quantize a weight so that its product with typical inputs changes least, not the weight itself.

GPTQ (arXiv 2210.17323, section 3): columns are rounded one after the other, and what rounding one of them does to the
outputs is taken back by the columns that are still to come, as far as inputs are correlated. The result is plain MXFP4,
block scales by the same rule, of the weights as they are when their block is reached.
"""

import torch

from ...backends.functional import quantize
from ...numerics import BLOCK_SIZE, QuantScheme
from ...numerics.formats.e2m1 import decode_e2m1, encode_e2m1, pack_codes, round_nearest
from ...numerics.formats.e8m0 import decode_e8m0, inverse_scale


#: Added to the diagonal of the inputs' Gram matrix, as a share of its mean.
DAMPING = 0.01


@torch.no_grad()
def quantize_with_feedback(weight: torch.Tensor, gram: torch.Tensor, scheme: QuantScheme) -> dict[str, torch.Tensor]:
    """The tensors of a packed weight ``[N, K]``: ``weight`` uint8 ``[N, K/2]``, ``weight_scale`` uint8 ``[N, K/32]``.

    Args:
        gram: sum of ``x x^T`` over inputs, float32 ``[K, K]``.
        scheme: plain MXFP4 in blocks of 1x32, ``K`` a multiple of 32.

    Raises `ValueError` for another scheme or shape, and for weights or inputs that are not finite.
    """
    columns = weight.shape[1]
    if scheme != QuantScheme(scheme.scale_rule) or columns % BLOCK_SIZE:
        raise ValueError(
            f"error feedback is for plain MXFP4 in whole blocks of 1x32, not {scheme} of {columns} columns"
        )
    if not (weight.isfinite().all() and gram.isfinite().all()):
        raise ValueError("the weight or its inputs on the calibration texts hold NaN or infinity")
    left = weight.to(torch.float32, copy=True)
    weights_of_error = _inverse_factor(gram)
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    scales = []
    for start in range(0, columns, BLOCK_SIZE):
        here, after = slice(start, start + BLOCK_SIZE), slice(start + BLOCK_SIZE, columns)
        block, factor = left[:, here], weights_of_error[here, here]
        scales.append(quantize(block.contiguous(), scale_rule=scheme.scale_rule).scale)
        byte = scales[-1][:, 0].int()
        errors = torch.empty_like(block)
        for i in range(BLOCK_SIZE):
            column = block[:, i].contiguous()
            codes[:, start + i], value = _round(column, byte)
            errors[:, i] = (column - value) / factor[i, i]
            block[:, i + 1 :] -= errors[:, i, None] * factor[i, None, i + 1 :]
        left[:, after] -= errors @ weights_of_error[here, after]
    return {"weight": pack_codes(codes), "weight_scale": torch.cat(scales, dim=1)}


def _inverse_factor(gram: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of the damped matrix: row ``i`` says how the columns after ``i`` make up
    for an error in column ``i``."""
    damped = gram.double()
    mean = damped.diagonal().mean()
    damped = damped + torch.eye(len(gram), dtype=torch.float64) * (DAMPING * mean if mean > 0 else 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _round(column: torch.Tensor, byte: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and values of one column ``[N]`` under the scale bytes ``[N]`` of its block, as int32."""
    codes = encode_e2m1(round_nearest(column * inverse_scale(byte)))
    return codes, decode_e2m1(codes) * decode_e8m0(byte)
