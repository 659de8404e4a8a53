# SPDX-License-Identifier: Apache-2.0
"""Operators on tensors: quantize, dequantize, and both at once.

Each is the function of the same name in [`hf_mxfp4.backends.select`] or [`hf_mxfp4.numerics`], so all backends, and
eager and compiled code, give the same bits. A scheme is its text (`str(scheme)`), rounded to nearest.
"""

import functools

import torch

from ..backends import functional
from ..backends import select as backends
from ..numerics import MXFP4Tensor, QuantScheme, parse_scheme
from .packed_weight import PACKED_FIELDS, part_sizes


parse = functools.lru_cache(maxsize=256)(parse_scheme)


def read_scheme(text: str) -> QuantScheme:
    """The scheme of an operator's argument. Raises `ValueError` for one that draws random numbers: an operator must be
    a function of its arguments."""
    scheme = parse(text)
    if scheme.rounding != "nearest":
        raise ValueError(f"scheme {text!r} draws random numbers; the operators round to nearest")
    return scheme


@torch.library.custom_op("hf_mxfp4::fake_quantize", mutates_args=())
def _fake_quantize(x: torch.Tensor, scheme: str, backend: str) -> torch.Tensor:
    return backends.fake_quantize(x.detach(), read_scheme(scheme), backend).contiguous()


@torch.library.custom_op("hf_mxfp4::fake_quantize_e4m3", mutates_args=())
def _fake_quantize_e4m3(x: torch.Tensor) -> torch.Tensor:
    return backends.fake_quantize_e4m3(x.detach()).contiguous()


@_fake_quantize.register_fake
def _(x, scheme, backend):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@_fake_quantize_e4m3.register_fake
def _(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_fake_quantize.register_autograd(lambda ctx, grad: (grad, None, None))
_fake_quantize_e4m3.register_autograd(lambda ctx, grad: grad)


@torch.library.custom_op("hf_mxfp4::quantize", mutates_args=())
def _quantize(
    x: torch.Tensor, scheme: str, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    packed = functional.quantize(x.detach(), **vars(read_scheme(scheme)), backend=backend)
    parts = (getattr(packed, part) for part in PACKED_FIELDS.values())
    return tuple(x.new_empty(0, dtype=torch.uint8) if part is None else part.contiguous() for part in parts)


@_quantize.register_fake
def _(x, scheme, backend):
    sizes = part_sizes(read_scheme(scheme), x.shape[-1]).values()
    shapes = ((0,) if size is None else (*x.shape[:-1], size) for size in sizes)
    return tuple(torch.empty(shape, dtype=torch.uint8, device=x.device) for shape in shapes)


@torch.library.custom_op("hf_mxfp4::dequantize", mutates_args=())
def _dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    macro: torch.Tensor | None,
    residual_codes: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
    length: int,
    scheme: str,
    dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    parts = codes, scale, macro, residual_codes, residual_scale
    packed = MXFP4Tensor(*parts, length=length, axis=codes.dim() - 1, scheme=read_scheme(scheme), dtype=dtype)
    return backends.dequantize(packed, dtype, backend).contiguous()


@_dequantize.register_fake
def _(codes, scale, macro, residual_codes, residual_scale, length, scheme, dtype, backend):
    return torch.empty(*codes.shape[:-1], length, dtype=dtype, device=codes.device)


def _define_vmap(operator: torch.library.CustomOpDef) -> None:
    """Under `torch.vmap`, run an operator on all tensors at once: rows do not depend on each other."""

    def batched(info, axes, *arguments):
        moved = [x if axis is None else x.movedim(axis, 0) for x, axis in zip(arguments, axes, strict=True)]
        out = operator(*moved)
        if isinstance(out, torch.Tensor):
            return out, 0
        return out, tuple(0 if part.numel() else None for part in out)  # parts that the scheme does not have are empty

    operator.register_vmap(batched)


for _operator in (_fake_quantize, _quantize, _dequantize):
    _define_vmap(_operator)
