# SPDX-License-Identifier: Apache-2.0
"""Products of MXFP4 codes as they are, on FP4 tensor cores, and of MXFP8 inputs with them, by
`torch.nn.functional.scaled_mm`. Tested with a stand-in for it alone: nothing here has run on hardware yet.

Two recipes of PyTorch 2.11 and later multiply two matrices of E2M1 codes, a third E4M3 elements:

* ``mxfp4``: one E8M0 scale per 32 elements, the bytes of plain MXFP4. Compute capability 10.0 and 10.3.
* ``nvfp4``: one E4M3 scale per 16 elements and one float32 scale per tensor. A scale ``2**e * (1 + m/4)`` of 32
  elements is an E4M3 number for 16 binades of ``e``; it is written twice. Compute capability 10.0 and above.
* ``mxfp8``: one E8M0 scale per 32 E4M3 elements. A code, times its block's mantissa up to 1.5, is such an element, and
  the scale stays. Where there is ``mxfp4``.

All need K to be a multiple of 32 and N of 16, and scales in tiles of 128 rows and 4 columns (`SWIZZLE_32_4_4`).
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

from ..numerics import (
    BLOCK_SIZE,
    MXFP4Tensor,
    block_scales,
    decode_e8m0,
    dequantize_mxfp8,
    quantize,
    quantize_mxfp8,
)
from ..numerics.formats import E8M0_NAN
from . import quantization
from . import triton as triton_kernels


#: Hardware with NVFP4 products, and with those of MXFP4 and MXFP8 too.
FP4_HARDWARE = ("sm_100", "sm_103", "sm_120", "sm_121")
MXFP4_HARDWARE = ("sm_100", "sm_103")
_SWIZZLED = SwizzleType.SWIZZLE_32_4_4
_PLAIN = SwizzleType.NO_SWIZZLE


#: Elements and scale bytes of rows in MXFP8, as [`hf_mxfp4.numerics.quantize_mxfp8`] gives them.
MXFP8Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class FP4Operand(NamedTuple):
    """A matrix ``[R, C]``: ``elements`` float4_e2m1fn_x2 ``[R, C/2]`` or float8_e4m3fn ``[R, C]``, and ``scale``, flat,
    float8_e8m0fnu for 32 elements or float8_e4m3fn for 16. The latter are to be multiplied by ``factor``, powers of two
    in float32, ``[1, 1]`` or ``[R, 1]``, and ``misfits`` of them, an int32 scalar on the device, are wrong."""

    elements: torch.Tensor
    scale: torch.Tensor
    factor: torch.Tensor | None = None
    misfits: torch.Tensor | None = None


def swizzle_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scales of one byte each, ``[R, C]``, in the layout that cuBLAS reads: flat, padded with zeros to tiles of 128 x
    4, tile after tile along a row of tiles. Row r and column c of a tile are at ``16 (r % 32) + 4 (r // 32) + c``."""
    rows, columns = scale.shape
    padding = 0, -columns % 4, 0, -rows % 128
    tiles = F.pad(scale.view(torch.uint8), padding) if any(padding) else scale.view(torch.uint8)
    tiles = tiles.reshape(-(-rows // 128), 4, 32, -(-columns // 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def to_fp4(packed: MXFP4Tensor | MXFP8Rows, recipe: str, by_rows: bool = False) -> FP4Operand:
    """Codes and scales, without residuals and macro factors, as an operand of ``recipe``, the same values; ``by_rows``
    with a factor for each row instead of one."""
    if recipe == "mxfp8":
        elements, byte = _as_mxfp8(packed) if isinstance(packed, MXFP4Tensor) else packed
        elements = elements.reshape(-1, elements.shape[-1]).contiguous()
        return FP4Operand(elements, swizzle_scales(byte.reshape(len(elements), -1).view(torch.float8_e8m0fnu)))
    assert isinstance(packed, MXFP4Tensor)
    elements = packed.codes.reshape(-1, packed.codes.shape[-1]).view(torch.float4_e2m1fn_x2)
    byte = packed.scale.reshape(len(elements), -1)
    if recipe == "mxfp4":
        return FP4Operand(elements, swizzle_scales(byte.view(torch.float8_e8m0fnu)))
    macro = None if packed.macro is None else packed.macro.reshape(len(elements), -1)
    name = quantization.choose_backend(byte, packed.scheme, "auto", family="dequantize", dtype=torch.bfloat16)
    convert = triton_kernels.nvfp4_scales if name == "triton" else nvfp4_scales
    return FP4Operand(elements, *convert(byte, macro, by_rows))


def _as_mxfp8(packed: MXFP4Tensor) -> MXFP8Rows:
    """Return codes with mantissas up to 1.5, if any, in MXFP8: the values that they have with scales of 1."""
    unscaled = replace(packed, scale=torch.full_like(packed.scale, 127))
    return quantization.dequantize(unscaled, torch.bfloat16).to(torch.float8_e4m3fn), packed.scale


def nvfp4_scales(byte: torch.Tensor, macro: torch.Tensor | None, by_rows: bool) -> tuple[torch.Tensor, ...]:
    """Return swizzled scales, factors, and how many do not fit, of ``byte [R, C]`` and factors ``macro``, or `None`."""
    counts = byte.to(torch.int32).masked_fill(byte == E8M0_NAN, 0)
    top = counts.amax(dim=1, keepdim=True) if by_rows else counts.amax().reshape(1, 1)
    # The largest scale gets into the top binade, 256 to 448. Factors are normal, as are their reciprocals.
    factor = decode_e8m0((top - 8).clamp(min=1))
    scale = block_scales(byte, macro)
    stored = (scale / factor).to(torch.float8_e4m3fn)
    # Byte 0 is a block of zeros, or of numbers that are none in the products of GPUs.
    misfits = ((stored.float() * factor != scale) & (byte != 0) & (byte != E8M0_NAN)).sum(dtype=torch.int32)
    per_16 = stored.view(torch.uint8).repeat_interleave(2, dim=1).view(torch.float8_e4m3fn)
    return swizzle_scales(per_16), factor, misfits


def fit(a: FP4Operand, b: FP4Operand) -> bool:
    """Whether all scales of both are right. Under ``nvfp4`` this waits for the device."""
    return a.misfits is None or int(a.misfits + b.misfits) == 0


def fp4_product(a: FP4Operand, b: FP4Operand, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return ``a [M, K] b[N, K]^T`` in ``dtype``; the factor of ``b`` is one number."""
    if a.factor is None:
        blocks = ScalingType.BlockWise1x32
        scales = a.scale, blocks, b.scale, blocks, _SWIZZLED, _SWIZZLED
        return F.scaled_mm(a.elements, b.elements.t(), *scales, output_dtype=dtype)
    recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    swizzles = [_SWIZZLED, _PLAIN]
    by_rows = len(a.factor) > 1
    of_a = torch.ones_like(b.factor) if by_rows else a.factor
    scales = [a.scale, of_a.reshape(1)], recipe, [b.scale, b.factor.reshape(1)], recipe, swizzles, swizzles
    out = F.scaled_mm(a.elements, b.elements.t(), *scales, output_dtype=dtype)
    return out.mul_(a.factor) if by_rows else out


def unsupported_operands(x: torch.Tensor, shape: Sequence[int]) -> str | None:
    """Why an input ``[..., K]`` and a weight of ``shape`` (N, K) are not multiplied in FP4; `None` where they are."""
    if not quantization.has_plain_memory(x) or shape[1] % BLOCK_SIZE or shape[0] % 16:
        return f"a weight of {shape[0]} x {shape[1]}, and FP4 products need N % 16 = 0 and K % 32 = 0"
    if x.shape[:-1].numel() <= triton_kernels.MOST_DECODED_ROWS:
        return f"{x.shape[:-1].numel()} rows are too few"
    if quantization.is_captured(x):
        return "the range of scales cannot be looked at in a CUDA graph"
    return None


@functools.lru_cache(maxsize=64)
@torch.no_grad()
def problem(recipe: str, device: torch.device) -> str | None:
    """Why a recipe, which PyTorch may lack, cannot be used on a device; `None` where a small product is right."""
    generator = torch.Generator().manual_seed(0)
    x = _example(130, generator)
    weight = _example(48, generator)
    options: dict[str, Any] = {}
    if recipe != "mxfp4":
        search = "block_mantissas_fp8" if recipe == "mxfp8" else "block_mantissas"
        options = {"macro_block": 128, "macro_search": search}
    right = quantize(weight, **options)
    right_values = right.dequantize(torch.float64)
    left: MXFP4Tensor | MXFP8Rows
    if recipe == "mxfp8":
        elements, byte = quantize_mxfp8(x)
        left_values = dequantize_mxfp8(elements, byte, torch.float64)
        left = (elements.to(device), byte.to(device))
    else:
        codes = quantize(x, **options)
        left_values = codes.dequantize(torch.float64)
        left = codes.map(lambda part: part.to(device))
    right = right.map(lambda part: part.to(device))
    try:
        out = fp4_product(to_fp4(left, recipe), to_fp4(right, recipe)).cpu().double()
    except Exception as error:  # builds and drivers fail in every way, and other products do not
        return f"{recipe} products fail: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    error_bound = 2**-7 * (left_values.abs() @ right_values.abs().t())
    if ((out - left_values @ right_values.t()).abs() > error_bound).any():
        return f"{recipe} products are wrong on {device}; please report `hf-mxfp4 doctor --json`"
    return None


def _example(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Return a matrix on the CPU whose blocks have different magnitudes."""
    exponents = torch.randint(-3, 4, (rows, 3, 1), generator=generator, device="cpu")
    x = torch.randn(rows, 3, 32, generator=generator, device="cpu") * exponents.exp2()
    return x.flatten(1)
