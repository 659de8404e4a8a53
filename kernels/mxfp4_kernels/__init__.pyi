# SPDX-License-Identifier: Apache-2.0
from .common.packed import Packed as Packed
from .common.scheme import Scheme as Scheme, Side as Side, unsupported_scheme as unsupported_scheme
from .common.tensors import unsupported_dtype as unsupported_dtype
from .decode.product import (
    PackedProduct as PackedProduct,
    linear_w4a16 as linear_w4a16,
    unsupported_weight as unsupported_weight,
)
from .dequantization import dequantize as dequantize
from .fp4 import nvfp4_scales as nvfp4_scales
from .fp8 import (
    from_fp8 as from_fp8,
    to_fp8 as to_fp8,
    to_fp8_rows_and_columns as to_fp8_rows_and_columns,
    transpose_fp8 as transpose_fp8,
)
from .fp8_gradient import FP8Gradient as FP8Gradient, gradient_to_fp8 as gradient_to_fp8
from .quantization import (
    fake_quantize as fake_quantize,
    fake_quantize_rows_and_columns as fake_quantize_rows_and_columns,
    quantize as quantize,
    quantize_rows_and_columns as quantize_rows_and_columns,
)
