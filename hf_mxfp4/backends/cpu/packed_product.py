# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights on the CPU: on the codes for few rows, as in decoding, and for more with panels of
dequantized values that stay in the cache."""

import ctypes
import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ...numerics import MXFP4Tensor, QuantScheme
from .functions import TYPES, addresses_of, description, fake_quantize, parts_of
from .library import ProductStruct, load
from .threads import in_threads, openmp_parallel


#: Multiplications that are worth waking a thread for.
_WORTH_A_THREAD = 1 << 17
#: Elements of a panel, and the least rows, on one thread and on several: torch's product with fewer is slow. oneDNN
#: computes some with fewer than 1024, of 512 x 512 by AMX among them, on one thread whatever their number.
_PANEL, _PANEL_ROWS = 1 << 20, (512, 1024)


class OnCodes:
    """Products on the codes of weights of one scheme and shape, with inputs of one dtype. What all of them have in
    common is looked up once: at every call it would take longer than the arithmetic of a single token.

    Args:
        scheme, in_features, out_features: of the weights; of experts, those of each.
        dtype: of inputs and bias: float32, bfloat16 or float16.
    """

    __slots__ = ("_common", "_described", "_function", "in_features", "out_features")

    def __init__(self, scheme: QuantScheme, in_features: int, out_features: int, dtype: torch.dtype):
        self.in_features, self.out_features = in_features, out_features
        self._function, self._described = load()[0].mxfp4_product, description(scheme, in_features)
        self._common = ProductStruct(
            type=TYPES[dtype],
            in_features=in_features,
            out_features=out_features,
            weights=ctypes.addressof(self._described),
            n_experts=1,
        )

    def __call__(
        self,
        x: torch.Tensor,
        parts: Sequence[torch.Tensor | None],
        bias: torch.Tensor | None = None,
        inputs: QuantScheme | None = None,
        ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Arguments and result as of [`product`], with ``ends`` of [`grouped_product`], and with the parts of the
        weight. Those that do not fit together are not noticed."""
        out_features = self.out_features
        out = x.new_empty((*x.shape[:-1], out_features))
        size = out.numel()
        if not size:
            return out
        x, n_rows = x.contiguous(), size // out_features
        held, places = addresses_of(parts)
        arguments = ProductStruct.from_buffer_copy(self._common)
        arguments.x, arguments.y, arguments.n_rows = x.data_ptr(), out.data_ptr(), n_rows
        arguments.codes, arguments.scale, arguments.macro = places[:3]
        if places[3] is not None:
            arguments.residual_codes, arguments.residual_scale = places[3:]
        if bias is not None:
            bias = bias.contiguous()
            arguments.bias = bias.data_ptr()
        if inputs is not None:
            described = description(inputs, self.in_features)
            arguments.inputs = ctypes.addressof(described)
        if ends is not None:
            arguments.ends, arguments.n_experts = ends.data_ptr(), len(ends)
        threads = torch.get_num_threads()
        if threads > 1:
            threads = min(threads, size * self.in_features // _WORTH_A_THREAD)
        if threads > 1:
            arguments.parallel = openmp_parallel()
        arguments.threads = max(1, threads)
        self._function(ctypes.byref(arguments))
        return out


#: The one for a scheme, a shape and a dtype.
on_codes = functools.lru_cache(maxsize=256)(OnCodes)


def product(
    x: torch.Tensor,
    weight: MXFP4Tensor,
    bias: torch.Tensor | None = None,
    inputs: QuantScheme | None = None,
    prepared: OnCodes | None = None,
) -> torch.Tensor:
    """``Q(x) Q(W)^T + b`` of CPU tensors, without gradients.

    Of up to [`most_rows`] rows sums are in float32, of exact products up to the rounding of a macro factor, and rounded
    once, the same whatever the number of threads; of more, ``Q(W)`` is rounded to the dtype of ``x`` first, in panels.

    Args:
        x: ``[..., K]`` float32, bfloat16 or float16.
        weight: ``[N, K]``, quantized along its last axis.
        bias: ``[N]`` in the dtype of ``x``.
        inputs: how ``x`` is quantized first: a scheme that [`unsupported_reason`] has nothing against.
        prepared: what [`on_codes`] gives for these arguments, to save the search.

    Returns:
        ``[..., N]`` in the dtype of ``x``.

    Raises:
        ValueError: ``x``, the weight and the bias do not fit together.
        RuntimeError: one of them is not on the CPU.
    """
    _check(x, weight, bias)
    out_features = weight.codes.shape[0]
    if x.shape[:-1].numel() > most_rows(x.dtype) and out_features:
        return _by_panels(x if inputs is None else fake_quantize(x, inputs), weight, bias)
    if prepared is None or prepared.out_features != out_features:
        prepared = on_codes(weight.scheme, weight.length, out_features, x.dtype)
    return prepared(x, parts_of(weight), bias, inputs)


def grouped_product(
    x: torch.Tensor,
    weight: MXFP4Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None = None,
    inputs: QuantScheme | None = None,
) -> torch.Tensor:
    """[`product`] of each expert's rows with its own weight, all on the codes.

    Args:
        x: ``[S, K]``, rows sorted by expert.
        weight: ``[experts, N, K]``, quantized along its last axis.
        ends: int32 ``[experts]`` on the CPU, where the rows of each end.
        bias: ``[experts, N]`` in the dtype of ``x``.
        inputs: as there.

    Returns:
        ``[S, N]`` in the dtype of ``x``.
    """
    _check(x, weight, bias)
    prepared = on_codes(weight.scheme, weight.length, weight.codes.shape[1], x.dtype)
    return prepared(x, parts_of(weight), bias, inputs, ends)


@functools.cache
def most_rows(dtype: torch.dtype) -> int:
    """Up to how many rows of this dtype products are computed on the codes: beyond, panels are faster on this
    processor."""
    return load()[0].mxfp4_product_rows(TYPES[dtype])


def _check(x: torch.Tensor, weight: MXFP4Tensor, bias: torch.Tensor | None) -> None:
    """Before addresses are handed on."""
    if x.shape[-1] != weight.length:
        raise ValueError(f"an input of {x.shape[-1]} columns meets a weight of {weight.length}")
    if bias is None:
        return
    if bias.dtype is not x.dtype or bias.shape != weight.codes.shape[:-1]:
        expected = f"{x.dtype} {list(weight.codes.shape[:-1])}"
        raise ValueError(f"the bias is {bias.dtype} {list(bias.shape)}; expected {expected}")
    if not bias.is_cpu:
        raise RuntimeError(f"the bias is on {bias.device}, the input on cpu; move one of them")


def _by_panels(x: torch.Tensor, weight: MXFP4Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product with the dequantized values of some rows of the weight after the other, in memory that is used again:
    fresh memory as large as the weight costs more than to fill it."""
    out_features, length = weight.codes.shape[0], weight.length
    least = _PANEL_ROWS[torch.get_num_threads() > 1]
    rows = min(out_features, max(least, _PANEL // max(1, length)))
    panel = torch.empty(rows, length, dtype=x.dtype)
    held, places = addresses_of(parts_of(weight))
    scheme, function = ctypes.byref(description(weight.scheme, length)), load()[0].mxfp4_dequantize
    out = x.new_empty(*x.shape[:-1], out_features) if rows < out_features else None
    for start in range(0, out_features, rows):
        stop = min(start + rows, out_features)
        origin = panel.data_ptr() - start * length * panel.element_size()

        def fill(first: int, last: int, start: int = start, origin: int = origin) -> None:
            function(origin, TYPES[x.dtype], length, scheme, start + first, start + last, *places)

        in_threads(fill, count=stop - start, cost=(stop - start) * length)
        values = F.linear(x, panel[: stop - start], None if bias is None else bias[start:stop])
        if out is None:
            return values
        out[..., start:stop] = values
    return out
