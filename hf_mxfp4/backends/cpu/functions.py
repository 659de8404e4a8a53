# SPDX-License-Identifier: Apache-2.0
"""Calls of the fused CPU functions on torch tensors."""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ... import numerics
from ..._logging import get_logger
from ...numerics import BLOCK_SIZE, MXFP4Tensor, QuantScheme, ScaleRule
from ...numerics.fallback import blocks_at_rate
from .library import SchemeStruct, load
from .threads import WORTH_A_THREAD, in_threads


#: Added to the bits of a block's maximum so that the exponent rounds up where the rule says; see `scale_from_amax`.
_CARRIES = {ScaleRule.RCEIL: 0x3FFFFF, ScaleRule.FLOOR: 0, ScaleRule.EVEN: 0x200000, ScaleRule.MSE: 0}
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SEARCHES = {"static": 1, "dynamic": 2, "blockwise": 3}
#: Elements of the rows whose error sums are added up before the next: the sums depend on it, not on the threads.
_PORTION = 1 << 18
_HISTOGRAM_BINS = 64


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
        get_logger().warning("the fused CPU functions were compiled wrongly here and are not used; CPU runs eagerly")
        return "the compiled functions disagree with the reference (compiler fault?)"
    return None


def fake_quantize(x: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """[`hf_mxfp4.numerics.apply_scheme`] along the last axis of a CPU tensor that is supported."""
    rows = x.detach().contiguous()
    out = torch.empty_like(rows)
    if rows.numel():
        _over_rows("mxfp4_quantize", rows, scheme, out.data_ptr(), *[None] * 5)
    return out


def quantizer(dtype: torch.dtype, scheme: QuantScheme, length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """[`fake_quantize`] of tensors of this dtype with this last axis, its constant arguments looked up once: those of a
    single token take longer than its quantization. Not of tensors that require gradients."""
    function, kind, described = load()[0].mxfp4_quantize, TYPES[dtype], ctypes.byref(description(scheme, length))
    one_thread, nothing = WORTH_A_THREAD // max(1, _cost_per_element(scheme)), [None] * 5

    def run(x: torch.Tensor) -> torch.Tensor:
        size = x.numel()
        if not 0 < size <= one_thread:
            return fake_quantize(x, scheme)
        rows = x.contiguous()
        out = torch.empty_like(rows)
        n_rows = size // length
        function(rows.data_ptr(), kind, length, described, 0, n_rows, out.data_ptr(), *nothing)
        return out

    return run


def quantize(x: torch.Tensor, scheme: QuantScheme, axis: int) -> MXFP4Tensor:
    """[`hf_mxfp4.numerics.quantize`] of a CPU tensor that is supported; ``axis`` is not negative."""
    rows = x.detach().movedim(axis, -1).contiguous()
    length = rows.shape[-1]

    def empty(size: int) -> torch.Tensor:
        return torch.empty(*rows.shape[:-1], size, dtype=torch.uint8)

    n_blocks, n_bytes = -(-length // BLOCK_SIZE), (length + 1) // 2
    n_macro = -(-n_blocks // _macro_blocks(scheme, length))
    fallback = scheme.outlier_fallback is not None
    outputs = {
        "codes": empty(n_bytes),
        "scale": empty(n_blocks),
        "macro": empty(n_macro) if scheme.macro_block is not None else None,
        "residual_codes": empty(n_bytes) if fallback else None,
        "residual_scale": empty(n_blocks) if fallback else None,
    }
    if rows.numel():
        _over_rows("mxfp4_quantize", rows, scheme, None, *map(_address, outputs.values()))
    return MXFP4Tensor(**outputs, length=length, axis=axis, scheme=scheme, dtype=x.dtype)


def dequantize(tensor: MXFP4Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[`MXFP4Tensor.dequantize`] of CPU tensors; ``dtype`` is float32, bfloat16 or float16."""
    out = torch.empty(*tensor.codes.shape[:-1], tensor.length, dtype=dtype)
    if out.numel():
        held, places = addresses_of(parts_of(tensor))
        _over_rows("mxfp4_dequantize", out, tensor.scheme, *places)
    return out.movedim(-1, tensor.axis)


def addresses_of(
    parts: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor | None], list[int | None]]:
    """The parts of a packed tensor, contiguous, and where they lie as long as somebody holds them. Raises
    `RuntimeError` for a tensor that is not in the memory of the CPU."""
    held: list[torch.Tensor | None] = []
    for part in parts:
        if part is not None and not part.is_cpu:
            raise RuntimeError(f"the packed weight is on {part.device}, its input on cpu; move one of them")
        held.append(None if part is None else part.contiguous())
    return held, [None if part is None else part.data_ptr() for part in held]


def parts_of(tensor: MXFP4Tensor) -> tuple[torch.Tensor | None, ...]:
    """The parts of a packed tensor in the order of the library's arguments."""
    return tensor.codes, tensor.scale, tensor.macro, tensor.residual_codes, tensor.residual_scale


@dataclass(frozen=True)
class ErrorSums:
    """Sums over a matrix ``x`` and its quantized values ``Q``, in float32 and added up in float64; see
    [`hf_mxfp4.numerics.decompose`] for the components and the deadzone, and statistics.cpp for the order of the fields.
    """

    energy: float
    scale_bias: float
    deadzone: float
    grid: float
    scale_dot_grid: float
    quantized_dot: float
    hidden_energy: float
    hidden_quantized: float
    hidden_dot: float
    deadzone_count: float
    zero_count: float
    blocks: float
    gamma_sum: float
    gamma_square_sum: float
    delta_sum: float
    delta_square_sum: float
    not_finite: float


def error_sums(x: torch.Tensor, scheme: QuantScheme) -> tuple[ErrorSums, list[int]]:
    """Return sums over the error of quantizing a CPU tensor along its last axis, which is supported, and the histogram
    of ``log2(s / s*)`` over its blocks in 64 bins of [-2, 2]. Independent of the number of threads."""
    rows = x.detach().contiguous()
    if rows.numel() == 0:
        return ErrorSums(*[0.0] * len(fields(ErrorSums))), [0] * _HISTOGRAM_BINS
    portion = max(1, _PORTION // rows.shape[-1])
    starts = range(0, rows.numel() // rows.shape[-1], portion)
    sums = torch.zeros(len(starts), len(fields(ErrorSums)), dtype=torch.float64)
    bins = torch.zeros(len(starts), _HISTOGRAM_BINS, dtype=torch.int64)

    arguments = _common(rows, scheme)

    def add_portions(first: int, last: int) -> None:
        for index in range(first, last):
            start, stop = starts[index], min(starts[index] + portion, starts.stop)
            load()[0].mxfp4_statistics(*arguments, start, stop, sums[index].data_ptr(), bins[index].data_ptr())

    in_threads(add_portions, count=len(starts), cost=4 * _cost(rows, scheme))
    return ErrorSums(*map(math.fsum, sums.t().tolist())), bins.sum(dim=0).tolist()


def _over_rows(name: str, rows: torch.Tensor, scheme: QuantScheme, *rest: Any) -> None:
    """Call a function of the library on portions of rows; the ``rest`` of its arguments ends with the addresses of
    values and of the tensors of an [`MXFP4Tensor`], `None` for those that are not asked for or not there."""
    function, arguments = getattr(load()[0], name), _common(rows, scheme)
    in_threads(
        lambda first, last: function(*arguments, first, last, *rest),
        count=rows.numel() // rows.shape[-1],
        cost=_cost(rows, scheme),
    )


def _cost(rows: torch.Tensor, scheme: QuantScheme) -> int:
    """Roughly, elements of plain quantization that would take as long."""
    return rows.numel() * _cost_per_element(scheme)


def _cost_per_element(scheme: QuantScheme) -> int:
    passes = 2 if scheme.outlier_fallback is not None else 1
    if scheme.macro_block is not None:
        passes += {"static": 0, "dynamic": 12, "blockwise": 8}[scheme.macro_search]
    return passes * (3 if scheme.scale_rule is ScaleRule.MSE else 1)


def _common(rows: torch.Tensor, scheme: QuantScheme) -> tuple:
    """The arguments that all functions begin with: the matrix, its type and length, and the scheme."""
    return rows.data_ptr(), TYPES[rows.dtype], rows.shape[-1], ctypes.byref(description(scheme, rows.shape[-1]))


@functools.lru_cache(maxsize=256)
def description(scheme: QuantScheme, length: int) -> SchemeStruct:
    """A scheme for rows of this length as the library takes it."""
    rule, alpha, rate = scheme.scale_rule, scheme.outlier_fallback, scheme.fallback_rate
    return SchemeStruct(
        carry=_CARRIES[rule],
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


def _address(tensor: torch.Tensor | None) -> int | None:
    """Where the elements of a tensor lie."""
    return None if tensor is None else tensor.data_ptr()


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
    return True
