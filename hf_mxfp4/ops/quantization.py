# SPDX-License-Identifier: Apache-2.0
"""Which backend quantizes a tensor: the eager reference, the Triton kernels on a GPU, or the fused C++ on the CPU.

All backends give the same bits. Each function here raises `ValueError` when the backend named cannot do what is asked.
"""

import functools

import torch
import torch.nn.functional as F
from torch._C._functorch import is_functorch_wrapped_tensor

from .. import numerics
from ..numerics import MXFP4Tensor, QuantScheme, ScaleRule, apply_scheme
from ..numerics.rng import check_seed
from . import cpu
from . import triton as triton_kernels
from .self_check import is_verified


_BLOCKS = QuantScheme()
OWN_TYPES = (torch.Tensor, torch.nn.Parameter)


# ---- the choice -----------------------------------------------------------------------------------------------------


def choose_backend(
    x: torch.Tensor,
    scheme: QuantScheme,
    backend: str,
    seed: int | None = None,
    *,
    family: str = "quantize",
    dtype: torch.dtype | None = None,
) -> str:
    """Return the backend for a tensor.

    Args:
        x: what is quantized; otherwise any tensor on the device.
        scheme: of the codes.
        backend: ``"auto"``, or the one named.
        seed: for stochastic rounding, which is eager without one.
        family: ``"quantize"``, ``"fp8"`` (round to E4M3), or what is done with codes: ``"dequantize"`` or ``"decode"``
            (multiply with them).
        dtype: of values that codes become; by default that of ``x``.
    """
    if type(x) not in OWN_TYPES or is_functorch_wrapped_tensor(x) or x.is_neg() or x._is_zerotensor():
        return "eager"  # there is no memory to hand to a kernel
    device = x.device
    name = _choice(device, dtype or x.dtype, scheme, backend, seed is not None, family != "quantize")
    if name == "triton" and backend == "auto" and not is_verified(family, device):
        return "eager"
    return name


@functools.lru_cache(maxsize=256)
def _choice(
    device: torch.device, dtype: torch.dtype, scheme: QuantScheme, backend: str, has_seed: bool, reads: bool
) -> str:
    if reads:
        scheme = as_read(scheme)
    name, reason = backend_for(device.type, dtype, scheme, backend)
    if name == "triton" and not reason and scheme.rounding != "nearest" and not has_seed:
        reason = f"{scheme} draws random numbers and needs a seed"
        if backend == "auto":
            name = "eager"
    if reason and name == backend != "eager":
        raise ValueError(f"backend={backend!r} cannot quantize here: {reason}; use backend='auto'")
    return name


def backend_for(device_type: str, dtype: torch.dtype, scheme: QuantScheme, backend: str) -> tuple[str, str | None]:
    """Return the backend for tensors of a device and dtype, and why the fast one (that was named, or that belongs to
    the device) is not usable; `None` when it is."""
    if backend == "eager":
        return "eager", "eager was asked for"
    fast = backend
    if backend == "auto":
        fast = "cpu" if device_type == "cpu" else "triton"
    if fast == "triton":
        reason = triton_kernels.unsupported_reason(device_type, dtype, scheme)
    elif device_type == "cpu":
        reason = cpu.unsupported_reason(dtype, scheme)
    else:
        reason = f"the tensor is on {device_type}"
    if reason and backend == "auto":
        return "eager", reason
    return fast, reason


def as_read(scheme: QuantScheme) -> QuantScheme:
    """Return what of a scheme matters to who reads codes: not how scales were chosen and values rounded."""
    search = "block_mantissas" if scheme.mantissas else scheme.macro_search
    return QuantScheme(ScaleRule.RCEIL, scheme.macro_block, search, scheme.outlier_fallback)


def supports_e4m3(x: torch.Tensor, backend: str = "auto") -> bool:
    """Return whether the Triton kernels round rows of a tensor to E4M3: where they quantize blocks of it."""
    return x.is_floating_point() and x.dim() > 0 and choose_backend(x, _BLOCKS, backend, family="fp8") == "triton"


def has_plain_memory(x: torch.Tensor) -> bool:
    """Return whether the values of a tensor are what its memory holds, so that a kernel may read it: a tensor of one of
    torch's own kinds, not inside `torch.vmap` or `torch.func.jvp`, not negated and not zero without memory."""
    if type(x) not in OWN_TYPES:
        return False
    return not (is_functorch_wrapped_tensor(x) or x.is_neg() or x._is_zerotensor())


