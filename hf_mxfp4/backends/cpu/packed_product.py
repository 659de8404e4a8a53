# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights on the CPU: on the codes for few rows, as in decoding, and for more with panels of
dequantized values that stay in the cache."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...numerics import MXFP4Tensor, QuantScheme
from .functions import (
    TYPES,
    checked_parts,
    dequantize_into,
    description,
    in_memory,
    part_sizes,
    parts_of,
)
from .library import ProductStruct, load


#: Multiplications that are worth waking a thread for.
_WORTH_A_THREAD = 1 << 17
#: Elements of a panel, and the least rows, on one thread and on several: torch's product with fewer is slow. oneDNN
#: computes some with fewer than 1024 on one thread whatever their number.
_PANEL, _PANEL_ROWS = 1 << 20, (512, 1024)


@functools.lru_cache(maxsize=256)
def _prepared(
    scheme: QuantScheme, in_features: int, out_features: int, dtype: torch.dtype
) -> tuple[ProductStruct, tuple[int | None, ...], Callable[[Any], None]]:
    """What products with weights of one scheme and shape have in common: arguments, sizes of parts, the function."""
    arguments = ProductStruct(
        type=TYPES[dtype],
        in_features=in_features,
        out_features=out_features,
        weights=ctypes.pointer(description(scheme, in_features)),
        n_experts=1,
        threads=1,
    )
    return arguments, part_sizes(scheme, in_features), load()[0].mxfp4_product


def _on_codes(
    x: torch.Tensor,
    weight: MXFP4Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """[`product`], or [`grouped_product`] with the ``ends`` of rows."""
    in_features, out_features = weight.length, weight.codes.shape[-2]
    common, sizes, function = _prepared(weight.scheme, in_features, out_features, x.dtype)
    leading = (out_features,) if ends is None else (len(ends), out_features)
    _check(x, bias, x.dtype, in_features, leading)
    parts = checked_parts(parts_of(weight), leading, sizes)
    out = x.new_empty((*x.shape[:-1], out_features))
    size = out.numel()
    if not size:
        return out
    # All that the library reads stays referenced until it returns.
    x, n_rows = in_memory(x), size // out_features
    arguments = ProductStruct.from_buffer_copy(common)
    arguments.x, arguments.y, arguments.n_rows = x.data_ptr(), out.data_ptr(), n_rows
    arguments.codes, arguments.scale, arguments.macro = map(_address, parts[:3])
    if parts[3] is not None:
        arguments.residual_codes, arguments.residual_scale = map(_address, parts[3:])
    if bias is not None:
        bias = in_memory(bias)
        arguments.bias = bias.data_ptr()
    if ends is not None:
        ends = _checked_ends(ends, n_rows)
        arguments.ends, arguments.n_experts = ends.data_ptr(), len(ends)
    if size * in_features >= 2 * _WORTH_A_THREAD:
        arguments.threads = torch.get_num_threads()
    function(ctypes.byref(arguments))
    return out


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def product(
    x: torch.Tensor,
    weight: MXFP4Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x Q(W)^T + b`` of CPU tensors, without gradients.

    Of up to [`most_rows`] rows sums are in float32, of exact products up to the rounding of a macro factor, and rounded
    once, the same whatever the number of threads; of more, ``Q(W)`` is rounded to the dtype of ``x`` first, in panels.

    Args:
        x: ``[..., K]`` float32, bfloat16 or float16.
        weight: ``[N, K]``, quantized along its last axis.
        bias: ``[N]`` in the dtype of ``x``.

    Returns:
        ``[..., N]`` in the dtype of ``x``.

    Raises:
        ValueError: ``x``, the weight and the bias do not fit together.
        RuntimeError: one of them is not on the CPU, or its memory was freed.
    """
    if x.shape[:-1].numel() > most_rows() and weight.codes.shape[0]:
        return _by_panels(x, weight, bias)
    return _on_codes(x, weight, bias)


def grouped_product(
    x: torch.Tensor,
    weight: MXFP4Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[`product`] of each expert's rows with its own weight, all on the codes.

    Args:
        x: ``[S, K]``, rows sorted by expert.
        weight: ``[experts, N, K]``, quantized along its last axis.
        ends: int32 ``[experts]`` on the CPU, where the rows of each end.
        bias: ``[experts, N]`` in the dtype of ``x``.

    Returns:
        ``[S, N]`` in the dtype of ``x``.
    """
    return _on_codes(x, weight, bias, ends)


@functools.cache
def most_rows() -> int:
    """Return up to how many rows products are computed on the codes: beyond, panels are faster on this processor."""
    return load()[0].mxfp4_product_rows()


def _check(
    x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, in_features: int, leading: tuple[int, ...]
) -> None:
    """Raise the errors of [`product`] for ``x`` and the bias; ``leading`` is the shape of the bias."""
    if x.shape[-1] != in_features:
        raise ValueError(f"an input of {x.shape[-1]} columns meets a weight of {in_features}")
    if x.dtype is not dtype:
        raise ValueError(f"the input is {x.dtype}; expected {dtype}")
    if bias is None:
        return
    if bias.dtype is not dtype or bias.shape != leading:
        raise ValueError(f"the bias is {bias.dtype} {list(bias.shape)}; expected {dtype} {list(leading)}")
    if not bias.is_cpu:
        raise RuntimeError(f"the bias is on {bias.device}, the input on cpu; move one of them")


def _checked_ends(ends: torch.Tensor, n_rows: int) -> torch.Tensor:
    """Return where the rows of experts end, in memory; rows after them belong to experts of other processes. Raises
    `ValueError` where they are no rows."""
    places = [0, *ends.flatten().tolist()]
    if ends.dtype is not torch.int32 or ends.dim() != 1 or places != sorted(places) or places[-1] > n_rows:
        raise ValueError(
            f"the rows of experts end at {ends.dtype} {list(ends.shape)} {places[1:]}; expected an int32 vector that "
            f"rises to at most the number of rows, {n_rows}"
        )
    return in_memory(ends.cpu())


def _by_panels(x: torch.Tensor, weight: MXFP4Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product with the dequantized values of some rows of the weight after the other, in memory that is used again:
    fresh memory as large as the weight costs more than to fill it."""
    out_features, length = weight.codes.shape[0], weight.length
    _check(x, bias, x.dtype, length, (out_features,))
    least = _PANEL_ROWS[torch.get_num_threads() > 1]
    rows = min(out_features, max(least, _PANEL // max(1, length)))
    panel = torch.empty(rows, length, dtype=x.dtype)
    parts = checked_parts(parts_of(weight), (out_features,), part_sizes(weight.scheme, length))
    out = x.new_empty(*x.shape[:-1], out_features) if rows < out_features else None
    for start in range(0, out_features, rows):
        stop = min(start + rows, out_features)
        some = panel[: stop - start]
        dequantize_into(some, [None if part is None else part[start:stop] for part in parts], weight.scheme)
        values = F.linear(x, some, None if bias is None else bias[start:stop])
        if out is None:
            return values
        out[..., start:stop] = values
    return out
