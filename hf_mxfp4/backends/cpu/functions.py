# SPDX-License-Identifier: Apache-2.0
"""Calls of the fused CPU functions on torch tensors."""

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from ... import numerics
from ..._logging import get_logger
from ...numerics import BLOCK_SIZE, MXFP4Tensor, QuantScheme, ScaleRule
from ...numerics.fallback import blocks_at_rate
from ...numerics.formats.e8m0 import CARRY
from .library import SchemeStruct, load


TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SEARCHES = {"static": 1, "dynamic": 2, "blockwise": 3}
_PARTS = ("codes", "scale", "macro", "residual_codes", "residual_scale")
#: Work, in elements of plain quantization, that is worth waking a thread for.
WORTH_A_THREAD = 1 << 19


def unsupported_reason(dtype: torch.dtype, scheme: QuantScheme) -> str | None:
    """Why the fused functions cannot quantize CPU tensors of this dtype under this scheme; `None` when they can."""
    if dtype not in TYPES:
        return f"the fused CPU functions take float32, bfloat16 and float16, not {dtype}"
    if scheme.rounding != "nearest":
        return f"rounding={scheme.rounding!r} has no fused CPU function"
    if scheme.block_rows != 1:
        return f"block_rows={scheme.block_rows} has no fused CPU function"
    return library_problem()


@functools.cache
def library_problem() -> str | None:
    """Why the library cannot be used; `None` when it can."""
    library, reason = load()
    if library is None:
        return reason
    if not _agrees_with_the_reference():
        get_logger().warning(
            "the fused CPU functions were compiled wrongly and are not used, so the CPU runs eagerly; to compile them "
            "with another compiler, set CXX and delete %s",
            library._name,
        )
        return "the compiled functions disagree with the reference (compiler fault?)"
    return None


def fake_quantize(x: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """[`hf_mxfp4.numerics.apply_scheme`] along the last axis of a CPU tensor that is supported."""
    rows = in_memory(x)
    out = torch.empty_like(rows)
    if rows.numel():
        _over_rows("mxfp4_quantize", rows, scheme, out.data_ptr(), *[None] * 5)
    return out


def quantize(x: torch.Tensor, scheme: QuantScheme, axis: int) -> MXFP4Tensor:
    """[`hf_mxfp4.numerics.quantize`] of a CPU tensor that is supported; ``axis`` is not negative."""
    rows = in_memory(x.movedim(axis, -1))
    *leading, length = rows.shape
    parts = [
        None if size is None else torch.empty(*leading, size, dtype=torch.uint8) for size in part_sizes(scheme, length)
    ]
    if rows.numel():
        addresses = [None if part is None else part.data_ptr() for part in parts]
        _over_rows("mxfp4_quantize", rows, scheme, None, *addresses)
    return MXFP4Tensor(*parts, length=length, axis=axis, scheme=scheme, dtype=x.dtype)


def dequantize(tensor: MXFP4Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[`MXFP4Tensor.dequantize`] of CPU tensors; ``dtype`` is float32, bfloat16 or float16."""
    leading = tensor.codes.shape[:-1]
    parts = checked_parts(parts_of(tensor), leading, part_sizes(tensor.scheme, tensor.length))
    out = torch.empty(*leading, tensor.length, dtype=dtype)
    dequantize_into(out, parts, tensor.scheme)
    return out.movedim(-1, tensor.axis)


def dequantize_into(out: torch.Tensor, parts: Sequence[torch.Tensor | None], scheme: QuantScheme) -> None:
    """Write the values of [`checked_parts`] to a contiguous tensor ``[..., length]``."""
    if out.numel():
        _over_rows("mxfp4_dequantize", out, scheme, *[None if part is None else part.data_ptr() for part in parts])


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, detached, with contiguous elements in memory. Raises `RuntimeError` where its storage was freed."""
    contiguous, n_bytes = x.is_contiguous(), x.nbytes
    if n_bytes and not contiguous:
        n_bytes = (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))) * x.itemsize
    if n_bytes and n_bytes + x.storage_offset() * x.itemsize > x.untyped_storage().nbytes():
        raise RuntimeError(
            f"the memory of a tensor {list(x.shape)} was freed (FSDP frees parameters between passes); "
            "gather its values before it is quantized or multiplied"
        )
    if x.requires_grad:
        x = x.detach()
    if x.is_neg() or x._is_zerotensor():
        return x.clone(memory_format=torch.contiguous_format)
    return x if contiguous else x.contiguous()


def checked_parts(
    parts: Sequence[torch.Tensor | None], leading: Sequence[int], sizes: Sequence[int | None]
) -> list[torch.Tensor | None]:
    """Return the parts of a packed tensor as [`in_memory`] does, whose axes are those ``leading`` and one of a size of
    [`part_sizes`]. Raises `ValueError` for parts of other shapes and `RuntimeError` for one that is not on the CPU."""
    found: list[torch.Tensor | None] = []
    rows = math.prod(leading)
    for name, part, size in zip(_PARTS, parts, sizes, strict=True):
        if part is None and size is None:
            found.append(None)
            continue
        if part is not None and not part.is_cpu:
            raise RuntimeError(f"the packed weight is on {part.device}, its input on cpu; move one of them")
        if part is None or size is None or part.dtype is not torch.uint8 or part.shape != (*leading, size):
            actual = "missing" if part is None else f"{part.dtype} {list(part.shape)}"
            expected = "none" if size is None else f"torch.uint8 {[*leading, size]}"
            raise ValueError(f"{name} of a packed tensor is {actual}; its scheme and length need {expected}")
        whole = part.is_contiguous() and part.untyped_storage().nbytes() == rows * size
        found.append(part if whole else in_memory(part))
    return found


