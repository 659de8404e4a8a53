# SPDX-License-Identifier: Apache-2.0
"""The numeric contract of MXFP4 quantization in pure torch: no modules, no transformers."""

from .decompose import COMPONENTS, ErrorDecomposition, decompose, decompose_scheme
from .formats.e2m1 import E2M1_MAGNITUDES, E2M1_MAX, decode_e2m1, encode_e2m1, pack_codes, unpack_codes
from .formats.e4m3 import dequantize_e4m3, e4m3_scale_byte, fake_quantize_e4m3, quantize_e4m3
from .formats.e8m0 import BLOCK_SIZE, ScaleRule, decode_e8m0, scale_from_amax
from .hadamard import random_signs, rotate, unrotate
from .packed import MXFP4Tensor, dequantize
from .quantize import apply_scheme, fake_quantize, quantize
from .rng import counted_uniform
from .schemes import (
    FP8,
    FULL,
    GEMM_OPERANDS,
    PLAIN,
    REUSE,
    ROTATION_SIZES,
    SAVED_FORMS,
    GemmScheme,
    LinearScheme,
    OperandScheme,
    QuantScheme,
    Rotation,
    parse_rotation,
    parse_scheme,
)


__all__ = [
    "BLOCK_SIZE",
    "COMPONENTS",
    "E2M1_MAGNITUDES",
    "E2M1_MAX",
    "ErrorDecomposition",
    "FP8",
    "FULL",
    "GEMM_OPERANDS",
    "GemmScheme",
    "LinearScheme",
    "MXFP4Tensor",
    "OperandScheme",
    "PLAIN",
    "QuantScheme",
    "REUSE",
    "ROTATION_SIZES",
    "SAVED_FORMS",
    "Rotation",
    "ScaleRule",
    "apply_scheme",
    "counted_uniform",
    "decode_e2m1",
    "decode_e8m0",
    "decompose",
    "decompose_scheme",
    "dequantize",
    "dequantize_e4m3",
    "e4m3_scale_byte",
    "encode_e2m1",
    "fake_quantize",
    "fake_quantize_e4m3",
    "pack_codes",
    "parse_rotation",
    "parse_scheme",
    "quantize",
    "quantize_e4m3",
    "random_signs",
    "rotate",
    "scale_from_amax",
    "unpack_codes",
    "unrotate",
]
