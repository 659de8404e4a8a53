# SPDX-License-Identifier: Apache-2.0
"""Tensors that kernels read and write: their dtypes, where they are, and how they are passed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import triton

from . import blocks


#: Whether TRITON_INTERPRET=1 was set when the kernels were defined, which is what counts.
INTERPRETED = not isinstance(blocks.clamp, triton.JITFunction)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsupported_dtype(dtype: object) -> str | None:
    """Return why the kernels do not read and write a dtype; `None` when they do."""
    if dtype in DTYPES:
        return None
    return f"{dtype} is not supported by the Triton kernels; use {', '.join(map(str, DTYPES))}"


def check_input(name: str, x: object, axes: int = 1) -> None:
    """Raise `TypeError` or `ValueError` unless ``x`` is a tensor with at least ``axes`` axes that the kernels read."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} needs a tensor, got {type(x).__name__}")
    if (reason := unsupported_dtype(x.dtype)) is not None:
        raise TypeError(reason)
    if x.dim() < axes:
        raise ValueError(f"{name} needs at least {axes} axes, got {x.dim()}")
    check_device(x)


def check_output(dtype: object) -> None:
    """Raise `TypeError` for an output dtype that the kernels do not write."""
    if (reason := unsupported_dtype(dtype)) is not None:
        raise TypeError(reason)


def check_device(x: torch.Tensor) -> None:
    """Raise `ValueError` for a tensor on a CPU where kernels are not interpreted."""
    if x.device.type == "cpu" and not INTERPRETED:
        raise ValueError("the Triton kernel needs a GPU tensor, got one on the CPU")


def output_tensor(
    out: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device, name: str = "out"
) -> torch.Tensor:
    """Return the contiguous tensor that a kernel writes: ``out``, or a new one.

    Raises `TypeError` for an ``out`` of another dtype, and `ValueError` for another shape, device or layout.
    """
    if out is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    if out.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {out.dtype}")
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"{name} has the shape {list(out.shape)}; the result has {list(shape)}")
    if out.device != device:
        raise ValueError(f"{name} is on {out.device}, the input is on {device}")
    if not out.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got the strides {list(out.stride())}")
    return out


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as kernels read it: bfloat16 as int16 bits."""
    if tensor.dtype != torch.bfloat16:
        return tensor
    return tensor.view(torch.int16)


def output_bits(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return an output as kernels write it. Triton's interpreter writes bfloat16 as int16 bits."""
    if tensor is None or not INTERPRETED:
        return tensor
    return bits(tensor)


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context in which kernels start on a device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
