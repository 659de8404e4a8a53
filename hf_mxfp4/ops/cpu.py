# SPDX-License-Identifier: Apache-2.0
"""Calls of the C++ functions of [`mxfp4_kernels.cpu`] on torch tensors: quantization fused into one pass, with the
reference's bits, and products with packed weights, on the codes for few rows, as in decoding, and for more with panels
of dequantized values that stay in the cache."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from mxfp4_kernels import cpu as library

from .. import numerics
from .._logging import get_logger
from ..numerics import BLOCK_SIZE, PARTS, MXFP4Tensor, QuantScheme, ScaleRule, part_sizes


TYPES = library.TYPES
_SEARCHES = {"static": 1, "dynamic": 2, "block_mantissas": 3, "block_mantissas_fp8": 3}
_part_sizes = functools.lru_cache(maxsize=256)(part_sizes)
#: Multiplications that are worth waking a thread for.
_WORTH_A_THREAD = 1 << 17
#: Elements of a panel, and the least rows, on one thread and on several: torch's product with fewer is slow. oneDNN
#: computes some with fewer than 1024 on one thread whatever their number.
_PANEL = 1 << 20
_PANEL_ROWS = (512, 1024)


def unsupported_reason(dtype: torch.dtype, scheme: QuantScheme) -> str | None:
    """Return why the functions cannot quantize CPU tensors of this dtype under this scheme; `None` when they can."""
    if dtype not in TYPES:
        return f"the fused CPU functions take float32, bfloat16 and float16, not {dtype}"
    if scheme.rounding != "nearest":
        return f"rounding={scheme.rounding!r} has no fused CPU function"
    if scheme.block_rows != 1:
        return f"block_rows={scheme.block_rows} has no fused CPU function"
    return library_problem()


@functools.cache
def library_problem() -> str | None:
    """Return why the library cannot be used; `None` when it can."""
    logger = get_logger()
    loaded, reason = library.load()
    if loaded is None:
        logger.warning("CPU quantization runs eagerly, without the fused functions: %s", reason)
        return reason
    if not _agrees_with_the_reference() or not _multiplies_as_the_reference():
        logger.warning(
            "the fused CPU functions were compiled wrongly and are not used, so the CPU runs eagerly; to compile them "
            "with another compiler, set CXX and delete %s",
            loaded._name,
        )
        return "the compiled functions disagree with the reference (compiler fault?)"
    return None


# ---- quantization ---------------------------------------------------------------------------------------------------


def fake_quantize(x: torch.Tensor, scheme: QuantScheme, out: torch.Tensor | None = None) -> torch.Tensor:
    """[`hf_mxfp4.numerics.apply_scheme`] along the last axis of a CPU tensor that is supported, written to ``out`` if
    that is a contiguous tensor of its shape and dtype."""
    rows = library.in_memory(x)
    if out is None or out.dtype is not rows.dtype or out.shape != rows.shape or not out.is_contiguous():
        out = torch.empty_like(rows)
    if rows.numel():
        library.over_rows("mxfp4_quantize", rows, _description(scheme, rows.shape[-1]), out.data_ptr(), *[None] * 5)
    return out


def quantize(x: torch.Tensor, scheme: QuantScheme, axis: int, out: MXFP4Tensor | None = None) -> MXFP4Tensor:
    """[`hf_mxfp4.numerics.quantize`] of a CPU tensor that is supported, written to the tensors of ``out``, an earlier
    result for a tensor of this shape; ``axis`` is not negative."""
    rows = library.in_memory(x.movedim(axis, -1))
    *leading, length = rows.shape
    sizes = _part_sizes(scheme, length)
    if out is None:
        new = [None if size is None else rows.new_empty(*leading, size, dtype=torch.uint8) for size in sizes]
        fields = dict(zip(PARTS, new, strict=True))
        out = MXFP4Tensor(**fields, length=length, axis=axis, scheme=scheme, dtype=x.dtype)
    parts = library.checked_parts(out.parts, leading, sizes)
    if rows.numel():
        library.over_rows("mxfp4_quantize", rows, _description(scheme, length), None, *map(library.address, parts))
    return out


def dequantize(tensor: MXFP4Tensor, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """[`MXFP4Tensor.dequantize`] of CPU tensors, written to ``out`` if that is an earlier result; ``dtype`` is float32,
    bfloat16 or float16."""
    leading = tensor.codes.shape[:-1]
    if out is None or tensor.axis != len(leading):
        out = tensor.codes.new_empty(*leading, tensor.length, dtype=dtype)
    parts = library.checked_parts(tensor.parts, leading, _part_sizes(tensor.scheme, tensor.length))
    _dequantize_into(out, parts, tensor.scheme)
    return out if tensor.axis == len(leading) else out.movedim(-1, tensor.axis)


def _dequantize_into(out: torch.Tensor, parts: Sequence[torch.Tensor | None], scheme: QuantScheme) -> None:
    if out.numel():
        library.over_rows("mxfp4_dequantize", out, _description(scheme, out.shape[-1]), *map(library.address, parts))


def dither(rows: torch.Tensor, scheme: QuantScheme | None, half_cell: int, attempts: int, seed: int) -> int:
    """Move contiguous float32 rows ``[N, K]`` on the CPU in place, as `hf_mxfp4.prepare` defines it, under a supported
    scheme or, with `None`, without one; return how many weights other than zeros stayed where they were."""
    stayed = ctypes.c_int64(0)
    if rows.numel():
        how = library.DitherStruct(half_cell=half_cell, attempts=attempts, seed=seed)
        described, cost = (None, 1) if scheme is None else _description(scheme, rows.shape[-1])
        threads = library.threads_for(4 * cost * rows.numel())
        function = library.load()[0].mxfp4_dither
        length = rows.shape[-1]
        function(rows.data_ptr(), length, described, len(rows), threads, ctypes.byref(how), ctypes.byref(stayed))
    return stayed.value


@functools.lru_cache(maxsize=256)
def _description(scheme: QuantScheme, length: int) -> tuple[Any, int]:
    """Return a pointer to a scheme for rows of this length as the library takes it, and roughly how many elements of
    plain quantization take as long as one under this scheme."""
    rule = scheme.scale_rule
    alpha = scheme.outlier_fallback
    described = library.SchemeStruct(
        carry=rule.carry,
        clips=rule.clips,
        least_squares=rule.least_squares,
        search=0 if scheme.macro_block is None else _SEARCHES[scheme.macro_search],
        mantissas=scheme.mantissas,
        macro_blocks=_macro_blocks(scheme, length),
        fallback=alpha is not None,
        alpha=alpha or 0.0,
    )
    passes = 2 if alpha is not None else 1
    if scheme.macro_block is not None:
        passes += {"static": 0, "dynamic": 12}.get(scheme.macro_search, 2 * scheme.mantissas)
    return ctypes.pointer(described), passes * (3 if rule.least_squares else 1)


def _macro_blocks(scheme: QuantScheme, length: int) -> int:
    if scheme.macro_block == "row":
        return max(1, -(-length // BLOCK_SIZE))
    return 1 if scheme.macro_block is None else int(scheme.macro_block) // BLOCK_SIZE


def _agrees_with_the_reference() -> bool:
    """Return whether the compiler kept to the arithmetic as written."""
    generator = torch.Generator().manual_seed(0)
    like = {"dtype": torch.float32, "device": "cpu"}  # whatever the caller's defaults are
    x = torch.randn(8, 300, generator=generator, **like) * torch.exp2(torch.arange(-40, 40, 10, **like))[:, None]
    searched = QuantScheme(ScaleRule.MSE, 128, "dynamic", 0.3), QuantScheme(ScaleRule.EVEN, 128, "block_mantissas")
    for scheme in (*searched, QuantScheme(ScaleRule.EVEN, 128, "static", 1.0), QuantScheme()):
        for dtype in TYPES:
            largest = torch.finfo(dtype).max
            values = x.clamp(-largest, largest).to(dtype)
            packed = quantize(values, scheme, 1)
            expected = numerics.quantize(values, **vars(scheme))
            if not torch.equal(fake_quantize(values, scheme), numerics.apply_scheme(values, scheme)):
                return False
            if not torch.equal(packed.codes, expected.codes) or not torch.equal(packed.scale, expected.scale):
                return False
            if not torch.equal(dequantize(packed, dtype), expected.dequantize(dtype)):
                return False
    x = x[:, :256]
    return all(torch.equal(library.rotate(x, size), numerics.rotate(x, size)) for size in numerics.ROTATION_SIZES)


def _multiplies_as_the_reference() -> bool:
    """Return whether products on codes, of whole numbers and so exact in every order of sums, are right."""
    generator = torch.Generator().manual_seed(0)
    like = {"dtype": torch.float32, "device": "cpu"}
    x = torch.randint(-2, 3, (6, 300), generator=generator, **like)
    weights = torch.randint(-4, 5, (3, 33, 300), generator=generator, **like)
    ends = torch.tensor([1, 3, 6], dtype=torch.int32, device="cpu")  # tiles have 1, 2 and 4 rows
    for scheme in (QuantScheme(), QuantScheme(ScaleRule.EVEN, 128, "block_mantissas", 1.0)):
        weight = numerics.quantize(weights, **vars(scheme))
        values = weight.dequantize(torch.float64).mT
        expected = torch.cat([x[:1].double() @ values[0], x[1:3].double() @ values[1], x[3:].double() @ values[2]])
        for dtype in TYPES:
            if not torch.equal(product(x.to(dtype), weight, ends=ends), expected.to(dtype)):
                return False
    return True


# ---- products with packed weights -----------------------------------------------------------------------------------


@functools.cache
def most_rows() -> int:
    """Return up to how many rows products are computed on the codes: beyond, panels are faster on this processor."""
    return library.load()[0].mxfp4_product_rows()


class PackedProduct:
    """Multiply rows of one dtype with packed weights of one shape and scheme, on the CPU and without gradients.

    Up to [`most_rows`] rows, and rows of experts, are multiplied with the codes: sums are in float32, of exact products
    up to the rounding of a macro factor, and rounded once, the same whatever the number of threads. For more rows,
    ``Q(W)`` is first rounded to the dtype of ``x``, in panels.

    Args:
        n: rows of a weight.
        k: its columns.
        scheme: what weights are quantized with.
        dtype: of inputs, biases and outputs: float32, bfloat16 or float16.
        n_experts: experts of a weight ``[E, N, K]``; `None` for a weight ``[N, K]``.
    """

    def __init__(self, n: int, k: int, scheme: QuantScheme, dtype: torch.dtype, n_experts: int | None = None):
        self.n = n
        self.k = k
        self.scheme = scheme
        self._function = library.load()[0].mxfp4_product
        self._arguments = library.ProductStruct(
            type=TYPES[dtype],
            in_features=k,
            out_features=n,
            weights=_description(scheme, k)[0],
            n_experts=n_experts or 1,
            threads=1,
        )

    def __call__(
        self,
        x: torch.Tensor,
        packed: Sequence[torch.Tensor | None],
        bias: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``[..., N]``. Shapes, dtypes and devices of arguments must be right, and those other than ``x``
        contiguous; they are not checked.

        Args:
            x: ``[..., K]``; of experts ``[S, K]``, rows sorted by expert.
            packed: the parts of a packed weight, in the order of [`PARTS`].
            bias: ``[N]`` or ``[E, N]``, or `None`.
            ends: int32 ``[E]``, where the rows of each expert end.
        """
        if ends is None and x.numel() > most_rows() * self.k and self.n:
            return self._by_panels(x, packed, bias)
        out = x.new_empty((*x.shape[:-1], self.n))
        size = out.numel()
        if not size:
            return out
        # All that the library reads stays referenced until it returns.
        x = library.in_memory(x)
        codes, scale, macro, residual_codes, residual_scale = packed
        arguments = library.ProductStruct.from_buffer_copy(self._arguments)
        arguments.x = x.data_ptr()
        arguments.y = out.data_ptr()
        arguments.n_rows = size // self.n
        arguments.codes = codes.data_ptr()
        arguments.scale = scale.data_ptr()
        if macro is not None:
            arguments.macro = macro.data_ptr()
        if residual_codes is not None:
            arguments.residual_codes = residual_codes.data_ptr()
            arguments.residual_scale = residual_scale.data_ptr()
        if bias is not None:
            arguments.bias = bias.data_ptr()
        if ends is not None:
            arguments.ends = ends.data_ptr()
        if size * self.k >= 2 * _WORTH_A_THREAD:
            arguments.threads = torch.get_num_threads()
        self._function(ctypes.byref(arguments))
        return out

    def _by_panels(
        self, x: torch.Tensor, packed: Sequence[torch.Tensor | None], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return a product with the dequantized values of some rows of the weight after the other, in memory that is
        used again: fresh memory as large as the weight costs more than to fill it."""
        least = _PANEL_ROWS[torch.get_num_threads() > 1]
        rows = min(self.n, max(least, _PANEL // max(1, self.k)))
        panel = x.new_empty(rows, self.k)
        out = None
        if rows < self.n:
            out = x.new_empty(*x.shape[:-1], self.n)
        for start in range(0, self.n, rows):
            stop = min(start + rows, self.n)
            some = panel[: stop - start]
            _dequantize_into(some, [None if part is None else part[start:stop] for part in packed], self.scheme)
            values = F.linear(x, some, None if bias is None else bias[start:stop])
            if out is None:
                return values
            out[..., start:stop] = values
        return out


_product_of = functools.lru_cache(maxsize=256)(PackedProduct)


def product(
    x: torch.Tensor, weight: MXFP4Tensor, bias: torch.Tensor | None = None, ends: torch.Tensor | None = None
) -> torch.Tensor:
    """Check tensors and multiply them as [`PackedProduct`] does.

    Args:
        x: ``[..., K]`` float32, bfloat16 or float16; of experts ``[S, K]``, rows sorted by expert.
        weight: ``[N, K]`` or ``[experts, N, K]``, quantized along its last axis.
        bias: ``[N]`` or ``[experts, N]`` in the dtype of ``x``.
        ends: int32 ``[experts]`` on the CPU, where the rows of each end.

    Returns:
        ``[..., N]`` in the dtype of ``x``.

    Raises:
        ValueError: ``x``, the weight and the bias do not fit together.
        RuntimeError: one of them is not on the CPU, or its memory was freed.
    """
    n = weight.codes.shape[-2]
    k = weight.length
    leading: tuple[int, ...] = (n,)
    n_experts = None
    if ends is not None:
        ends = library.checked_ends(ends, x.shape[0])
        n_experts = len(ends)
        leading = (n_experts, n)
    library.check_product(x, bias, k, leading)
    packed = library.checked_parts(weight.parts, leading, _part_sizes(weight.scheme, k))
    bias = None if bias is None else library.in_memory(bias)
    return _product_of(n, k, weight.scheme, x.dtype, n_experts)(x, packed, bias, ends)
