# SPDX-License-Identifier: Apache-2.0
"""The numeric contract of MXFP4 quantization in pure torch: no modules, no transformers."""

from .decompose import COMPONENTS, ErrorDecomposition, decompose, decompose_scheme
from .energy import ErrorEnergy, decibels
from .formats import (
    BLOCK_SIZE,
    E2M1_MAGNITUDES,
    ScaleRule,
    decode_e2m1,
    decode_e8m0,
    dequantize_e4m3,
    dequantize_mxfp8,
    encode_e2m1,
    fake_quantize_e4m3,
    pack_codes,
    quantize_e4m3,
    quantize_mxfp8,
    round_nearest,
    scale_from_amax,
    unpack_codes,
)
from .hadamard import random_signs, rotate, unrotate
from .nvfp4 import dequantize_nvfp4, fake_quantize_nvfp4, nvfp4_tensor_scale, quantize_nvfp4
from .packed import PARTS, MXFP4Tensor, block_scales, part_sizes
from .quantize import apply_scheme, fake_quantize, quantize
from .rng import counted_uniform
from .schemes import (
    FP8,
    FULL,
    GEMM_OPERANDS,
    MXFP8,
    NVFP4,
    PLAIN,
    REUSE,
    ROTATION_SIZES,
    GemmScheme,
    LinearScheme,
    OperandScheme,
    QuantScheme,
    Rotation,
    parse_rotation,
    parse_scheme,
)
