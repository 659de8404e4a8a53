# SPDX-License-Identifier: Apache-2.0
"""Products of MXFP4 codes as they are, on FP4 tensor cores, by `torch.nn.functional.scaled_mm`. Tested with a stand-in
for it alone: nothing here has run on hardware yet.

Two recipes of PyTorch 2.11 and later multiply two matrices of E2M1 codes:

* ``mxfp4``: one E8M0 scale per 32 elements, the bytes of plain MXFP4. Compute capability 10.0 and 10.3.
* ``nvfp4``: one E4M3 scale per 16 elements and one float32 scale per tensor. A scale ``2**e * (1 + m/4)`` of 32
  elements is an E4M3 number for 16 binades of ``e``; it is written twice. Compute capability 10.0 and above.

Both need K to be a multiple of 32 and N of 16, and scales in tiles of 128 rows and 4 columns (`SWIZZLE_32_4_4`).
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

from ..backends import dispatch
from ..backends import triton as triton_kernels
from ..numerics import BLOCK_SIZE, MXFP4Tensor, QuantScheme, block_scales, decode_e8m0, quantize
from ..numerics.formats import E8M0_NAN


#: Hardware with NVFP4 products, and with those of MXFP4 too.
FP4_HARDWARE = ("sm_100", "sm_103", "sm_120", "sm_121")
_MXFP4_HARDWARE = ("sm_100", "sm_103")
#: The largest block scale of a row or tensor is in the top binade of E4M3, 256 to 448.
_TOP_EXPONENT = 8
#: Bytes of the E8M0 numbers whose reciprocals are normal as well.
_NORMAL = 1, 253
_SWIZZLED, _PLAIN = SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE


class FP4Operand(NamedTuple):
    """A matrix ``[R, C]`` of codes as `scaled_mm` takes it.

    Attributes:
        elements: float4_e2m1fn_x2 ``[R, C/2]``, the memory of the codes.
        scale: flat, swizzled: float8_e8m0fnu, one for 32 elements, or float8_e4m3fn, one for 16.
        factor: powers of two in float32 that scales are multiplied by: ``[1, 1]``, or ``[R, 1]``; `None` under
            ``mxfp4``.
        misfits: how many scales of blocks are no E4M3 numbers, an int32 scalar on the device; `None` under ``mxfp4``.
    """

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


def to_fp4(packed: MXFP4Tensor, recipe: str, by_rows: bool = False) -> FP4Operand:
    """Codes and scales, without residuals and macro factors, as an operand of ``recipe``, the same values; ``by_rows``
    with a factor for each row instead of one."""
    elements = packed.codes.reshape(-1, packed.codes.shape[-1]).view(torch.float4_e2m1fn_x2)
    byte = packed.scale.reshape(len(elements), -1)
    if recipe == "mxfp4":
        return FP4Operand(elements, swizzle_scales(byte.view(torch.float8_e8m0fnu)))
    macro = None if packed.macro is None else packed.macro.reshape(len(elements), -1)
    name = dispatch.choose_backend(byte, packed.scheme, "auto", family="dequantize", dtype=torch.bfloat16)
    convert = triton_kernels.nvfp4_scales if name == "triton" else _nvfp4_scales
    return FP4Operand(elements, *convert(byte, macro, by_rows))


def _nvfp4_scales(
    byte: torch.Tensor, macro: torch.Tensor | None, by_rows: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Swizzled scales, factors, and how many do not fit."""
    counts = byte.to(torch.int32).masked_fill(byte == E8M0_NAN, 0)
    top = counts.amax(dim=1, keepdim=True) if by_rows else counts.amax().reshape(1, 1)
    factor = decode_e8m0((top - _TOP_EXPONENT).clamp(*_NORMAL))
    scale = block_scales(byte, macro)
    stored = (scale / factor).to(torch.float8_e4m3fn)
    # Byte 0 is a block of zeros, or of numbers that are none in the products of GPUs.
    misfits = ((stored.float() * factor != scale) & (byte != 0) & (byte != E8M0_NAN)).sum(dtype=torch.int32)
    per_16 = stored.view(torch.uint8).repeat_interleave(2, dim=1).view(torch.float8_e4m3fn)
    return swizzle_scales(per_16), factor, misfits


