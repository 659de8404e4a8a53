# SPDX-License-Identifier: Apache-2.0
"""Which backend quantizes a tensor: the eager reference, the Triton kernels on a GPU, or the fused C++ on the CPU."""

import functools

import torch

from ..numerics import MXFP4Tensor, QuantScheme, apply_scheme
from . import cpu, triton_kernels


#: The eager reference computes rows in portions of this many elements on the CPU, so that what lies between input and
#: output stays in the processor's cache.
_EAGER_PORTION = 1 << 17


def fake_quantize(x: torch.Tensor, scheme: QuantScheme, backend: str = "auto") -> torch.Tensor:
    """[`hf_mxfp4.numerics.fake_quantize`] along the last axis, on the backend named or, for ``"auto"``, the fastest
    that covers the scheme. All backends give the same bits.

    Raises `ValueError` when the backend named cannot do it.
    """
    name = choose_backend(x, scheme, backend)
    if name == "cpu":
        return cpu.fake_quantize(x, scheme)
    return triton_kernels.fake_quantize(x, scheme) if name == "triton" else _eager(x, scheme)


def dequantize(tensor: MXFP4Tensor, dtype: torch.dtype, backend: str = "auto") -> torch.Tensor:
    """[`MXFP4Tensor.dequantize`], the same bits, on the backend named or, for ``"auto"``, the fastest that there is.

    Raises `ValueError` when the backend named cannot do it.
    """
    made_by = tensor.scheme
    # How scales were chosen and values rounded is of no concern to who reads them.
    scheme = QuantScheme("rceil", made_by.macro_block, made_by.macro_search, made_by.outlier_fallback)
    name = choose_backend(tensor.codes.new_empty(0, dtype=dtype), scheme, backend)
    if name == "cpu":
        return cpu.dequantize(tensor, dtype)
    if name == "triton":
        return triton_kernels.dequantize(tensor, dtype)
    # The class is named because a subclass may choose a backend of its own.
    return MXFP4Tensor.dequantize(tensor, dtype)


def choose_backend(x: torch.Tensor, scheme: QuantScheme, backend: str) -> str:
    """The backend for this tensor. Raises `ValueError` when the one named cannot do it."""
    if not _is_plain(x):
        # Tracing and other stand-ins for tensors have no memory to hand to a kernel.
        return "eager"
    name, reason = backend_for(x.device.type, x.dtype, scheme, backend)
    if reason and name == backend != "eager":
        raise ValueError(f"backend={backend!r} cannot quantize here: {reason}; use backend='auto'")
    return name


@functools.lru_cache(maxsize=256)
def backend_for(device_type: str, dtype: torch.dtype, scheme: QuantScheme, backend: str) -> tuple[str, str | None]:
    """The backend chosen for a tensor, and why the fast one (that was named, or that belongs to the device) is not
    usable; `None` when it is."""
    if backend == "eager":
        return "eager", "eager was asked for"
    fast = backend if backend != "auto" else ("cpu" if device_type == "cpu" else "triton")
    obstacle = _cpu_obstacle if fast == "cpu" else triton_kernels.obstacle
    reason = obstacle(device_type, dtype, scheme)
    return ("eager" if reason and backend == "auto" else fast), reason


def _cpu_obstacle(device_type: str, dtype: torch.dtype, scheme: QuantScheme) -> str | None:
    return cpu.obstacle(dtype, scheme) if device_type == "cpu" else f"the tensor is on {device_type}"


def _is_plain(x: torch.Tensor) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()


def _eager(x: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    whole = scheme.rounding != "nearest" or scheme.block_rows != 1 or scheme.fallback_rate is not None
    if whole or x.device.type != "cpu" or x.dim() < 2 or x.numel() <= 2 * _EAGER_PORTION or not _is_plain(x):
        return apply_scheme(x, scheme)
    rows = x.detach().reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=x.dtype)
    step = max(1, _EAGER_PORTION // x.shape[-1])
    for start in range(0, rows.shape[0], step):
        out[start : start + step] = apply_scheme(rows[start : start + step], scheme)
    return out.view(x.shape)