@functools.lru_cache(maxsize=256)
def part_sizes(scheme: QuantScheme, length: int) -> tuple[int | None, ...]:
    """Bytes of each part of a packed row; `None` for parts that the scheme does not have."""
    n_bytes, n_blocks = (length + 1) // 2, -(-length // BLOCK_SIZE)
    macro = None if scheme.macro_block is None else -(-n_blocks // _macro_blocks(scheme, length))
    return n_bytes, n_blocks, macro, *((None, None) if scheme.outlier_fallback is None else (n_bytes, n_blocks))


def parts_of(tensor: MXFP4Tensor) -> tuple[torch.Tensor | None, ...]:
    """The parts of a packed tensor in the order of the library's arguments."""
    return tuple(getattr(tensor, name) for name in _PARTS)


def takes_rotation(x: torch.Tensor) -> bool:
    """Whether [`rotate`] takes a tensor of torch's own kind."""
    return x.is_cpu and x.dtype in TYPES and library_problem() is None


def rotate(x: torch.Tensor, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[`hf_mxfp4.numerics.rotate`] of a CPU tensor in float32, bfloat16 or float16 along its last axis, which ``size``
    (16, 32, 64 or 128) divides: computed in float32, rounded to ``dtype`` once. It is its own inverse."""
    if size not in numerics.ROTATION_SIZES or x.shape[-1] % size:
        raise ValueError(f"rows of {x.shape[-1]} elements cannot be rotated in blocks of {size}")
    rows = in_memory(x)
    out = torch.empty_like(rows, dtype=torch.float32)
    count, threads = rows.numel() // size, threads_for(rows.numel())
    load()[0].mxfp4_rotate(rows.data_ptr(), TYPES[x.dtype], out.data_ptr(), size, size**-0.5, count, threads)
    return out.to(dtype)


def _over_rows(name: str, rows: torch.Tensor, scheme: QuantScheme, *rest: Any) -> None:
    """Call a function of the library on all rows. The ``rest`` of its arguments ends with the addresses of values and
    of the tensors of an [`MXFP4Tensor`], `None` for those that are not asked for or not there."""
    length, size = rows.shape[-1], rows.numel()
    described, threads = ctypes.byref(description(scheme, length)), threads_for(size * _cost_per_element(scheme))
    getattr(load()[0], name)(rows.data_ptr(), TYPES[rows.dtype], length, described, size // length, threads, *rest)


def threads_for(cost: int) -> int:
    """All threads that torch computes with, or one for little work: OpenMP ends threads that it is not asked for."""
    return torch.get_num_threads() if cost > WORTH_A_THREAD else 1


def _cost_per_element(scheme: QuantScheme) -> int:
    """Roughly, elements of plain quantization that would take as long."""
    passes = 2 if scheme.outlier_fallback is not None else 1
    if scheme.macro_block is not None:
        passes += {"static": 0, "dynamic": 12, "blockwise": 8}[scheme.macro_search]
    return passes * (3 if scheme.scale_rule is ScaleRule.MSE else 1)


@functools.lru_cache(maxsize=256)
def description(scheme: QuantScheme, length: int) -> SchemeStruct:
    """A scheme for rows of this length as the library takes it."""
    rule, alpha, rate = scheme.scale_rule, scheme.outlier_fallback, scheme.fallback_rate
    return SchemeStruct(
        carry=CARRY[rule],
        clips=rule.clips,
        least_squares=rule is ScaleRule.MSE,
        search=0 if scheme.macro_block is None else _SEARCHES[scheme.macro_search],
        macro_blocks=_macro_blocks(scheme, length),
        fallback=alpha is not None,
        alpha=alpha or 0.0,
        fallback_blocks=0 if rate is None else blocks_at_rate(rate, -(-length // BLOCK_SIZE)),
    )


def _macro_blocks(scheme: QuantScheme, length: int) -> int:
    if scheme.macro_block == "row":
        return max(1, -(-length // BLOCK_SIZE))
    return 1 if scheme.macro_block is None else scheme.macro_block // BLOCK_SIZE


def _agrees_with_the_reference() -> bool:
    """A compiler that does not keep to the arithmetic as written must not go unnoticed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 300, generator=generator) * torch.exp2(torch.arange(-40.0, 40.0, 10.0))[:, None]
    searched = QuantScheme("mse", 128, "dynamic", 0.3), QuantScheme("even", 128, "blockwise")
    selective = QuantScheme("even", 128, "static", 1.0, fallback_rate=0.3)
    for scheme in (*searched, selective, QuantScheme()):
        for dtype in (torch.float32, torch.bfloat16):
            values = x.to(dtype)
            packed, expected = quantize(values, scheme, 1), numerics.quantize(values, **vars(scheme))
            if not torch.equal(fake_quantize(values, scheme), numerics.apply_scheme(values, scheme)):
                return False
            if not torch.equal(packed.codes, expected.codes) or not torch.equal(packed.scale, expected.scale):
                return False
            if not torch.equal(dequantize(packed, dtype), expected.dequantize(dtype)):
                return False
    x = x[:, :256]
    return all(torch.equal(rotate(x, size), numerics.rotate(x, size)) for size in numerics.ROTATION_SIZES)
