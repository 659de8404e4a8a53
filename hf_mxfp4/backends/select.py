# SPDX-License-Identifier: Apache-2.0
"""Which backend quantizes a tensor: the eager reference, the Triton kernels on a GPU, or the fused C++ on the CPU."""

import functools

import torch
import torch.nn.functional as F
from torch._C._functorch import is_functorch_wrapped_tensor

from .. import numerics
from ..numerics import MXFP4Tensor, QuantScheme, apply_scheme, rotate
from ..numerics.rng import noise_source
from . import cpu
from . import triton as triton_kernels
from .self_check import is_verified


#: The eager reference computes rows in portions of this many elements on the CPU, so that what lies between input and
#: output stays in the processor's cache.
_EAGER_PORTION = 1 << 17
_BLOCKS = QuantScheme()
_OWN_TYPES = (torch.Tensor, torch.nn.Parameter)


def fake_quantize(
    x: torch.Tensor,
    scheme: QuantScheme,
    backend: str = "auto",
    *,
    seed: int | None = None,
    rotation: int | None = None,
    signs: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """[`hf_mxfp4.numerics.fake_quantize`] along the last axis, on the backend named or, for ``"auto"``, the fastest
    that covers the scheme. All backends give the same bits; stochastic rounding is eager without a ``seed``.

    With a ``rotation`` the axis is first padded with zeros to a multiple of that size and rotated in float32 (with
    ``signs`` of its padded length; see [`hf_mxfp4.numerics.rotate`]), and the result is float32, of float64 the same,
    or of the ``dtype`` given.

    Raises `ValueError` when the backend named cannot do it.
    """
    if seed is not None:
        noise_source(scheme.rounding, None, seed)
    if needs_operator(x) and scheme.rounding == "nearest" and rotation is None:
        values = torch.ops.hf_mxfp4.fake_quantize(x.detach(), str(scheme), backend)
        return values if dtype is None else values.to(dtype)
    name = choose_backend(x, scheme, backend, seed)
    if rotation is not None:
        if name == "triton" and scheme.fallback_rate is None:
            return triton_kernels.fake_quantize_rotated(x, scheme, seed, rotation, signs, dtype or torch.float32)
        x = rotate_rows(x, rotation, "cpu" if name == "cpu" else "eager", signs=signs)
        name = choose_backend(x, scheme, backend, seed)
    if name == "cpu":
        values = cpu.fake_quantize(x, scheme)
    else:
        values = triton_kernels.fake_quantize(x, scheme, seed, dtype) if name == "triton" else _eager(x, scheme, seed)
    return values if dtype is None else values.to(dtype)


def rotate_rows(
    x: torch.Tensor,
    size: int,
    backend: str = "auto",
    *,
    signs: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x`` padded with zeros along its last axis to a multiple of ``size`` and rotated in float32 (float64 stays) by
    [`hf_mxfp4.numerics.rotate`], the same bits, in that dtype or the ``dtype`` given. On a CPU in fused C++ where there
    are no ``signs``, unless the ``backend`` is the eager one."""
    padding = -x.shape[-1] % size
    if padding:
        x = F.pad(x, (0, padding))
    has_memory = not torch.compiler.is_compiling() and is_torchs_own(x)
    is_fused = has_memory and signs is None and backend in ("auto", "cpu")
    if is_fused and not (x.requires_grad and torch.is_grad_enabled()) and cpu.takes_rotation(x):
        return cpu.rotate(x, size, dtype or torch.float32)
    values = rotate(x if x.dtype == torch.float64 else x.float(), size, signs=signs)
    return values if dtype is None else values.to(dtype)


def fake_quantize_e4m3(x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """[`hf_mxfp4.numerics.fake_quantize_e4m3`], the same bits, by Triton where that quantizes blocks of ``x``."""
    if supports_e4m3(x, backend):
        return triton_kernels.fake_quantize_e4m3(x)
    return numerics.fake_quantize_e4m3(x)


def quantize_e4m3(x: torch.Tensor, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """[`hf_mxfp4.numerics.quantize_e4m3`], the same bits, by Triton where that quantizes blocks of ``x``."""
    return (triton_kernels if supports_e4m3(x, backend) else numerics).quantize_e4m3(x)


def dequantize_e4m3(
    elements: torch.Tensor, byte: torch.Tensor, dtype: torch.dtype, backend: str = "auto"
) -> torch.Tensor:
    """[`hf_mxfp4.numerics.dequantize_e4m3`], the same bits, by Triton where that dequantizes MXFP4."""
    device, kernels = elements.device, False
    if not torch.compiler.is_compiling() and is_torchs_own(elements):
        kernels = _choice(device.type, dtype, _BLOCKS, backend, None) == "triton"
        kernels = kernels and (backend != "auto" or is_verified("dequantize", device))
    return (triton_kernels if kernels else numerics).dequantize_e4m3(elements, byte, dtype)


def supports_e4m3(x: torch.Tensor, backend: str = "auto") -> bool:
    """Whether the Triton kernels round rows of a tensor to E4M3: where they quantize blocks of it."""
    return x.is_floating_point() and x.dim() > 0 and choose_backend(x, _BLOCKS, backend) == "triton"


def dequantize(tensor: MXFP4Tensor, dtype: torch.dtype, backend: str = "auto") -> torch.Tensor:
    """[`MXFP4Tensor.dequantize`], the same bits, on the backend named or, for ``"auto"``, the fastest that there is.

    Raises `ValueError` when the backend named cannot do it.
    """
    scheme = as_read(tensor.scheme)
    if needs_operator(tensor.codes):
        parts = tensor.codes, tensor.scale, tensor.macro, tensor.residual_codes, tensor.residual_scale
        out = torch.ops.hf_mxfp4.dequantize(*parts, tensor.length, str(scheme), dtype, backend)
        return out.movedim(-1, tensor.axis)
    name = "eager"
    if not torch.compiler.is_compiling() and is_torchs_own(tensor.codes):
        device = tensor.codes.device
        name = _choice(device.type, dtype, scheme, backend, None)
        if name == "triton" and backend == "auto" and not is_verified("dequantize", device):
            name = "eager"
    if name == "cpu":
        return cpu.dequantize(tensor, dtype)
    if name == "triton":
        return triton_kernels.dequantize(tensor, dtype)
    # The class is named because a subclass may choose a backend of its own.
    return MXFP4Tensor.dequantize(tensor, dtype)


@functools.lru_cache(maxsize=64)
def as_read(scheme: QuantScheme) -> QuantScheme:
    """Return what of a scheme matters to who reads codes: not how scales were chosen and values rounded."""
    return QuantScheme("rceil", scheme.macro_block, scheme.macro_search, scheme.outlier_fallback)


def computes_on_codes(x: torch.Tensor, dtype: torch.dtype, scheme: QuantScheme, backend: str = "auto") -> bool:
    """Whether products in ``dtype`` of few rows on the device of ``x`` are computed on a weight's codes. Raises
    `ValueError` when the backend named cannot do it."""
    if torch.compiler.is_compiling() or not is_torchs_own(x):
        return False
    name = _reader(x.device.type, dtype, scheme, backend)
    return name == "cpu" or name == "triton" and (backend != "auto" or is_verified("decode", x.device))


def reader(x: torch.Tensor, scheme: QuantScheme, backend: str) -> str:
    """The backend that reads codes of a scheme for products with tensors like ``x``. Raises `ValueError` when the one
    named cannot do it."""
    if torch.compiler.is_compiling() or not is_torchs_own(x):
        return "eager"
    return _reader(x.device.type, x.dtype, scheme, backend)


@functools.lru_cache(maxsize=256)
def _reader(device_type: str, dtype: torch.dtype, scheme: QuantScheme, backend: str) -> str:
    return _choice(device_type, dtype, as_read(scheme), backend, None)


def choose_backend(x: torch.Tensor, scheme: QuantScheme, backend: str, seed: int | None = None) -> str:
    """The backend for this tensor. Raises `ValueError` when the one named cannot do it."""
    if torch.compiler.is_compiling() or not is_torchs_own(x):
        # Tracing and other stand-ins for tensors have no memory to hand to a kernel.
        return "eager"
    name = _choice(x.device.type, x.dtype, scheme, backend, seed)
    return name if name != "triton" or backend != "auto" or is_verified("quantize", x.device) else "eager"


def _choice(device_type: str, dtype: torch.dtype, scheme: QuantScheme, backend: str, seed: int | None) -> str:
    name, reason = backend_for(device_type, dtype, scheme, backend)
    if name == "triton" and not reason and scheme.rounding != "nearest" and seed is None:
        name, reason = ("eager" if backend == "auto" else name), f"{scheme} draws random numbers and needs a seed"
    if reason and name == backend != "eager":
        raise ValueError(f"backend={backend!r} cannot quantize here: {reason}; use backend='auto'")
    return name


@functools.lru_cache(maxsize=256)
def backend_for(device_type: str, dtype: torch.dtype, scheme: QuantScheme, backend: str) -> tuple[str, str | None]:
    """The backend for tensors of a device and dtype, and why the fast one (that was named, or that belongs to the
    device) is not usable; `None` when it is."""
    if backend == "eager":
        return "eager", "eager was asked for"
    fast = backend if backend != "auto" else ("cpu" if device_type == "cpu" else "triton")
    if fast == "cpu":
        on_cpu = device_type == "cpu"
        reason = cpu.unsupported_reason(dtype, scheme) if on_cpu else f"the tensor is on {device_type}"
    else:
        reason = triton_kernels.unsupported_reason(device_type, dtype, scheme)
    return ("eager" if reason and backend == "auto" else fast), reason


def is_torchs_own(x: torch.Tensor) -> bool:
    """Return whether the values of a tensor are what its memory holds, so that a kernel may read it: a tensor of one of
    torch's own kinds, not inside `torch.vmap` or `torch.func.jvp`, not negated and not zero without memory."""
    if type(x) not in _OWN_TYPES:
        return False
    return not (is_functorch_wrapped_tensor(x) or x.is_neg() or x._is_zerotensor())


def needs_operator(x: torch.Tensor) -> bool:
    """Return whether an operator stands for what runs on a tensor's memory: where Dynamo traces, and inside
    `torch.vmap` and `torch.func.jvp`."""
    return type(x) in _OWN_TYPES and (torch.compiler.is_compiling() or is_functorch_wrapped_tensor(x))


def _eager(x: torch.Tensor, scheme: QuantScheme, seed: int | None = None) -> torch.Tensor:
    whole = scheme.rounding != "nearest" or scheme.block_rows != 1
    if whole or x.device.type != "cpu" or x.dim() < 2 or x.numel() <= 2 * _EAGER_PORTION or not is_torchs_own(x):
        return apply_scheme(x, scheme, seed=seed)
    rows = x.detach().reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=x.dtype)
    step = max(1, _EAGER_PORTION // x.shape[-1])
    for start in range(0, rows.shape[0], step):
        out[start : start + step] = apply_scheme(rows[start : start + step], scheme)
    return out.view(x.shape)
