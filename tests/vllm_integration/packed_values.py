# SPDX-License-Identifier: Apache-2.0
"""Packed weights inside vLLM as the values that they stand for. The harness itself imports nothing of this package: it
serves exports without it, too."""

import torch

from hf_mxfp4.backends import dequantize
from hf_mxfp4.gemm import packed_shapes, packed_tensor
from hf_mxfp4.numerics import QuantScheme


def values_inside(inside: dict[str, torch.Tensor], name: str, scheme: QuantScheme) -> torch.Tensor:
    """The float32 values of the packed weight of layer ``name`` in what [`served_weights`] found."""
    packed = {part: inside[f"{name}.{part}"] for part in packed_shapes(1, 32, scheme)}
    return dequantize(packed_tensor(packed, 2 * packed["weight"].shape[1], scheme, torch.float32), torch.float32)