def is_captured(tensor: torch.Tensor) -> bool:
    """Return whether what is computed with this tensor is being captured in a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def needs_operator(x: torch.Tensor) -> bool:
    """Return whether an operator stands for what runs on a tensor's memory: where Dynamo traces."""
    return type(x) in OWN_TYPES and torch.compiler.is_compiling()


def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype to add many numbers up in: float64, or float32 on devices that have no other (Apple's GPUs)."""
    return torch.float32 if device.type == "mps" else torch.float64


# ---- what backends do -----------------------------------------------------------------------------------------------


def fake_quantize(
    x: torch.Tensor,
    scheme: QuantScheme,
    backend: str = "auto",
    *,
    seed: int | None = None,
    rotation: int | None = None,
    signs: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[`hf_mxfp4.numerics.fake_quantize`] along the last axis, on the backend named or, for ``"auto"``, the fastest
    that covers the scheme. Stochastic rounding is eager without a ``seed``.

    With a ``rotation`` the axis is first padded with zeros to a multiple of that size and rotated in float32 (with
    ``signs`` of its padded length; see [`hf_mxfp4.numerics.rotate`]), and the result is float32, of float64 the same,
    or of the ``dtype`` given. Kernels write to ``out``, a contiguous tensor of the shape and dtype of the result, where
    they can; the result is another tensor elsewhere.
    """
    if seed is not None:
        check_seed(scheme.rounding, seed)
    name = choose_backend(x, scheme, backend, seed)
    if rotation is not None and name != "triton":
        x = rotate_rows(x, rotation, "cpu" if name == "cpu" else "eager", signs=signs)
        rotation = None
        name = choose_backend(x, scheme, backend, seed)
    if name == "triton":
        return triton_kernels.fake_quantize(x, scheme, seed, rotation, signs, dtype, out)
    if name == "cpu":
        values = cpu.fake_quantize(x, scheme, out)
    else:
        values = apply_scheme(x, scheme, seed=seed)
    return values if dtype is None or values.dtype is dtype else values.to(dtype)


def quantize(
    x: torch.Tensor,
    scheme: QuantScheme,
    backend: str = "auto",
    *,
    axis: int = -1,
    seed: int | None = None,
    out: MXFP4Tensor | None = None,
) -> MXFP4Tensor:
    """[`hf_mxfp4.numerics.quantize`] on the backend named or the fastest, which the tensor's `dequantize` takes too.
    Kernels write to the tensors of ``out``, an earlier result for such a tensor; other backends do not."""
    if seed is not None:
        check_seed(scheme.rounding, seed)
    axis %= x.dim()
    name = choose_backend(x, scheme, backend, seed)
    if name == "cpu":
        tensor = cpu.quantize(x, scheme, axis, out)
    elif name == "triton":
        tensor = triton_kernels.quantize(x, scheme, axis, seed, out)
    else:
        tensor = numerics.quantize(x, **vars(scheme), axis=axis, seed=seed)
    return tensor if tensor is out else FusedTensor(**vars(tensor))


class FusedTensor(MXFP4Tensor):
    """[`MXFP4Tensor`] that dequantizes on the fused backend where there is one."""

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return dequantize(self, dtype or self.dtype)


def dequantize(
    tensor: MXFP4Tensor, dtype: torch.dtype, backend: str = "auto", *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[`MXFP4Tensor.dequantize`] on the backend named or, for ``"auto"``, the fastest that there is. Kernels write to
    ``out``, an earlier result for such a tensor; other backends do not."""
    if needs_operator(tensor.codes):
        scheme = str(as_read(tensor.scheme))
        values = torch.ops.hf_mxfp4.dequantize(*tensor.parts, tensor.length, scheme, dtype, backend)
        return values.movedim(-1, tensor.axis)
    name = choose_backend(tensor.codes, tensor.scheme, backend, family="dequantize", dtype=dtype)
    if name == "cpu":
        return cpu.dequantize(tensor, dtype, out)
    if name == "triton":
        return triton_kernels.dequantize(tensor, dtype, out)
    # The class is named because a subclass may choose a backend of its own.
    return MXFP4Tensor.dequantize(tensor, dtype)


def rotate_rows(
    x: torch.Tensor, size: int, backend: str = "auto", *, signs: torch.Tensor | None = None
) -> torch.Tensor:
    """``x`` padded with zeros along its last axis to a multiple of ``size`` and rotated in float32 (float64 stays) by
    [`hf_mxfp4.numerics.rotate`]. On a CPU in fused C++ where there are no ``signs``, unless the ``backend`` is the
    eager one."""
    padding = -x.shape[-1] % size
    if padding:
        x = F.pad(x, (0, padding))
    has_memory = not torch.compiler.is_compiling() and has_plain_memory(x)
    is_fused = has_memory and signs is None and backend in ("auto", "cpu") and x.is_cpu and x.dtype in cpu.TYPES
    if is_fused and not (x.requires_grad and torch.is_grad_enabled()) and cpu.library_problem() is None:
        return cpu.library.rotate(x, size)
    return numerics.rotate(x if x.dtype == torch.float64 else x.float(), size, signs=signs)


def quantize_e4m3(
    x: torch.Tensor, backend: str = "auto", scale_dtype: torch.dtype = torch.uint8
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`hf_mxfp4.numerics.quantize_e4m3`], by Triton where that quantizes blocks of ``x``. With scales in float32 what
    else is in a row with NaN may be a number."""
    if supports_e4m3(x, backend):
        return triton_kernels.quantize_e4m3(x, scale_dtype)
    elements, byte = numerics.quantize_e4m3(x)
    return elements, byte if scale_dtype == torch.uint8 else numerics.decode_e8m0(byte)


def quantize_e4m3_twice(x: torch.Tensor, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the elements of [`quantize_e4m3`] of a matrix ``[R, C]``, the same transposed, ``[C, R]``, both
    contiguous, and scales of rows in float32, ``[R, 1]``."""
    if supports_e4m3(x, backend):
        return triton_kernels.quantize_e4m3_twice(x)
    elements, byte = numerics.quantize_e4m3(x)
    return elements, elements.mT.contiguous(), numerics.decode_e8m0(byte)


def transpose_e4m3(elements: torch.Tensor) -> torch.Tensor:
    """Return E4M3 elements ``[..., R, C]`` as ``[..., C, R]``, contiguous."""
    transposed = elements.mT
    if transposed.is_contiguous() or not elements.is_contiguous():
        return transposed.contiguous()
    name = choose_backend(elements, _BLOCKS, "auto", family="dequantize", dtype=torch.bfloat16)
    return triton_kernels.transpose_e4m3(elements) if name == "triton" else transposed.contiguous()


def dequantize_e4m3(
    elements: torch.Tensor, byte: torch.Tensor, dtype: torch.dtype, backend: str = "auto"
) -> torch.Tensor:
    """[`hf_mxfp4.numerics.dequantize_e4m3`], by Triton where that dequantizes MXFP4."""
    name = choose_backend(elements, _BLOCKS, backend, family="dequantize", dtype=dtype)
    return (triton_kernels if name == "triton" else numerics).dequantize_e4m3(elements, byte, dtype)


def quantize_mxfp8(x: torch.Tensor, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """[`hf_mxfp4.numerics.quantize_mxfp8`] on the backend of [`quantize_e4m3`]."""
    return numerics.quantize_mxfp8(x, functools.partial(quantize_e4m3, backend=backend))


def dequantize_mxfp8(
    elements: torch.Tensor, byte: torch.Tensor, dtype: torch.dtype, backend: str = "auto"
) -> torch.Tensor:
    """[`hf_mxfp4.numerics.dequantize_mxfp8`] on the backend of [`dequantize_e4m3`]."""
    return numerics.dequantize_mxfp8(elements, byte, dtype, functools.partial(dequantize_e4m3, backend=backend))


def fake_quantize_mxfp8(x: torch.Tensor, backend: str = "auto", dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the MXFP8 values of ``x`` in its own shape, as ``dtype`` if one is given."""
    return dequantize_mxfp8(*quantize_mxfp8(x, backend), dtype or x.dtype, backend)


def fake_quantize_e4m3(x: torch.Tensor, backend: str = "auto", dtype: torch.dtype | None = None) -> torch.Tensor:
    """[`hf_mxfp4.numerics.fake_quantize_e4m3`], by Triton where that quantizes blocks of ``x``; as ``dtype`` if any."""
    kernels = triton_kernels if supports_e4m3(x, backend) else numerics
    return kernels.dequantize_e4m3(*kernels.quantize_e4m3(x), dtype or x.dtype)