def fit(a: FP4Operand, b: FP4Operand) -> bool:
    """Whether both operands are their codes to the bit. Under ``nvfp4`` this waits for the device."""
    return a.misfits is None or int(a.misfits + b.misfits) == 0


def fp4_product(a: FP4Operand, b: FP4Operand, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``a [M, K] b[N, K]^T`` in ``dtype``; the factor of ``b`` is one number."""
    if a.factor is None:
        blocks = ScalingType.BlockWise1x32
        scales = a.scale, blocks, b.scale, blocks, _SWIZZLED, _SWIZZLED
        return F.scaled_mm(a.elements, b.elements.t(), *scales, output_dtype=dtype)
    recipe, swizzles = [ScalingType.BlockWise1x16, ScalingType.TensorWise], [_SWIZZLED, _PLAIN]
    by_rows = len(a.factor) > 1
    of_a = torch.ones_like(b.factor) if by_rows else a.factor
    scales = [a.scale, of_a.reshape(1)], recipe, [b.scale, b.factor.reshape(1)], recipe, swizzles, swizzles
    out = F.scaled_mm(a.elements, b.elements.t(), *scales, output_dtype=dtype)
    return out.mul_(a.factor) if by_rows else out


def choose_recipe(
    x: torch.Tensor, weight: torch.Tensor, hardware: str, schemes: tuple[QuantScheme, QuantScheme]
) -> tuple[str | None, str]:
    """The recipe for an input ``[..., K]`` and a weight ``[N, K]`` quantized by ``schemes``; `None`, and why, where
    there is none."""
    (n, k), rows = weight.shape, x.shape[:-1].numel()
    if k % BLOCK_SIZE or n % 16:
        return None, f"FP4 products need in_features % 32 = 0 and out_features % 16 = 0, and a weight is {n} x {k}"
    if rows <= triton_kernels.MOST_DECODED_ROWS:
        return None, f"{rows} rows are too few for an FP4 product"
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None, "a CUDA graph is captured, and the range of scales cannot be looked at"
    is_plain = not any(scheme.mantissas for scheme in schemes)
    if is_plain and hardware in _MXFP4_HARDWARE and problem("mxfp4", x.device) is None:
        return "mxfp4", ""
    reason = problem("nvfp4", x.device)
    return ("nvfp4", "") if reason is None else (None, reason)


@functools.lru_cache(maxsize=64)
@torch.no_grad()
def problem(recipe: str, device: torch.device) -> str | None:
    """Why a recipe cannot be used on a device, found once by a small product; `None` where that is right. PyTorch may
    have been built without it."""
    generator = torch.Generator().manual_seed(0)
    mantissas = {} if recipe == "mxfp4" else {"macro_block": 128, "macro_search": "block_mantissas"}
    codes, values = [], []
    for rows in (130, 48):
        x = torch.randn(rows, 3, 32, generator=generator, device="cpu")
        x *= torch.randint(-3, 4, (rows, 3, 1), generator=generator, device="cpu").exp2()
        packed = quantize(x.flatten(1), **mantissas)
        codes.append(packed.map(lambda part: part.to(device)))
        values.append(packed.dequantize(torch.float64))
    try:
        found = fp4_product(*(to_fp4(each, recipe) for each in codes)).cpu().double()
    except Exception as error:  # builds and drivers fail in every way, and other products do not
        return f"{recipe} products fail: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    error = (found - values[0] @ values[1].t()).abs()
    is_right = bool((error <= 2**-7 * (values[0].abs() @ values[1].abs().t())).all())
    return None if is_right else f"{recipe} products are wrong on {device}; please report this with `hf-mxfp4 env`"
